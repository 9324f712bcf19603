"""Compose the config of a run from Python, and restore Hydra's global state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from tfm_blocks.compose.command_line import compose_config, prepare_arguments, split_arguments
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.compose.run import compose_resumed, compose_run, read_resume_folder, should_verify, task_overrides
from tfm_blocks.errors import ConfigError, Problem, cut


@dataclass(frozen=True)
class Request:
    """A config composed by Hydra. `typed`: the arguments of `tfm train` for the same run."""

    config: DictConfig
    typed: Sequence[str]

    @property
    def resumed(self) -> Path | None:
        """Return the folder of the run to resume, or None. Raises ConfigError."""
        return read_resume_folder(self.config)

    def compose(self) -> Composed:
        """Return the config of a new run. Raises ConfigError."""
        return compose_run(self.config)

    def compose_resumed(self, recorded: Mapping[str, Any], where: str, text: str) -> Composed:
        """Return the recorded config with the changes that resuming allows. Raises ConfigError."""
        return compose_resumed(self.config, recorded, where, text)


@contextmanager
def compose_request(overrides: Sequence[str], config_dir: Path | None) -> Iterator[Request]:
    """Compose `conf/`, the folder `config_dir` and the overrides as `tfm train` does.

    Hydra's global settings exist only inside the context. Raises ConfigError.
    """
    _expect_overrides(overrides)
    options = ["--config-dir", str(config_dir.resolve())] if config_dir else []
    texts = split_arguments(prepare_arguments([*options, *overrides])).texts
    config: Any = compose_config(list(texts), config_dir, hydra=True)
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        with open_dict(config):
            del config["hydra"]
        if should_verify(config):
            rule = "compares two trainings and is not available from Python"
            raise ConfigError(Problem("verify", rule, help="tfm train verify=resume …"))
        yield Request(config, [*options, *task_overrides()])
    finally:
        HydraConfig.instance().cfg = before


def _expect_overrides(overrides: Sequence[str]) -> None:
    for text in overrides:
        if not isinstance(text, str) or text.startswith("-"):
            rule = f"must be strings such as 'trainer.steps=20', but has {cut(repr(text))}"
            raise ConfigError(Problem("overrides", rule, help="config_dir=… names a folder; sweeps need tfm train -m"))
