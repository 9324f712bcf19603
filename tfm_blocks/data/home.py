"""Paths that begin with `~`."""

from __future__ import annotations

from pathlib import Path

from tfm_blocks.errors import ConfigError, Problem


def expand_home(address: str, path: str) -> Path:
    """Replace a leading `~` or `~user` by that home folder. Raises ConfigError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        rule = f"begins with the home folder of a user who does not exist here: {path}"
        raise ConfigError(
            Problem(address, rule, help="write the whole path; ./ before a ~ makes it a letter")
        ) from None
