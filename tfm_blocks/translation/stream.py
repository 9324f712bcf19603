"""Lines in, translated lines out, while the input is still being written."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TextIO

from tfm_blocks.data.text import UTF8_MARK, read_lines
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import DataError, Place, Problem
from tfm_blocks.network.packed import packed
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.translator import Translation, Translator

BREAKING = re.compile("[\x00-\x1f\x7f\x85\u2028\u2029]")  # what readers of lines and columns could stumble over
READ = 1 << 16  # bytes at a time: some hundred lines, enough to fill batches of like length


@dataclass(frozen=True, kw_only=True)
class Stream:
    """How lines are translated; `strict` is that of `fitting`."""

    translator: Translator
    search: Search
    batch_tokens: int
    strict: bool
    scores: bool

    def run(
        self, source: Iterable[list[str]], target: TextIO, prefix: Path | None, tell: Callable[[int], object]
    ) -> None:
        """Writes the translations of each chunk of lines as soon as they are there, and tells how many lines are done.

        Raises DataError.
        """
        prefixes = read_lines(prefix, "--prefix") if prefix else None
        first = 1
        with packed(self.translator.network):
            for chunk in source:
                begins = _as_many(prefixes, len(chunk), first, str(prefix)) if prefixes else []
                tokenizer = self.translator.tokenizer
                texts = fitting(chunk, tokenizer, self.search, "stdin", strict=self.strict, first_line=first)
                _tell_blank(texts, begins, first)
                found = self.translator.search(
                    texts, self.search, prefixes=begins, batch_tokens=self.batch_tokens, first_line=first
                )
                for number, translations in enumerate(found, first):
                    target.writelines(self._written(number, one) for one in translations)
                target.flush()
                first += len(chunk)
                tell(first - 1)
        if prefixes and next(prefixes, None) is not None:
            rule = f"has more lines than the {first - 1} of stdin"
            raise DataError(Problem(str(prefix), rule, Place(str(prefix), first)))

    def _written(self, number: int, one: Translation) -> str:
        text = BREAKING.sub(" ", one.text)
        if self.search.nbest > 1:
            return f"{number}\t{one.score:.4f}\t{text}\n"
        return f"{one.score:.4f}\t{text}\n" if self.scores else f"{text}\n"


def fitting(
    lines: Sequence[str], tokenizer: Tokenizer, search: Search, name: str, *, strict: bool, first_line: int = 1
) -> list[str]:
    """Lines of more than `max_tokens` tokens are cut, with a warning, or raise DataError if `strict`."""
    most = search.max_tokens
    fit = []
    for number, text in enumerate(lines, first_line):
        ids = tokenizer.encode(text) if 4 * len(text) > most else []  # a character has at most four bytes
        if len(ids) > most:
            rule = f"the line has {len(ids)} tokens, and the most is {most}"
            if strict:
                raise DataError(Problem(name, rule, Place(name, number), help="raise --max-tokens, or split the line"))
            print(f"warning: {name}:{number}: {rule}: the rest of it is left out", file=sys.stderr)
        fit.append(tokenizer.decode(ids[:most]) if len(ids) > most else text)
    return fit


def _tell_blank(texts: Sequence[str], prefixes: Sequence[str], first: int) -> None:
    for number, (text, prefix) in enumerate(zip(texts, prefixes, strict=False), first):
        if prefix.strip() and not text.strip():
            print(f"warning: stdin:{number}: the line is blank, so its prefix is left out", file=sys.stderr)


def chunks(source: BinaryIO, name: str) -> Iterator[list[str]]:
    """The lines that are there, at most READ bytes of them; it waits for one line. DataError where it is not UTF-8."""
    rest, number = b"", 1
    while data := os.read(source.fileno(), READ):
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            yield from _decoded(lines, name, number)
            number += len(lines)
    if rest:
        yield from _decoded([rest], name, number)


def typed() -> Iterator[list[str]]:
    """The lines that somebody types at a prompt, each by itself, until Ctrl-D."""
    with suppress(ImportError):
        import readline  # noqa: F401  gives `input` history and keys to edit with; not on every system
    assert isinstance(sys.stdin, TextIOWrapper)
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    print("a sentence a line; Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            yield [input("> " if sys.stdout.isatty() else "")]
        except EOFError:
            return


def _decoded(lines: Sequence[bytes], name: str, first: int) -> Iterator[list[str]]:
    """The lines; where one is not UTF-8, those before it, and then the error."""
    chunk: list[str] = []
    for number, line in enumerate(lines, first):
        try:
            chunk.append((line.removeprefix(UTF8_MARK) if number == 1 else line).decode("utf-8").removesuffix("\r"))
        except UnicodeDecodeError:
            yield chunk
            raise DataError(Problem(name, "the line is not UTF-8 text", Place(name, number))) from None
    yield chunk


def _as_many(prefixes: Iterator[str], count: int, first: int, name: str) -> list[str]:
    found = list(islice(prefixes, count))
    if len(found) < count:
        rule = f"ends after {first - 1 + len(found)} lines, but stdin goes on"
        raise DataError(Problem(name, rule, help="a prefix file has a line, empty or not, for each line of stdin"))
    return found
