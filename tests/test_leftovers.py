"""A command that fails or is killed leaves nothing: its output does not exist, or is the whole old one, and the next try works."""

import os
import resource
import signal
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from itertools import count
from pathlib import Path

import pytest

from tests.exchange.published import publish
from tests.preloaded import run_python
from tfm_blocks.cli import main
from tfm_blocks.runs.files import written_beside
from tfm_blocks.runs.folder import new_folder

KILLED = """
import os, signal, sys
from tfm_blocks.cli import main
place, seen = int(sys.argv[1]), 0
def hear(event, arguments):
    global seen
    writes = event == "open" and (set(arguments[1] or "") & set("wax+") or (arguments[2] or 0) & os.O_CREAT)
    if (writes or event in ("os.rename", "os.mkdir")) and "/new" in str(arguments[0]):
        seen += 1
        if seen == place:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hear)
main(sys.argv[2:])
"""
COMMANDS = {
    "import": "import {theirs} -o {out}/new",
    "huggingface": "export {run} --to huggingface -o {out}/new",
    "ctranslate2": "export {run} --to ctranslate2 -o {out}/new",
    "onnx": "export {run} --to onnx -o {out}/new",
    "eject": "eject {run} -o {out}/new.py --weights {out}/new.pt",
    "svg": "figure {run} -o {out}/new.svg",
    "png": "figure {run} -o {out}/new.png",
    "view": "view {run} -o {out}/new.html",
    "report": "report {run} -o {out}/new.html",
    "schema": "schema -o {out}/new.json",
    "diff": "diff tiny base -o {out}/new.pdf",
}
PLACES = 20


def each(*fast):
    """Parametrise by all commands; only `fast` ones are tried by default, and the slow one by hand."""
    marks = {name: pytest.mark.grid for name in COMMANDS if name not in fast} | {"onnx": pytest.mark.slow}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks.get(name, ())) for name in COMMANDS])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    publish("gpt2", root / "theirs")
    main(["import", str(root / "theirs"), "-o", str(root / "run")])
    return root


@pytest.fixture
def words(name, folders, tmp_path):
    return COMMANDS[name].format(theirs=folders / "theirs", run=folders / "run", out=tmp_path).split()


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def status_of(words):
    """Run a command and return its status and its errors. Its output needs no disk."""
    with Path(os.devnull).open("w") as out, redirect_stdout(out), redirect_stderr(StringIO()) as errors:
        try:
            main(words)
        except SystemExit as exit:
            return exit.code, errors.getvalue()
    return 0, ""


@contextmanager
def full_after(size):
    """Let no file grow above `size` bytes."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@pytest.mark.grid
@each("import", "svg")
def test_a_full_disk_leaves_nothing_and_does_not_block_the_next_try(name, words, tmp_path):
    assert status_of(words) == (0, "")
    whole = tree(tmp_path)
    largest = max(len(content) for content in whole.values())
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    for path in files:
        path.write_text("old")
    for path in {*tmp_path.iterdir()} - {*files}:
        path.rename(tmp_path.parent / f"{tmp_path.name}-first")
    before = tree(tmp_path)
    for place in range(PLACES):
        with full_after(largest * place // PLACES):
            status, errors = status_of(words)
        assert status in (1, 2) and errors.startswith("error: ") and "new" in errors.splitlines()[0], errors
        assert tree(tmp_path) == before and len({*tmp_path.iterdir()}) == len(files)
    assert status_of(words) == (0, "") and tree(tmp_path).keys() == whole.keys()


@each("svg")
def test_a_killed_command_leaves_no_output_and_does_not_block_the_next_try(name, words, tmp_path):
    for place in count(1):
        done = run_python(["-c", KILLED, str(place), *words])
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        left = {path.name for path in tmp_path.iterdir()}
        weights = {"new.pt", "new.py.part"} if name == "eject" else set()  # its weights are renamed before its model
        assert left == weights or all(path.endswith(".part") for path in left), left
    assert place > 2 and not any(path.endswith(".part") for path in tree(tmp_path)), tree(tmp_path).keys()
    assert (tmp_path / words[words.index("-o") + 1]).exists()


@pytest.mark.grid
def test_a_killed_eject_leaves_no_model_with_the_weights_of_another(tmp_path):
    paths = {tmp_path / "new.py", tmp_path / "new.pt"}
    for place in count(1):
        for path in paths:
            path.write_text("old")
        words = f"eject tiny -o {tmp_path}/new.py --weights {tmp_path}/new.pt".split()
        if run_python(["-c", KILLED, str(place), *words]).returncode == 0:
            break
        models, weights = ([path.read_bytes() for path in tmp_path.glob(f"new.{end}")] for end in ("py", "pt"))
        assert models in ([], [b"old"]) and (weights == [b"old"] or not models), (place, models)
    assert place > 3 and not any(path.read_bytes() == b"old" for path in paths)


def test_a_folder_that_another_process_writes_is_refused(tmp_path, folders):
    with new_folder(tmp_path / "new") as part:
        status, errors = status_of(["import", str(folders / "theirs"), "-o", str(tmp_path / "new")])
        assert status == 1 and "is being written by another process" in errors and part.is_dir()
    assert (tmp_path / "new").is_dir() and not part.exists()


def test_a_failure_leaves_no_new_parents(tmp_path, folders):
    (tmp_path / "generation_config.json").write_text("{")
    for path in (folders / "theirs").iterdir():
        if path.name != "generation_config.json":
            (tmp_path / path.name).symlink_to(path)
    before = {*tmp_path.iterdir()}
    status, errors = status_of(["import", str(tmp_path), "-o", str(tmp_path / "a" / "b" / "new")])
    assert status == 1 and "generation_config.json" in errors and {*tmp_path.iterdir()} == before


def test_links_devices_and_old_files_are_kept(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(KeyError), written_beside(tmp_path / "link") as part:
        part.write_text("half")
        raise KeyError
    assert (tmp_path / "file").read_text() == "old"
    with written_beside(tmp_path / "link") as part:
        part.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    with written_beside(tmp_path / "pipe") as part:
        assert part == tmp_path / "pipe"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link", "pipe"} and (tmp_path / "pipe").is_fifo()
