"""Splitting lines into source texts, and truncating texts that are too long for the model or the search."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import DataError, Place, Problem
from tfm_blocks.language.spec import TARGET
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.translator import Translator


def split_line(line: str, names: Sequence[str], number: int, *, strict: bool) -> tuple[str, ...]:
    """Return the text of each source; a wrong number of tabs gives blanks with a warning, or DataError if `strict`."""
    if len(names) == 1:
        return (line,)
    columns = tuple(line.split("\t"))
    if len(columns) == len(names) or not line:
        return columns if line else ("",) * len(names)
    rule = f"the line has {len(columns)} tab-separated texts, but the model reads {', '.join(names)}"
    if strict:
        raise DataError(Problem("stdin", rule, Place("stdin", number), help="paste FILE1 FILE2 | tfm translate RUN"))
    print(f"warning: stdin:{number}: {rule}: its translation is an empty line", file=sys.stderr)
    return ("",) * len(names)


def fitting(
    rows: Sequence[Sequence[str]],
    translator: Translator,
    search: Search,
    name: str,
    *,
    strict: bool,
    first_line: int = 1,
) -> list[tuple[str, ...]]:
    """Truncate texts to `max_tokens` and to the model's maximum length, with a warning.

    `strict` raises DataError instead.
    """
    limits = _longest_texts(translator)
    return [
        tuple(
            _fit(text, limit, translator.tokenizer, search, Place(name, number), strict=strict)
            for text, limit in zip(row, limits, strict=True)
        )
        for number, row in enumerate(rows, first_line)
    ]


def _longest_texts(translator: Translator) -> list[float]:
    """Return the maximum number of tokens of the text of each source, without eos."""
    if translator.inputs:
        return [translator.network.longest(name).tokens - 1 for name in translator.inputs]
    count = len(translator.sources)
    return [(translator.network.longest(TARGET).tokens - 1) // count - 1] * count  # bos, and an eos after each


def _fit(text: str, longest: float, tokenizer: Tokenizer, search: Search, place: Place, *, strict: bool) -> str:
    most = int(min(search.max_tokens, longest))
    ids = tokenizer.encode(text) if 4 * len(text) > most else []  # a character has at most four bytes
    if len(ids) <= most:
        return text
    limit = "--max-tokens" if search.max_tokens <= longest else "the model's positions"
    rule = f"the line has {len(ids)} tokens, but the maximum is {most}, by {limit}"
    if strict:
        help = "split the line, or raise --max-tokens" if search.max_tokens < longest else "split the line"
        raise DataError(Problem(place.file, rule, place, help=help))
    print(f"warning: {place.file}:{place.line}: {rule}: the rest is cut", file=sys.stderr)
    return _beginning(text, ids, most, tokenizer)


def _beginning(text: str, ids: Sequence[int], most: int, tokenizer: Tokenizer) -> str:
    """Return the longest prefix of whole characters of `text` that has at most `most` tokens."""
    for count in range(most, 0, -1):
        begin = tokenizer.decode(ids[:count])
        if text.startswith(begin) and len(tokenizer.encode(begin)) <= most:
            return begin
    return ""
