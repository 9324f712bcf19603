"""Read a run folder: its state, settings, measurements and scores. No weights are loaded and nothing is computed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from tfm_blocks.errors import Problem, RunError, cut, print_on_rank_0
from tfm_blocks.metric_schema import (
    BITS_PER_BYTE,
    EQUAL_LOSS,
    HIDING,
    LABEL_SCORES,
    OBJECTIVE,
    PSEUDO,
    SOLVED,
    SOLVED_FROM,
    TEST_KEYS,
    TOKEN_ACCURACY,
    VAL_KEYS,
    find_score,
)
from tfm_blocks.runs.files import Setting, damaged, named_folder, parse_mapping, read_settings_part, read_text
from tfm_blocks.runs.folder import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    MODEL,
    STATUS,
    SWEEP,
    WEIGHTS,
    is_run,
    modified,
    step_files,
    step_of,
)
from tfm_blocks.runs.lock import holder_of
from tfm_blocks.runs.metrics import Best, read_last_row, read_rows, summarise
from tfm_blocks.runs.records import (
    WAITING,
    JobEntry,
    Measured,
    RunFile,
    SavedScores,
    Status,
    scores_folder,
    with_intervals,
)

ROOT_KEY = re.compile(r"\n(?=\w)")
NUMBERS = ("steps", "seconds", "parameters", "multiply_adds", "tokens_seen", "tokens_per_second")
NO_EXPERIMENT = frozenset({"name", "sweep_name", "logger"})  # root keys of a config that do not change the experiment
EXTRA_SCORES = frozenset({"objective.pseudo_documents"})  # keys that only add a score after the training
HEADLINES = [
    k.name for keys in (TEST_KEYS, VAL_KEYS) for k in sorted(keys, key=lambda k: k.headline or 0) if k.headline
]
UNFINISHED = {
    "running": "its training is still running",
    "interrupted": "its training was killed",
    "stopped": "its training was stopped early",
    "preempted": "its training was stopped early, and can be resumed",
    "failed": "its training failed",
    "diverged": "its training diverged",
    "done": "the training has finished, but the file is lost",
    "averaged": "the average was made, but the file is lost",
    "merged": "the adapters were merged, but the file is lost",
    "saved": "the model was saved from Python, but the file is lost",
}
RESUMABLE = ("preempted", "stopped", "failed", "interrupted")  # a diverged run needs a higher trainer.patience_nan


class SavedRun:
    """A run folder, or a job of a sweep that has no folder yet. Each file is read when a value of it is first used.

    The values of a missing or damaged file are empty, except `config`. `job` is the run's entry in a sweep, or
    None. `known` are values by name that replace the folder's values. `translated_in` is the folder of the translations
    behind `scores`, if it is not the run folder.
    """

    def __init__(self, folder: Path, job: JobEntry | None = None, **known: Any) -> None:
        self.folder, self.job = folder, job
        self.name = named_folder(folder).name
        self.translated_in: Path | None = None
        vars(self).update(known)

    def replace(self, **known: Any) -> SavedRun:
        """Return a copy in which `known` replace values of the folder."""
        return SavedRun(**{**vars(self), **known})

    @cached_property
    def begun(self) -> bool:
        """Return True if the run has a folder."""
        return is_run(self.folder)

    @cached_property
    def start(self) -> RunFile:
        """Return run.json."""
        return RunFile.read_or_empty(self.folder)

    @cached_property
    def status(self) -> Status:
        """Return status.json."""
        return Status.read_or_empty(self.folder)

    @cached_property
    def config_text(self) -> str:
        """Return the text of config.yaml. Raises RunError."""
        return read_text(self.folder / CONFIG)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Return config.yaml. Raises RunError."""
        try:
            return parse_mapping(self.config_text)
        except ValueError as error:
            raise damaged(self.folder / CONFIG, error) from None

    @cached_property
    def settings(self) -> Mapping[str, Setting]:
        """Return the values of config.yaml by dotted key, with lists as single values.

        The file is parsed in parts, one for each root key, and parts are cached, because runs share most of them. A
        file that was edited by hand into another form is parsed as a whole.
        """
        with suppress(RunError):
            for parts in (ROOT_KEY.split(self.config_text), [self.config_text]):
                with suppress(ValueError):
                    return {key: value for part in parts for key, value in read_settings_part(part).items()}
        return {}

    @cached_property
    def _ending(self) -> tuple[str, str]:
        state, reason = self.status.state, self.status.reason
        if state == "running" and not holder_of(self.folder):
            state = "interrupted"
        job = self.job
        if job is None or state in ("done", "running") or (state and job.state in (WAITING, "running")):
            return state, reason
        if job.state == "running" and not any(map(holder_of, (self.folder.parent, self.folder))):
            return "interrupted", reason
        return job.state, job.reason or reason

    @cached_property
    def state(self) -> str:
        """Return the state; for an unfinished job, the state in its sweep takes precedence.

        A run that is "running" but held by no live process is "interrupted".
        """
        return self._ending[0]

    @cached_property
    def reason(self) -> str:
        """Return the reason of the state."""
        return self._ending[1]

    @cached_property
    def choices(self) -> Mapping[str, str]:
        """Return the option of each config group; of a job without a folder, the values of its overrides."""
        if self.begun or self.job is None:
            return self.start.choices
        return dict(text.partition("=")[::2] for text in self.job.overrides)

    @property
    def model(self) -> str:
        """Return the name of the model."""
        return self.choices.get("model", "")

    @property
    def data(self) -> str:
        """Return the name of the data."""
        return self.choices.get("data", "")

    @property
    def commands(self) -> tuple[str, ...]:
        """Return the command lines that began and resumed the run, or the overrides of a job without a folder."""
        return self.start.commands if self.begun or self.job is None else (" ".join(self.job.overrides),)

    def has(self, words: Sequence[str]) -> bool:
        """Return True if each word occurs in the path, model, data or command lines."""
        text = " ".join((str(self.folder), self.model, self.data, *self.commands)).lower()
        return all(word.lower() in text for word in words)

    @cached_property
    def changed(self) -> float:
        """Return the time of the last change, in seconds since 1970."""
        if not self.begun and self.job is not None:
            return modified(self.folder.parent / SWEEP)
        files = (STATUS, METRICS, MODEL, CHECKPOINTS)
        return max(modified(self.folder / name) for name in files) or modified(self.folder)

    @cached_property
    def _last_row(self) -> Mapping[str, float]:
        return read_last_row(self.folder / METRICS)

    @property
    def step(self) -> int:
        """Return the number of optimizer updates."""
        return self.status.steps or int(self._last_row.get("step", 0))

    @property
    def last_validation_loss(self) -> float | None:
        """Return the loss of the last validation."""
        return self._last_row.get(OBJECTIVE)

    @property
    def headline(self) -> tuple[str, float] | None:
        """Return a name and value of the last test, or else of the last validation."""
        measured = {**self._last_row, **self.status.scores}
        return next(((name, measured[name]) for name in HEADLINES if name in measured), None)

    @cached_property
    def _measured(self) -> Mapping[str, Any]:
        measured = vars(self.status)
        if self.status.best is not None:
            return measured
        summary = summarise(read_rows(self.folder / METRICS))  # it is not done
        return {**measured, **{name: measured[name] or value for name, value in summary.items()}}

    @cached_property
    def numbers(self) -> Mapping[str, float]:
        """Return the sizes and speeds of NUMBERS."""
        return {name: self._measured[name] for name in NUMBERS if self._measured[name] is not None}

    @cached_property
    def best(self) -> Mapping[str, Best]:
        """Return the best validation by metric."""
        best: Mapping[str, Best] = self._measured["best"]
        return best

    @cached_property
    def scored_on(self) -> str:
        """Return the split of the scores."""
        return self.status.scored_on

    @cached_property
    def test_set(self) -> str:
        """Return the hash of the scored split."""
        return self.status.test_set.sha256

    @cached_property
    def values(self) -> Mapping[str, float]:
        """Return the logged scores of the finished model, such as perplexity."""
        split = f"{self.status.scored_on}/"
        scores = self.status.scores.items()
        return {name.removeprefix(split): value for name, value in scores if name.startswith(split)}

    @cached_property
    def scores(self) -> Mapping[str, Measured]:
        """Return the scores of the finished model in percent, from sacreBLEU, and the pseudo-perplexity."""
        is_hiding = self.settings.get("objective.name") in HIDING
        values = {name: value for name, value in self.values.items() if is_hiding or name != TOKEN_ACCURACY.key}
        pseudo = SavedScores.of_weights(self.folder, PSEUDO, self.status.steps).scores if is_hiding else ()
        status = self.status
        return with_intervals(values, status.test_set.rows, (*status.translation, *pseudo), status.halves)

    @property
    def halves(self) -> Mapping[str, float]:
        """Return half of the 95 % interval of the `scores` and `values` that rows add up to, in their units."""
        halves = self.status.halves.items()
        return {name: half for name, half in halves if name in self.scores or name in self.values}

    @property
    def saved_names(self) -> list[str]:
        """Return the names of the scores that `tfm evaluate --test` kept."""
        return [path.parent.name for path in self.folder.glob(f"scores/*/{SavedScores.FILE}")]

    def with_saved_scores(self, name: str) -> SavedRun:
        """Return the run with the scores that `tfm evaluate --test` kept under this name.

        The run has no scores if it kept none, or if it was trained further since then.
        """
        folder = scores_folder(self.folder, name)
        saved = SavedScores.of_weights(self.folder, name, self.numbers.get("steps"))
        if not saved.scores:
            return self.replace(test_set="", scored_on="", scores={}, values={})
        fractions = {} if saved.exact_match is None else {"exact_match": saved.exact_match}
        scores = with_intervals(fractions, saved.test_set.rows, saved.scores, {})
        return self.replace(
            test_set=saved.test_set.sha256, scored_on=name, scores=scores, values={}, translated_in=folder
        )

    def value_of(self, name: str) -> float | None:
        """Return a score of the finished model, such as `BLEU`, `loss`, or `accuracy@64` of answers of a length."""
        if "@" in name or "/" in name:
            value = self.values.get((score := find_score(name)).key)
            return 100 * value if value is not None and score.in_percent else value
        if name == SOLVED.name:
            scaled = self.values.get("scaled_accuracy")
            return None if scaled is None else 100.0 * (100 * scaled >= SOLVED_FROM)
        return self.scores[name].value if name in self.scores else self.values.get(name)

    def method_of(self, name: str) -> str:
        """Return the key that comparable scores share: the signature, or for a loss the tokenizer."""
        name = name.partition("/")[0]  # a score of a corpus of a mix
        if name in self.scores and name != TOKEN_ACCURACY.name:
            return self.scores[name].signature
        if name in LABEL_SCORES or name in (BITS_PER_BYTE, SOLVED.name) or "@" in name:
            return ""
        smoothing = self.settings.get("label_smoothing") if name == "loss" else ""
        return f"{self.tokenizer} {smoothing} {self.predicted}"

    @cached_property
    def predicted(self) -> str:
        """Return the settings of the objective that determine which tokens validation and test predict.

        All objectives that predict each target token from the tokens before it have the same losses.
        """
        if not self.settings or self.settings.get("objective.name", EQUAL_LOSS[0]) in EQUAL_LOSS:
            return EQUAL_LOSS[0] if self.settings else ""
        others = {"objective.rate", "objective.static", *EXTRA_SCORES}  # they change only the training, or add a score
        kept = sorted(key for key in self.settings if key.startswith("objective.") and key not in others)
        return str({key: self.settings[key] for key in kept})

    @property
    def tokenizer(self) -> str:
        """Return the hash of the vocabulary, which is the target's if sources have a separate one."""
        return self.start.text.get("vocabulary", "")

    def describe(self) -> dict[str, Any]:
        """Return the run as JSON values, without its settings."""
        return {
            "folder": str(self.folder),
            "state": self.state,
            "reason": self.reason,
            **self.numbers,
            "best": {name: asdict(best) for name, best in self.best.items()},
            "scored_on": self.scored_on,
            "scores": {name: asdict(score) for name, score in self.scores.items()},
            "values": self.values,
            "halves": self.halves,
            "parent": self.start.parent,
            "facts": self.start.facts,
            "changes": self.start.changes,
        }

    def expect_finished(self) -> None:
        """Raise RunError if the run has no final weights, with the reason and a fix.

        A finished run that is being trained for longer has weights. Print a warning that they are old.
        """
        reason = f" ({cut(self.reason)})" if self.reason else ""
        cause = UNFINISHED.get(self.state, "the training did not finish") + reason
        if not (self.folder / WEIGHTS).is_file():
            fixes = {"running": "wait until it ends", "done": "restore it"}
            fixes |= dict.fromkeys(RESUMABLE, f"{self.status.resume or f'tfm train resume={self.folder}'} resumes it")
            fix = fixes.get(self.state)
            if kept := step_files(self.folder / CHECKPOINTS):
                after = f"uses its weights after step {step_of(kept[-1]):,}"
                fix = f"{f'{fix}, or: ' if fix else ''}tfm translate {self.folder} --checkpoint last {after}"
            help = fix or "no weights were kept before that: train a new run"
            raise RunError(Problem(str(self.folder), f"has no {WEIGHTS}: {cause}", help=help))
        if self.state in UNFINISHED and self.state not in ("done", "averaged", "merged", "saved"):
            print_on_rank_0(f"warning: {self.folder}: {cause}; its weights are from before that")
