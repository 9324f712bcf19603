"""Colours of figures. Kinds of boxes also differ by their text, and marks by a sign, so no meaning needs colour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tfm_blocks.figures.drawing import Kind

Mark = Literal["added", "removed", "changed"]


@dataclass(frozen=True)
class Theme:
    """Colours as #rrggbb. `fills` maps kinds of boxes to colours; other boxes have the colour of the background."""

    background: str
    ink: str
    faint: str
    plate: str
    fills: Mapping[Kind, str]
    marks: Mapping[Mark, str]


SIGNS: Mapping[Mark, str] = {"added": "+", "removed": "−", "changed": "~"}
_MARKS: Mapping[Mark, str] = {"added": "#0072b2", "removed": "#d55e00", "changed": "#8a5a00"}  # of Okabe and Ito
THEMES = {
    "paper": Theme(
        background="#ffffff",
        ink="#111111",
        faint="#555555",
        plate="#f3f3f4",
        fills={
            "attention": "#ffe2bb",
            "ffn": "#c2e8f7",
            "norm": "#f2f4c1",
            "embedding": "#fce0e1",
            "linear": "#dcdff0",
            "softmax": "#cbe7cf",
            "stack": "#f3f3f4",
        },
        marks=_MARKS,
    ),
    "dark": Theme(
        background="#16181d",
        ink="#e8e8e8",
        faint="#a8adb5",
        plate="#22252c",
        fills={
            "attention": "#5c4114",
            "ffn": "#12475a",
            "norm": "#484a18",
            "embedding": "#5a2d31",
            "linear": "#363d63",
            "softmax": "#23502b",
            "stack": "#2c3039",
        },
        marks={"added": "#56b4e9", "removed": "#ff9248", "changed": "#e6b04a"},
    ),
    "plain": Theme(
        background="#ffffff",
        ink="#000000",
        faint="#000000",
        plate="#ffffff",
        fills={},
        marks=dict.fromkeys(_MARKS, "#000000"),
    ),
}
