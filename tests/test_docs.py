"""Every fence of README.md and docs/ runs.

The fences of a page run in order, in one copy of the checkout. A `text` fence follows the fence whose output it shows:
`…` in a line stands for any text, and a line `…` for any lines. A comment right before a fence marks an exception:
`fails: 2` its exit status; `smaller: KEY=SIZE …` that the defaults of the copied conf/ have these sizes while it runs,
unless pytest runs with -m slow; `whole` that this output comes of whole trainings only; `about: 0.1` that its numbers depend
on the machine; `ci` that .ci/run runs it, not this test. The commands themselves run as they are written, with the loggers
that a reader gets.

After `about: 0.1`, decimal numbers may differ by a tenth of the larger one, or of 1 if both are smaller. Times, speeds and
sizes in memory, with a unit (`3 s`, `12 MB`) or in a column of MEASURED_COLUMNS, may be any numbers. Whole numbers stay
exact, because they count steps, pairs or parameters.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import pytest
import yaml

from tfm_blocks.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [path for path in PAGES if path.is_file() and path.parent.name != "cookbook"]  # its files run in tests/oracles
PAGES.remove(ROOT / "docs" / "index.md")  # a copy of README.md
COPIED = ("conf", "docs", "tests", "tfm_blocks", "train.py", "pyproject.toml")
LONG = {  # pages that train for more than a minute
    "architecture", "comparing", "dates", "ladder", "language-model", "own-blocks", "probes", "running", "runs", "sweep", "sweeps", "tracking", "translating",
}  # fmt: skip
DEFAULT = {"contributing", "models"}  # the other pages run in CI: pytest -m grid
OF_RUNS = re.compile(r"\btrain\b|\btfm runs\b|\bruns/|\btfm\.")  # fences that train, or need runs
LANGUAGES = ("bash", "python", "yaml", "text")
HEADER = "# @package _global_\n"
COMMENT = re.compile(r"<!-- (?:(fails): (\d+)|(smaller): (\S.*)|(ci)|(whole)|(about): (0\.\d+)) -->")
CONFIG_FILE = re.compile(r"my_conf/[\w/-]+\.yaml")
SCRIPT_FILE = re.compile(r"# (\w+\.py)\n")
INSTALL = re.compile(r"^pip install [^&\n]+&& ", re.MULTILINE)  # its packages are already installed
RUN = re.compile(r"([ ━─])\1+")  # the width of a column depends on all its rows
OF_OUTPUT = ("whole", "about")  # comments before a text fence
DECIMAL = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)\.\d+(?:e[-+]?\d+)?|\d+e-\d+")
MEASURED = re.compile(r"(?<![\w.])\d[\d,.]*(?= (?:s|ms|tokens/s|MB|GB)\b)|\b\d+:\d\d:\d\d\b")
MEASURED_COLUMNS = {"tokens/s", "time", "changed"}
MESSAGE = re.compile(r"\s*help: .*|(?:\s*--> |error: |warning: |note: ).*…")  # has `…` itself, or is a long line, cut
HIDDEN = re.compile(r"(?<!, )…(?![\"\]]|$)|(?<=[\w:±] )…$")  # inside a line; at its end, where a value is expected
MOST_HIDDEN = 10  # fences
NEVER = re.compile(r"(?!)")
ANY_LINES = r"(?:.*\n)*?"
SIZES = {
    "d_model", "d_ff", "layers", "vocab", "data.train", "data.val", "data.test", "schedule.warmup", "sweep.trials",
    "trainer.steps", "trainer.validate_every", "trainer.validate_sentences",
}  # fmt: skip


@dataclass(frozen=True)
class Fence:
    where: str
    language: str
    code: str
    marks: dict[str, str]
    file: str  # that its info string, the line before it or its second line names


def fences(page):
    """Yield the fences of a page. Raises AssertionError with page and line for a fence that cannot be run."""
    lines = enumerate(page.read_text("utf-8").splitlines(), 1)
    marks, before, follows = {}, "", False
    for number, line in lines:
        where = f"{page.name}:{number}"
        if line.lstrip().startswith(("```", "~~~")):
            language, _, info = line.removeprefix("```").partition(" ")
            assert language in LANGUAGES, f"{where}: a fence is bash, python, yaml or text, at the margin, not {line!r}"
            assert follows or language != "text", f"{where}: a text fence follows the fence whose output it shows"
            body = [inner for _, inner in takewhile(lambda row: row[1] != "```", lines)]
            named = CONFIG_FILE.search("\n".join((info, before, *body[1:2])))
            yield Fence(where, language, "\n".join((*body, "")), marks, named[0] if named else "")
            marks, before, follows = {}, "", True
        elif "<!--" in line:
            match = COMMENT.fullmatch(line)
            assert match, f"{where}: unknown comment {line!r}"
            name, value = [*(part for part in match.groups() if part is not None), ""][:2]
            marks, follows = {**marks, name: value}, follows and name in OF_OUTPUT
        elif line.strip():
            assert not marks, f"{where}: a comment stands right before its fence"
            before, follows = line, False


class Folder:
    """A copy of the checkout for the fences of one page."""

    def __init__(self, tmp_path):
        self.path = tmp_path / "tfm-blocks"
        self.path.mkdir(parents=True)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, self.path / name)
        command = tmp_path / "bin" / "tfm"
        command.parent.mkdir(parents=True)
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tfm_blocks "$@"\n')
        command.chmod(0o755)
        search = os.pathsep.join([str(command.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
        own = {"PYTHONPATH": str(self.path), "TFM_BLOCKS_CACHE": str(tmp_path / "cache"), "WANDB_MODE": "offline"}
        self.environment = {**os.environ, "PATH": search, **own}
        self.plugins = []

    def run(self, *command):
        """Return the exit status and output of a command."""
        options = {"cwd": self.path, "env": self.environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, text=True, check=False, **options)
        return done.returncode, done.stdout

    def write(self, name, text):
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(text, "utf-8")
        return name

    def bash(self, fence, short):
        code = INSTALL.sub("", fence.code.replace("\\\n", " "))
        with self.smaller(fence.marks.get("smaller", "").split() if short else [], fence.where):
            return self.run("bash", "-e", "-c", code)

    @contextlib.contextmanager
    def smaller(self, sizes, where):
        """Replace the defaults of these sizes in the copy of conf/ by smaller ones. Raises AssertionError for other keys."""
        conf, kept = self.path / "conf", self.path.with_name("conf")
        shutil.copytree(conf, kept)
        for size in sizes:
            key, value = size.split("=")
            assert key in SIZES, f"{where}: {key} is not a size: a reader would train another thing"
            group, _, name = key.rpartition(".")
            files = [
                path for path in sorted((conf / (group or "model")).glob("*.yaml")) if set_default(path, name, value)
            ]
            assert files, f"{where}: no file of conf/{group or 'model'} sets {name}"
            for path in (conf / "experiment").rglob("*.yaml") if group else ():
                set_default(path, f"  {name}", value)
        yield
        shutil.rmtree(conf)
        kept.rename(conf)

    def python(self, fence, short):
        """Run a script; one that begins with its file name is kept, as a plug-in of the following model files."""
        named = SCRIPT_FILE.match(fence.code)
        if named:
            self.plugins += ["--plugins", named[1].removesuffix(".py")]
        return self.run(sys.executable, self.write(named[1] if named else "fence.py", fence.code))

    def yaml(self, fence, short):
        """Check a model file; other YAML must be readable."""
        name = self.write(fence.file or "my_conf/model/fence.yaml", fence.code)
        if not fence.code.startswith(HEADER) or "/experiment/" in name:
            yaml.safe_load(fence.code)
        elif self.plugins:  # which would stay registered in this process
            return self.run(sys.executable, "-m", "tfm_blocks", "check", name, *self.plugins)
        else:
            return self.check(name)
        return 0, ""

    def check(self, name):
        """Run `tfm check` in this process, which already imported torch."""
        said = io.StringIO()
        with contextlib.chdir(self.path), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                main(["check", name])
            except SystemExit as ended:
                return ended.code, said.getvalue()
        return 0, said.getvalue()


def set_default(path, key, value):
    """Set a root key of a YAML file. Return True if the file has the key."""
    text, count = re.subn(
        rf"^{key}: [^#\n]*?(?=\s*(#|$))", f"{key}: {value}", path.read_text("utf-8"), flags=re.MULTILINE
    )
    path.write_text(text, "utf-8")
    return bool(count)


def run_page(page, tmp_path, *, short=True, skipped=NEVER):
    """Run a page. Raises AssertionError with page and line for the first fence with another result than stated.

    Commands and scripts in which the pattern `skipped` occurs are not run.
    """
    folder = Folder(tmp_path)
    output = ""
    for fence in fences(page):
        if fence.language == "text":
            compared = output is not None and not (short and "whole" in fence.marks)
            tolerance = float(fence.marks.get("about", 0))
            assert not compared or is_output(fence.code, output, tolerance), f"{fence.where}: the output was:\n{output}"
        elif fence.language != "yaml" and skipped.search(fence.code):
            output = None
        elif "ci" in fence.marks:
            assert all(run_by_ci(line) for line in fence.code.splitlines()), f"{fence.where}: .ci/run does not run it"
        else:
            status, output = getattr(folder, fence.language)(fence, short)
            expected = int(fence.marks.get("fails", 0))
            assert status == expected, f"{fence.where}: exit status {status}, not {expected}\n{output}"


def is_output(text, output, tolerance=0.0):
    """Return True if `text` is the output, widths aside; `…` stands for a part of a line, or alone for any lines.

    With a tolerance, decimal numbers may differ by this fraction of the larger one, or of 1, and measured numbers by any.
    """
    shown, real = ([RUN.sub(r"\1", line.strip()) for line in each.splitlines()] for each in (text, output))
    if tolerance:
        shown, real = (list(_without_measured(lines)) for lines in (shown, real))
    number = DECIMAL if tolerance else NEVER
    pattern = "".join(ANY_LINES if line == "…" else _pattern(line, number) + "\n" for line in shown if line)
    found = re.fullmatch(pattern, "".join(line + "\n" for line in real if line))
    numbers = [text for line in shown if line != "…" for text in number.findall(line)]
    return found is not None and all(
        abs(one - other) <= tolerance * max(abs(one), abs(other), 1)
        for one, other in zip(map(_float, numbers), map(_float, found.groups()), strict=True)
    )


def _float(text):
    return float(text.replace(",", ""))


def _without_measured(lines):
    """Yield the lines with `N` in place of each time, speed and size in memory."""
    columns = set()
    for line in lines:
        if line.startswith("┃"):
            columns = {place for place, cell in enumerate(line.split("┃")) if cell.strip() in MEASURED_COLUMNS}
        cells = enumerate(line.split("│"))
        line = "│".join(" N " if place in columns and re.search(r"\d", cell) else cell for place, cell in cells)
        yield MEASURED.sub("N", line)


def _pattern(line, number):
    """Return a pattern of a line in which each number is a group."""
    parts = [re.escape(part).replace("…", ".*") for part in number.split(line)]
    return f"({DECIMAL.pattern})".join(parts)


def run_by_ci(command):  # as written in .ci/run, or as its grep extracts it from README.md
    script = (ROOT / ".ci/run").read_text("utf-8")
    patterns = re.findall(r'grep [^"\n]*"([^"\n]+)" README\.md', script)
    return command in script or any(re.fullmatch(pattern, command) for pattern in patterns)


def marks_of(page):
    if page.stem in LONG:
        return [pytest.mark.slow]
    return [] if page.stem in DEFAULT else [pytest.mark.grid]


@pytest.mark.parametrize("page", [pytest.param(page, marks=marks_of(page), id=page.stem) for page in PAGES])
@pytest.mark.parametrize("short", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["short", "whole"])
def test_the_commands_of_a_page_give_the_shown_output(page, short, tmp_path):
    run_page(page, tmp_path, short=short)


@pytest.mark.grid
@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES if page.stem in LONG])
def test_the_commands_of_a_long_page_that_need_no_runs_give_the_shown_output(page, tmp_path):
    run_page(page, tmp_path, skipped=OF_RUNS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```bash\necho one\n```\n```text\ntwo\n```\n", "page.md:4: the output was:"),
        ("```bash\nseq 3\n```\n```text\n1\n3\n```\n", "page.md:4: the output was:"),
        ("```bash\ntrue\n```\nwords between\n```text\n```\n", "page.md:5: a text fence follows the fence"),
        ("```bash\ntrue\n```\n\n```bash\nfalse\ntrue\n```\n", "page.md:5: exit status 1, not 0"),
        ("<!-- fails: 2 -->\n```bash\ntrue\n```\n", "page.md:2: exit status 0, not 2"),
        (f"```yaml\n{HEADER}defaults: [base, _self_]\nheds: 2\n```\n", "page.md:1: exit status 2, not 0"),
        ("<!-- ci -->\n```bash\npip install something-else\n```\n", "page.md:2: .ci/run does not run it"),
        ("- a list\n  ```bash\n  false\n  ```\n", "page.md:2: a fence is bash"),
        ("<!-- smaller: logger=csv -->\n```bash\ntrue\n```\n", "page.md:2: logger is not a size"),
        ("<!-- skip -->\n```bash\ntrue\n```\n", "page.md:1: unknown comment"),
        ("<!-- ci -->\nwords between\n```bash\n```\n", "page.md:2: a comment stands right before"),
    ],
)
def test_a_wrong_fence_is_reported_with_its_line(text, message, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text, "utf-8")
    with pytest.raises(AssertionError) as caught:
        run_page(page, tmp_path)
    assert message in str(caught.value)


def test_an_ellipsis_stands_for_lines_or_for_a_part_of_a_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\necho first; seq 3; echo run 7 in 4 s\n```\n```text\nfirst\n…\n3\nrun … s\n…\n```\n", "utf-8"
    )
    run_page(page, tmp_path)


SAID = "loss 1.0 of 3, 1,234.5 in 7 s, p 0.02"
TABLE = """
┏━━━━━┳━━━━━━━━━━┳━━━━━━━┓
┃ run ┃ tokens/s ┃ steps ┃
┡━━━━━╇━━━━━━━━━━╇━━━━━━━┩
│ one │   {} │    {} │
└─────┴──────────┴───────┘
"""


@pytest.mark.parametrize(
    ("shown", "said", "agrees"),
    [
        ("loss 1.05 of 3, 1,300.1 in 7 s, p 0.02", SAID, True),
        ("loss 1.0 of 3, 1,234.5 in 2,100 s, p 0.02", SAID, True),  # seconds of another machine
        ("loss 1.0 of 3, 1,234.5 in 0.5 s, p 0.09", SAID, True),
        ("loss 1.2 of 3, 1,234.5 in 7 s, p 0.02", SAID, False),
        ("loss 1.0 of 3, 1,400.1 in 7 s, p 0.02", SAID, False),
        ("loss 1.0 of 3, 1,234.5 in 7 s, p 0.2", SAID, False),
        ("loss 1.0 of 4, 1,234.5 in 7 s, p 0.02", SAID, False),  # whole numbers are exact
        ("loss 1.0 of 3, 1,234.5 in 7 ms, p 0.02", SAID, False),
        (TABLE.format("9", "60"), TABLE.format("4,321", "60"), True),
        (TABLE.format("9", "61"), TABLE.format("4,321", "60"), False),
        ("at 0:01:12", "at 0:00:01", True),
        ("differ by 4.8e-07", "differ by 1e-06", True),
    ],
)  # fmt: skip
def test_with_a_tolerance_decimal_numbers_agree_by_it_measured_ones_always_and_whole_ones_exactly(shown, said, agrees):
    assert is_output(shown, said, 0.1) == agrees
    assert is_output(shown, said) == (shown == said)


def hides_a_number(text):
    """Return True if `…` stands for a value in a line; a line that is cut at its right end hides none."""
    lines = [line.rstrip() for line in text.splitlines()]
    return any(HIDDEN.search(line) and not MESSAGE.fullmatch(line) for line in lines if line.strip() != "…")


@pytest.mark.parametrize(
    ("line", "hides"),
    [
        ("test: loss …", True),
        ("done: 6 steps in … s", True),
        ("│ tiny │ … │ 60 │", True),
        ("│ tiny │ … ± … │", True),
        ("…", False),
        ("step 200/200  val: loss 4.773, …  loss 0.005  …", False),
        ('["…"]', False),
        ("[…]", False),
        ("    -> …", False),  # a translation
        ("│ encoder.0.attn │ attention │ …", False),
        ("┏━━━━━┳━…", False),
        ("train it on: tfm train data=…", False),
        ("error: heads: the width must split evenly into heads …", False),
    ],
)
def test_an_ellipsis_hides_a_number_unless_it_cuts_a_line(line, hides):
    assert hides_a_number(line) == hides


def test_few_fences_hide_numbers():
    places = [
        fence.where
        for page in PAGES
        for fence in fences(page)
        if fence.language == "text" and hides_a_number(fence.code)
    ]
    assert len(places) <= MOST_HIDDEN, f"show numbers, with `about` where they depend on the machine: {places}"


def test_the_comment_about_sets_the_tolerance(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```bash\necho loss 1.0\n```\n<!-- about: 0.1 -->\n```text\nloss 1.05\n```\n")
    run_page(page, tmp_path / "within")
    page.write_text(page.read_text().replace("1.05", "1.2"))
    with pytest.raises(AssertionError, match="the output was"):
        run_page(page, tmp_path / "beyond")


def test_a_fence_has_smaller_defaults_unless_it_runs_whole_and_the_next_fence_has_those_of_conf(tmp_path):
    page = tmp_path / "page.md"
    fence = "```bash\ngrep -h ^steps conf/trainer/default.yaml\n```\n```text\nsteps: {} …\n```\n"
    page.write_text("<!-- smaller: trainer.steps=2 -->\n" + fence.format("2") + fence.format("450"))
    run_page(page, tmp_path / "short")
    with pytest.raises(AssertionError, match=r"page\.md:5: the output was:\s+steps: 450"):
        run_page(page, tmp_path / "whole", short=False)
