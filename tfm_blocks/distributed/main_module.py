"""Keep new processes from importing the caller's script."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def main_hidden() -> Iterator[None]:
    """Hide the main module from processes that are started inside.

    A new process imports the script of its parent, which would train again unless all of it stood below
    `if __name__ == "__main__"`. Nothing in the processes of a run is defined there.
    """
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
