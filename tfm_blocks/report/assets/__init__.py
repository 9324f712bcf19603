"""The styles, scripts and templates of the pages."""

from pathlib import Path


def asset(name: str) -> str:
    """Return the text of a file of this folder."""
    return (Path(__file__).parent / name).read_text("utf-8")
