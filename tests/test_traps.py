"""The table of traps names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "decisions" / "17-traps-of-runs.md"


def test_every_test_that_the_table_names_is_there():
    file, named = "", 0
    for before, test in re.findall(r"`([\w/]*(?:\.py)?)::(test_\w+)`", PAGE.read_text("utf-8")):
        file, named = before or file, named + 1
        assert f"def {test}(" in (TESTS / file).read_text("utf-8"), f"{file}::{test}"
    assert named > 40
