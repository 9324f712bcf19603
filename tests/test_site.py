"""The site of the documentation: mkdocs builds it without a warning, and generated pages agree with the code."""

import os
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

import tfm_blocks

ROOT = Path(__file__).parent.parent


def build(root, folder):
    """Run mkdocs so that a warning, such as one of a broken link, is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    return subprocess.run(
        command, cwd=root, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )


def test_the_site_builds_without_a_warning_and_describes_the_python_api(tmp_path):
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "same seed gives the same weights" in (tmp_path / "reference" / "python.html").read_text("utf-8")
    assert "<code>MODEL|RUN</code>" in (tmp_path / "reference" / "commands.html").read_text("utf-8")
    assert (tmp_path / "conf" / "model" / "base.yaml").is_file(), "models.md links to it"


def test_broken_links_fail_the_build(tmp_path):
    """Build a site of one page without and with broken links."""
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "site_hooks.py", tmp_path / "docs")
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    settings = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(f"{settings}\nnav:\n  - Start: index.md\n  - Decisions: []\n", "utf-8")
    page = tmp_path / "docs" / "index.md"
    page.write_text("# Start\n\n[model](../conf/model/base.yaml)\n", "utf-8")
    assert build(tmp_path, tmp_path / "site").returncode == 0
    links = ("missing.md", "index.md#no-such-heading", "../conf/model/no_such.yaml")
    page.write_text(page.read_text("utf-8") + "".join(f"\n[link]({link})\n" for link in links), "utf-8")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    for part in ("missing.md", "no-such-heading", "no_such.yaml"):
        assert part in done.stderr


def test_the_citation_has_the_version_and_the_licence_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert (citation["version"], citation["license"]) == (tfm_blocks.__version__, project["license"])


def test_the_generated_pages_are_current():
    pages = runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]()
    stale = [page.name for page, text in pages.items() if page.read_text("utf-8") != text]
    assert not stale, "python docs/generate.py"
