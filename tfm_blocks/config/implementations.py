"""Find the implementations of a config group: each is a module of one package, so their names are a closed set."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any


def implementations(package: str, constant: str) -> dict[str, Any]:
    """Return the constant that each module of the package defines, by the name of the module."""
    folders = import_module(package).__path__
    return {one.name: getattr(import_module(f"{package}.{one.name}"), constant) for one in iter_modules(folders)}
