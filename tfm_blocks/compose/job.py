"""Compose the jobs of a sweep. Jobs that select the same options of groups share one composition."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from tfm_blocks.compose.command_line import override_key, sets_value
from tfm_blocks.compose.composition import add_plus, compose_config
from tfm_blocks.compose.folders import config_folders, root_keys
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.compose.run import ConfigFiles, compose_run, read_files
from tfm_blocks.language.sources import find_knobs


@dataclass
class JobComposer:
    """Composes jobs. Each file is read once, so files that may have changed need a new composer.

    `compositions` holds the config and its files for each selection of options, before any value is set.
    """

    config_dir: Path | None
    compositions: dict[tuple[str, ...], tuple[DictConfig, ConfigFiles]] = field(default_factory=dict)

    @cached_property
    def folders(self) -> list[Path]:
        """Return the config folders. Raises ConfigError."""
        return config_folders(self.config_dir)

    def compose(self, overrides: Sequence[str]) -> Composed:
        """Compose the config of a job. Raises ConfigError and Hydra's errors."""
        values, (config, files) = self._select(overrides)
        config = deepcopy(config)
        ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), config)
        config.hydra.overrides.task = [add_plus(text) for text in overrides]
        return compose_run(config, files)

    def unused(self, overrides: Sequence[str]) -> list[str]:
        """Return the overrides of knobs that the model of the job lacks or does not read."""
        values, (config, _) = self._select(overrides)
        raw = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
        read = find_knobs({**raw, "hydra": None}) | find_knobs(values) | root_keys()
        return [text for text in values if "." not in (key := override_key(text)) and key not in read]

    def _select(self, overrides: Sequence[str]) -> tuple[list[str], tuple[DictConfig, ConfigFiles]]:
        """Return the overrides that set values, and the composition of the others, which select options."""
        texts = [add_plus(text) for text in overrides]
        values = [text for text in texts if sets_value(text, self.folders)]
        selection = tuple(text for text in texts if text not in values)
        if selection not in self.compositions:
            config = compose_config(selection, self.config_dir, hydra=True)
            self.compositions[selection] = (config, read_files(config))
        return values, self.compositions[selection]


def compose_job(overrides: Sequence[str], config_dir: Path | None) -> Composed:
    """Compose the config of a single job. Raises ConfigError and Hydra's errors."""
    return JobComposer(config_dir).compose(overrides)
