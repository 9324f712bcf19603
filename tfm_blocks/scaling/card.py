"""The figures of a device, from a YAML file of `cards/` or of a user."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml

from tfm_blocks.config.settings import Above0, Count, Settings, read_settings
from tfm_blocks.errors import ConfigError, Problem, shown, suggest
from tfm_blocks.language.files import expect_unambiguous, nested_events
from tfm_blocks.scaling.kernels import KERNELS

FOLDER = files("tfm_blocks.scaling") / "cards"
SUFFIX = ".yaml"


class Card(Settings):
    """A device with its connections; a plan leaves out the times that an unknown figure would need.

    device: whose kernels the plan counts. memory: GB. bandwidth: of the memory, GB/s. bf16, fp32: TFLOP/s of products.
    utilisation: the fraction of them that training reaches. link: GB/s that a card sends within a node. network: GB/s
    that a card sends to other nodes. cards_per_node: cards that `link` connects.
    """

    name: str
    device: Literal[*KERNELS]  # type: ignore[valid-type]
    memory: Above0 | None = None
    bandwidth: Above0 | None = None
    bf16: Above0 | None = None
    fp32: Above0 | None = None
    utilisation: Above0 = 1.0
    link: Above0 | None = None
    network: Above0 | None = None
    cards_per_node: Count = 1


def card_names() -> list[str]:
    """Return the names of the shipped cards."""
    return sorted(file.name.removesuffix(SUFFIX) for file in FOLDER.iterdir() if file.name.endswith(SUFFIX))


def read_card(name: str) -> Card:
    """Read a shipped card by its name, or the file of another card by its path. Raises ConfigError."""
    is_path = name.endswith(SUFFIX)
    if not is_path and name not in card_names():
        help = f"{suggest(name, card_names())}; or the path of a {SUFFIX} file with the keys of h100{SUFFIX}"
        raise ConfigError(Problem("--card", f"must be a known card, but is {shown(name)}", help=help))
    try:
        text = (Path(name) if is_path else FOLDER / f"{name}{SUFFIX}").read_text("utf-8")
        for event, _ in nested_events(text):
            expect_unambiguous(event, "--card", name)
        values: Any = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        rule = f"must be a YAML file, but {shown(name)} cannot be read: {type(error).__name__}"
        raise ConfigError(Problem("--card", rule, help="check the path and the text of the file")) from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(Problem(name, "must be a mapping of figures", help="write lines such as memory: 80"))
    return read_settings(Card, values)
