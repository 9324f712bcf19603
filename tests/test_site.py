"""The site of the documentation: zensical builds it without a warning, and generated pages agree with the code."""

import argparse
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import pytest
import yaml

import tfm_blocks
from tfm_blocks.cli import command_parser
from tfm_blocks.exchange.family import families

ROOT = Path(__file__).parent.parent
SVG = "{http://www.w3.org/2000/svg}"


def build(root):
    """Run zensical so that a warning, such as one of a broken link, is an error."""
    command = [sys.executable, str(root / "docs" / "build_site.py")]
    return subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.grid
def test_the_site_builds_without_a_warning_and_describes_the_python_api(tmp_path):
    for name in ("conf", "docs", "tfm_blocks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout
    site = tmp_path / "site"
    assert "same seed gives the same weights" in (site / "reference" / "python.html").read_text("utf-8")
    assert "<code>MODEL|RUN</code>" in (site / "reference" / "commands.html").read_text("utf-8")
    for page, file in (
        ("models.html", "conf/model/base.yaml"),
        ("importing.html", "tfm_blocks/exchange/families/model/apertus.yaml"),
    ):
        assert f'href="{file}"' in (site / page).read_text("utf-8") and (site / file).is_file()
    hosts = set(re.findall(r'<(?:link|script|img)[^>]*"https?://', (site / "index.html").read_text("utf-8")))
    assert not hosts, "a reader's browser fetches nothing from other hosts"


BROKEN = {
    "missing.md": "page does not exist",
    "index.md#no-such-heading": "anchor does not exist",
    "../conf/model/no_such.yaml": "conf/model/no_such.yaml",
    "../tfm_blocks/exchange/families/no_such.yaml": "families/no_such.yaml",
}


@pytest.mark.grid
def test_a_broken_link_fails_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "build_site.py", tmp_path / "docs")
    for folder in ("conf/model", "tfm_blocks/exchange/families"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    settings = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(f"{settings}\nnav:\n  - Start: index.md\n", "utf-8")
    page, text = tmp_path / "docs" / "index.md", "# Start\n\n[model](../conf/model/base.yaml)\n"
    page.write_text(text, "utf-8")
    assert build(tmp_path).returncode == 0
    for link, message in BROKEN.items():
        page.write_text(f"{text}\n[link]({link})\n", "utf-8")
        done = build(tmp_path)
        assert done.returncode == 1 and message in done.stdout, done.stdout


def test_the_citation_has_the_version_and_the_licence_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert (citation["version"], citation["license"]) == (tfm_blocks.__version__, project["license"])


def test_the_generated_pages_are_current(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    pages = runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]()
    stale = [page.name for page, text in pages.items() if page.read_text("utf-8") != text]
    assert not stale, "python docs/generate.py"


@pytest.mark.parametrize("page", ["tour.md", "contributing.md"])
def test_the_files_that_a_page_on_the_code_names_exist(page):
    files = [
        f"/{path.relative_to(ROOT)}"
        for folder in ("tfm_blocks", "docs", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    prose = re.sub(r"^```.*?^```", "", (ROOT / "docs" / page).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    names = set(re.findall(r"`([\w/]+\.py)`", prose)) - {"train.py"}
    assert names and not [name for name in names if not any(file.endswith(f"/{name}") for file in files)]


def test_the_recording_shows_the_commands_of_the_front_page():
    recorder = runpy.run_path(str(ROOT / "docs" / "record.py"))
    rows = [element.text for element in ElementTree.parse(recorder["FILE"]).iter(f"{SVG}text")]
    assert [row.removeprefix("$ ") for row in rows if row.startswith("$ ")] == list(recorder["COMMANDS"])
    front = (ROOT / "README.md").read_text("utf-8")
    assert all(command in front for command in recorder["COMMANDS"][1:])
    assert rows[-1] == "1987-03-03"


def test_the_recording_shows_each_line_at_its_time_and_scrolls_when_the_screen_is_full(tmp_path):
    recorder = runpy.run_path(str(ROOT / "docs" / "record.py"))
    pause, text = list(recorder["record"]("echo one; sleep 0.5; echo 'two < three'", tmp_path))[1]
    assert text == "two < three"
    assert 0.4 < pause < 20
    lines = [recorder["Line"](float(second), f"line {second}", typed=False) for second in range(30)]
    drawing = recorder["draw"](lines)
    ElementTree.fromstring(drawing)
    length = 29 + recorder["HELD"]
    shown = dict(re.findall(r"@keyframes l(\d+) { 0% { opacity: 0; } ([\d.]+)%", drawing))
    assert {int(line): float(part) for line, part in shown.items()} == pytest.approx(
        {line: 100 * line / length for line in range(30)}, abs=1e-3
    )
    full = 30 - recorder["ROWS"]
    assert re.findall(r"translateY\((-\d+)px\); }", drawing)[-1] == str(-recorder["HEIGHT"] * full)


def test_the_site_and_the_reference_list_every_page_and_preset():
    docs = ROOT / "docs"
    listed = re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2])
    assert sorted(listed) == sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))
    presets = [path for group in ("experiment", "debug") for path in (ROOT / "conf" / group).rglob("*.yaml")]
    headings = {f"### {path.relative_to(ROOT / 'conf').with_suffix('')}".replace("/", "=", 1) for path in presets}
    assert headings <= {*(docs / "reference" / "config.md").read_text("utf-8").splitlines()}


def test_the_reference_has_a_section_for_every_command():
    page = (ROOT / "docs" / "reference" / "commands.md").read_text("utf-8")
    names = [name for name, _ in subcommands(command_parser(), "tfm")]
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == names
    assert "tfm dashboard push" in names


def subcommands(parser, prefix):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield f"{prefix} {name}", command
                yield from subcommands(command, f"{prefix} {name}")


def test_the_front_page_has_the_numbers_of_the_cookbook_and_of_the_families():
    readme = (ROOT / "README.md").read_text("utf-8")
    index = (ROOT / "docs" / "cookbook" / "index.md").read_text("utf-8")
    lines = [int(number) for number in re.findall(r"^\| \[.*\| (\d+) \| `", index, re.MULTILINE)]
    assert f"each of the {len(lines)} published architectures" in readme
    assert f"takes {min(lines)} to {max(lines)} lines of YAML, with a median of {median(lines):.0f}" in readme
    architectures = {family.architecture for family in families().values()}
    assert f"imports {len(architectures)} architectures" in readme
    changes, models = (
        (ROOT / "CHANGELOG.md").read_text("utf-8"),
        (ROOT / "tfm_blocks/exchange/families/model").iterdir(),
    )
    assert f"a cookbook of {len(lines)} published architectures" in changes
    assert f"{len([*models])} more families" in changes
