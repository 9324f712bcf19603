"""`tfm evaluate`: scores as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.table import Table

from tfm_blocks.report.screen import screen
from tfm_blocks.runs.folder import finite_or_null
from tfm_blocks.translation.evaluate import Score
from tfm_blocks.translation.perplexity import Perplexity


def show_scores(systems: Mapping[str, Sequence[Score]], lines: int) -> None:
    """Prints a row for each score of each system, and below the table how they were computed."""
    title = f"{lines:,} lines" if lines > 1 else "1 line"
    table = Table("run", "score", "value", "95 %", "p", title=title, title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    for name, scores in systems.items():
        for one in scores:
            p = "" if one.p is None else f"{one.p:.4f}"
            table.add_row(name, one.name, f"{one.value:.2f}", f"± {one.interval:.2f}", p)
    console = screen()
    console.print(table)
    for one in next(iter(systems.values())):
        console.print(f"{one.name}: {one.signature}")


def print_json(systems: Mapping[str, Sequence[Score]], lines: int) -> None:
    """Prints everything that the table shows, unrounded."""
    found = {name: [asdict(one) for one in scores] for name, scores in systems.items()}
    print(json.dumps(finite_or_null({"lines": lines, "runs": found}), indent=1, ensure_ascii=False))


def show_perplexity(found: Perplexity, run: str, *, as_json: bool) -> None:
    """Prints the perplexity of a text."""
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
