"""Log to Weights & Biases. A run that is stopped and resumed stays one run in W&B."""

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
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from PIL import Image
from pydantic import Field

from tfm_blocks.config.settings import Filled, Settings
from tfm_blocks.errors import PREEMPTED
from tfm_blocks.metric_schema import IN_EVERY_ROW, METRIC_KEYS, TOKENS
from tfm_blocks.runs.folder import CONFIG, MODEL, TOKENIZER, WEIGHTS
from tfm_blocks.tracking.loggers import LoggedRun, LoggerKind, RunLogger, TranslationSample

if TYPE_CHECKING:
    import wandb

DIVERGED = 3  # an exit status that sends an alert
READING = 120.0  # timeout in seconds to read W&B's files from before a resume
PATIENCE = 5.0  # timeout in seconds for a server to answer


class WandbSettings(Settings):
    """Weights & Biases.

    entity: the team; null: the default entity of the API key. group: the group of the run in W&B. artifact: upload the
    final weights.
    """

    project: Filled
    entity: Filled | None
    group: str | None = None
    job_type: str = "train"
    tags: list[str] = Field(default_factory=list)
    artifact: bool = False


class WandbLogger(RunLogger):
    """Log to a W&B run with its files in `folder`/wandb; online if there is a key and the server answers.

    A resumed run keeps its `id`. Offline, each start of the run has a separate folder, and `wandb sync` joins them.
    A resumed run skips values that were logged before.
    """

    name = "W&B"
    shows_pictures = True

    def __init__(self, settings: WandbSettings, run: LoggedRun) -> None:
        import wandb

        self.settings = settings
        self.logged = logged_keys(run.folder, run.id)
        mode, reason = choose_mode(os.environ)
        options = settings.model_dump(include={"project", "entity", "group", "job_type", "tags"})
        options["group"] = settings.group or run.config.get("sweep_name")
        config = {**run.config, "facts": dict(run.facts)}
        options |= {"name": run.folder.name, "config": config, "id": run.id, "resume": "allow"}
        try:
            self.run = _start_run(options, run.folder, mode)
        except (wandb.Error, OSError):
            if mode != "online":
                raise
            wandb.teardown()  # else its service keeps the ID of the refused run
            mode, reason = "offline", "the server refused the run"
            self.run = _start_run(options, run.folder, mode)
        for key in METRIC_KEYS:  # the summary of each metric, and tokens as the x-axis
            axis = None if key.name in IN_EVERY_ROW else TOKENS
            summary = None if key.summary == "last" else key.summary  # W&B always keeps the last value
            name = re.sub(r"{.*", "*", key.name)  # of several keys
            self.run.define_metric(name, summary=summary, step_metric=axis)
        self.run.config.update(_missing_settings(config, self.run.config))  # type: ignore[no-untyped-call]
        if mode == "offline":
            print(f"W&B: offline, {reason}; to upload: wandb sync {Path(self.run.dir).parent}")
        elif mode == "online":
            print(f"W&B: {self.run.url}")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._log(metrics, step or 0)

    def log_samples(self, split: str, samples: Sequence[TranslationSample], step: int) -> None:
        import wandb

        table = wandb.Table(columns=["source", "output", "reference"], data=[list(sample) for sample in samples])
        self._log({f"samples/{split}": table}, step)

    def log_pictures(self, pictures: Mapping[str, bytes], step: int) -> None:
        """Log each PNG under a separate key, because W&B shows all images of a list in the size of the first."""
        import wandb

        self._log({name: wandb.Image(Image.open(BytesIO(picture))) for name, picture in pictures.items()}, step)

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        new = values.keys() - self.logged.get(step, set())
        if new - IN_EVERY_ROW:
            self.run.log(
                {name: value for name, value in values.items() if name in new or name in IN_EVERY_ROW}, step=step
            )

    def log_weights(self, run: Path) -> None:
        """Upload the model and its weights if `artifact` is set."""
        if self.settings.artifact:
            import wandb

            artifact = wandb.Artifact(f"weights-{self.run.id}", type="model", metadata={"run": run.name})
            for name in (MODEL, TOKENIZER, WEIGHTS, CONFIG):
                artifact.add_file(str(run / name))
            self.run.log_artifact(artifact)

    def close(self, exit_code: int, reason: str) -> None:
        if exit_code == PREEMPTED:
            self.run.alert(f"{self.run.name} was preempted", reason, level="WARN")
            self.run.mark_preempting()
        elif exit_code == DIVERGED:
            self.run.alert(f"{self.run.name} diverged", reason, level="ERROR")
        self.run.finish(exit_code=exit_code)


def _missing_settings(config: Mapping[str, Any], logged: Any) -> dict[str, Any]:
    """Return by address the settings of groups that a W&B sweep chose: W&B only has the name of the choice."""
    return {
        address: value
        for key, group in config.items()
        if isinstance(group, Mapping) and isinstance(logged.get(key), str)
        for name, value in group.items()
        if (address := f"{key}.{name}") not in logged
    }


def logged_keys(folder: Path, id: str) -> dict[int, set[str]]:
    """Return the keys by step that earlier starts of the run logged, as W&B's command reads them from its files."""
    keys: dict[int, set[str]] = {}
    for part in sorted((folder / "wandb").glob(f"*run-*-{id}")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(part)]
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=READING)
            for record in map(json.loads, done.stdout.splitlines()):
                if history := record.get("history"):
                    names = {name.partition("._")[0] for name in history["item"]}  # a table has samples/val._type
                    keys.setdefault(history["step"].get("num", 0), set()).update(names)
    return keys


Mode = Literal["online", "offline", "disabled"]


def choose_mode(environment: Mapping[str, str]) -> tuple[Mode, str]:
    """Return the mode and a short reason.

    WANDB_MODE decides first, then a missing key, then a server that does not answer.
    """
    requested = environment.get("WANDB_MODE", "")
    if requested in ("offline", "dryrun", "disabled"):  # dryrun is W&B's older name for offline
        return ("disabled" if requested == "disabled" else "offline"), f"as WANDB_MODE={requested} requests"
    server = environment.get("WANDB_BASE_URL") or _stored_server()
    if not has_key(environment, server):
        return "offline", "no key was found (wandb login stores one)"
    if not _answers(server):
        return "offline", f"{server} does not answer"
    return "online", "a key was found"


def _stored_server() -> str:
    """Return the address that `wandb login --host` stored, or the default of the installed version."""
    import wandb

    return wandb.setup().settings.base_url


def has_key(environment: Mapping[str, str], server: str) -> bool:
    """Return True if the environment has a key or an identity token, or the netrc file has a key for the server."""
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    machines = [urlsplit(server).netloc]
    if server.rstrip("/") == wandb.Settings().base_url:
        machines.append("api.wandb.ai")  # the default server had this name when older versions stored their keys
    home = Path(environment.get("HOME") or Path.home())
    for path in [Path(environment["NETRC"])] if "NETRC" in environment else [home / ".netrc", home / "_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            return any(map(netrc.netrc(str(path)).authenticators, machines))
    return False


def _answers(server: str) -> bool:
    """Return True if the server answers, also with a refusal. Uses the proxies of the environment."""
    try:
        urllib.request.urlopen(server, timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _start_run(options: Mapping[str, Any], folder: Path, mode: Mode) -> wandb.Run:
    import wandb

    quiet = wandb.Settings(silent=True, console="off", init_timeout=4 * PATIENCE, disable_git=True)
    return wandb.init(**options, dir=str(folder), mode=mode, settings=quiet, reinit="finish_previous")


LOGGER = LoggerKind(WandbSettings, WandbLogger)
