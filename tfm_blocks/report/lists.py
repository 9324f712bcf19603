"""Runs, models and jobs of a sweep on the terminal and as JSON: lists, one run, and the scores of `tfm evaluate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from tfm_blocks.compose.comments import Entry
from tfm_blocks.errors import Problem, counted
from tfm_blocks.metric_schema import PSEUDO
from tfm_blocks.report.comparison import Comparison
from tfm_blocks.report.comparison_tables import SCORE, interval, runs_table, scores_table
from tfm_blocks.report.differences import Group, Runs
from tfm_blocks.report.screen import print_json, print_table, screen
from tfm_blocks.report.table import COUNT, P_VALUE, Cell, Rows, Table, numbers, p_cell, texts
from tfm_blocks.runs.records import Score, spread_text
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.scoring.perplexity import Perplexity

TESTS = (
    "p: two-sided paired approximate randomization over these lines (Riezler and Maxwell 2005): a small p says that "
    "these trained models differ, and nothing about other seeds; sacreBLEU's p: its paired bootstrap (Koehn 2004), "
    "about half of that, for comparison with papers"
)


# Facts that other lines or the node table show.
SHOWN_ELSEWHERE = frozenset({"model", "seed", "command", "resumed", "parameters_by_node", "optimizer_groups"})


def show_runs(runs: Runs, *, as_json: bool) -> None:
    """Print a row for each run; as JSON, unrounded and with the command lines."""
    if as_json:
        print_json([entry_record(run) for run in runs])
        return
    columns = texts("run", "state", "model", "data") + numbers(COUNT, "step", "score", "changed")
    rows: Rows = []
    for run in runs:
        score = Cell(f"{run.headline[0]} {run.headline[1]:.4g}", run.headline[1]) if run.headline else None
        changed = Cell(datetime.fromtimestamp(run.changed).strftime("%Y-%m-%d %H:%M"), run.changed)
        rows.append([str(run.folder), run.state, run.model, run.data, run.step, score, changed])
    print_table(Table("", columns, rows))


def entry_record(run: SavedRun) -> dict[str, Any]:
    """Return the fields of a run for JSON."""
    changed = datetime.fromtimestamp(run.changed).astimezone().isoformat(timespec="seconds")
    return {
        "folder": str(run.folder),
        "state": run.state,
        "model": run.model,
        "data": run.data,
        "step": run.step,
        "score": dict([run.headline]) if run.headline else {},
        "changed": changed,
        "commands": run.commands,
    }


def show_models(models: Sequence[Entry], *, as_json: bool) -> None:
    """Print a row for each model; as JSON, with its files."""
    if as_json:
        print_json([asdict(model) for model in models])
        return
    rows = [[model.name, ", ".join(model.parents), model.about, " ".join(model.knobs)] for model in models]
    print_table(Table("models", texts("model", "inherits", "what it is", "knobs that it sets"), rows))


def show_jobs(jobs: Sequence[tuple[Sequence[str], int, Sequence[Problem]]]) -> None:
    """Print a row for each job: its overrides, and its number of parameters or the reason why it cannot start."""
    columns = texts("job") + numbers(COUNT, "parameters") + texts("verdict")
    rows = [
        [
            " ".join(overrides),
            None if problems else parameters,
            "; ".join(f"{problem.address}: {problem.rule}" for problem in problems[:1]) or "fine",
        ]
        for overrides, parameters, problems in jobs
    ]
    print_table(Table(counted(len(jobs), "job"), columns, rows))


def show_run(run: SavedRun) -> None:
    """Print the run in lines."""
    for line in _lines(run):
        screen().print(line, soft_wrap=True)


def _lines(run: SavedRun) -> Iterator[str]:
    score = f", {run.headline[0]} {run.headline[1]:.4g}" if run.headline else ""
    reason = f" ({run.reason})" if run.reason else ""
    yield f"{run.folder}: {run.state or 'of no known state'}{reason}, {counted(run.step, 'step')}{score}"
    yield from run.commands
    if run.start.parent:
        yield f"branched off {run.start.parent}"
    alone = Comparison([run], [], [Group(run.name, [run])])
    yield from _numbers("measured", runs_table(alone))
    if run.scored_on:
        yield from _numbers(f"scores on {run.scored_on}", scores_table(alone))
    for name, value in run.start.facts.items():
        if name not in SHOWN_ELSEWHERE and value is not None:
            yield f"{name}: {_text(value)}"
    for change in run.start.changes:
        if facts := {name: value for name, value in change.items() if name not in SHOWN_ELSEWHERE}:
            yield f"changed by resume {change.get('resumed', '')}: {_text(facts)}"


def _numbers(what: str, table: Table) -> Iterator[str]:
    """Yield the numbers of a table of one run, in a line."""
    pairs = zip(table.columns, table.cells[0], strict=True)
    if known := [f"{column.heading} {cell.text}" for column, cell in pairs if column.form and cell.text]:
        yield f"{what}: {', '.join(known)}"


def _text(value: Any) -> str:
    """Return a value as text, such as `device cpu, cores 2` for a mapping."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    return f"{value:,}" if type(value) is int else str(value)


def show_scores(systems: Mapping[str, Sequence[Score]], counts: Mapping[str, int], *, as_json: bool) -> None:
    """Print a row for each score of each system, and below the table how they were computed; as JSON, unrounded.

    `counts` has the number of lines of each system, or of documents for a pseudo-perplexity.
    """
    unit = "document" if any(score.name == PSEUDO for scores in systems.values() for score in scores) else "line"
    if as_json:
        runs = {
            name: [asdict(score) | {"low": score.ends[0], "high": score.ends[1]} for score in scores]
            for name, scores in systems.items()
        }
        print_json({f"{unit}s": counts, "runs": runs})
        return
    tested = any(score.difference is not None for scores in systems.values() for score in scores)
    columns = texts("run", "score") + numbers(SCORE, "value", "95 %")
    if tested:
        columns += numbers("{:+.2f}", "difference") + numbers(SCORE, "95 % of it")
        columns += numbers(P_VALUE, "p", "sacreBLEU's p")
    rows: Rows = []
    for name, scores in systems.items():
        for score in scores:
            half = Cell(spread_text(score.value, *score.ends), score.interval) if score.interval > 0 else None
            difference = interval(score.difference_interval, "{:+.2f}")
            tests = [score.difference, difference, p_cell(score.p), p_cell(score.p_sacrebleu)] if tested else []
            rows.append([name, score.name, score.value, half, *tests])
    console = screen()
    fewest, most = min(counts.values()), counted(max(counts.values()), unit)
    print_table(Table(most if len(set(counts.values())) == 1 else f"{fewest:,} to {most}", columns, rows))
    if tested:
        console.print(TESTS)
    for score in next(iter(systems.values())):
        console.print(f"{score.name}: {score.signature}", soft_wrap=True)


def show_perplexity(perplexity: Perplexity, run: str, *, as_json: bool) -> None:
    """Print the perplexity of a text."""
    pseudo = "pseudo-" if perplexity.pseudo else ""
    values = {
        f"{pseudo}perplexity per token": perplexity.per_token,
        f"{pseudo}perplexity per word": perplexity.per_word,
    }
    values |= {} if pseudo else {"bits per byte": perplexity.bits_per_byte}
    if as_json:
        sizes = {"tokens": perplexity.tokens, "words": perplexity.words, "bytes": perplexity.bytes}
        sizes |= {"unknown_tokens": perplexity.unknown} if pseudo else {}
        print_json(
            {"run": run, **{name.replace(" ", "_").replace("-", "_"): value for name, value in values.items()}, **sizes}
        )
        return
    for name, value in values.items():
        print(f"{name}: {value:.4f}")
    sizes_text = f"{perplexity.tokens:,} tokens, {perplexity.words:,} words, {perplexity.bytes:,} bytes"
    print(f"{sizes_text}, ends of lines {'excluded' if pseudo else 'included'}")
    if perplexity.unknown:
        total = perplexity.tokens + perplexity.unknown
        print(f"{perplexity.unknown:,} of {total:,} tokens are unknown to the tokenizer, and are not predicted")
