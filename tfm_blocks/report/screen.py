"""Where reports are printed."""

from __future__ import annotations

from rich.console import Console

WIDE = 160


def screen() -> Console:
    """The terminal at its width; a pipe or a file at 160 columns, so that nothing in it is folded."""
    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)
