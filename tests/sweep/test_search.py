"""Trials of a search, pruning, and the state after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import optuna
import pytest

from tests.conftest import COMPOSER
from tests.sweep.jobs import Small, job_of, settings_of
from tfm_blocks.compose.folders import CONF
from tfm_blocks.compose.overrides import parse_overrides
from tfm_blocks.compose.run import compose_job
from tfm_blocks.compose.sweep import list_parts
from tfm_blocks.errors import ConfigError, RunError
from tfm_blocks.sweep.checks import expect_measured
from tfm_blocks.sweep.engine import Sweep
from tfm_blocks.sweep.folder import SweepFolder, claim_sweep
from tfm_blocks.sweep.job import DIVERGED, DONE, NOT_STARTED, PRUNED, STOPPED, WRONG, Progress, SweepJob
from tfm_blocks.sweep.launchers.local import LocalLauncher
from tfm_blocks.sweep.search import JOURNAL, Study
from tfm_blocks.sweep.sources import draw_jobs
from tfm_blocks.training.settings import read_run

SPACE = [
    "schedule.scale=tag(log,interval(0.01,10))",
    "heads=choice(2,4)",
    "seed=7",
    "layers=range(1,6,2)",
    "d_ff=int(interval(8,64))",
]
OPTUNA = {"method": "optuna", "trials": 12, "seed": 1, "metric": "val/loss", "startup": 3, "halving": 3}
Start = Callable[..., Study]


@pytest.fixture
def start(small: Small, tmp_path: Path) -> Start:
    """Return a function that creates a search in a folder and starts no process."""
    composed = small()

    def make(number: int, texts: list[str]) -> SweepJob:
        state = WRONG if "heads=4" in texts and number % 2 else "waiting"
        return job_of(composed, f"{number:03}", texts, state)

    def search(folder: str, **settings: object) -> Study:
        (tmp_path / folder).mkdir(exist_ok=True)
        known = SweepFolder(tmp_path / folder, [], "", [], {})
        read = settings_of(**OPTUNA | settings)
        return Study(known, list_parts(parse_overrides(SPACE), [CONF]), read, make)

    return search


def end(search: Study, job: SweepJob, state: str, *scores: float) -> None:
    """End a job that has these scores after 1, 2, … steps."""
    job.state, job.progress = state, Progress(scores=dict(enumerate(scores, 1)))
    search.ended(job)


def score_of(job: SweepJob) -> float:
    """Return the score of a job: a smaller scale is better."""
    return float(job.overrides[0].partition("=")[2])


def work(search: Study, jobs: int) -> list[list[str]]:
    """Finish `jobs` jobs one after the other; return their overrides."""
    done = []
    while len(done) < jobs and (job := search.next()):
        end(search, job, DONE, score_of(job))
        done.append(list(job.overrides))
    return done


def test_values_come_from_the_space_in_hydra_syntax(start: Start) -> None:
    for job in [*work(start("one"), 12), *draw_jobs(list_parts(parse_overrides(SPACE), [CONF]), 12, 1)]:
        scale, heads, seed, layers, d_ff = (text.partition("=")[2] for text in job)
        assert 0.01 <= float(scale) <= 10 and heads in "24" and seed == "7" and layers in "135"
        assert 8 <= int(d_ff) <= 64


def test_a_resumed_search_requests_the_trials_of_an_uninterrupted_search(start: Start) -> None:
    whole = work(start("whole"), 12)
    parts = work(start("parts"), 5)
    journal = Path(start("parts").folder.path / JOURNAL)
    with journal.open("a") as file:
        file.write('{"op_code": 5, "half a li')  # as a killed process leaves it
    journal.with_name(journal.name + ".lock").symlink_to(journal)
    assert parts + work(start("parts"), 12) == whole


@pytest.mark.parametrize("line", ['{"op_code": 3, "bad', '{"op_code": 3}', "[]", '{"op_code": 99, "worker_id": "x"}'])
def test_a_damaged_journal_is_reported_and_stays_as_it_is(start: Start, line: str) -> None:
    work(start("one"), 3)
    journal = start("one").folder.path / JOURNAL
    with journal.open("a") as file:
        file.write(f"{line}\n{{half a li")
    before = journal.read_bytes()
    with pytest.raises(RunError, match=r"optuna\.journal: is damaged: "):
        start("one")
    assert journal.read_bytes() == before


def test_the_search_finds_better_values(start: Start) -> None:
    """Compare TPE with random draws for a score that is easy to learn."""
    tried = work(start("one", trials=40, halving=None), 40)
    scales = [float(job[0].partition("=")[2]) for job in tried]
    assert sum(scales[20:]) / len(scales[20:]) < sum(scales[:3]) / 3


def test_failed_trials_count_as_failed_and_a_stopped_trial_resumes(start: Start) -> None:
    search = start("one", trials=12)
    states = [DONE, DIVERGED, PRUNED, STOPPED, NOT_STARTED]
    names = []
    for state in states:
        job = search.next()
        assert job
        end(search, job, state, 1.0)
        names.append(job.name)
    wrong = {job.name for job in search.jobs if job.state == WRONG}
    study = optuna.load_study(study_name="sweep", storage=search.study._storage)
    trial_states = {f"{trial.number:03}": trial.state.name for trial in study.trials}
    assert [trial_states[name] for name in names] == ["COMPLETE", "FAIL", "PRUNED", "RUNNING", "RUNNING"]
    assert {trial_states[name] for name in wrong} <= {"FAIL"}
    assert search.succeeded, "one is done"
    assert (
        search.news()
        == f"search: best val/loss 1.0000: {names[0]}; {1 + len(wrong)} of {len(search.jobs)} trials failed"
    )
    again = start("one", trials=12)
    first, second = again.next(), again.next()
    assert first and second and [first.name, second.name] == names[3:]
    assert first.overrides == next(job.overrides for job in search.jobs if job.name == first.name)


def test_successive_halving_stops_trials_outside_the_best_third(start: Start) -> None:
    search = start("one", startup=50)
    jobs = [job for _ in range(6) if (job := search.next())]
    scores = [3.0, 2.0, 1.0, 5.0, 0.5, 4.0]
    hopeless = []
    for job, score in zip(jobs, scores, strict=False):
        job.progress.scores[1] = score
        hopeless.append(search.should_prune(job))
    expected = []
    for count, score in enumerate(scores[: len(jobs)], 1):  # the jobs that reached the rung before
        best = sorted(scores[:count])[: max(1, count // 3)]
        expected.append(score not in best)
    assert hopeless == expected


def test_a_metric_that_is_better_when_it_is_larger_is_maximised(start: Start) -> None:
    search = start("one", metric="val/bleu")
    assert search.study.direction.name == "MAXIMIZE"
    with pytest.raises(ConfigError, match=r"sweep\.metric: must be a validation metric .* but is 'val/los'"):
        start("two", metric="val/los")


LM = ["data=lm", "data.dir=x", "model=decoder_only"]
MIX = [*LM, "data.mix={a: {}, b: {val: null}}"]


@pytest.mark.parametrize(
    ("metric", "overrides", "reason"),
    [
        ("val/loss/a", MIX, ""),
        ("val/loss/b", MIX, "but the corpora of data.mix with validation text are: a"),
        ("val/loss/{corpus}", MIX, "but the corpora of data.mix with validation text are: a"),
        ("val/loss/a", [], "but the corpora of data.mix with validation text are: none"),
        ("val/exact_match/{group}", [], "which a run of this data and objective does not measure"),
        ("val/mcc", [], "which a run of this data and objective does not measure"),
        ("val/bleu", [], ""),
        ("val/bleu", ["trainer.validate_sentences=0"], "but trainer.validate_sentences is 0"),
        ("val/bleu", LM, "but plain text is not translated"),
    ],
)
def test_a_search_follows_a_metric_that_its_runs_measure(metric: str, overrides: list[str], reason: str) -> None:
    sizes = ["vocab=300", "d_model=16", "heads=2", "schedule.warmup=2"]
    read = read_run(compose_job([*sizes, *overrides], COMPOSER).mapping)
    assert settings_of(**OPTUNA | {"metric": metric})
    with pytest.raises(ConfigError) if reason else nullcontext() as caught:
        expect_measured(metric, read)
    assert not caught or caught.value.problems[0].rule.endswith(reason)


def test_random_jobs_are_distinct_and_more_trials_keep_the_first_ones() -> None:
    space = list_parts(parse_overrides(["heads=2,4", "seed=range(1,4)"]), [CONF])
    assert len(draw_jobs(space, 50, 1)) == 6
    few, many = (
        draw_jobs(list_parts(parse_overrides(SPACE), [CONF]), 5, 3),
        draw_jobs(list_parts(parse_overrides(SPACE), [CONF]), 9, 3),
    )
    assert many[:5] == few and draw_jobs(list_parts(parse_overrides(SPACE), [CONF]), 5, 4) != few


# Replaces a training in the sweep's folder: 000 scores 1 and continues until 001 is stopped, which scores 2
# after the study has the score of 000.
TRAINS = """
for word; do case $word in *.json) name=$(basename $word .json) ;; esac; done
state() { echo "{\\"state\\": \\"$1\\"}" > $name/status.json; }
until_said() { for try in {1..400}; do grep -qs $1 $2 && return; sleep 0.05; done; }
trap 'state preempted; exit 75' TERM
echo started
mkdir -p $name && echo {} > $name/run.json && state running
[ $name = 000 ] || until_said completed_rung_0 optuna.journal
printf 'step,val/loss\\n1,%d\\n' $((10#$name + 1)) > $name/metrics.csv
until_said preempted 001/status.json
state done
"""


def test_a_pruned_trial_stops_with_a_checkpoint_and_never_resumes(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed, overrides = small(), ["schedule.scale=interval(1,2)"]
    parts = list_parts(parse_overrides(overrides), [CONF])
    settings = settings_of(**OPTUNA | {"trials": 2, "parallel": 2})
    (tmp_path / "trains.sh").write_text(TRAINS)
    for _ in ("trained", "repeated"):
        folder = claim_sweep(tmp_path, "x", overrides, "")
        monkeypatch.chdir(folder.path)
        search = Study(folder, parts, settings, lambda n, texts: job_of(composed, f"{n:03}", texts))
        sweep = Sweep(folder, search, settings, LocalLauncher(2), ["bash", str(tmp_path / "trains.sh")])
        assert sweep.run() == 0
        assert [job.state for job in search.jobs] == [DONE, PRUNED]
        assert [trial.state.name for trial in search.study.trials] == ["COMPLETE", "PRUNED"]
        assert [trial.intermediate_values for trial in search.study.trials] == [{1: 1.0}, {1: 2.0}]
        assert (folder.path / "001" / "status.json").read_text() == '{"state": "preempted"}\n'
        assert (folder.path / "001.log").read_text() == "started\n"
    job_record = json.loads((folder.path / "sweep.json").read_text())["jobs"][1]
    assert job_record["state"] == PRUNED and search.succeeded
