"""Lines made to fit: a text for each source, none longer than the model and the search take."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import DataError, Place, Problem
from tfm_blocks.language.spec import TARGET
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.translator import Translator


def split_columns(line: str, names: Sequence[str], number: int, *, strict: bool) -> tuple[str, ...]:
    """The text of each source. With a wrong number of tabs they are blank, with a warning, or DataError if `strict`."""
    if len(names) == 1:
        return (line,)
    columns = tuple(line.split("\t"))
    if len(columns) == len(names) or not line:
        return columns if line else ("",) * len(names)
    rule = f"the line has {len(columns)} texts with tabs between, but the model reads {', '.join(names)}"
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
    """Texts of more tokens than `max_tokens`, or than the model's positions have room for, are cut with a warning.

    `strict` raises DataError instead.
    """
    rooms = _rooms(translator)
    return [
        tuple(
            _fit(text, room, translator.tokenizer, search, Place(name, number), strict=strict)
            for text, room in zip(row, rooms, strict=True)
        )
        for number, row in enumerate(rows, first_line)
    ]


def _rooms(translator: Translator) -> list[float]:
    """The most tokens of the text of each source, without eos."""
    if translator.inputs:
        return [translator.network.longest(name).tokens - 1 for name in translator.inputs]
    count = len(translator.sources)
    return [(translator.network.longest(TARGET).tokens - 1) // count - 1] * count  # bos, and an eos after each


def _fit(text: str, room: float, tokenizer: Tokenizer, search: Search, place: Place, *, strict: bool) -> str:
    most = int(min(search.max_tokens, room))
    ids = tokenizer.encode(text) if 4 * len(text) > most else []  # a character has at most four bytes
    if len(ids) <= most:
        return text
    limit = "--max-tokens" if search.max_tokens <= room else "the positions that the model knows"
    rule = f"the line has {len(ids)} tokens, and the most is {most}, by {limit}"
    if strict:
        help = "split the line, or raise --max-tokens" if search.max_tokens < room else "split the line"
        raise DataError(Problem(place.file, rule, place, help=help))
    print(f"warning: {place.file}:{place.line}: {rule}: the rest of it is left out", file=sys.stderr)
    return _beginning(text, ids, most, tokenizer)


def _beginning(text: str, ids: Sequence[int], most: int, tokenizer: Tokenizer) -> str:
    """As much of `text` as `most` tokens hold: whole characters, which may end before the last of these tokens."""
    for count in range(most, 0, -1):
        begin = tokenizer.decode(ids[:count])
        if text.startswith(begin) and len(tokenizer.encode(begin)) <= most:
            return begin
    return ""
