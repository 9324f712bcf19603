"""Hooks of mkdocs: decisions and the cookbook in the navigation, and files of conf/ that pages link to."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
CODE_IN_CELL = re.compile(r"(?<=<code>)[^<]*\\\|[^<]*(?=</code>)")
CONF_LINK = re.compile(r"\]\((?:\.\./)+(conf/[\w/.-]+)\)")


def on_config(config):
    """List the pages of docs/decisions in the order of their numbers, and of docs/cookbook after its index."""
    for section in config.nav:
        for title in {"Cookbook", "Decisions"} & section.keys():
            pages = sorted(page.name for page in Path(config.docs_dir, title.lower()).glob("*.md"))
            pages.sort(key=lambda name: name != "index.md")
            section[title] = [f"{title.lower()}/{name}" for name in pages]
    return config


def on_files(files, config):
    """Add the files of conf/, so that pages can link to them."""
    for path in sorted(ROOT.glob("conf/**/*.yaml")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, **_):
    """Point links to conf/ outside of docs/ to those files."""
    up = "../" * page.file.src_uri.count("/")
    return CONF_LINK.sub(rf"]({up}\1)", markdown)


def on_page_content(html, **_):
    """Write | for the \\| of code in tables, as GitHub does."""
    return CODE_IN_CELL.sub(lambda match: match[0].replace("\\|", "|"), html)
