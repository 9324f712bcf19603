"""Facts that a run folder records, and their use in `tfm show` and `tfm compare`."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

import tfm_blocks as tfm
from tests.launch.test_resume import begin, go_on, handlers, stopping  # noqa: F401  a fixture
from tfm_blocks.cli import main
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.runs.files import read_json, write_json
from tfm_blocks.runs.model import read_network
from tfm_blocks.tracking.dashboard import FACTS
from tfm_blocks.training.checkpoints import PreemptedError

Small = Callable[..., Composed]


@pytest.mark.grid
def test_a_run_keeps_its_facts_and_a_resume_records_changes(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The vocabulary of these few dates is smaller than the requested one."""
    with pytest.raises(PreemptedError):
        begin(small(*stopping(5), "vocab=2000"), tmp_path)
    run = tmp_path / "run"
    record = read_json(run / "run.json")
    facts = record["facts"]
    assert set(facts) == set(FACTS) and "changes" not in record
    assert facts["versions"]["tfm-blocks"] == tfm.__version__
    assert facts["versions"]["torch"] == version("torch") and {"python", "lightning", "hydra-core"} <= set(facts["versions"])  # fmt: skip
    facts["versions"] |= {"torch": "2.0.0"}  # as if another version had started the run
    write_json(run / "run.json", record)
    go_on(run, "plugins=[faulty]")
    kept = read_json(run / "run.json")
    assert kept["facts"] == facts, "those of the start stay"
    (change,) = kept["changes"]
    assert change == {"resumed": 1, "versions": {"torch": version("torch")}}
    _expect_counted(facts, run)
    _expect_shown(run, capsys)


def _expect_counted(facts: dict[str, int], run: Path) -> None:
    """Check the counts against the network: each subword is a row of its only table."""
    network = read_network(run, plugins=["faulty"])
    assert facts["parameters"] == sum(one.numel() for one in network.parameters())
    pieces, width = next(one for name, one in network.named_parameters() if name.startswith("src_emb")).shape
    assert pieces < 2000 and facts["parameters_asked"] == facts["parameters"] + (2000 - pieces) * width


def _expect_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    main(["show", str(run), "--plugins", "faulty", "--json"])
    output = json.loads(capsys.readouterr().out)
    status, record = read_json(run / "status.json"), read_json(run / "run.json")
    shown_run = output["run"]
    assert (shown_run["state"], shown_run["commands"]) == ("done", record["commands"])
    assert (shown_run["facts"], shown_run["changes"]) == (record["facts"], record["changes"])
    assert (
        shown_run["scores"]["BLEU"]["value"]
        == next(one for one in status["translation"] if one["name"] == "BLEU")["value"]
    )
    assert output["parameters"] == record["facts"]["parameters"] and output["nodes"]
    main(["show", str(run), "--plugins", "faulty"])
    shown = capsys.readouterr().out
    requested = record["facts"]["parameters_asked"]
    for line in (f"parameters_asked: {requested:,}", f"changed by resume 1: versions torch {version('torch')}"):
        assert f"\n{line}\n" in shown
    assert "torch 2.0.0" in shown and "\nscores on test: exact match 0.00 (0.0–" in shown
