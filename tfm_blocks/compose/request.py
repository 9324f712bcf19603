"""The config of one run that is requested from Python, without a trace in Hydra's global state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from tfm_blocks.compose.command_line import composed, prepare_arguments, split_arguments
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.compose.run import compose_resumed, compose_run, is_to_verify, resumed_run, task_overrides
from tfm_blocks.errors import ConfigError, Problem, cut


@dataclass(frozen=True)
class Request:
    """A config as Hydra composed it. `typed`: the words after `tfm train` that give the same run."""

    config: DictConfig
    typed: Sequence[str]

    @property
    def resumed(self) -> Path | None:
        """The folder of the run to resume, if any. Raises ConfigError."""
        return resumed_run(self.config)

    def compose(self) -> Composed:
        """Return the config of a new run. Raises ConfigError."""
        return compose_run(self.config)

    def compose_resumed(self, recorded: Mapping[str, Any], where: str, text: str) -> Composed:
        """Return the recorded config with the changes that a resume takes. Raises ConfigError."""
        return compose_resumed(self.config, recorded, where, text)


@contextmanager
def compose_request(overrides: Sequence[str], own: Path | None) -> Iterator[Request]:
    """Compose `conf/`, the folder `own` and the overrides as `tfm train` does.

    Hydra's settings are global, and exist only inside. Raises ConfigError.
    """
    _expect_overrides(overrides)
    options = ["--config-dir", str(own.resolve())] if own else []
    texts = split_arguments(prepare_arguments([*options, *overrides])).texts
    config: Any = composed(list(texts), own, hydra=True)
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        with open_dict(config):
            del config["hydra"]
        if is_to_verify(config):
            rule = "compares two trainings in place of a run"
            raise ConfigError(Problem("verify", rule, help="tfm train verify=resume …"))
        yield Request(config, [*options, *task_overrides()])
    finally:
        HydraConfig.instance().cfg = before


def _expect_overrides(overrides: Sequence[str]) -> None:
    for text in overrides:
        if not isinstance(text, str) or text.startswith("-"):
            rule = f"must be texts such as 'trainer.steps=20', but one is {cut(repr(text))}"
            raise ConfigError(Problem("overrides", rule, help="config_dir=… names a folder; sweeps need tfm train -m"))
