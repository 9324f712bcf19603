"""The styles, scripts and templates of the pages."""

import hashlib
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template


def asset(name: str) -> str:
    """Return the text of a file of this folder."""
    return (Path(__file__).parent / name).read_text("utf-8")


def page_template(name: str) -> Template:
    """Return a template that escapes all text."""
    loader = FunctionLoader(asset)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name)


def content_policy(scripts: Iterable[str], connect: str = "'none'") -> str:
    """Return the content security policy: these scripts by their hashes, and inline styles and pictures.

    `connect` is the origin that scripts may fetch from.
    """
    hashes = [b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    rules = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; connect-src {connect}; {rules}"
