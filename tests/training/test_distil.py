"""Distillation from a trained run, and weights of losses that follow a schedule."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import tfm_blocks as tfm
from tests.conftest import expect_problem, taught
from tests.launch.test_resume import go_on
from tests.training.test_balance import MIXTURE
from tfm_blocks.compose.model import compose_model
from tfm_blocks.data.layout import batch_of
from tfm_blocks.data.prepare import prepare
from tfm_blocks.errors import RunError
from tfm_blocks.launch import check
from tfm_blocks.launch.check import check_run
from tfm_blocks.launch.job import train
from tfm_blocks.network.build import build_network, check_model, network_without_values
from tfm_blocks.network.graph import TAP
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.runs.model import read_network
from tfm_blocks.training.objective import DistilObjective
from tfm_blocks.training.settings import LossSettings

SIZES = {"d_model": 16, "d_ff": 24, "heads": 2, "layers": 1, "vocab": 37, "dropout": 0.0}
SHORT = [
    "trainer.steps=2",
    "trainer.log_every=2",
    "trainer.validate_every=2",
    "trainer.validate_sentences=0",
]


def batch(inputs, generator):
    """Return rows of several lengths, with labels at some positions of the target."""
    ids = {name: torch.randint(3, 37, (3, 9), generator=generator) for name in inputs}
    for tensor in ids.values():
        tensor[1, 6:] = 0
    labels_BT = ids["tgt"].roll(-1, 1) * (ids["tgt"] != 0)
    labels_BT[:, -1], labels_BT[0, :3] = 0, 0
    return batch_of(ids, labels_BT)


@pytest.mark.parametrize("model", ["tiny", pytest.param("decoder_only", marks=pytest.mark.grid)])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_loss_is_the_weighted_sum_of_cross_entropy_and_divergence(model, temperature):
    student, teacher = (tfm.build(model, **SIZES, seed=seed).double() for seed in (1, 2))
    losses = LossSettings(ce=0.3, kl=0.7, z_loss=0.01)
    read = batch([tensor.name for tensor in student.spec.inputs], torch.Generator().manual_seed(1))
    objective = DistilObjective(student, 0.1, None, losses, teacher=teacher, temperature=temperature)
    total, sums = objective.loss(read)
    logits_NV = student(**read.inputs).flatten(0, 1)[read.kept_N]
    with torch.no_grad():
        target_NV = teacher(**read.inputs).flatten(0, 1)[read.kept_N]
    labels_N, first = read.labels_BT.flatten()[read.kept_N], student.first_predicted
    options = {"reduction": "sum"}
    ce = F.cross_entropy(logits_NV[:, first:], labels_N - first, label_smoothing=0.1, **options)
    kl = temperature**2 * F.kl_div(
        F.log_softmax(logits_NV[:, first:] / temperature, 1),
        F.softmax(target_NV[:, first:] / temperature, 1),
        **options,
    )
    z = logits_NV.logsumexp(1).square().sum()
    expected = 0.3 * ce + 0.7 * kl + 0.01 * z
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-9)
    nll = F.cross_entropy(logits_NV, labels_N, **options)
    torch.testing.assert_close(sums, torch.stack([ce, nll, 0.01 * z, 0.7 * kl]).detach(), rtol=1e-6, atol=1e-9)
    own, theirs = (torch.autograd.grad(one, list(student.parameters())) for one in (total, expected))
    torch.testing.assert_close(own, theirs, rtol=1e-6, atol=1e-9)
    assert not any(parameter.requires_grad for parameter in teacher.parameters()) and not teacher.training
    student.float()
    plain = [value.item() for value in objective.scores(read)[:2]]
    assert plain == pytest.approx([ce.item(), nll.item()], rel=1e-5)


@pytest.mark.parametrize("recomputes", [False, True])
def test_hidden_states_follow_those_of_the_teacher(recomputes):
    """The reference reads the values of nodes by hooks, and takes means over positions that are not padding."""
    student, teacher = (tfm.build("tiny", **SIZES | {"layers": layers}, seed=layers).double() for layers in (1, 2))
    student.recomputes = recomputes
    hidden = {"encoder.0.ffn": "encoder.1.ffn", "decoder.0.self": "decoder.0.self"}
    read, losses = batch(["src", "tgt"], torch.Generator().manual_seed(1)), LossSettings(ce=0.3, kl=0.7, hidden=2.0)
    total, sums = DistilObjective(student, 0.0, None, losses, teacher=teacher, temperature=2.0, hidden=hidden).loss(
        read
    )
    gradients = torch.autograd.grad(total, list(student.parameters()))
    values = []
    for network, addresses in ((student, hidden), (teacher, hidden.values())):
        seen = {}
        for call in network.calls:
            if call.address in addresses:
                call.module.post.register_forward_hook(
                    lambda *x, seen=seen, name=call.address: seen.update({name: x[2]})
                )
        network.recomputes = False
        network(**read.inputs)
        values.append(list(seen.values()))
    expected = 0.0
    for ids, own_BND, other_BND in zip(read.inputs.values(), *values, strict=True):
        for row in range(3):
            kept = int((ids[row] != 0).sum())
            labels = int((read.labels_BT[row] != 0).sum())
            expected += labels * F.mse_loss(own_BND[row, :kept], other_BND[row, :kept].detach())
    torch.testing.assert_close(sums[-1], 2.0 * expected.detach(), rtol=1e-5, atol=1e-6)
    plain = DistilObjective(student, 0.0, None, losses, teacher=teacher, temperature=2.0).loss(read)[0]
    theirs = torch.autograd.grad(plain + 2.0 * expected, list(student.parameters()))
    torch.testing.assert_close(gradients, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [None, 12])
def test_positions_that_are_no_input_count_in_the_distance_of_hidden_states(size):
    """Learned tokens are never padding; an axis of a fixed size, such as the axis of a plug-in, has no padding."""
    sizes = [f"{key}={value}" for key, value in SIZES.items()]
    composed = compose_model("tiny", [*sizes, "model.graph.mem={block: learned_tokens, tokens: 3, after: src_pos}"])
    student, teacher = (build_network(check_model(composed.model, composed.sources), seed=seed) for seed in (1, 2))
    node = {call.address: call.node for call in student.calls}["encoder.0.ffn"]
    if size:
        vars(node)["shape"] = (node.shape[0], size, node.shape[2])
    read = batch(["src", "tgt"], torch.Generator().manual_seed(1))
    options = {"teacher": teacher, "temperature": 2.0, "hidden": {"encoder.0.ffn": "encoder.0.ffn"}}
    _, sums = DistilObjective(student, 0.0, None, LossSettings(hidden=1.0), **options).loss(read)
    own_BND, other_BND = (
        network.trunk_with_losses(read.inputs)[1][f"{TAP}encoder.0.ffn"] for network in (student, teacher)
    )
    squares_BN = (own_BND - other_BND).square().mean(2)
    kept_B = [12, 12 if size else 3 + 6, 12]
    distance = sum(squares_BN[row, :kept].mean() * read.counts_B[row] for row, kept in enumerate(kept_B))
    torch.testing.assert_close(sums[-1].float(), distance.detach())


def test_a_teacher_without_padding_in_its_output_gives_no_nan():
    """The student has a logit for each id, and the teacher none for padding."""
    student, teacher = tfm.build("tiny", **SIZES), tfm.build("tiny", **SIZES, seed=2)
    read = batch(["src", "tgt"], torch.Generator().manual_seed(1))
    head = teacher.head
    vars(teacher)["first_predicted"] = 1
    teacher.head = lambda x_ND: head(x_ND).index_fill(-1, torch.tensor([0]), -torch.inf)
    total, _ = DistilObjective(student, 0.0, None, LossSettings(), teacher=teacher, temperature=2.0).loss(read)
    total.backward()
    assert total.isfinite() and all(parameter.grad.isfinite().all() for parameter in student.parameters())


@pytest.mark.grid
def test_a_run_has_a_teacher_which_stays_as_it_is_and_is_checked_before_training(small, tmp_path):
    overrides = taught(small, tmp_path, ["objective=distil", "objective.teacher=TEACHER", *SHORT])
    weights = tmp_path / "teacher" / "run" / "weights.safetensors"
    before = load_file(weights)
    run = train(check_run(small(*overrides, "losses.kl={start: 1, end: 2, steps: 2}")), tmp_path)
    (row,) = (row for row in read_rows(run / "metrics.csv") if "train/aux_loss/kl" in row)
    assert row["train/aux_loss/kl"] > 0
    checkpoint = torch.load(next((run / "checkpoints").glob("*.ckpt")), weights_only=True)
    own = read_network(run).state_dict()
    assert set(checkpoint["state_dict"]) == {f"network.{name}" for name in own} and not before.keys() <= own.keys()
    after = load_file(weights)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for changed, rule in (
        ("vocab=290", "whose tokenizer has other ids"),
        ("model=decoder_only", "which reads src, tgt, but the model reads tgt"),
        ("objective.teacher=nothing", "there is no such run folder"),
        ("objective.hidden={encoder.0.fnn: encoder.0.ffn}", "names encoder.0.fnn, which is not a node before"),
        (
            "objective.hidden={encoder.0.ffn: decoder.0.ffn}",
            "of the shape B S 16 with decoder.0.ffn of the shape B T 16",
        ),
    ):
        with pytest.raises(RunError, match=rule) as caught:
            train(check_run(small(*overrides, changed)), tmp_path)
        assert caught.value.problems[0].help and not (tmp_path / "run-2").exists()
    save_file({name: tensor + 1 for name, tensor in before.items()}, weights)
    with pytest.raises(RunError, match="the weights of the teacher changed since the run began"):
        go_on(run, "trainer.steps=8")


def test_a_text_with_more_tokens_than_the_teacher_has_positions_is_an_error(small, monkeypatch):
    run = check_run(small("model=gpt2", "objective=distil", "objective.teacher=teacher"))
    teacher = check_run(small("model=gpt2", "max_length=5")).spec
    monkeypatch.setattr(check, "read_spec", lambda folder: teacher)
    prepared = prepare(run.settings.data, 300, tell=lambda text: None)
    with expect_problem("objective.teacher", "has a node pos which has 5 positions, but tgt of train", "max_length"):
        check.check_lengths(network_without_values(run.spec), prepared, run)


def test_a_weight_follows_its_schedule():
    losses = LossSettings(
        kl={"start": 1.0, "end": 0.0, "steps": 4, "after": 2}, blocks={"decoder": 0.5, "decoder.1": 2}
    )
    weights = [losses.weight("kl", step) for step in range(1, 9)]
    assert weights == [1, 1, 0.75, 0.5, 0.25, 0, 0, 0]
    assert [losses.factor(name, 1) for name in ("decoder.0.ffn", "decoder.1.ffn", "decoder.11.ffn", "dec")] == [
        0.5,
        2,
        0.5,
        1,
    ]


@pytest.mark.grid
def test_a_factor_scales_the_loss_of_a_block_and_its_logged_value(small, tmp_path):
    values = []
    for factor in ([], ["losses.blocks={decoder: {start: 0.25, end: 0.25, steps: 1}}"]):
        run = train(check_run(small(MIXTURE, *SHORT, "trainer.log_every=1", *factor)), tmp_path)
        values.append(read_rows(run / "metrics.csv")[0]["train/aux_loss/decoder.0.ffn"])
    assert values[1] == pytest.approx(0.25 * values[0], rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "address", "rule"),
    [
        (["losses.kl=0.5"], "losses.kl", "objective=next_token has no such loss"),
        (["losses.hidden=0.5"], "losses.hidden", "objective=next_token has no such loss"),
        (["losses.z_loss=-1"], "losses.z_loss", "must be at least 0, but is -1"),
        (["losses.z_loss=much"], "losses.z_loss", "must be a float or a mapping, but is 'much'"),
        (["losses.z_loss=null"], "losses.z_loss", "must be a float or a mapping, but is None"),
        (["losses.z_loss={start: 1, steps: 3}"], "losses.z_loss.end", "is missing"),
        (["losses.blocks={decoder: 1}"], "losses.blocks", "names decoder, but no block has a loss"),
        ([MIXTURE, "losses.blocks={decoder.1: 1}"], "losses.blocks", "the blocks with a loss are decoder.0.ffn"),
    ],
)
def test_a_wrong_weight_is_refused(small, overrides, address, rule):
    with expect_problem(address, rule):
        check_run(small(*overrides))
