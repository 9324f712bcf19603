"""The folder of a sweep, and the handling of existing job folders."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.sweep.jobs import Small, job_of
from tfm_blocks.errors import ConfigError, RunError
from tfm_blocks.runs.lock import hold
from tfm_blocks.sweep.folder import JOURNAL, SweepFolder, claim_sweep
from tfm_blocks.sweep.job import DONE, ERROR, SweepJob


def test_the_same_overrides_have_the_same_folder_and_others_a_new_one(tmp_path: Path) -> None:
    def claim(*overrides: str) -> str:
        folder = claim_sweep(tmp_path, "heads", overrides, "python train.py …")
        folder.write([])
        return folder.path.name

    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "status.json").write_text("{}")  # a run with the same name
    assert claim("heads=2,4") == "heads-2"
    assert claim("heads=2,8") == "heads-3"
    assert claim("heads=2,4", "seed=1") == "heads-4"
    assert [claim("heads=2,8"), claim("heads=2,4", "seed=1"), claim("heads=2,4")] == ["heads-3", "heads-4", "heads-2"]
    assert claim("seed=1", "heads=2,4") == "heads-5", "no job of it is in an earlier folder"


def test_equal_commands_that_start_at_the_same_moment_have_the_same_folder(tmp_path: Path) -> None:
    """The first command holds the folder, and has not written its jobs yet."""
    folder = claim_sweep(tmp_path, "x", ["seed=1,2"], "")
    with hold(folder.path):
        assert claim_sweep(tmp_path, "x", ["seed=1,2"], "").path == folder.path
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: claim_sweep(tmp_path, "y", ["seed=1,2"], "").path, range(40)))
    assert set(folders) == {tmp_path / "y"} and sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]
    (tmp_path / "z").touch()
    assert claim_sweep(tmp_path, "z", ["seed=1,2"], "").path == tmp_path / "z-2"


def test_new_jobs_of_an_existing_folder_get_new_names(small: Small, tmp_path: Path) -> None:
    """seed=1 is the default, so the first command had this job implicitly."""
    first = claim_sweep(tmp_path, "x", ["heads=2,4"], "")
    first.write([job_of(small("heads=2"), "heads-2"), job_of(small("heads=4"), "heads-4")])
    jobs = [
        job_of(small(f"heads={heads}", f"seed={seed}"), f"heads-{heads}_seed-{seed}")
        for heads in (2, 4)
        for seed in (1, 2)
    ]
    folder = claim_sweep(tmp_path, "x", ["heads=2,4", "seed=1,2"], "", configs={job.config for job in jobs})
    assert folder.path == tmp_path / "x"
    folder.adopt_names(jobs)
    folder.expect_unchanged(jobs)
    assert [job.name for job in jobs] == ["heads-2", "heads-2_seed-2", "heads-4", "heads-4_seed-2"]
    folder.write(jobs[:2])
    assert list(claim_sweep(tmp_path, "x", ["heads=2,4", "seed=1,2"], "").known) == [
        "heads-2",
        "heads-4",
        "heads-2_seed-2",
    ]
    assert claim_sweep(tmp_path, "x", [], "", configs={job_of(small("heads=8")).config}).path == tmp_path / "x-2"


def test_a_new_job_whose_name_is_taken_gets_a_number(small: Small, tmp_path: Path) -> None:
    """seed=0 is the config of the earlier job a, and seed=9 of no earlier job."""
    before = [job_of(small(f"seed={seed}"), name, [name]) for seed, name in enumerate(("a", "b", "b-2"))]
    claim_sweep(tmp_path, "x", [], "").write(before)
    for _ in ("extended", "repeated"):
        jobs = [job_of(small(f"seed={seed}"), name, [name, "d_ff=24"]) for seed, name in ((0, "a"), (9, "b"))]
        folder = claim_sweep(tmp_path, "x", ["d_ff=24"], "", configs={job.config for job in jobs})
        folder.adopt_names(jobs)
        folder.expect_unchanged(jobs)
        assert [job.name for job in jobs] == ["a", "b-3"]
        folder.write(jobs)
    assert list(claim_sweep(tmp_path, "x", ["d_ff=24"], "").known) == ["a", "b", "b-2", "b-3"]


def test_of_jobs_with_one_config_each_keeps_its_name(small: Small, tmp_path: Path) -> None:
    """A ladder tries a rate, and trains a result with the same config if this rate is the best."""
    claim_sweep(tmp_path, "x", [], "").write([job_of(small(), "rate-0.01"), job_of(small(), "x1_seed-1")])
    folder, job = claim_sweep(tmp_path, "x", [], ""), job_of(small(), "x1_seed-1")
    folder.adopt_names([job])
    assert job.name == "x1_seed-1"


def test_a_job_with_the_overrides_of_an_earlier_job_keeps_its_name(small: Small, tmp_path: Path) -> None:
    claim_sweep(tmp_path, "x", [], "").write([job_of(small(), "a", ["heads=2", "seed=1"])])
    folder, job = claim_sweep(tmp_path, "x", [], ""), job_of(small("dropout=0.2"), "a", ["seed=1", "heads=2"])
    folder.adopt_names([job])
    with pytest.raises(ConfigError, match="a: its config has changed"):
        folder.expect_unchanged([job])


def test_a_search_adopts_no_jobs_of_other_sweeps(small: Small, tmp_path: Path) -> None:
    folder, job = claim_sweep(tmp_path, "x", ["sweep=optuna"], ""), job_of(small())
    folder.write([job])
    (folder.path / JOURNAL).touch()
    assert claim_sweep(tmp_path, "x", ["heads=2,4"], "", configs={job.config}).path == tmp_path / "x-2"


def test_sweep_json_is_what_other_commands_read(small: Small, tmp_path: Path) -> None:
    folder = claim_sweep(tmp_path, "x", ["heads=2"], "python train.py -m heads=2")
    job = job_of(small())
    job.state, job.reason = "killed", "SIGKILL"
    folder.write([job])
    record = json.loads((tmp_path / "x" / "sweep.json").read_text())
    assert record["format"] == 1 and record["command"] == "python train.py -m heads=2"
    (job_record,) = record["jobs"]
    job_record.pop("config")
    assert job_record == {
        "name": "heads-2", "overrides": ["heads=2"], "log": "heads-2.log", "state": "killed", "reason": "SIGKILL",
    }  # fmt: skip
    assert claim_sweep(tmp_path, "x", ["heads=2"], "").known["heads-2"].state == "killed"


def test_a_job_with_a_changed_config_is_refused(small: Small, tmp_path: Path) -> None:
    claim_sweep(tmp_path, "x", [], "").write([job_of(small())])
    folder = claim_sweep(tmp_path, "x", [], "")
    folder.expect_unchanged([job_of(small("name=other"))])
    with pytest.raises(ConfigError, match=r"(?s)1 of 1 jobs are not what .*heads-2: its config has changed"):
        folder.expect_unchanged([job_of(small("dropout=0.2"))])


@pytest.mark.parametrize("state", ["running", "failed", "preempted", DONE])
def test_the_state_of_a_job_is_read_from_its_folder(small: Small, tmp_path: Path, state: str) -> None:
    folder, job = job_in_state(small, tmp_path, state)
    assert folder.state_before(job) == state


def test_a_damaged_status_or_sweep_file_is_reported_and_nothing_changes(small: Small, tmp_path: Path) -> None:
    folder, job = job_in_state(small, tmp_path, DONE)
    (folder.run(job) / "status.json").write_text('{"state": "do')
    folder.restore_state(job, [DONE])
    assert job.state == ERROR and job.reason.startswith(f"{folder.run(job) / 'status.json'}: is damaged")
    with pytest.raises(RunError, match=r"status\.json: is damaged"):
        folder.state_before(job)
    (folder.path / "sweep.json").write_text('{"form')
    with pytest.raises(RunError, match=r"sweep\.json: is damaged"):
        claim_sweep(tmp_path, "x", [], "")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    (folder.run(job) / "status.json").unlink()
    assert folder.state_before(job) == "", "a run that was killed before its first step"


def test_diverged_runs_are_kept_under_another_name_and_unstarted_runs_removed(small: Small, tmp_path: Path) -> None:
    for number in (1, 2):
        folder, job = job_in_state(small, tmp_path, "diverged")
        folder.archive_previous(job)
        assert not folder.run(job).exists()
        assert (folder.path / f"heads-2.before-{number}" / "status.json").is_file()
    folder.run(job).mkdir()
    (folder.run(job) / "config.yaml").write_text("")
    assert folder.state_before(job) == ""
    folder.archive_previous(job)
    assert not folder.run(job).exists() and not (folder.path / "heads-2.before-3").exists()


def job_in_state(small: Small, root: Path, state: str) -> tuple[SweepFolder, SweepJob]:
    """Write a sweep with one job whose run folder has this state."""
    folder, job = claim_sweep(root, "x", [], ""), job_of(small())
    folder.run(job).mkdir()
    (folder.run(job) / "run.json").write_text("{}")
    (folder.run(job) / "status.json").write_text(json.dumps({"state": state}))
    folder.write([job])
    return folder, job
