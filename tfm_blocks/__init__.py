"""Compose, train, compare and use Transformers that are written as small YAML graphs of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfm_blocks.translation.settings import Sampling, Search

if TYPE_CHECKING:
    from tfm_blocks.network.graph import Network
    from tfm_blocks.translation.translator import Translator

__all__ = ["Sampling", "Search", "build", "load"]
__version__ = "0.1.0"


def build(model: str, *, seed: int = 1, **knobs: Any) -> Network:
    """The network of a model, a name under conf/model/ or a path to a YAML file, with its root knobs set by `knobs`.

    `build("base", heads=8, vocab=37000)(src=src_BS, tgt=tgt_BT)` gives logits_BTV; ids are int64, 0 is padding.
    The same seed gives the same weights. Raises ConfigError where the model or a knob is wrong.
    """
    from tfm_blocks.compose.model import compose_model
    from tfm_blocks.network.build import build_network, check_model
    from tfm_blocks.registry.plugins import load_plugins

    overrides = [f"{name}={'null' if value is None else value}" for name, value in knobs.items()]
    composed = compose_model(model, overrides)
    load_plugins(())
    return build_network(check_model(composed.model, composed.sources), seed=seed)


def load(
    run: str | Path, *, device: str = "cpu", plugins: Sequence[str] = (), checkpoint: str | None = None
) -> Translator:
    """The translator of a finished run folder, with the plug-in modules that its model needs.

    `checkpoint` takes the weights of a validation, also of a run that is not finished: `last`, `best` or a step.
    `device` is a name of torch's, or `auto`: CUDA if there is a device, else the CPU.
    Raises RunError where the folder is damaged, foreign or incomplete.
    """
    from tfm_blocks.translation.translator import Translator

    return Translator.load(run, device=device, plugins=plugins, checkpoint=checkpoint)
