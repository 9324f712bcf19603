"""Build the site of the documentation in site/: python docs/build_site.py; with --serve, show it and follow changes.

The module is also an extension of Python-Markdown: pages read on the site as they read on GitHub.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor
from markdown.preprocessors import Preprocessor

ROOT = Path.cwd()
CODE_IN_CELL = re.compile(r"(?<=<code>)[^<]*\\\|[^<]*(?=</code>)")
COPIED = ("conf", "tfm_blocks/exchange/families")  # folders outside of docs/ whose files the pages link to
FILE_LINK = re.compile(rf"\]\(\.\./((?:\.\./)*)((?:{'|'.join(COPIED)})/[\w/.-]+)\)")


class FileLinks(Preprocessor):
    """Point links from docs/ to files outside of it to their copies in the site."""

    def run(self, lines: list[str]) -> list[str]:
        """Return the lines of a page. Raises FileNotFoundError for a link to a missing file."""
        for _, path in FILE_LINK.findall("\n".join(lines)):
            if not (ROOT / path).is_file():
                raise FileNotFoundError(path)
        return [FILE_LINK.sub(r"](\1\2)", line) for line in lines]


class CodeInCells(Postprocessor):
    r"""Write | for the \| of code in tables."""

    def run(self, text: str) -> str:
        """Return the HTML of a page."""
        return CODE_IN_CELL.sub(lambda code: code[0].replace("\\|", "|"), text)


class AsOnGitHub(Extension):
    """Links and tables as GitHub shows them."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register both processors."""
        md.preprocessors.register(FileLinks(md), "file_links", 30)
        md.postprocessors.register(CodeInCells(md), "code_in_cells", 0)


def makeExtension() -> Extension:
    """Return the extension, by the name of this module in mkdocs.yml."""
    return AsOnGitHub()


def build_site(*, serve: bool = False) -> int:
    """Run zensical in the current folder. Return its exit status."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "zensical", *(["serve"] if serve else ["build", "--clean", "--strict"])]
    status = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode
    for folder in COPIED:
        shutil.copytree(ROOT / folder, ROOT / "site" / folder, dirs_exist_ok=True)
    return status


if __name__ == "__main__":
    sys.exit(build_site(serve="--serve" in sys.argv))
