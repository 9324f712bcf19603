"""Try a tokenizer of others in a separate process, because it can crash its library or never return."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from tfm_blocks.data.published_tokenizer import FAST, PublishedTokenizer, stored_text
from tfm_blocks.data.vocabulary import Vocabulary
from tfm_blocks.errors import LONGEST_LINE, Problem, RunError, cut, shown

SECONDS = 5  # of CPU time for all texts; usual tokenizers take milliseconds
LOADING = 60  # seconds of CPU time
WAIT = 600  # seconds, on a busy machine
MEMORY = 16 << 30  # bytes of addresses
RUN = 48  # characters; a pattern whose time doubles with each one exceeds SECONDS
LETTERS = 8  # of the patterns, which are tried in pairs
TEXTS = (
    *("", " ", "\n", "\r\n\t ", "\0", "\ufffd\U0010ffff"),
    "The quick brown fox jumps over 13 lazy dogs, doesn't it? (x+y)*z = 0.5; foo_bar@example.org/a/b",
    "naïve Ärger ﬁ Ⅷ Ελληνικά русский עברית العربية हिन्दी ไทย 中文 日本語 한국어 🙂👩‍👩‍👧 e\u0301\u200b\u202e",
)
PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from tfm_blocks.data import tokenizer_trial as t; t.try_tokenizer()"
)


def expect_usable(files: Mapping[str, bytes], where: str) -> None:
    """Raise RunError if the tokenizer of these files fails, crashes or does not return for some texts."""
    try:
        rule = _fault(stored_text(Vocabulary(1 << 31, 0, 0), files))
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8: {error}"
    if rule:
        raise RunError(
            Problem(where, rule, help="the file is damaged, or of another kind: restore it, or name another")
        )


@cache
def _fault(text: str) -> str:
    """Return the fault of a tokenizer, or an empty text. The process imports nothing from the current folder."""
    root = str(Path(__file__).parent.parent.parent)
    command = [sys.executable, "-P", "-c", PROGRAM, root]
    try:
        done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=WAIT, check=False)
    except subprocess.TimeoutExpired:
        return f"cannot be used: the library does not return within {WAIT} s"
    if done.returncode == -signal.SIGXCPU:
        return (
            f"cannot be used: short texts take more than {SECONDS} s of CPU time; a pattern may backtrack without end"
        )
    if done.returncode < 0:
        return f"cannot be used: the library crashes ({signal.Signals(-done.returncode).name})"
    if done.returncode:
        reason = (done.stdout or done.stderr).decode("utf-8", "replace").strip().splitlines() or ["it fails"]
        return cut(reason[-1], LONGEST_LINE)
    return ""


def try_tokenizer() -> None:
    """Encode and decode texts with the tokenizer of stdin, under limits, and print its fault."""
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, LOADING)):
        _limit(limit, value)
    text = sys.stdin.buffer.read().decode()
    try:
        tokenizer = PublishedTokenizer.from_text(text, "")
    except RunError as error:
        sys.exit(_print(error.problems[0].rule))
    _limit(resource.RLIMIT_CPU, int(time.process_time()) + SECONDS)
    for text in _texts(tokenizer.files):
        try:
            tokenizer.text_of(tokenizer.published_ids([text])[0])
        except BaseException as error:  # also a panic of the library
            sys.exit(_print(f"cannot encode and decode {shown(text)}: {str(error).partition(chr(10))[0]}"))


def _limit(limit: int, value: int) -> None:
    most = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def _print(rule: str) -> int:
    print(rule.encode("utf-8", "backslashreplace").decode())
    return 1


def _texts(files: Mapping[str, bytes]) -> Iterator[str]:
    """Yield TEXTS, and runs of characters before which a pattern can backtrack."""
    yield from TEXTS
    patterns = "".join(_patterns(json.loads(files[FAST]))) if FAST in files else ""
    letters = [*dict.fromkeys(filter(str.isalnum, patterns))][:LETTERS]
    runs = [*map(chr, range(32, 127)), *dict.fromkeys(patterns), *map("".join, product(letters, letters))]
    for run, end in product(runs, ("!", "\x01", "z", "!" + "".join(letters))):
        yield run * RUN + end


def _patterns(value: Any) -> Iterator[str]:
    """Yield the regular expressions in the JSON of a tokenizer."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _patterns(inner)
    if isinstance(value, dict) and isinstance(pattern := value.get("Regex"), str):
        yield pattern
