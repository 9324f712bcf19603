from __future__ import annotations

import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import wandb

from tfm_blocks.tracking.loggers import LoggedRun
from tfm_blocks.tracking.loggers.wandb import WandbLogger, WandbSettings, choose_mode, has_key

KEY = "0" * 40
SETTINGS = WandbSettings(project="test", entity=None)


@pytest.fixture
def refusing() -> str:
    """Return the address of a port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("machine", [urlsplit(wandb.Settings().base_url).netloc, "api.wandb.ai"])
def test_a_key_is_found_in_the_environment_or_in_netrc(machine: str, tmp_path: Path) -> None:
    server = wandb.Settings().base_url
    assert has_key({"WANDB_API_KEY": KEY}, server)
    assert has_key({"WANDB_IDENTITY_TOKEN_FILE": "token"}, server)
    assert not has_key({"HOME": str(tmp_path)}, server)
    (tmp_path / ".netrc").write_text(f"machine {machine} login user password {KEY}\n")
    assert has_key({"HOME": str(tmp_path)}, server)
    assert not has_key({"HOME": str(tmp_path)}, "https://wandb.example.org")


def test_without_a_key_or_a_server_a_run_is_offline(tmp_path: Path, refusing: str) -> None:
    assert choose_mode({"HOME": str(tmp_path)})[0] == "offline"
    assert choose_mode({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": refusing})[0] == "offline"


@pytest.mark.grid
def test_a_server_that_wandb_login_stored_is_used(tmp_path: Path, refusing: str) -> None:
    (tmp_path / "settings").write_text(f"[default]\nbase_url = {refusing}\n")
    (tmp_path / ".netrc").write_text(f"machine {urlsplit(refusing).netloc} login user password {KEY}\n")
    program = "import os; from tfm_blocks.tracking.loggers import wandb; print(*wandb.choose_mode(os.environ))"
    environment = {
        "WANDB_CONFIG_DIR": str(tmp_path),
        "HOME": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"offline {refusing} does not answer\n"


def test_a_setting_that_wandb_refuses_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(wandb.Error, match="Invalid project name"):
        WandbLogger(WandbSettings(project="team/project", entity=None), LoggedRun(tmp_path, {}, {}, "abc"))


@pytest.mark.parametrize(("value", "mode"), [("offline", "offline"), ("dryrun", "offline"), ("disabled", "disabled")])
def test_wandb_mode_is_respected(value: str, mode: str) -> None:
    assert choose_mode({"WANDB_API_KEY": KEY, "WANDB_MODE": value})[0] == mode


@pytest.mark.grid
def test_an_offline_run_keeps_flat_knobs_and_its_exit_code_in_the_run_folder(tmp_path: Path) -> None:
    program = f"""
import pathlib
import numpy as np
from tfm_blocks.data.labels import LabelCoder
from tfm_blocks.report.confusion import confusion_png
from tfm_blocks.tracking.loggers import LoggedRun
from tfm_blocks.tracking.loggers.wandb import WandbLogger, WandbSettings
settings = WandbSettings(project="test", entity=None)
logger = WandbLogger(settings, LoggedRun(pathlib.Path({str(tmp_path)!r}), {{"heads": 4, "graph": {{"add_norm": "post"}}}}, {{}}, "abc"))
logger.log_metrics({{"train/loss": 2.5}}, 1)
logger.log_samples("val", [("a", "b", "c")], 1)
logger.log_pictures({{"confusion/val": confusion_png(LabelCoder("class", ("x", "y")), np.eye(2, dtype=int))}}, 1)
logger.close(3, "diverged")
"""
    environment = {"WANDB_MODE": "offline", "HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0].startswith(
        "W&B: offline, as WANDB_MODE=offline requests; to upload: wandb sync "
    )
    folder = Path(done.stdout.split("wandb sync ")[1].strip())
    assert folder.parent == tmp_path / "wandb"
    stored = next(folder.glob("*.wandb")).read_bytes()
    assert b"heads" in stored and b"train/loss" in stored
    assert list((folder / "files" / "media" / "table" / "samples").glob("val*.json"))
    assert list((folder / "files" / "media" / "images" / "confusion").glob("val*.png"))


def test_a_server_that_refuses_the_key_leaves_an_offline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None:
            """Print no request log."""

    server = HTTPServer(("127.0.0.1", 0), Refuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    wandb.teardown()  # W&B keeps the address that it read first
    logger = WandbLogger(SETTINGS, LoggedRun(tmp_path, {"heads": 4}, {}, "abc"))
    logger.log_metrics({"train/loss": 1.0}, 1)
    logger.close(0, "")
    server.shutdown()
    assert "W&B: offline, the server refused the run" in capsys.readouterr().out
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
