"""Serve the page of a model on 127.0.0.1, and recheck the model when one of its files changes."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

from tfm_blocks.errors import Problem, TfmError, config_error
from tfm_blocks.report.model_page import ViewedModel, render_view

ADDRESS = "127.0.0.1"
PAUSE = 0.1  # seconds between checks of the files
RETRY = 1.0  # seconds between checks of models that have a problem
Read = Callable[[], Sequence[ViewedModel]]


class WatchedPage:
    """The page of the last valid version of the models, and the problems of the current version."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.version = 0
        self.problems: Sequence[Problem] = ()
        self.warnings = ""
        self.models = self._read()
        self.stamps = self._stamps()
        self._accept(self.models)

    @property
    def state(self) -> dict[str, object]:
        """Return the state that an open page polls."""
        problems = [{"address": problem.address, "text": str(problem)} for problem in self.problems]
        return {"version": str(self.version), "problems": problems}

    def watch_files(self) -> None:
        """Recheck the models after each change of their files, forever."""
        while True:
            time.sleep(RETRY if self.problems else PAUSE)
            stamps = self._stamps()
            if stamps != self.stamps or self.problems:  # a problem may lie in a file that no valid version has read
                self.stamps = stamps
                try:
                    self._accept(self._read())
                except TfmError as error:
                    self.problems = error.problems
                except Exception as error:  # an editor replaces the file, or a plug-in fails
                    self.problems = (Problem("", f"{type(error).__name__}: {error}"),)

    def _read(self) -> Sequence[ViewedModel]:
        """Read the models, and print their warnings unless they were printed since the last valid version."""
        output = StringIO()
        try:
            with redirect_stderr(output):
                models = self.read()
        except Exception:
            self.warnings += self._print_new(output.getvalue())
            raise
        self._print_new(output.getvalue())
        self.warnings = output.getvalue()
        return models

    def _print_new(self, warnings: str) -> str:
        """Print the warnings that follow the known ones, and return them."""
        new = "" if warnings in self.warnings else warnings.removeprefix(self.warnings)
        print(new, end="", file=sys.stderr, flush=True)
        return new

    def _accept(self, models: Sequence[ViewedModel]) -> None:
        html = render_view(models, str(self.version + 1))
        self.models, self.html, self.problems, self.version = models, html, (), self.version + 1

    def _stamps(self) -> dict[str, tuple[int, int] | None]:
        """Return the time and size of each file, or None if it does not exist."""
        stamps: dict[str, tuple[int, int] | None] = {}
        for file in {file for model in self.models for file in model.sources.files}:
            stamps[file] = None
            with suppress(OSError):
                status = Path(file).stat()
                stamps[file] = status.st_mtime_ns, status.st_size
        return stamps


class PageHandler(BaseHTTPRequestHandler):
    """Serves the page and its state. It refuses other host names, which protects against DNS rebinding."""

    def __init__(self, page: WatchedPage, *arguments: Any) -> None:
        self.page = page
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Send the page or its state."""
        hosts = [f"{name}:{self.connection.getsockname()[1]}" for name in (ADDRESS, "localhost")]
        if self.headers.get("Host") not in hosts:
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            self._send("text/html", self.page.html)
        elif self.path == "/state":
            self._send("application/json", json.dumps(self.page.state))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, kind: str, text: str) -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(HTTPStatus.OK)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(data))}
        headers |= {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):  # the page was closed or reloaded
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing for requests."""


def serve(read: Read, port: int) -> None:
    """Serve the page until the process is interrupted. Raises ConfigError if the port is taken."""
    page = WatchedPage(read)
    try:
        server = ThreadingHTTPServer((ADDRESS, port), partial(PageHandler, page))
    except (OSError, OverflowError) as error:
        raise config_error("--port", f"cannot be used: {port} ({error})", "leave it out") from None
    threading.Thread(target=page.watch_files, daemon=True).start()
    print(f"http://{ADDRESS}:{server.server_port}/ shows the model; Ctrl-C stops", flush=True)
    server.serve_forever()
