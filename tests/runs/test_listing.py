"""Listing, finding and deleting runs."""

import json
import os
import tempfile
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from tests.runs.test_lock import leave_heartbeat
from tfm_blocks.cli import main
from tfm_blocks.errors import RunError
from tfm_blocks.runs.listing import delete_run
from tfm_blocks.runs.lock import LIMIT, hold
from tfm_blocks.runs.metrics import TAIL
from tfm_blocks.runs.records import Status
from tfm_blocks.runs.saved_run import SavedRun

HEADER = "step,train/loss,val/loss,val/exact_match,test/loss,test/exact_match\n"


def leave(folder, state="done", steps=850, model="tiny", score=0.5):
    """Write the folder of a run; an unfinished run validated only after step 400."""
    folder.mkdir(parents=True)
    record = {"choices": {"model": model, "data": "dates"}, "commands": [f"python train.py model={model} heads=2"]}
    (folder / "run.json").write_text(json.dumps(record))
    done = {"steps": steps, "scores": {"test/loss": 0.3, "test/exact_match": score}} if state == "done" else {}
    (folder / "status.json").write_text(json.dumps({"state": state, **done}))
    rows = ["20,2.5,,,,\n", "400,1.5,0.9,0.25,,\n", "420,1.4,,,,\n"]
    (folder / "metrics.csv").write_text(HEADER + "".join(rows))
    return folder


def listing(capsys, *arguments):
    main(["runs", *map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)


def test_runs_are_listed_with_state_model_step_and_score_newest_first(tmp_path, capsys):
    leave(tmp_path / "a", model="prenorm")
    leave(tmp_path / "b", "running")
    with hold(leave(tmp_path / "sweep" / "c", "running")):
        runs = listing(capsys, "--in", tmp_path)
    by_name = {one["folder"].removeprefix(f"{tmp_path}/"): one for one in runs}
    assert list(by_name) == ["sweep/c", "b", "a"]
    assert [by_name[name]["state"] for name in by_name] == ["running", "interrupted", "done"]
    assert by_name["a"]["score"] == {"test/exact_match": 0.5} and by_name["a"]["step"] == 850
    assert by_name["b"]["score"] == {"val/exact_match": 0.25} and by_name["b"]["step"] == 420
    assert (by_name["a"]["model"], by_name["a"]["data"]) == ("prenorm", "dates")
    newest = max(path.stat().st_mtime for path in (tmp_path / "a").iterdir())
    assert datetime.fromisoformat(by_name["a"]["changed"]).timestamp() == pytest.approx(newest, abs=1)


@pytest.mark.parametrize("score", ["NaN", "Infinity", "null"])
def test_a_score_that_is_not_finite_is_omitted(score, tmp_path, capsys):
    """Older runs wrote NaN and Infinity into status.json."""
    run = leave(tmp_path / "a", score=0.125)
    (run / "status.json").write_text((run / "status.json").read_text().replace("0.125", score))
    (entry,) = listing(capsys, "--in", tmp_path)
    assert entry["score"] == {"test/loss": 0.3}
    main(["compare", str(run), "--json"])
    assert "NaN" not in (said := capsys.readouterr().out) and "Infinity" not in said


def test_runs_are_found_by_words_of_their_command_and_by_state(tmp_path, capsys):
    leave(tmp_path / "one", model="prenorm")
    leave(tmp_path / "two", "failed", model="prenorm")
    leave(tmp_path / "three")

    def names(*arguments):
        return sorted(one["folder"].rpartition("/")[2] for one in listing(capsys, *arguments))

    assert names("--in", tmp_path) == ["one", "three", "two"]
    assert names("Prenorm", "heads=2", "--in", tmp_path) == ["one", "two"]
    assert names("prenorm", "--state", "failed", "--in", tmp_path) == ["two"]


def test_a_damaged_file_of_one_run_does_not_hide_the_others(tmp_path, capsys):
    leave(tmp_path / "a")
    (leave(tmp_path / "b") / "status.json").write_text("{")
    (tmp_path / "b" / "run.json").unlink()
    (tmp_path / "b" / "metrics.csv").write_text(f"{HEADER}x,,,,,\n40,,y,0.5,z\0,\n")
    main(["runs", "--in", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "test/exact_match 0.5" in shown and str(tmp_path / "b") in shown


@contextmanager
def without_privileges():
    """Act as another user if the user is root, who can read every folder."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_an_unreadable_folder_is_skipped_with_a_warning_but_not_deleted_in_part(capsys):
    with tempfile.TemporaryDirectory() as name:  # other users cannot enter tmp_path
        root = Path(name)
        root.chmod(0o755)
        sweep = leave_sweep(root / "sweep")
        whole = listing(capsys, "--in", root)
        (sweep / "zz").mkdir(mode=0)
        with without_privileges():
            main(["runs", "--in", name, "--json"])
            output = capsys.readouterr()
            assert json.loads(output.out) == whole
            assert output.err == f"warning: {sweep / 'zz'}: is skipped, because it cannot be read: Permission denied\n"
            main(["compare", name])
            assert "two" in capsys.readouterr().out
            with pytest.raises(SystemExit):
                main(["runs", "--delete", str(sweep), "--yes"])
        assert "zz: cannot be read: Permission denied" in capsys.readouterr().err
        assert sorted(path.name for path in sweep.iterdir()) == ["one", "sweep.json", "two", "zz"]


def test_a_run_is_deleted_only_with_yes_and_never_while_it_trains(tmp_path, capsys):
    run, other, text = leave(tmp_path / "a"), leave(tmp_path / "b", "running"), tmp_path / "my_text"
    text.mkdir()
    for arguments, said in [
        ([run], "nothing was deleted yet"),
        ([run, text, "--yes"], "is not a run folder, so it is not deleted"),
        ([tmp_path, "--yes"], "is not a run folder, so it is not deleted"),
    ]:
        with pytest.raises(SystemExit):
            main(["runs", "--delete", *map(str, arguments)])
        assert said in capsys.readouterr().err
    with hold(other), pytest.raises(SystemExit):
        main(["runs", "--delete", str(run), str(other), "--yes"])
    assert run.is_dir() and other.is_dir() and text.is_dir()
    main(["runs", "--delete", str(run), "--yes"])
    assert not run.exists() and other.is_dir()


@pytest.mark.parametrize("words", ["nomatch", "--state failed", "--json", "--in elsewhere"])
def test_delete_refuses_the_filters_of_the_list(words, tmp_path, capsys):
    run = leave(tmp_path / "a")
    with pytest.raises(SystemExit):
        main(["runs", *words.split(), "--delete", str(run), "--yes"])
    assert "--delete: deletes exactly the folders that it names, so it takes no WORD" in capsys.readouterr().err
    assert run.is_dir()


def test_yes_without_delete_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["runs", str(leave(tmp_path / "a")), "--yes"])
    assert "--yes: confirms --delete, which is missing" in (said := capsys.readouterr().err) and "help: " in said


def test_a_folder_that_is_named_twice_or_lies_in_a_deleted_sweep_is_deleted_once(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, sweep = leave(tmp_path / "a"), leave_sweep(tmp_path / "sweep")
    main(["runs", "--delete", "a", str(run), str(sweep / "one"), "sweep", "--yes"])
    assert not run.exists() and not sweep.exists()
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [str(run), "sweep"]


def test_a_run_of_another_host_cannot_be_deleted_while_its_heartbeat_is_fresh(tmp_path, capsys):
    run = leave(tmp_path / "a", "running")
    leave_heartbeat(run, age=5)
    assert [one["state"] for one in listing(capsys, "--in", tmp_path)] == ["running"]
    with pytest.raises(SystemExit):
        main(["runs", "--delete", str(run), "--yes"])
    assert "4711 on node7" in capsys.readouterr().err and run.is_dir()
    leave_heartbeat(run, age=LIMIT + 1)
    assert [one["state"] for one in listing(capsys, "--in", tmp_path)] == ["interrupted"]
    main(["runs", "--delete", str(run), "--yes"])
    assert not run.exists()


def test_jobs_of_another_hosts_sweep_are_running_while_its_heartbeat_is_fresh(tmp_path, capsys):
    sweep = leave_sweep(tmp_path / "sweep")
    listed = (sweep / "sweep.json").read_text().replace('"name": "three"', '"name": "three", "state": "running"')
    (sweep / "sweep.json").write_text(listed)
    for age, state in ((5, "running"), (LIMIT + 1, "interrupted")):
        leave_heartbeat(sweep, age)
        (three,) = listing(capsys, "three", "--in", tmp_path)
        assert three["state"] == state


@pytest.mark.grid
def test_an_incomplete_last_row_does_not_shift_columns(tmp_path, capsys):
    run, measured = leave(tmp_path / "a", "running"), "400,1.5,0.9,0.25,,\n"
    for kept in range(len(measured) + 1):
        rows = "420,1.4,,,,\n" * (TAIL // 12 - 2)
        rows += "," * (TAIL - kept - len(rows) - 1) + "\n"
        (run / "metrics.csv").write_text(HEADER + rows + measured + rows)
        (only,) = listing(capsys, "--in", tmp_path)
        assert only["score"] == ({"val/exact_match": 0.25} if kept == len(measured) else {}), kept


def test_the_first_row_after_the_names_is_read(tmp_path, capsys):
    (leave(tmp_path / "a", "running") / "metrics.csv").write_text(HEADER + "400,1.5,0.9,0.25,,\n")
    (leave(tmp_path / "b", "running") / "metrics.csv").write_text("")
    assert [one["score"] for one in listing(capsys, "--in", tmp_path)] == [{}, {"val/exact_match": 0.25}]


def test_a_job_without_a_folder_is_not_running_where_its_sweep_was_killed(tmp_path, capsys):
    sweep = leave_sweep(tmp_path / "sweep")
    listed = (sweep / "sweep.json").read_text().replace('"name": "three"', '"name": "three", "state": "running"')
    (sweep / "sweep.json").write_text(listed)

    def state():
        return next(one["state"] for one in listing(capsys, "--in", tmp_path) if one["folder"].endswith("three"))

    assert state() == "interrupted"
    with hold(sweep):
        assert state() == "running"
    (sweep / "three").mkdir()
    assert state() == "interrupted"
    with hold(sweep / "three"):
        assert state() == "running"


def leave_sweep(folder):
    """Write a sweep with a finished job, a job whose end only sweep.json records, and a job without a folder."""
    leave(folder / "one")
    leave(folder / "two", "failed")
    jobs = [
        {"name": "one"},
        {"name": "two", "state": "timed out"},
        {"name": "three", "overrides": ["model=big", "heads=4"]},
    ]
    (folder / "sweep.json").write_text(json.dumps({"format": 1, "command": "…", "jobs": jobs}))
    return folder


def test_jobs_of_nested_sweeps_are_listed_with_their_states_those_without_a_folder_too(tmp_path, capsys):
    leave_sweep(tmp_path / "week" / "sweep")
    by_name = {one["folder"].rpartition("/")[2]: one for one in listing(capsys, "--in", tmp_path)}
    assert {name: one["state"] for name, one in by_name.items()} == {
        "one": "done",
        "two": "timed out",
        "three": "waiting",
    }
    assert by_name["three"]["model"] == "big" and by_name["three"]["commands"] == ["model=big heads=4"]
    (only,) = listing(capsys, "--in", tmp_path, "--state", "timed out")
    assert only["folder"].endswith("week/sweep/two")
    with pytest.raises(SystemExit):
        main(["runs", "--in", str(tmp_path), "--state", "dnoe"])
    assert "did you mean done?" in capsys.readouterr().err


def test_a_sweep_is_deleted_only_with_yes_and_if_no_run_trains(tmp_path, capsys):
    sweep, other = leave_sweep(tmp_path / "sweep"), leave(tmp_path / "other")
    with pytest.raises(SystemExit):
        main(["runs", "--delete", str(sweep)])
    with hold(sweep / "two"), pytest.raises(SystemExit):
        main(["runs", "--delete", str(sweep), "--yes"])
    assert (sweep / "one").is_dir()
    main(["runs", "--delete", str(sweep), "--yes"])
    assert not sweep.exists() and other.is_dir()
    capsys.readouterr()


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        '{"jobs": 3}',
        '{"jobs": [3, {"name": 5}, {"name": "../../x"}, {}]}',
        '{"jobs": [{"name": "%s"}]}' % ("x" * 400),
    ],
)
def test_a_damaged_sweep_hides_none_of_its_runs(tmp_path, capsys, damage):
    leave(tmp_path / "sweep" / "a")
    (tmp_path / "sweep" / "sweep.json").write_text(damage)
    folders = [one["folder"] for one in listing(capsys, "--in", tmp_path)]
    assert str(tmp_path / "sweep" / "a") in folders and all(one.startswith(str(tmp_path / "sweep")) for one in folders)


def test_a_run_that_starts_while_its_folder_is_deleted_is_one_error(tmp_path, monkeypatch):
    leave(tmp_path / "a")

    @contextmanager
    def hold_until_a_start(folder):
        with hold(folder):
            yield
        (folder / "run.json").write_text("{}")

    monkeypatch.setattr("tfm_blocks.runs.listing.hold", hold_until_a_start)
    with pytest.raises(RunError, match="contains new files of another process"):
        delete_run(tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["run.json"]


@pytest.mark.parametrize(("scores", "headline"), [
    ({"test/loss": 1.0, "test/perplexity": 2.0, "test/accuracy": 0.5, "test/f1": 0.4}, ("test/accuracy", 0.5)),
    ({"test/loss": 1.0, "test/spearman": 0.5}, ("test/spearman", 0.5)),
    ({"test/loss": 1.0, "test/perplexity": 2.0, "test/bleu": 30.0}, ("test/bleu", 30.0)),
    ({"test/loss": 1.0, "test/perplexity": 2.0}, ("test/perplexity", 2.0)),
])  # fmt: skip
def test_labels_are_listed_by_their_own_score(tmp_path, scores, headline):
    assert SavedRun(tmp_path, status=Status(scores=scores)).headline == headline
