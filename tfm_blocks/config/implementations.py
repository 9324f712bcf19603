"""Find the implementations of a config group: each is a module of one package, so their names are a closed set."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any


def names_of(package: str) -> list[str]:
    """Return the names of the modules of a package."""
    return [one.name for one in iter_modules(import_module(package).__path__)]


def implementation(package: str, name: str, constant: str) -> Any:
    """Return the constant that a module of the package defines; `name` is one of `names_of`."""
    return getattr(import_module(f"{package}.{name}"), constant)
