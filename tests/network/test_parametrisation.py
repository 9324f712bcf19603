"""Width and depth transfer: initial values, rates, decay, eps and constants relative to a base."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.nn import functional as F

from tests.network.examples import ALL, name
from tests.network.random_graphs import models
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.cli import main
from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.build import build_network, check_model, weight_rules
from tfm_blocks.registry.blocks import block
from tfm_blocks.training.groups import build_optimizer
from tfm_blocks.training.optimizer_settings import read_optimizer

BASE = {"d_model": 32, "d_ff": 64, "heads": 2, "layers": 2, "kv_heads": 1}
WIDE = {"d_model": 128, "d_ff": 256, "heads": 8, "layers": 4, "kv_heads": 4}
ADAMW = read_optimizer({"name": "adamw", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1})


def check(model, sizes, *overrides, parametrisation="mup", base=BASE):
    """Return the checked spec of a model of these sizes; knobs that the model lacks are left out."""
    knobs = compose_model(model, []).mapping
    texts = [f"{knob}={size}" for knob, size in sizes.items() if knob in knobs]
    if parametrisation != "standard":
        texts.append(f"model.parametrisation={parametrisation}")
        texts += [f"model.base.{knob}={size}" for knob, size in base.items() if knob in knobs]
    composed = compose_model(model, [*texts, "vocab=50", *overrides])
    return check_model(composed.model, composed.sources)


class HandWritten(torch.nn.Module):
    """GPT-2 of two layers with the parametrisation written by hand: logits / m, attention scaled by √K_base / K.

    nanoGPT-mup's table, with the scale of the embedding 1 and Xavier-uniform values of the base.
    """

    def __init__(self, network, heads, growth, key_growth, branch):
        super().__init__()
        self.network, self.heads, self.growth, self.key_growth, self.branch = network, heads, growth, key_growth, branch

    def forward(self, ids_BT):
        weights = dict(self.network.named_parameters())
        B, T = ids_BT.shape
        embedding = weights["emb.block.weight"]
        x = F.embedding(ids_BT, embedding) + weights["pos.block.weight"][:T]
        D = x.shape[2]
        for layer in range(2):
            here = {key.removeprefix(f"decoder.{layer}."): value for key, value in weights.items()}
            y = F.layer_norm(x, [D], here["self.pre.norm.weight"], here["self.pre.norm.bias"])
            qkv = F.linear(y, here["self.block.qkv.weight"], here["self.block.qkv.bias"])
            q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in qkv.chunk(3, 2))
            K = q.shape[3]
            scores = q @ k.mT * math.sqrt(K / self.key_growth) / K
            scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
            y = (torch.softmax(scores, 3) @ v).transpose(1, 2).reshape(B, T, D)
            x = x + self.branch * F.linear(y, here["self.block.out.weight"], here["self.block.out.bias"])
            y = F.layer_norm(x, [D], here["ffn.pre.norm.weight"], here["ffn.pre.norm.bias"])
            y = F.gelu(F.linear(y, here["ffn.block.inner.weight"], here["ffn.block.inner.bias"]), approximate="tanh")
            x = x + self.branch * F.linear(y, here["ffn.block.out.weight"], here["ffn.block.out.bias"])
        x = F.layer_norm(x, [D], weights["decoder.last.norm.weight"], weights["decoder.last.norm.bias"])
        return F.linear(x, embedding) / self.growth


def gpt2(parametrisation, **sizes):
    return check("gpt2", {**BASE, **sizes}, parametrisation=parametrisation, base={**BASE, "layers": 1})


@pytest.mark.parametrize("parametrisation, branch", [("mup", 1.0), ("completep", 0.5)])
def test_logits_equal_those_of_a_model_written_by_hand(parametrisation: str, branch: float) -> None:
    network = build_network(gpt2(parametrisation, d_model=128, d_ff=256, heads=2), seed=1).eval()
    ids_BT = torch.randint(2, 50, (3, 7), generator=torch.Generator().manual_seed(1))
    own = network(tgt=ids_BT)
    by_hand = HandWritten(network, heads=2, growth=4, key_growth=4, branch=branch)(ids_BT)
    torch.testing.assert_close(own, by_hand)


# The table of nanoGPT-mup, with m = 4: the standard deviation over that of the base, the rate and the decay.
BY_HAND = {
    "emb.block.weight": (1, 1, 1),
    "pos.block.weight": (1, 1, 1),
    "decoder.0.self.block.qkv.weight": (1 / 2, 1 / 4, 4),
    "decoder.0.self.block.out.weight": (1 / 2, 1 / 4, 4),
    "decoder.0.ffn.block.inner.weight": (1 / 2, 1 / 4, 4),
    "decoder.0.ffn.block.out.weight": (1 / 2, 1 / 4, 4),
}


@pytest.mark.parametrize("parametrisation, depth", [("mup", 1), ("completep", 2)])
def test_initial_values_rates_decay_and_eps_follow_the_table(parametrisation: str, depth: int) -> None:
    base = build_network(gpt2("standard"), seed=1)
    spec = gpt2(parametrisation, d_model=128, d_ff=256, heads=8)
    network = build_network(spec, seed=1)
    optimizer = build_optimizer(ADAMW, network)
    groups = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
    for address, weight in network.named_parameters():
        group, own = groups[id(weight)], base.get_parameter(address)
        in_layer = depth if "0." in address or "1." in address else 1
        assert group["eps"] == pytest.approx(1e-8 / (4 * in_layer)), address
        if address.replace(".1.", ".0.") not in BY_HAND:
            assert (group["rate"], group["weight_decay"]) == (1, 0), address
            torch.testing.assert_close(weight.flatten()[:16], own.flatten()[:16])  # zeros and ones
            continue
        spread, rate, decay = BY_HAND[address.replace(".1.", ".0.")]
        torch.testing.assert_close(weight.std() / own.std(), torch.tensor(float(spread)), rtol=0.05, atol=0)
        assert (group["rate"], group["weight_decay"]) == pytest.approx((rate, decay * 0.1)), address


@pytest.mark.parametrize("parametrisation", ["mup", "completep"])
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path.stem in ("gpt2", "moe") else [pytest.mark.grid])
        for path in ALL
        if path.stem != "switch"  # needs four layers
    ],
    ids=name,
)
def test_a_model_at_the_sizes_of_its_base_is_the_standard_model(path, parametrisation: str) -> None:
    own, standard = (
        build_network(check(str(path), BASE, parametrisation=which), seed=3) for which in (parametrisation, "standard")
    )
    for (address, weight), (other, value) in zip(own.named_parameters(), standard.named_parameters(), strict=True):
        assert address == other and torch.equal(weight, value), address
    groups, others = (build_optimizer(ADAMW, network).param_groups for network in (own, standard))
    assert sorted((group["rate"], group["eps"], group["weight_decay"]) for group in groups) == sorted(
        (group["rate"], group["eps"], group["weight_decay"]) for group in others
    )
    assert [node.post for node in own.spec.nodes] == [node.post for node in standard.spec.nodes]
    constants = ("beta", "scale", "multiplier")
    for module, other in zip(own.modules(), standard.modules(), strict=True):
        pairs = ((getattr(module, key, 0), getattr(other, key, 0)) for key in constants)
        assert all(own == theirs for own, theirs in pairs if not isinstance(own, torch.nn.Module))


NO_RULE = {
    "add_and_normalise": "no rule is known for L2Norm",
    "scalenorm": "no rule is known for ScaleNorm",
    "talking_heads": "no rule is known for the weight block.mix_scores of talking_heads_attention",
    "deepnorm": "no rule is known for deepnorm under completep with 2 times the layers of the base",
    "switch": "the model with these sizes is invalid",
    "hyper_connections": "no rule is known for write_streams under completep with 2 times the layers of the base",
    "rwkv7_values": "no rule is known for a stack without residual connections",
    "attention_residuals": "no rule is known for a stack without residual connections",
    "redundant": "no rule is known for copies that are side by side",
}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.stem in ("moe", *NO_RULE) else [pytest.mark.grid]) for path in ALL],
    ids=name,
)
def test_each_weight_of_each_model_has_a_rule_or_the_model_a_named_error(path) -> None:
    if path.stem in NO_RULE:
        with pytest.raises(ConfigError, match=NO_RULE[path.stem]):
            check(str(path), WIDE, parametrisation="completep")
        return
    spec = check(str(path), WIDE, parametrisation="completep")
    names = [name for name, _ in build_network(spec, seed=1).named_parameters()]
    assert list(weight_rules(spec)) == names


@pytest.mark.usefixtures("plugged")
@pytest.mark.parametrize(
    "parametrisation, examples",
    [("completep", 6), *(pytest.param(which, 300, marks=pytest.mark.grid) for which in ("mup", "completep"))],
)
def test_random_models_get_rules_or_a_named_error(examples: int, parametrisation: str) -> None:
    counts = {"rules": 0, "errors": 0}

    @settings(max_examples=examples, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(models())
    def run(model):
        try:
            check_model(model)
        except ConfigError:
            return
        args = model["args"]
        where = {f"args.{arg}": args[arg] // 2 for arg in ("d_model", "d_ff", "heads")}
        try:
            spec = check_model({**model, "parametrisation": parametrisation, "base": {"d_model": 4, "where": where}})
        except ConfigError as error:
            counts["errors"] += 1
            assert all(
                "no rule is known" in problem.rule or problem.address == "model.base" for problem in error.problems
            )
            assert all(problem.help for problem in error.problems)
            return
        counts["rules"] += 1
        network = build_network(spec, seed=1)
        assert list(weight_rules(spec)) == [name for name, _ in network.named_parameters()]

    run()
    assert counts["rules"] > counts["errors"], counts


WRONG = [
    (["model.parametrisation=mupp"], "must be one of standard, mup, completep, but is 'mupp'", "did you mean mup"),
    (
        ["model.parametrisation=mup"],
        "mup scales the weights relative to a base, which is missing",
        "model.base.d_model",
    ),
    (["model.parametrisation=mup", "model.base.d_modl=32"], "the model reads no knob 'd_modl'", "did you mean d_model"),
    (["model.parametrisation=mup", "model.base.d_model=0"], "must be a whole number of at least 1, but is 0", "=512"),
    (["model.parametrisation=mup", "model.base.d_model=1.5"], "must be a whole number of at least 1, but is 1.5", ""),
    (["model.base.d_model=32"], "has no effect without a parametrisation", "model.parametrisation=mup"),
    (["model.base=32"], "has no effect without a parametrisation", "leave it out"),
    (["model.parametrisation=mup", "model.base=32"], "must have sizes by the names of knobs, but is 32", ""),
    (
        ["model.parametrisation=mup", "model.base.d_model=36"],
        "the model with these sizes is invalid: model.graph.encoder.layer.attn: the width must split evenly into heads",
        "",
    ),
    (
        [
            *("d_model=64", "heads=4", "d_ff=64", "layers=1", "vocab=50"),
            "model.graph.encoder.layer.attn.position={block: rotary, share: 0.5}",
            *("model.parametrisation=mup", "model.base.d_model=24"),
        ],
        "the model with these sizes is invalid: model.graph.encoder.layer.attn: share · 6 is 3: it must be even",
        "",
    ),
    (
        ["model.parametrisation=mup", "model.base={where: {graph.nope.repeat: 3}}"],
        "has a size at 'graph.nope.repeat', but the model has no such layers",
        "model.base.d_model",
    ),
    (["model.parametrisation=mup", "model.base.dropout=1"], "the model reads no knob 'dropout' that is a whole", ""),
]


@pytest.mark.parametrize("overrides, rule, help", WRONG, ids=[rule for _, rule, _ in WRONG])
def test_a_wrong_base_is_an_error_with_a_fix(overrides, rule, help) -> None:
    with pytest.raises(ConfigError) as caught:
        composed = compose_model("base", overrides)
        check_model(composed.model, composed.sources)
    (problem,) = caught.value.problems
    assert problem.rule.startswith(rule) and help in problem.help and problem.address.startswith("model.")


def test_a_sweep_over_parametrisations_may_set_the_base_of_all() -> None:
    composed = compose_model("tiny", ["model.parametrisation=standard", "model.base.d_model=32"])
    assert check_model(composed.model, composed.sources).base is None


def test_a_base_without_a_stack_has_no_depth_to_compare() -> None:
    composed = compose_model("tiny", ["model.parametrisation=completep", "model.base.layers=2"])
    composed.model["graph"]["encoder"]["at"] = {"2:": {"more": {"repeat": 2, "layer": {"f": {"block": "ffn"}}}}}
    with pytest.raises(ConfigError, match=r"model.base: has no layers encoder.\*.more, so the depths cannot be"):
        check_model(composed.model, composed.sources)


def test_the_json_of_the_weights_has_the_rules(capsys) -> None:
    sizes = ["d_model=128", "d_ff=256", "heads=8", "layers=2", "vocab=50"]
    base = ["model.parametrisation=mup", "model.base.d_model=32", "model.base.d_ff=64", "model.base.heads=2"]
    main(["show", "tiny", "--weights", "--json", *sizes, *base])
    records = {record["names"][0]: record for record in json.loads(capsys.readouterr().out)["weights"]}
    rule = records["encoder.0.ffn.block.inner.weight"]["rule"]
    assert (rule["name"], rule["rate"], rule["decay"], rule["eps"]) == ("matrix", 0.25, 4, 0.25)
    assert "variance 1/inputs" in rule["reason"]


def low_rank(declared: dict[str, str]) -> type[torch.nn.Module]:
    """Return a plug-in block x A B / D, with a matrix A that is no Linear, and a constant that depends on the width."""

    class LowRank(torch.nn.Module):
        """A test."""

        width_rules = declared

        def __init__(self, D: int) -> None:
            super().__init__()
            self.down, self.up, self.constant = torch.nn.Parameter(torch.empty(D, 3)), Linear(3, D), 1 / D

        def match_base(self, base: object) -> None:
            self.constant = base.constant

        def initialise(self, name: str, generator: torch.Generator) -> None:
            torch.nn.init.normal_(self.down, std=len(self.down) ** -0.5, generator=generator)

        def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
            return self.up(x_BTD @ self.down) * self.constant

    return LowRank


RANK = "model.graph.encoder.layer.ffn.block=low_rank"


def test_a_matrix_of_a_plug_in_whose_axes_nobody_knows_is_an_error(registry) -> None:
    block("low_rank", "x: B T D -> B T D", branch=True, source="a test")(low_rank({}))
    rule = r"the weight block.down of low_rank, 128 \(base 32\) × 3 \(base 3\): which of its axes is summed over"
    with pytest.raises(ConfigError, match=rule):
        check("prenorm", WIDE, RANK)


@pytest.mark.grid
def test_a_plug_in_declares_the_rule_of_a_weight_and_its_constants(registry) -> None:
    block("low_rank", "x: B T D -> B T D", branch=True, source="a test")(low_rank({"down": "output"}))
    spec = check("prenorm", WIDE, RANK)
    network = build_network(spec, seed=1)
    (own,) = {module.constant for module in network.modules() if hasattr(module, "constant")}
    assert own == 1 / 32
    rules = weight_rules(spec)
    down, up = (rules[f"encoder.0.ffn.block.{name}"] for name in ("down", "up.weight"))
    assert (down.name, down.rate, down.decay) == ("output", 1 / 4, 4) and (up.name, up.rate) == ("input", 1)
    spread = network.get_parameter("encoder.0.ffn.block.down").std()
    torch.testing.assert_close(spread, torch.tensor(32**-0.5 / 4), rtol=0.1, atol=0)


@pytest.mark.grid
def test_a_reason_in_the_declaration_is_the_error(registry) -> None:
    block("low_rank", "x: B T D -> B T D", branch=True, source="a test")(low_rank({"": "it divides by the width"}))
    with pytest.raises(
        ConfigError, match=r"no rule is known for LowRank with a width that differs .*: it divides by the width"
    ):
        check("prenorm", WIDE, RANK)


def test_the_difference_of_two_models_shows_their_parametrisations(capsys) -> None:
    main(["diff", "tiny", "tiny", "model.parametrisation=mup", "model.base.d_model=64"])
    assert "mup of d_model: 64" in capsys.readouterr().out


def test_a_format_without_the_factors_is_refused(tmp_path, capsys) -> None:
    overrides = ["layers=1", "vocab=50", "model.parametrisation=mup", "model.base.d_model=32", "model.base.heads=2"]
    with pytest.raises(SystemExit):
        main(["eject", "tiny", *overrides, "-o", str(tmp_path / "model.py")])
    assert (
        "is mup, whose factors of embeddings, scores and logits an ejected file cannot express"
        in capsys.readouterr().err
    )


CONSTANT = ["schedule=constant", "schedule.warmup=10"]


@pytest.mark.grid
def test_the_schedule_and_the_decay_must_not_depend_on_the_width_again() -> None:
    from tfm_blocks.compose.command_line import compose_arguments
    from tfm_blocks.compose.run import compose_run
    from tfm_blocks.launch.check import check_remote_run

    def check_run(*overrides):
        base = ["model.parametrisation=mup", "model.base.d_model=32", "model.base.heads=1"]
        composed = compose_run(compose_arguments(["model=tiny", *base, *overrides]))
        return check_remote_run(composed)

    for overrides, address, help in (
        (["schedule=noam"], "schedule.d_model", "write schedule.d_model=32"),
        (
            ["schedule=constant", "schedule.warmup=10", "optimizer=adam", "optimizer.weight_decay=0.1"],
            "optimizer.weight_decay",
            "adamw",
        ),
        (
            [
                "schedule=constant",
                "schedule.warmup=10",
                "optimizer=adamw",
                "+optimizer.groups.a={where: {role: matrix}, name: adam}",
            ],
            "optimizer.groups.a.weight_decay",
            "adamw",
        ),
        ([*CONSTANT, "optimizer=muon"], "optimizer.scale", "optimizer.scale='(out/in)**0.5'"),
        ([*CONSTANT, "optimizer=lion"], "optimizer", "optimizer=adamw"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_run(*overrides)
        assert any(problem.address == address and help in problem.help for problem in caught.value.problems)
    check_run("schedule=noam", "schedule.d_model=32", "optimizer=adam", "optimizer.weight_decay=0")
    check_run(*CONSTANT, "optimizer=muon", "optimizer.scale='(out/in)**0.5'")


def test_an_update_of_muon_is_the_same_for_outputs_of_random_inputs_at_all_widths() -> None:
    """The update of a map from `in` to `out` has the spectral norm (out/in)**0.5, and the factors of AdamW do not apply."""
    muon = read_optimizer({"name": "muon", "scale": "(out/in)**0.5", "weight_decay": 0.1})
    for width in (32, 128):
        sizes = [f"{knob}={width * ratio}" for knob, ratio in (("d_model", 1), ("d_ff", 4))]
        base = ["model.parametrisation=mup", "model.base.d_model=32", "model.base.d_ff=128"]
        composed = compose_model("gpt2", [*sizes, "heads=2", "layers=1", "vocab=40", "max_length=8", *base])
        network = build_network(check_model(composed.model), seed=1)
        optimizer = build_optimizer(muon, network)
        generator = torch.Generator().manual_seed(2)
        for weight in network.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator)
        before = {name: weight.detach().clone() for name, weight in network.named_parameters()}
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = group["rate"], 0.0
        optimizer.step()
        for layer in ("inner", "out"):
            update = before[f"decoder.0.ffn.block.{layer}.weight"] - network.get_parameter(
                f"decoder.0.ffn.block.{layer}.weight"
            )
            outputs, inputs = update.shape
            expected = (outputs / inputs) ** 0.5
            assert 0.6 * expected < torch.linalg.matrix_norm(update, 2) < 1.3 * expected
