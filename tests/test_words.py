"""Names stand for one thing, and pages, messages, docstrings and comments use plain words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "tfm_blocks").rglob("*.py"))
SCRIPTS = [*MODULES, ROOT / "train.py", *sorted((ROOT / "docs").glob("*.py"))]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONFIG_FILES = sorted((ROOT / "conf").rglob("*.yaml"))
HABITS = re.compile(
    r"\b(is|are|was|were|be|been) (told|asked|left)\b(?! (to|by|out|in|of|over))|\bheard? of\b|\bbegins? anew\b|\bgoes on with\b"
    r"|\bby heart\b|\bof (its|their) own\b|\bso many\b|\bso long\b|\bheed|\bmend(s|ed)?\b"
    r"|\b(the|its|their) begin\b|\banother [a-z]+ than\b|\b(tokens|lines|pairs|sentences|steps|maps) a (second|step|head)\b"
    r"|\b(has|have|had) (a )?(BLEU|chrF|TER|exact match)\b|\b(came|owed|again)\b",
    re.IGNORECASE,
)
CODE = re.compile(r"`[^`]*`")
SHARED = {  # the same command or function at two levels of the interface
    "add_commands": "each module of cli/ adds its commands",
    "train": "tfm.train, tfm train and launch.job.train",
}


def public_names(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name


def test_a_public_class_or_function_has_a_name_of_its_own() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for name in public_names(path):
            places[name].append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1 and name not in SHARED} == {}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module, docstrings included, and its comments."""
    source = path.read_text("utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def habits(read: Callable[[Path], Iterable[tuple[int, str]]], paths: list[Path]) -> list[tuple[str, int, str]]:
    """Return the place and the text of each habit in the files."""
    return [(str(path), line, text) for path in paths for line, text in read(path) if HABITS.search(text)]


def test_messages_docstrings_and_comments_use_plain_words() -> None:
    assert habits(texts, SCRIPTS) == []


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside of its fences, without code."""
    inside = False
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            yield number, CODE.sub("", line)


def comments(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        yield number, line.partition("#")[2]


def test_comments_of_conf_use_plain_words() -> None:
    assert habits(comments, CONFIG_FILES) == []


def test_pages_use_plain_words() -> None:
    assert habits(prose, PAGES) == []
