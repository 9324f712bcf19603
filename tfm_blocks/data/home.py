"""Expansion of paths that begin with `~`."""

from __future__ import annotations

from pathlib import Path

from tfm_blocks.errors import ConfigError, Problem


def expand_home(address: str, path: str) -> Path:
    """Replace a leading `~` or `~user` by the home folder. Raises ConfigError if the user does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        rule = f"names the home folder of a user that does not exist: {path}"
        raise ConfigError(Problem(address, rule, help="write the full path, or ./ before a literal ~")) from None
