"""Random damage to run and sweep folders, and the reaction of every command that reads them.

    python -m tests.damage COUNT SEED

prints as JSON the numbers of damaged files and of commands, and one traceback of each kind. All commands run in this process.
"""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from random import Random

import pytest
import yaml
from hydra import compose, initialize_config_dir

from tests.conftest import composed_small
from tfm_blocks.cli import main
from tfm_blocks.compose.folders import CONF
from tfm_blocks.compose.run import compose_resumed
from tfm_blocks.errors import TfmError, printable
from tfm_blocks.launch.check import check_resumed_run, check_run
from tfm_blocks.launch.job import train
from tfm_blocks.launch.run_spec import expect_resumable, read_saved_run
from tfm_blocks.runs.checkpoints import newest_intact
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.sweep.folder import claim_sweep
from tfm_blocks.sweep.job import Progress, SweepJob, result_of

CPU_SECONDS = 20  # limit of a command: an endless loop is a fault, but waiting for the CPU is not
WALL_SECONDS = 300  # limit of a command: a pipe that blocks takes no CPU time
TREES = {".json": (json.loads, json.dumps), ".yaml": (yaml.safe_load, yaml.safe_dump)}
ODD = [
    None,
    True,
    0,
    -1,
    5,
    2**70,
    1e308,
    float("nan"),
    "",
    "x",
    "x" * 300,
    "../..",
    "\x1b[2J\x07\r\u202e[red]",
    "\ud800",
]
ODD += [[], {}, [[]], [5], [None], {"x": 1}, {"": {}}, ["a", {"name": "b"}], "2024-01-01", "a\0b", [float("inf")]]
BOMBS = [b"a: " + b"[" * 50_000, b"[" * 50_000, b'{"a":' * 50_000, b"- " * 50_000, b"", b"\n", b"\xff\xfe\0", b"null"]
BOMBS += [
    b"{}",
    b"[]",
    b"5",
    b"\0" * 100,
    b"a: &a [*a]\n",
    b"a: &a {x: *a}\n",
    b"!!python/object/apply:os.system [true]",
]
BOMBS += [
    b"a: &a [x,x]\nb: &b [*a,*a]\n" + b"".join(b"%c: &%c [*%c,*%c]\n" % (c + 1, c + 1, c, c) for c in range(98, 120))
]
ROWS = [
    b"\r\n",
    b",\r\n",
    b"x,y,z\r\n",
    b"-1,1\r\n",
    b"1e400\r\n",
    b"nan,nan\r\n",
    b'"\r\n',
    b"\0\r\n",
    b"," * 5000 + b"\r\n",
]


def leave_runs(root, monkeypatch):
    """Train a run and copy it to three folders: `sound`, `victim` and `sweep/job`."""
    composed = composed_small(root, monkeypatch)("trainer.steps=3", "trainer.validate_every=2")
    run = train(check_run(composed), root / "trained")
    runs = root / "runs"
    for name in ("sound", "victim", "sweep/job"):
        shutil.copytree(run, runs / name)
    jobs = [{"name": "job", "overrides": ["heads=2"], "config": "x", "state": "done"}]
    jobs.append({"name": "later", "overrides": ["heads=4"], "config": "y", "state": "running", "reason": "again"})
    (runs / "sweep" / "sweep.json").write_text(json.dumps({"format": 1, "command": "…", "asked": [], "jobs": jobs}))
    return runs


class Resumed:
    """Run the checks of `resume=RUN trainer.steps=9` before training."""

    def __init__(self, run):
        with initialize_config_dir(str(CONF.resolve()), version_base=None):
            self.config = compose("train", [f"resume={run}", "trainer.steps=9"], return_hydra_config=True)

    def check(self, run):
        left = read_saved_run(run)
        composed = compose_resumed(self.config, left.config, str(run / "config.yaml"), left.config_text)
        settings = check_resumed_run(composed).settings
        newest = newest_intact(run / "checkpoints")
        expect_resumable(left, settings, newest.step if newest else 0)
        read_rows(run / "metrics.csv")


def run_command(arguments, lines=""):
    """Return the output of a command, which must be printable, and its status; an error must be a sentence."""
    with tempfile.NamedTemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as stdin, io.StringIO() as err:
        stdin.write(lines)
        stdin.seek(0)
        status, before, sys.stdin = 0, sys.stdin, stdin
        try:
            with redirect_stdout(out), redirect_stderr(err):
                main(arguments)
                out.flush()
        except SystemExit as left:
            status = left.code
        finally:
            sys.stdin = before
        texts = Path(out.name).read_text(), err.getvalue()
    assert status in (0, 1, 2, None), f"exit status {status}"
    assert not status or "error: " in texts[1], texts[1][-500:]
    assert "Traceback" not in texts[1]
    for text in texts if arguments[0] != "translate" else texts[1:]:
        raw = {one for one in text if printable(one) != one}
        assert not raw, f"prints {raw!r}"
    return *texts, status


def damage(path, whole, random):
    """Damage one file, whose content was `whole`; return a description of the damage."""
    kind = random.choice(["tree", "tree", "tree", "rows", "bytes", "cut", "bomb", "gone", "folder", "pipe", "loop"])
    if kind == "tree" and path.suffix in TREES:
        read, write = TREES[path.suffix]
        tree = read(whole)
        done = spoil(tree, random)
        path.write_bytes(write(tree).encode("utf-8", "surrogatepass"))
        return done
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind != "gone":
        path.write_bytes(spoil_bytes(kind, whole, random))
    return kind


def spoil(tree, random):
    """Replace, remove or add a value somewhere in a parsed file."""
    holders = [(tree, "")]
    for holder, where in holders:
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            if isinstance(holder[key], (dict, list)):
                holders.append((holder[key], f"{where}.{key}"))
    shallow = [one for one in holders if one[1].count(".") < 3 and one[0]]
    holder, where = random.choice(random.choice([shallow, [one for one in holders if one[0]]]))
    key = random.choice(list(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
    if random.random() < 0.25:
        del holder[key]
        return f"{where}.{key} removed"
    holder[key] = copy.deepcopy(random.choice(ODD))
    return f"{where}.{key} = {str(holder[key])[:40]!r}"


def spoil_bytes(kind, whole, random):
    if kind == "bomb" or not whole:
        return random.choice(BOMBS)
    if kind == "cut":
        return whole[: random.randrange(len(whole))]
    if kind == "rows":
        lines = whole.splitlines(keepends=True)
        lines.insert(random.randint(0, len(lines)), random.choice(ROWS))
        return b"".join(lines)
    spoiled = bytearray(whole)
    for _ in range(random.choice([1, 3, 30])):
        spoiled[random.randrange(min(len(spoiled), 4000))] = random.randrange(256)
    return bytes(spoiled)


class Fuzz:
    """Damage one file at a time, run all commands, and restore the file."""

    def __init__(self, runs, random):
        for number in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, late)
        self.runs, self.random, self.resumed = runs, random, Resumed(runs / "victim")
        self.files = {
            path: path.read_bytes()
            for path in [*(runs / "victim").rglob("*"), runs / "sweep" / "sweep.json"]
            if path.is_file() and "wandb" not in path.parts
        }
        self.sound = self.entries(run_command(["runs", "--json", "--in", str(runs)])[0])
        self.tracebacks, self.kinds, self.tried, self.checked = [], {}, 0, 0

    def once(self, path=None, done=None):
        """Damage a file, or use the damaged one, and run every command."""
        path = path or self.random.choice(self.chosen())
        try:
            done = done or damage(path, self.files[path], self.random)
            self.tried += 1
            for name, action in self.commands(path):
                self.guard(f"{name}: {path.relative_to(self.runs)}: {done}", action)
        finally:
            self.restore(path)

    def chosen(self):
        """Return candidates for damage: mostly JSON, YAML and CSV files, less often tensors."""
        plain = [path for path in self.files if path.suffix in (".json", ".yaml", ".csv", ".jsonl")]
        return plain if self.random.random() < 0.85 else list(self.files)

    def restore(self, path):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(self.files[path])

    def commands(self, path):
        victim, root = str(self.runs / "victim"), str(self.runs)
        yield "runs", lambda: self.list_runs(path)
        yield "compare", lambda: self.tfm("compare", root, *self.random.choice([["--json"], ["--csv"], []]))
        yield "poll", self.poll
        if path.name in ("model.json", "config.yaml", "run.json", "status.json", "latest.json"):
            yield "resume", lambda: self.resumed.check(self.runs / "victim")
        if path.name in ("model.json", "run.json", "status.json"):
            yield "show", lambda: self.tfm("show", victim)
        if path.name in ("model.json", "tokenizer.json", "weights.safetensors"):
            yield "translate", lambda: self.tfm("translate", victim, "--max-tokens", "3", lines="x\n")
        if self.random.random() < 0.02:
            yield "baseline", lambda: self.tfm("compare", root, "--baseline", str(self.runs / "sound"))
            yield "average", lambda: self.tfm("average", victim, "--last", "1")
            yield "report", lambda: self.tfm("report", root, "-o", str(self.runs.parent / "report.html"))
            shutil.rmtree(self.runs / "victim-average1", ignore_errors=True)

    def poll(self):
        """Read a sweep's folder and the runs of its jobs."""
        folder = claim_sweep(self.runs, "sweep", [], "…", configs=["x"])
        folder.adopt_names([])
        for name in folder.known:
            folder.state_before(SweepJob(name, []))
        Progress().read_new_rows(self.runs / "victim" / "metrics.csv")
        read_rows(self.runs / "victim" / "metrics.csv")
        result_of(1, self.runs / "victim", self.runs / "no.log", 0)

    def list_runs(self, path):
        """Check that a damaged run is one entry and does not change other entries."""
        out, *_ = run_command(["runs", "--json", "--in", str(self.runs)])
        self.tfm("runs", "--in", str(self.runs))
        entries = self.entries(out)
        names = ["sound"] if path.name == "sweep.json" else ["sound", "sweep/job", "sweep/later"]
        for name in names:
            assert entries[name] == self.sound[name], f"{name}: {entries.get(name)}"

    def entries(self, out):
        listed = json.loads(out)
        assert len({one["folder"] for one in listed}) == len(listed)
        return {one.pop("folder").removeprefix(f"{self.runs}/"): one for one in listed if one.pop("changed")}

    def tfm(self, *arguments, lines=""):
        run_command(list(arguments), lines)

    def guard(self, what, action):
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        signal.alarm(WALL_SECONDS)
        try:
            self.checked += 1
            with redirect_stderr(io.StringIO()), suppress(TfmError):
                action()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            place = next(
                (f"{Path(one.filename).name}:{one.lineno}" for one in reversed(frames) if "tfm_blocks" in one.filename),
                "",
            )
            kind = f"{type(error).__name__} {place} {str(error)[:60]}"
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
            if self.kinds[kind] == 1:
                self.tracebacks.append(f"{what}\n{''.join(traceback.format_exception(error))[-1800:]}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)

    @property
    def report(self):
        return {"damages": self.tried, "commands": self.checked, "kinds": self.kinds, "tracebacks": self.tracebacks}


def late(number, frame):
    limit = f"{WALL_SECONDS} s" if number == signal.SIGALRM else f"{CPU_SECONDS} s of CPU time"
    raise TimeoutError(f"no end after {limit}")


def fuzz(runs, count, seed):
    fuzzer = Fuzz(runs, Random(seed))
    for _ in range(count):
        fuzzer.once()
    return fuzzer.report


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        runs = leave_runs(Path(name), patch)
        print(json.dumps(fuzz(runs, int(sys.argv[1]), int(sys.argv[2])), indent=1))
