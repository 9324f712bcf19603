"""`tfm evaluate`: scores as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from tfm_blocks.report.screen import screen
from tfm_blocks.report.table import Cell, Sheet, print_sheet
from tfm_blocks.runs.folder import finite_or_null
from tfm_blocks.scoring.corpus import Score
from tfm_blocks.scoring.perplexity import Perplexity

TESTS = (
    "p: two-sided paired approximate randomization over these lines (Riezler and Maxwell 2005); sacreBLEU's p: its "
    "paired bootstrap (Koehn 2004), about half of that, for comparison with papers"
)


def show_scores(systems: Mapping[str, Sequence[Score]], lines: int) -> None:
    """Print a row for each score of each system, and below the table how they were computed."""
    tested = len(systems) > 1
    numbers = ["value", "95 %", *(["difference", "95 % of it", "p", "sacreBLEU's p"] if tested else [])]
    rows = [
        [Cell(name), Cell(one.name), *_numbers(one)[: len(numbers)]]
        for name, scores in systems.items()
        for one in scores
    ]
    console = screen()
    title = f"{lines:,} lines" if lines > 1 else "1 line"
    print_sheet(console, Sheet(title, ["run", "score", *numbers], rows, 2))
    if tested:
        console.print(TESTS)
    for one in next(iter(systems.values())):
        console.print(f"{one.name}: {one.signature}", soft_wrap=True)


def _numbers(one: Score) -> list[Cell]:
    numbers = [Cell(f"{one.value:.2f}", one.value), Cell(f"± {one.interval:.2f}", one.interval)]
    if one.difference is None or one.difference_interval is None:
        return numbers + 4 * [Cell("")]
    low, high = one.difference_interval
    numbers += [Cell(f"{one.difference:+.2f}", one.difference), Cell(f"[{low:+.2f}, {high:+.2f}]", low)]
    return numbers + [Cell("") if p is None else Cell(f"{p:.4f}", p) for p in (one.p, one.p_sacrebleu)]


def print_scores_json(systems: Mapping[str, Sequence[Score]], lines: int) -> None:
    """Print the scores and their tests, unrounded."""
    found = {name: [asdict(one) for one in scores] for name, scores in systems.items()}
    print(json.dumps(finite_or_null({"lines": lines, "runs": found}), indent=1, ensure_ascii=False))


def show_perplexity(found: Perplexity, run: str, *, as_json: bool) -> None:
    """Print the perplexity of a text."""
    values = {
        "perplexity per token": found.per_token,
        "perplexity per word": found.per_word,
        "bits per byte": found.bits_per_byte,
    }
    if as_json:
        sizes = {"tokens": found.tokens, "words": found.words, "bytes": found.bytes}
        record = {"run": run, **{name.replace(" ", "_"): one for name, one in values.items()}, **sizes}
        print(json.dumps(finite_or_null(record), indent=1))
        return
    for name, value in values.items():
        print(f"{name}: {value:.4f}")
    print(f"{found.tokens:,} tokens, {found.words:,} words, {found.bytes:,} bytes, ends of lines included")
