"""Compose, train, compare and use Transformers that are defined as small YAML graphs of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfm_blocks.errors import ConfigError, DataError, RunError, TfmError
from tfm_blocks.translation.settings import Sampling, Search
from tfm_blocks.version import __version__ as __version__

if TYPE_CHECKING:
    from tfm_blocks.data.tokenizer import Tokenizer
    from tfm_blocks.launch.python import Run
    from tfm_blocks.launch.rank import Callbacks
    from tfm_blocks.network.graph import Network
    from tfm_blocks.training.checkpoints import PreemptedError
    from tfm_blocks.training.non_finite import DivergedError
    from tfm_blocks.translation.encoder import Encoder
    from tfm_blocks.translation.translator import Translator

__all__ = [
    "ConfigError", "DataError", "DivergedError", "PreemptedError", "Run", "RunError", "Sampling", "Search", "TfmError",
    "Tokenizer", "build", "load", "save", "train",
]  # fmt: skip


def build(
    model: str, *, seed: int = 1, plugins: Sequence[str] = (), config_dir: str | Path | None = None, **knobs: Any
) -> Network:
    """Build the network of a model with its initial weights.

    Args:
        model: A name under conf/model/, or a path to a YAML file.
        seed: The same seed gives the same weights.
        plugins: Names of Python modules that register blocks or probe tasks of your own.
        config_dir: A folder with your own config files, like `--config-dir`.
        knobs: Values of root keys of the model, such as `heads=8` or `vocab=37000`.

    Returns:
        An `nn.Module`: `network(src=src_BS, tgt=tgt_BT)` returns logits_BTV. Ids are int64, 0 is padding.

    Raises:
        ConfigError: The model, a knob, or a plug-in is invalid.
    """
    from tfm_blocks.compose.model import compose_model
    from tfm_blocks.network.build import build_network, check_model
    from tfm_blocks.registry.plugins import load_plugins

    composed = compose_model(model, _overrides(knobs), None if config_dir is None else Path(config_dir))
    load_plugins(plugins)
    return build_network(check_model(composed.model, composed.sources), seed=seed)


def train(
    model: str | None = None,
    *,
    overrides: Sequence[str] = (),
    callbacks: Callbacks = (),
    plugins: Sequence[str] = (),
    config_dir: str | Path | None = None,
    **knobs: Any,
) -> Run:
    """Train a run in a new folder below runs/, or resume one with `resume=FOLDER`.

    The config is the same as in `tfm train`, and so are the weights. Handlers of signals, Hydra's state,
    logging levels, warning filters and random generators are restored before the function returns or raises.

    Args:
        model: A name under conf/model/, or a path FOLDER/model/NAME.yaml.
            Default: the model of the experiment, or else of conf/train.yaml.
        overrides: `KEY=VALUE` as on the command line, such as `"trainer.steps=20"`.
        callbacks: Lightning callbacks. They are not recorded, so also pass them to resume the run.
        plugins: Names of Python modules that register blocks or probe tasks of your own.
        config_dir: A folder with your own config files, like `--config-dir`.
        knobs: Root keys and groups of the config, such as `layers=2`, `seed=2`, `data="text"` or `name="mine"`.

    Returns:
        The folder of the finished run, with its scores.

    Raises:
        ConfigError: The config is invalid; nothing was started.
        DataError: The text cannot be used.
        RunError: A run folder is damaged, or memory is insufficient.
        DivergedError: The loss or its gradient was not finite too often.
        PreemptedError: A signal stopped the run after a checkpoint; `resume=FOLDER` resumes it.
    """
    from tfm_blocks.launch.python import train

    loaded = [f"plugins=[{','.join(plugins)}]"] if plugins else []
    folder = None if config_dir is None else Path(config_dir)
    return train(model, [*_overrides(knobs), *loaded, *overrides], callbacks=callbacks, config_dir=folder)


def save(network: Network, folder: str | Path, *, tokenizer: Tokenizer) -> Path:
    """Write a network that you trained yourself as a run folder.

    `tfm.load`, `tfm translate`, `tfm evaluate` and `init_from=FOLDER` read it.

    Args:
        network: A network from `tfm.build`, or the network of a translator from `tfm.load`.
        folder: A folder that does not exist yet.
        tokenizer: The tokenizer that the network was trained with.

    Returns:
        The folder.

    Raises:
        ConfigError: The tokenizer and the model differ in vocabulary size, or a block of the model is defined in a
            script, which cannot be imported.
        RunError: The folder exists, a weight is not finite, or the disk is full.
    """
    from tfm_blocks.translation.save import save_network

    return save_network(network, Path(folder), tokenizer)


def load(
    run: str | Path, *, device: str = "cpu", plugins: Sequence[str] = (), checkpoint: str | int | None = None
) -> Translator | Encoder:
    """Load the network and the tokenizer of a run folder: a translator, or an encoder if the model has no `tgt`.

    Args:
        run: A folder written by training or by `save`.
        device: a device of torch, such as `cpu`, or `auto`: the accelerator if there is one, else the CPU.
        plugins: The modules with the model's own blocks. Loading a run folder never imports them by itself.
        checkpoint: A saved validation to load instead of the final weights, also of an unfinished run: `"last"`,
            `"best"` or the number of a step.

    Returns:
        The translator or encoder; its `network` is an `nn.Module`.

    Raises:
        RunError: The folder is damaged, foreign or incomplete, or lacks the checkpoint.
        ConfigError: A plug-in cannot be imported.
    """
    from tfm_blocks.translation.classify import load_any

    return load_any(Path(run), device=device, plugins=plugins, checkpoint=checkpoint)


def _overrides(knobs: dict[str, Any]) -> list[str]:
    from tfm_blocks.compose.overrides import override_text

    return [override_text(name, value) for name, value in knobs.items()]


LAZY = {
    "DivergedError": "tfm_blocks.training.non_finite",
    "PreemptedError": "tfm_blocks.training.checkpoints",
    "Run": "tfm_blocks.launch.python",
    "Tokenizer": "tfm_blocks.data.tokenizer",
}  # classes of modules that import torch or tokenizers, which takes seconds

if not TYPE_CHECKING:  # otherwise a type checker would accept any name of the package

    def __getattr__(name: str) -> Any:
        """Import a class on first use."""
        if name not in LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(LAZY[name]), name)
