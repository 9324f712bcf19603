"""All problems of a run are reported together, before it starts."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import COMPOSER, expect_problem
from tests.preloaded import run_python
from tests.registry.test_plugins import BLOCK
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.compose.run import compose_job
from tfm_blocks.errors import ConfigError
from tfm_blocks.launch.check import available_cores, check_remote_run, check_resumed_run, check_run, warn_about_schedule
from tfm_blocks.launch.job import train as train_run
from tfm_blocks.registry.blocks import REGISTRY, BlockInfo

ROOT = Path(__file__).parents[2]


def train(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python([ROOT / "train.py", *arguments], folder, {**os.environ, **environment}, timeout=120)


@pytest.mark.grid
def test_problems_of_settings_devices_and_model_are_reported_together(tmp_path: Path) -> None:
    wrong = ["optimizer.eps=-1", "trainer.devices=1000", "trainer.accelerator=cpu", "heads=7", "+data.batch_size=32"]
    done = train(tmp_path, *wrong)
    assert done.returncode == 2
    addresses = [line.split(": ")[1] for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert addresses[:3] == ["data.batch_size", "optimizer.eps", "trainer.devices"]
    assert all(address.startswith("model.graph.") for address in addresses[3:]) and addresses[3:]
    for place in (
        "command line: +data.batch_size=32",
        "conf/optimizer/adam.yaml:4",
        "conf/trainer/default.yaml:",
        "base.yaml:20",
    ):
        assert place in done.stderr
    assert done.stderr.count("\n  help: ") == len(addresses)
    assert not list(tmp_path.iterdir())


@pytest.mark.grid
def test_a_config_file_is_checked_as_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    lines = ["# @package _global_", "optimizer:", "  lr: 3e-4", "data:", "  batch_size: 32"]
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text("\n".join(lines))
    done = train(tmp_path, "--config-dir", "conf", "experiment=mine")
    assert done.returncode == 2
    assert "optimizer.lr: no such setting" in done.stderr and "mine.yaml:3" in done.stderr
    assert "schedule.peak" in done.stderr and "data.step_tokens" in done.stderr and "mine.yaml:5" in done.stderr


def test_more_processes_than_cores_are_refused(small: Callable[..., Composed]) -> None:
    cores = available_cores()
    with pytest.raises(ConfigError, match=f"trainer.devices: is {cores + 1}, but this process may use {cores} "):
        check_run(small(f"trainer.devices={cores + 1}"))
    assert check_run(small(f"trainer.devices={cores}")).settings.trainer.devices == cores


def test_a_new_run_that_ends_before_its_warmup_is_warned_about_and_trains(
    small: Callable[..., Composed], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    composed = small("schedule=noam", "schedule.warmup=4000", "trainer.steps=2", "trainer.validate_every=2")
    train_run(check_run(composed), tmp_path)
    said = capsys.readouterr().err
    assert "warning: trainer.steps=2 is less than schedule.warmup=4000, so the learning rate never" in said
    assert "help: write schedule.warmup=1, or trainer.steps=16000 or more" in said


@pytest.mark.parametrize("schedule", ["noam", "inverse_sqrt"])
def test_a_warmup_that_the_run_completes_is_no_warning(
    small: Callable[..., Composed], capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    for steps, warned in ((100, False), (99, True)):
        settings = check_run(small(f"schedule={schedule}", "schedule.warmup=100", f"trainer.steps={steps}")).settings
        warn_about_schedule(settings)
        assert ("warning" in capsys.readouterr().err) == warned


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a system that binds processes to cores")
def test_only_cores_that_the_process_may_use_count() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_a_run_has_the_plug_ins_of_its_own_model(
    small: Callable[..., Composed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(BLOCK.replace("announced", "here").replace("Announced", "Here"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(REGISTRY, "blocks", dict(REGISTRY.blocks))
    assert check_run(small("plugins=[only_here,math]")).settings.plugins == []
    assert check_run(small("plugins=[math,only_here]", "++model.graph.src_pos={block: here}")).settings.plugins == [
        "only_here"
    ]


def test_a_wrong_plug_in_is_reported_without_errors_on_its_blocks(small: Callable[..., Composed]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_run(small("plugins=mine", "++model.graph.bad={block: theirs, after: src_pos}"))
    assert [problem.address for problem in caught.value.problems] == ["plugins"]


Blocks = dict[str, BlockInfo]
GRAPH = "++model.graph"
WRONG = {
    "leaks": (f"{GRAPH}.decoder.layer.self.block=leaks", "changing x at position 1 changes the output"),
    "leaks_later": (f"{GRAPH}.decoder.layer.self.block=leaks_later", "changing x at position 1 changes the output"),
    "forgets_sees": (f"{GRAPH}.decoder.layer.bad={{block: forgets_sees, after: self}}", "without an entry in sees"),
    "ignores_padding": (f"{GRAPH}.encoder.layer.attn.block=ignores_padding", "the content of padding changes"),
    "ignores_padding_of_kv": (f"{GRAPH}.decoder.layer.cross.block=ignores_padding_of_kv", "the content of padding"),
    "steps_otherwise": (f"{GRAPH}.decoder.layer.self.block=steps_otherwise", "differs from forward"),
    "centres_time": ("++model.args.position=centres_time", "attention with the position centres_time"),
    "other_axis": ("++model.args.scores=other_axis", "attention with the scores other_axis"),
    "time_norm": ("++model.args.norm=time_norm", "changing x at position 0 changes the output"),
    "running_maximum": ("++model.args.activation=running_maximum", "ffn with the activation running_maximum"),
}
TRIED = ("leaks", "centres_time")  # a block and a part; the others are tests of tests/network/contract too


@pytest.mark.parametrize(
    ("override", "rule"),
    [pytest.param(*WRONG[name], marks=[] if name in TRIED else [pytest.mark.grid], id=name) for name in WRONG],
)
def test_a_run_with_a_wrong_plug_in_is_refused_before_its_text_is_read(
    small: Callable[..., Composed], tmp_path: Path, wrong_blocks: Blocks, override: str, rule: str
) -> None:
    composed = small("plugins=[wrong_blocks]", override)
    for check in (check_run, check_remote_run):
        with pytest.raises(ConfigError) as caught:
            train_run(check(composed), tmp_path)
        assert caught.value.exit_status == 2
        for problem in caught.value.problems:
            assert problem.address.startswith("model.graph.") and problem.place and rule in problem.rule
            assert "(plug-in wrong_blocks)" in problem.rule and "tfm blocks --test wrong_blocks" in problem.help
    assert not list(tmp_path.iterdir())
    check_resumed_run(composed)


@pytest.mark.grid
def test_the_command_refuses_a_wrong_plug_in_with_its_node_and_line(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "wrong_blocks.py", tmp_path)
    (tmp_path / "model").mkdir()
    lines = ["# @package _global_", "defaults: [tiny, _self_]", "model:", "  graph:", "    decoder:", "      layer:"]
    (tmp_path / "model" / "mine.yaml").write_text("\n".join([*lines, "        self: {block: leaks}"]))
    arguments = ["--config-dir", ".", "model=mine", "plugins=[wrong_blocks]", "trainer.steps=2", "logger=csv"]
    done = train(tmp_path, *arguments)
    assert done.returncode == 2
    assert "error: model.graph.decoder.layer.self: leaks (plug-in wrong_blocks): changing x at" in done.stderr
    assert "mine.yaml:7:9   self: {block: leaks}" in done.stderr
    swept = train(tmp_path, "-m", *arguments, "layers=1,2")
    assert swept.returncode == 2 and "2 of 2 jobs cannot start, so none was started" in swept.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.grid
def test_a_run_trains_to_the_same_bits_as_without_the_trial_of_its_plug_ins(
    small: Callable[..., Composed], tmp_path: Path, wrong_blocks: Blocks
) -> None:
    blocks = [f"{GRAPH}.encoder.layer.attn.block=right", f"{GRAPH}.decoder.layer.self.block=right"]
    for name, check in (("tried", check_run), ("untried", check_resumed_run)):
        composed = small("plugins=[wrong_blocks]", *blocks, "dropout=0.2")
        torch.manual_seed(5)
        run = check(composed)
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))
        train_run(run, tmp_path / name)
    tried, untried = (load_file(tmp_path / name / "run" / "weights.safetensors") for name in ("tried", "untried"))
    assert tried.keys() == untried.keys() and all(torch.equal(tried[name], untried[name]) for name in tried)


CAUSAL = "+model.graph.encoder.layer.attn.mask=causal"
LEFT_TO_RIGHT = "but the model reads tgt from left to right"
PROBE = "but data=parity is a probe task"
LABELS = ["data=labels", "data.dir=x", "data.labels=[a,b]"]
TEXTS = [
    "data=text",
    "data.dir=x",
    "data.fields={a: a, tgt: b}",
    *(f"data.{name}=x.tsv" for name in ("train", "val", "test")),
]
COLUMNS = [*TEXTS[:2], "data.fields={src: a, doc: b, tgt: c}", *TEXTS[3:]]
GENERATOR = "objective.generator={{{}}}"
JUDGES = ["model=electra_discriminator", "objective=replaced_token"]
JUDGED = [*JUDGES, GENERATOR.format("model: electra, d_model: 64")]
TABLE = "model.graph.tgt_emb={same: null, block: embedding, in: tgt, vocab: 4}"
WRONG_PAIRS = [
    (["model=base", *COLUMNS], "data.train", "has the column doc, but the model reads src, tgt"),
    (["model=base", "objective=masked"], "model.inputs", LEFT_TO_RIGHT),
    (["model=decoder_only", "objective=masked"], "model.inputs", LEFT_TO_RIGHT),
    (["model=encoder_only", "data=parity", "objective=masked"], "objective", PROBE),
    (["model=encoder_only", CAUSAL, "objective=masked"], "model.graph", "no output position sees"),
    (["model=encoder_only", "objective=masked", "objective.random=0.3"], "objective.random", "more than all hidden tokens"),
    (["model=encoder_only", "objective=masked", "objective.rate=1"], "objective.rate", "must be below 1"),
    (["model=base", "objective=masked_diffusion"], "model.inputs", LEFT_TO_RIGHT),
    (["model=decoder_only", "objective=masked_diffusion"], "model.inputs", LEFT_TO_RIGHT),
    (["model=encoder_only", "data=parity", "objective=masked_diffusion"], "objective", PROBE),
    (["model=encoder_only", CAUSAL, "objective=masked_diffusion"], "model.graph", "no output position sees"),
    (["model=encoder_only", "objective=masked_diffusion", "objective.min_rate=0"], "objective.min_rate", "must be above 0"),
    (["model=two_sources", "objective=masked_diffusion"], "model.inputs", LEFT_TO_RIGHT),
    (["model=encoder_only", *LABELS, "objective=masked_diffusion"], "objective", "data.kind=labels has labels, but objective=masked_diffusion"),
    (["model=encoder_only", *TEXTS, "objective=masked_diffusion"], "model.inputs.src", "is not a column of the data, which has a, tgt"),
    (["model=encoder_only", "objective=span_corruption"], "model.inputs", "predicts tgt from left to right, but the model reads src"),
    (["model=two_sources", "objective=span_corruption"], "model.inputs", "makes one source of each row, but the model reads"),
    (["model=base", "data=parity", "objective=span_corruption"], "objective", PROBE),
    (["model=base", "objective=span_corruption", "objective.density=1"], "objective.density", "must be below 1"),
    (["model=base", "objective=span_corruption", "objective.span=0.5"], "objective.span", "must be at least 1"),
    (["model=base", "objective=span_corruption", "objective.sentinels=0"], "objective.sentinels", "must be at least 1"),
    (["model=encoder_only", "objective=denoising"], "model.inputs", "predicts tgt from left to right, but the model reads src"),
    (["model=two_sources", "objective=denoising"], "model.inputs", "makes one source of each row, but the model reads"),
    (["model=decoder_only", "data=parity", "objective=denoising"], "objective", PROBE),
    (["model=base", "objective=denoising", "objective.mask=1.5"], "objective.mask", "must be at most 1"),
    (["model=base", "objective=denoising", "objective.span=0"], "objective.span", "must be above 0"),
    (["model=encoder_only", "objective=prefix_lm"], "model.inputs", "predicts tgt from left to right, but the model reads src"),
    (["model=base", TABLE], "model.graph.tgt_emb.vocab", "has 4 ids, but tgt has "),
    (["model=two_sources", "objective=prefix_lm"], "model.inputs", "makes one source of each row, but the model reads"),
    (["model=base", "data=parity", "objective=prefix_lm"], "objective", PROBE),
    (["model=encoder_only", "objective=ul2"], "model.inputs", "predicts tgt from left to right, but the model reads src"),
    (["model=base", "objective=ul2", "objective.denoisers.suffix.density=1"], "objective.denoisers.suffix.density", "must be below 1"),
    (["model=base", "objective=ul2", "objective.denoisers.suffix.span=0.5"], "objective.denoisers.suffix.span", "must be at least 1"),
    ([*JUDGED, "model=base"], "model.inputs", LEFT_TO_RIGHT),
    ([*JUDGED, "model=electra"], "model.graph.logits", "needs one: was it replaced?"),
    ([*JUDGED, "data=parity"], "objective", PROBE),
    ([*JUDGES, "objective.generator={heads: 1}"], "objective.generator", "must name a model, but has the keys heads"),
    ([*JUDGES, GENERATOR.format("model: bert, d_model: 64, heads: 4")], "objective.generator", "has the shape [30522, 64] at src_emb"),
    ([*JUDGES, GENERATOR.format("model: encoder_only, vocab: 99")], "objective.generator.vocab", "has the vocabulary of the model"),
    ([*JUDGES, GENERATOR.format("model: decoder_only")], "objective.generator", "reads tgt, but the model reads src"),
    ([*JUDGES, GENERATOR.format("model: classifier, d_model: 128")], "objective.generator", "logits for each position, but the vocabulary has"),
    ([*JUDGES, GENERATOR.format("model: electra, width: 3")], "objective.generator: width", "no such knob"),
    ([*JUDGED, "trainer.strategy=fsdp2"], "trainer.strategy", "cannot divide the embeddings"),
    ([*JUDGED, "losses.kl=1"], "losses.kl", "is a weight of objective=distil"),
    (["losses.replaced=1"], "losses.replaced", "is a weight of objective=replaced_token"),
    (["model=base", *LABELS, "objective=denoising"], "objective", "data.kind=labels has labels, but objective=denoising reads"),
    (["model=encoder_only", *LABELS, "objective=masked"], "objective", "data.kind=labels has labels, but objective=masked reads"),
]  # fmt: skip


RULES = [rule for _, _, rule in WRONG_PAIRS]


@pytest.mark.parametrize(  # by default the first pair of each rule
    ("overrides", "address", "rule"),
    [
        pytest.param(*pair, marks=[] if RULES.index(pair[2]) == place else pytest.mark.grid)
        for place, pair in enumerate(WRONG_PAIRS)
    ],
)
def test_a_model_that_does_not_fit_its_objective_is_refused(overrides: list[str], address: str, rule: str) -> None:
    composed = compose_job(["layers=1", "logger=csv", *overrides], COMPOSER)
    with expect_problem(address, rule, among=True):
        check_run(composed)


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (["model=classifier", *LABELS], "data.kind=labels has labels, but objective=next_token reads a text"),
        (["model=base", "objective=label"], "objective=label predicts labels, but data.kind=dates has none"),
        (["model=base", "data=parity", "objective=masked"], PROBE),
    ],
)
def test_an_objective_that_the_data_cannot_have_is_the_only_problem(overrides: list[str], rule: str) -> None:
    with expect_problem("objective", rule):
        check_run(compose_job(["layers=1", "logger=csv", *overrides], COMPOSER))
