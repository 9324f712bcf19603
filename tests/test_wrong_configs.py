"""An invalid or hostile config fails before training: exit status 2, and one screen with an address, a place and a fix."""

from pathlib import Path

import pytest

from tests.preloaded import run_python

ROOT = Path(__file__).parent.parent
SCREEN = 24
HEADER = "# @package _global_\n"


def train(folder, *arguments):
    return run_python([ROOT / "train.py", *arguments], folder, timeout=120)


def refused(done, *messages):
    """Check the common properties of a refusal, and its messages."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) <= SCREEN
    assert "help: " in done.stderr
    for text in messages:
        assert text in done.stderr


WRONG = {
    "misspelt key": (["model.graph.encoder.layer.attn.haeds=4"], "attn.haeds: unknown key", "base.yaml:20:9", "did you mean heads?"),
    "misspelt root key": (["haeds=4"], "haeds: no such key", "haeds=4", "did you mean heads?"),
    "misspelt block": (["model.graph.encoder.layer.ffn.block=fnn"], "no block is called 'fnn'", "base.yaml:21", "did you mean ffn?"),
    "misspelt group option": (["model=bsae"], "no model is called 'bsae'", "command line: model=bsae", "did you mean base?"),
    "wrong value type": (["heads=2.5"], "model.args.heads: heads must be an int, but is 2.5", "base.yaml:12", "command line: heads=2.5"),
    "wrong setting type": (["trainer.steps=many"], "trainer.steps: must be an int, but is 'many'", "default.yaml:1:1", "trainer.steps=many"),
    "indivisible heads": (["heads=7"], "D % heads == 0", "base.yaml:20:9", "command line: heads=7", "heads can be 1, 2, 4"),
    "unknown reference": (["model.graph.decoder.layer.cross.kv=encodr"], "cross.kv: 'encodr' is neither", "base.yaml:28", "did you mean encoder?"),
    "shape clash in a residual": (
        ["model.graph.encoder.layer.out={block: unembed, vocab: 64, add_norm: post}"],
        "encoder.layer.out: its output B S 64 cannot be added to its input B S 128",
        "base.yaml:19",
        "width",
    ),
    "two forms on a node": (["model.graph.encoder.same=src_emb"], "exactly one of block, same, layer", "base.yaml:17:5", "same: null"),
    "missing input": (["model.graph.src_emb.in=null"], "src_emb: the first node has no earlier node", "base.yaml:15:5", "in: src"),
    "added key": (["+steps=3"], "steps: no such key", "+steps=3", "one of: callbacks"),
    "name that is no folder": (["name=../mine"], "name: must be a folder's name", "name=../mine", "write name="),
    "sizes beyond all memory": (["d_model=1099511627776"], "encoder.layer.attn", "base.yaml:20:9", "Storage size"),
    "rate of 1": (["model.args.attention_dropout=1"], "must be from 0 to below 1", "attention_dropout=1", "such as 0.1"),
    "step of nothing": (["trainer.clip=0"], "trainer.clip: must be above 0", "default.yaml", "trainer.clip=0"),
    "too few positions": (
        ["model.graph.src_pos={block: learned_position, max_length: 5}"],
        "src_pos: has 5 positions, but src of train has up to ",
        "base.yaml:16",
        "raise its max_length",
    ),
    "interpolation to nothing": (["heads=${haeds}"], "${haeds} cannot be resolved: there is no key 'haeds'", "tiny.yaml:6:1", "did you mean heads?"),
}  # fmt: skip


SHOWN = ("indivisible heads", "too few positions")


@pytest.mark.parametrize(
    "case",
    [pytest.param(WRONG[name], marks=[] if name in SHOWN else [pytest.mark.grid], id=name) for name in WRONG],
)
def test_the_error_of_a_wrong_config_fits_on_one_screen(case, tmp_path):
    arguments, *messages = case
    refused(train(tmp_path, *arguments), *messages)
    assert list(tmp_path.iterdir()) == [], "nothing was started"


HOSTILE = {
    "a hydra key": "hydra: {launcher: {_target_: evil.Launcher}, run: {dir: evil}}\n",
    "a target": "defaults: [tiny, _self_]\nmodel: {graph: {logits: {_target_: evil.function}}}\n",
    "a python tag": "defaults: [tiny, _self_]\nheads: !!python/object/apply:evil.function []\n",
    "a plug-in": "defaults: [tiny, _self_]\nplugins: evil\n",
}
EVIL = "from pathlib import Path\nPath('executed').touch()\n"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(HOSTILE[name], marks=[] if name in ("a target", "a python tag") else pytest.mark.grid, id=name)
        for name in HOSTILE
    ],
)
def test_a_hostile_model_file_is_refused_and_not_executed(text, tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text(HEADER + text)
    done = train(tmp_path, "--config-dir", str(tmp_path / "conf"), "model=mine")
    refused(done, "mine.yaml")
    assert {path.name for path in tmp_path.iterdir()} == {"evil.py", "conf"}
