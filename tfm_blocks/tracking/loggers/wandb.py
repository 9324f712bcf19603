"""Weights & Biases: one run there for one run here, however often it was stopped."""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from PIL import Image
from pydantic import Field

from tfm_blocks.config.settings import Settings
from tfm_blocks.metric_schema import IN_EVERY_ROW, METRIC_KEYS, TOKENS
from tfm_blocks.runs.folder import CONFIG, MODEL, TOKENIZER, WEIGHTS
from tfm_blocks.tracking.logger import LoggedRun, LoggerKind, RunLogger, TranslationSample

if TYPE_CHECKING:
    import wandb

DIVERGED, PREEMPTED = 3, 75  # exit statuses of which a team wants to know at once
READING = 120.0  # seconds that the files of an earlier part may take to read
PATIENCE = 5.0  # seconds that a server may take to answer before a run goes on without it


class WandbSettings(Settings):
    """Weights & Biases.

    entity: the team; null: the default entity of the API key. group: runs that W&B shows together. artifact: upload the
    final weights.
    """

    project: str
    entity: str | None
    group: str | None = None
    job_type: str = "train"
    tags: list[str] = Field(default_factory=list)
    artifact: bool = False


class WandbLogger(RunLogger):
    """Logs to a W&B run with its files in `folder`/wandb; online if there is a key and the server answers.

    A run that is resumed has the `id` of its first part; offline each part is a folder, for wandb sync to join. What a
    part before it has logged is not logged again, so no step is there twice.
    """

    name = "W&B"
    shows_pictures = True

    def __init__(self, settings: WandbSettings, run: LoggedRun) -> None:
        self.settings = settings
        self.logged = logged_keys(run.folder, run.id)
        mode, reason = choose_mode(os.environ)
        options = settings.model_dump(include={"project", "entity", "group", "job_type", "tags"})
        options["group"] = settings.group or run.config.get("sweep_name")
        config = {**run.config, "facts": dict(run.facts)}
        options |= {"name": run.folder.name, "config": config, "id": run.id, "resume": "allow"}
        self.run = _start_run(options, run.folder, mode)
        if self.run is None:
            import wandb

            wandb.teardown()  # its service holds the id of the run that was refused
            mode, reason = "offline", "the server refused the run"
            self.run = _start_run(options, run.folder, mode)
        if self.run:
            _define(self.run)
            self.run.config.update(_left_out(config, self.run.config))  # type: ignore[no-untyped-call]
        if mode == "offline" and self.run:
            print(f"W&B: offline, {reason}; to upload: wandb sync {Path(self.run.dir).parent}")
        elif mode == "online" and self.run:
            print(f"W&B: {self.run.url}")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._log(metrics, step or 0)

    def log_samples(self, split: str, samples: Sequence[TranslationSample], step: int) -> None:
        import wandb

        table = wandb.Table(columns=["source", "output", "reference"], data=[list(sample) for sample in samples])
        self._log({f"samples/{split}": table}, step)

    def log_pictures(self, pictures: Mapping[str, bytes], step: int) -> None:
        """Logs each PNG under a key of its own, because W&B shows all images of a list in the size of the first."""
        import wandb

        self._log({name: wandb.Image(Image.open(BytesIO(picture))) for name, picture in pictures.items()}, step)

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        new = values.keys() - self.logged.get(step, set())
        if self.run and new - IN_EVERY_ROW:
            self.run.log(
                {name: value for name, value in values.items() if name in new or name in IN_EVERY_ROW}, step=step
            )

    def log_weights(self, run: Path) -> None:
        """Uploads them where that is asked for."""
        if self.run and self.settings.artifact:
            import wandb

            artifact = wandb.Artifact(f"weights-{self.run.id}", type="model", metadata={"run": run.name})
            for name in (MODEL, TOKENIZER, WEIGHTS, CONFIG):
                artifact.add_file(str(run / name))
            self.run.log_artifact(artifact)

    def close(self, exit_code: int, reason: str) -> None:
        if not self.run:
            return
        if exit_code == PREEMPTED:
            self.run.alert(f"{self.run.name} was preempted", reason, level="WARN")
            self.run.mark_preempting()
        elif exit_code == DIVERGED:
            self.run.alert(f"{self.run.name} diverged", reason, level="ERROR")
        self.run.finish(exit_code=exit_code)


def _define(run: wandb.Run) -> None:
    """Tells which value of each key stands for the run, and that curves are over tokens; steps are there anyway.

    A name for several keys ends in a star.
    """
    for key in METRIC_KEYS:
        axis = None if key.name in IN_EVERY_ROW else TOKENS
        summary = None if key.summary == "last" else key.summary  # which W&B keeps anyway, under the plain name
        run.define_metric(re.sub(r"{.*", "*", key.name), summary=summary, step_metric=axis)


def _left_out(config: Mapping[str, Any], has: Any) -> dict[str, Any]:
    """By their addresses, the settings of groups that a sweep of W&B chooses: it keeps their keys to itself."""
    return {
        address: value
        for key, group in config.items()
        if isinstance(group, Mapping) and isinstance(has.get(key), str)
        for name, value in group.items()
        if (address := f"{key}.{name}") not in has
    }


def logged_keys(folder: Path, id: str) -> dict[int, set[str]]:
    """The keys by step that the parts of a run, as far as they are on this disk, have in W&B's own files."""
    found: dict[int, set[str]] = {}
    for part in sorted((folder / "wandb").glob(f"*run-*-{id}")):
        for history in _histories(part):
            names = {name.partition("._")[0] for name in history["item"]}  # of a table: samples/val._type
            found.setdefault(history["step"].get("num", 0), set()).update(names)
    return found


def _histories(part: Path) -> Iterator[dict[str, Any]]:
    """What was logged, as W&B's own reader tells it; nothing where it cannot, since a run goes on without."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(part)]
    with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=READING)
        yield from (record["history"] for record in map(json.loads, done.stdout.splitlines()) if "history" in record)


Mode = Literal["online", "offline", "disabled"]


def choose_mode(environment: Mapping[str, str]) -> tuple[Mode, str]:
    """The mode, and the reason for it as half a sentence: WANDB_MODE, then a missing key, then a server that does not
    answer.
    """
    asked = environment.get("WANDB_MODE", "")
    if asked in ("offline", "dryrun", "disabled"):  # the second is W&B's older name for the first
        return ("disabled" if asked == "disabled" else "offline"), f"as WANDB_MODE={asked} says"
    server = environment.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if not has_key(environment, server):
        return "offline", "no key was found (wandb login stores one)"
    if not _answers(server):
        return "offline", f"{server} does not answer"
    return "online", "a key was found"


def has_key(environment: Mapping[str, str], server: str) -> bool:
    """Looks at WANDB_API_KEY, then in the netrc file."""
    if environment.get("WANDB_API_KEY"):
        return True
    home = Path(environment.get("HOME") or Path.home())
    for path in [Path(environment["NETRC"])] if "NETRC" in environment else [home / ".netrc", home / "_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            return netrc.netrc(str(path)).authenticators(urlsplit(server).netloc) is not None
    return False


def _answers(server: str) -> bool:
    """True for any answer, also a refusal. Uses the proxies of the environment."""
    try:
        urllib.request.urlopen(server, timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _start_run(options: Mapping[str, Any], folder: Path, mode: Mode) -> wandb.Run | None:
    """None if the server refuses the run."""
    import wandb

    quiet = wandb.Settings(silent=True, console="off", init_timeout=4 * PATIENCE, disable_git=True)
    try:
        return wandb.init(**options, dir=str(folder), mode=mode, settings=quiet, reinit="finish_previous")
    except (wandb.Error, OSError):
        return None


LOGGER = LoggerKind(WandbSettings, WandbLogger)
