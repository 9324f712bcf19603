"""Search with optuna: choose the next job, prune bad jobs early, and record the scores."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfm_blocks.compose.sweep import Choices, OpenKey
from tfm_blocks.errors import config_error
from tfm_blocks.metric_schema import find_key
from tfm_blocks.runs.files import damaged, read_bytes
from tfm_blocks.runs.records import WAITING, JobEntry
from tfm_blocks.sweep.folder import JOURNAL, SweepFolder
from tfm_blocks.sweep.job import DONE, ERROR, FAILED, NOT_STARTED, PRUNED, RUNNING, STOPPED, Progress, SweepJob
from tfm_blocks.sweep.settings import OptunaSettings
from tfm_blocks.sweep.sources import JobSource, interval_text

try:
    import optuna
    from optuna.storages.journal import JournalFileBackend
except ImportError:
    help = "pip install -c constraints.txt -e '.[search]', or write sweep=random"
    raise config_error("sweep", "optuna is not installed", help) from None

MakeJob = Callable[[int, Sequence[str]], SweepJob]


class Study(JobSource):
    """The trials of an optuna study, which resumes from the journal in the sweep's folder.

    A trial whose job was stopped still runs in the study, so its job is resumed; a failed trial stays failed. `make`
    returns the job of a trial by its number; the job may be unable to start.
    """

    def __init__(self, folder: SweepFolder, parts: Sequence[OpenKey], settings: OptunaSettings, make: MakeJob) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.folder, self.parts, self.settings, self.make = folder, parts, settings, make
        self.study = _open(folder, settings)
        self.numbers: dict[str, int] = {}
        super().__init__([self._known(trial) for trial in self.study.trials])

    def next(self) -> SweepJob | None:
        """Return the job of the next trial; a trial that cannot start fails at once."""
        if self.waiting:
            return super().next()
        while len(self.jobs) < self.settings.trials:
            trial = self._new_trial()
            job = self._job(trial.number, trial.params)
            self.jobs.append(job)
            if job.state == WAITING:
                return job
            self.ended(job)
        return None

    def should_prune(self, job: SweepJob) -> bool:
        """Report the validation scores to optuna and return its decision.

        The last validation is not reported, since pruning a finished job saves nothing.
        """
        known = self.study.trials[self.numbers[job.name]]
        trial = optuna.trial.Trial(self.study, known._trial_id)
        for count, (step, score) in enumerate(sorted(job.progress.scores.items()), 1):
            if count not in known.intermediate_values and step < job.settings.trainer.steps:
                trial.report(score, count)
                if trial.should_prune():
                    return True
        return False

    def ended(self, job: SweepJob) -> None:
        """Report the end of a job to the study, unless the job will be resumed."""
        states, scores = optuna.trial.TrialState, job.progress.scores.values()
        if job.state in (STOPPED, NOT_STARTED):
            return
        state, value = states.PRUNED if job.state == PRUNED else states.FAIL, None
        if job.state == DONE and scores:
            state, value = states.COMPLETE, (min if self.settings.direction == "minimize" else max)(scores)
        self.study.tell(self.numbers[job.name], values=value, state=state, skip_if_finished=True)

    @property
    def succeeded(self) -> bool:
        """Return True if any trial is done, since a search needs only the best."""
        return any(job.state == DONE for job in self.jobs)

    def news(self) -> str:
        """Return the best trial and the number of failed trials, in a line."""
        count = sum(job.state in FAILED for job in self.jobs)
        failed = f"; {count} of {len(self.jobs)} trials failed" if count else ""
        if not any(trial.state == optuna.trial.TrialState.COMPLETE for trial in self.study.trials):
            return f"search: no trial is done{failed}"
        best, metric = self.study.best_trial, self.settings.metric
        value = find_key(metric).form.format(best.value)
        return f"search: best {metric} {value}: {self.jobs[best.number].name}{failed}"

    def _new_trial(self) -> Any:
        """Return a trial with a value for each key.

        The sampler depends on the seed and on the known trials, not on the history of this process.
        """
        self.study.sampler = optuna.samplers.TPESampler(
            seed=self.settings.seed + len(self.jobs), n_startup_trials=self.settings.startup
        )
        trial = self.study.ask()
        for part in self.parts:
            if isinstance(part, Choices) and part.ordered:
                trial.suggest_int(part.key, 0, len(part.texts) - 1)
            elif isinstance(part, Choices):
                trial.suggest_categorical(part.key, part.texts)
            elif part.whole:
                trial.suggest_int(part.key, int(part.low), int(part.high), log=part.log)
            else:
                trial.suggest_float(part.key, part.low, part.high, log=part.log)
        return trial

    def _job(self, number: int, params: Mapping[str, Any]) -> SweepJob:
        texts = []
        for part in (part for part in self.parts if part.key in params):
            value = params[part.key]
            if isinstance(part, Choices):
                texts.append(part.texts[value] if part.ordered else str(value))
            else:
                texts.append(interval_text(part, value))
        job = self.make(number, texts)
        job.progress = Progress(self.settings.metric)
        if len(texts) < len(self.parts):
            job.state, job.reason = ERROR, "the search was killed while it chose its values"
        self.numbers[job.name] = number
        return job

    def _known(self, trial: Any) -> SweepJob:
        """Return the job of a trial that an earlier command created."""
        job, states = self._job(trial.number, trial.params), optuna.trial.TrialState
        if trial.state == states.RUNNING:
            if self.folder.state_before(job) == DONE:  # but the sweep ended before it reported that
                job.state = DONE
            if job.state != WAITING:
                self.folder.read_progress(job)
                self.ended(job)
        elif trial.state in (states.COMPLETE, states.PRUNED):
            job.state = DONE if trial.state == states.COMPLETE else PRUNED
        elif job.state == WAITING:
            entry = self.folder.known.get(job.name, JobEntry(job.name, state=ERROR))
            job.state = entry.state if entry.state not in (WAITING, RUNNING) else ERROR
            job.reason = entry.reason
        return job


def _open(folder: SweepFolder, settings: OptunaSettings) -> Any:
    """Return the study of the folder, after dropping an incomplete line of a killed process from its journal.

    Raises RunError for a damaged journal, which stays as it is.
    """
    pruner = (
        optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=settings.halving)
        if settings.halving
        else optuna.pruners.NopPruner()
    )
    path = folder.path / JOURNAL
    text = read_bytes(path) if path.exists() else b""
    lines = text[: text.rfind(b"\n") + 1]
    for number, line in enumerate(lines.splitlines(), 1):
        try:
            json.loads(line)
        except (ValueError, RecursionError) as error:
            raise damaged(path, f"line {number} is not JSON: {error}") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise damaged(path, f"optuna cannot read it: {error!r}") from None
        os.truncate(path, len(lines))
        path.with_name(f"{JOURNAL}.lock").unlink(missing_ok=True)  # this process has locked the folder
        return optuna.create_study(
            study_name="sweep", storage=storage, direction=settings.direction, pruner=pruner, load_if_exists=True
        )
