"""Where metrics go: metrics.csv always, Weights & Biases where wanted."""

from __future__ import annotations

import contextlib
import csv
import netrc
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import wandb
from lightning.pytorch.loggers import Logger
from PIL import Image

from tfm_blocks.training.metrics import COLUMNS
from tfm_blocks.training.settings import WandbSettings

Sample = tuple[str, str, str]
PATIENCE = 5.0  # seconds that a server may take to answer before a run goes on without it


class RunLogger(Logger):
    """Takes metrics by name, as `metrics.COLUMNS` lists them, and sample translations: source, output, reference."""

    name = version = ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The config is in the run folder already."""

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Nothing, where there is no place for text."""

    def log_summary(self, values: Mapping[str, Any]) -> None:
        """Nothing, where there is no summary; status.json has it."""

    def close(self, exit_code: int) -> None:
        """The run ended, well or not."""


class CsvLogger(RunLogger):
    """One row a step that measured something; a metric that it did not measure stays blank."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        if not path.exists():
            self._append(("step", *COLUMNS))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._append((step, *(metrics.get(column, "") for column in COLUMNS)))

    def _append(self, row: Sequence[Any]) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(row)


class WandbLogger(RunLogger):
    """A W&B run whose files are under `folder`/wandb, online where a key is found and the server answers."""

    def __init__(self, settings: WandbSettings, folder: Path, config: Mapping[str, Any]) -> None:
        super().__init__()
        mode, reason = choose_mode(os.environ)
        begin = {"project": settings.project, "entity": settings.entity, "name": folder.name, "config": dict(config)}
        self.run = _begin(begin, folder, mode)
        if self.run is None:
            mode, reason = "offline", "the server refused the run"
            self.run = _begin(begin, folder, mode)
        if mode == "offline" and self.run:
            print(f"W&B: offline, {reason}; to upload: wandb sync {Path(self.run.dir).parent}")
        elif mode == "online" and self.run:
            print(f"W&B: {self.run.url}")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self.run:
            self.run.log(dict(metrics), step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        if self.run and samples:
            table = wandb.Table(columns=["source", "output", "reference"], data=[list(sample) for sample in samples])
            self.run.log({"samples": table}, step=step)

    def log_pictures(self, pictures: Mapping[str, bytes], step: int) -> None:
        """PNGs, each under its own key: W&B shows a list of images as if all had the size of the first."""
        if self.run and pictures:
            images = {name: wandb.Image(Image.open(BytesIO(picture))) for name, picture in pictures.items()}
            self.run.log(images, step=step)

    def log_summary(self, values: Mapping[str, Any]) -> None:
        if self.run:
            self.run.summary.update(dict(values))

    def close(self, exit_code: int) -> None:
        if self.run:
            self.run.finish(exit_code=exit_code)


Mode = Literal["online", "offline", "disabled"]


def choose_mode(environment: Mapping[str, str]) -> tuple[Mode, str]:
    """WANDB_MODE where it is set; else online with a key and a server that answers. The reason is a half sentence."""
    asked = environment.get("WANDB_MODE", "")
    if asked in ("offline", "disabled"):
        return ("offline" if asked == "offline" else "disabled"), f"as WANDB_MODE={asked} says"
    server = environment.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if not has_key(environment, server):
        return "offline", "no key was found (wandb login stores one)"
    if not _answers(server):
        return "offline", f"{server} does not answer"
    return "online", "a key was found"


def has_key(environment: Mapping[str, str], server: str) -> bool:
    """Whether WANDB_API_KEY or the netrc file has a key for `server`."""
    if environment.get("WANDB_API_KEY"):
        return True
    home = Path(environment.get("HOME") or Path.home())
    for path in [Path(environment["NETRC"])] if "NETRC" in environment else [home / ".netrc", home / "_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            return netrc.netrc(str(path)).authenticators(urlsplit(server).netloc) is not None
    return False


def _answers(server: str) -> bool:
    """Any answer counts, a refusal too; the environment's proxies are used."""
    try:
        urllib.request.urlopen(server, timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _begin(begin: Mapping[str, Any], folder: Path, mode: Mode) -> wandb.Run | None:
    """None where the server does not take the run."""
    quiet = wandb.Settings(silent=True, console="off", init_timeout=4 * PATIENCE, disable_git=True)
    try:
        return wandb.init(**begin, dir=str(folder), mode=mode, settings=quiet, reinit="finish_previous")
    except (wandb.Error, OSError):
        return None
