"""`tfm evaluate`: scores as a table or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from tfm_blocks.report.comparison_tables import P_VALUE, SCORE, interval
from tfm_blocks.report.screen import print_json, print_table, screen
from tfm_blocks.report.table import Cell, Column, Table, Value, texts
from tfm_blocks.runs.records import Score
from tfm_blocks.scoring.perplexity import Perplexity

TESTS = (
    "p: two-sided paired approximate randomization over these lines (Riezler and Maxwell 2005): a small p says that "
    "these trained models differ, and nothing about other seeds; sacreBLEU's p: its paired bootstrap (Koehn 2004), "
    "about half of that, for comparison with papers"
)


def show_scores(systems: Mapping[str, Sequence[Score]], lines: int) -> None:
    """Print a row for each score of each system, and below the table how they were computed."""
    tested = any(score.difference is not None for scores in systems.values() for score in scores)
    numbers = [Column("value", SCORE), Column("95 %", SCORE)]
    if tested:
        numbers += [Column("difference", "{:+.2f}"), Column("95 % of it", SCORE)]
        numbers += [Column("p", P_VALUE), Column("sacreBLEU's p", P_VALUE)]
    rows = [[name, *_row(score)[: 1 + len(numbers)]] for name, scores in systems.items() for score in scores]
    console = screen()
    print_table(Table(f"{lines:,} lines" if lines > 1 else "1 line", [*texts("run", "score"), *numbers], rows))
    if tested:
        console.print(TESTS)
    for score in next(iter(systems.values())):
        console.print(f"{score.name}: {score.signature}", soft_wrap=True)


def _row(score: Score) -> list[Value]:
    half = Cell(f"± {score.interval:.2f}", score.interval)
    difference = interval(score.difference_interval, "{:+.2f}")
    return [score.name, score.value, half, score.difference, difference, score.p, score.p_sacrebleu]


def print_scores_json(systems: Mapping[str, Sequence[Score]], lines: int) -> None:
    """Print the scores and their tests, unrounded."""
    runs = {name: [asdict(score) for score in scores] for name, scores in systems.items()}
    print_json({"lines": lines, "runs": runs})


def show_perplexity(perplexity: Perplexity, run: str, *, as_json: bool) -> None:
    """Print the perplexity of a text."""
    values = {
        "perplexity per token": perplexity.per_token,
        "perplexity per word": perplexity.per_word,
        "bits per byte": perplexity.bits_per_byte,
    }
    if as_json:
        sizes = {"tokens": perplexity.tokens, "words": perplexity.words, "bytes": perplexity.bytes}
        print_json({"run": run, **{name.replace(" ", "_"): value for name, value in values.items()}, **sizes})
        return
    for name, value in values.items():
        print(f"{name}: {value:.4f}")
    sizes_text = f"{perplexity.tokens:,} tokens, {perplexity.words:,} words, {perplexity.bytes:,} bytes"
    print(f"{sizes_text}, ends of lines included")
