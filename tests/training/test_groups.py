"""Groups of weights: what each learns with, and the errors of groups that nobody meant."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

import tfm_blocks as tfm
from tests.conftest import expect_problem
from tfm_blocks.compose.model import compose_model
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.errors import ConfigError
from tfm_blocks.launch.check import check_remote_run
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.network.graph import Network
from tfm_blocks.network.weights import Learning, list_weights
from tfm_blocks.training.groups import assign, build_optimizer, count_state, count_trained, freeze, group_rows
from tfm_blocks.training.optimizer_settings import OptimizerSettings, settings_type
from tfm_blocks.training.optimizers import JointOptimizer, orthogonal_factors

ISSUE = {
    "frozen": {"where": {"node": "encoder"}, "train": False},
    "embeddings": {"where": {"role": ["embedding", "head"]}, "rate": 10, "weight_decay": 0.0},
    "deep": {"where": {"node": "decoder.ffn"}, "rate": "0.9**(n-1-i)"},
    "matrices": {"where": {"role": ["matrix", "experts"]}, "name": "muon", "momentum": 0.9},
}


def settings(name: str = "adamw", **keys: Any) -> OptimizerSettings:
    return TypeAdapter(settings_type()).validate_python({"name": name, **keys})


def network() -> Network:
    return tfm.build("tiny", layers=3, d_model=8, d_ff=12, heads=2, vocab=30, dropout=0.1)


def learned(optimizer: OptimizerSettings) -> dict[str, Learning]:
    return {one.weight.name: one.learning for one in assign(optimizer, network())}


def test_each_weight_is_in_the_first_group_that_matches_it() -> None:
    table = learned(settings(weight_decay=0.1, groups=ISSUE))
    assert table["encoder.2.ffn.block.inner.weight"] == ("frozen", "frozen", 0.0, 0.0)
    assert table["src_emb.block.weight"] == ("embeddings", "adamw", 10.0, 0.0)
    for layer, rate in enumerate((0.81, 0.9, 1.0)):
        ffn = table[f"decoder.{layer}.ffn.block.inner.weight"]
        assert ffn[:2] == ("deep", "adamw") and ffn.rate == pytest.approx(rate) and ffn.decay == 0.1
        assert table[f"decoder.{layer}.ffn.block.inner.bias"].decay == 0.0
    assert table["decoder.0.self.block.qkv.weight"] == ("matrices", "muon", 1.0, 0.1)
    assert table["decoder.0.self.block.qkv.bias"] == ("default", "adamw", 1.0, 0.0)


def test_a_tied_weight_is_a_weight_of_each_block_that_reads_it() -> None:
    for block in ("embedding", "unembed"):
        table = learned(settings(groups={"own": {"where": {"block": ["ffn", block]}, "rate": 2}}))
        assert table["src_emb.block.weight"].group == table["decoder.0.ffn.block.out.weight"].group == "own"
    assert table["decoder.0.self.block.qkv.weight"].group == "default"


def test_the_rows_of_groups_count_every_parameter_once() -> None:
    rows = group_rows(assign(settings(groups=ISSUE), network()))
    assert sum(row["parameters"] for row in rows) == sum(one.numel() for one in network().parameters())
    assert {row["group"]: row["rates"] for row in rows}["deep"] == pytest.approx([0.81, 1.0])


WRONG: dict[str, tuple[list[str], str, str, str]] = {
    "no such role": (["a={where: {role: embeding}}"], "a.where.role", "no role is called 'embeding'", "did you mean embedding"),
    "no such node": (["a={where: {node: encodr}}"], "a.where.node", "the model has no weights at a node 'encodr'", "did you mean encoder"),
    "no such node of several": (["a={where: {node: [decodr, encoder.0.ffn]}, train: false}"], "a.where.node", "at a node 'decodr'", "did you mean decoder"),
    "no such role of several": (["a={where: {role: [embeding, bias]}}"], "a.where.role", "no role is called 'embeding'", "did you mean embedding"),
    "no such block": (["a={where: {block: atention}}"], "a.where.block", "no block with weights in the model is called 'atention'", "did you mean attention"),
    "no such key": (["a={where: {role: head}, rte: 2}"], "a.rte", "no such setting", "did you mean rate"),
    "no such optimizer": (["a={where: {role: head}, name: muom}"], "a.name", "must be one of adam", "did you mean muon"),
    "another optimizer's setting": (["a={where: {role: head}, momentum: 0.9}"], "a.momentum", "no such setting", "one of: betas"),
    "a role that the model lacks": (["a={where: {role: experts}}"], "a.where.role", "has the role experts", "its roles are embedding"),
    "no common weight": (["a={where: {role: embedding, node: decoder}}"], "a.where", "no weight matches all keys", "leave a key out"),
    "shadowed": (
        ["all={where: {node: decoder}}", "b={where: {node: decoder.ffn}, rate: 2}"], "b",
        "all its weights are taken by the earlier all", "write it before all",
    ),
    "muon on vectors": (["a={where: {role: gain}, name: muon}"], "a", "muon takes only matrix, experts, recurrent", "name: adamw"),
    "a negative rate": (["a={where: {role: head}, rate: -1}"], "a.rate", "above 0, but is -1", "train: false"),
    "a rate that ends at zero": (["a={where: {node: decoder}, rate: i}"], "a.rate", "in layer 0 of 2 must be", "train: false"),
    "bad arithmetic": (["a={where: {node: decoder}, rate: '0.9**('}"], "a.rate", "neither a number nor arithmetic", "0.9"),
    "an unknown name": (["a={where: {node: decoder}, rate: '0.9**depth'}"], "a.rate", "names depth", "0.9"),
    "a frozen rate": (["a={where: {node: decoder}, train: false, rate: 2}"], "a", "but sets rate", "leave train out"),
    "a key of where": (["a={where: {role: head}, node: encoder, train: false}"], "a.node", "no such setting", "write where: {node: …}"),
    "nothing to train": (["a={where: {node: [src_emb, encoder, decoder]}, train: false}"], "", "nothing to train", "train: false"),
    "the name of the rest": (["default={where: {role: head}, rate: 2}"], "", "the name of the remaining weights", "otherwise"),
    "no where": (["a={rate: 2}"], "a.where", "is missing", "write optimizer.groups.a.where"),
    "an empty where": (["a={where: {}}"], "a.where", "is empty", "role: embedding"),
}  # fmt: skip


@pytest.mark.parametrize(("groups", "address", "rule", "fix"), WRONG.values(), ids=WRONG)
def test_a_group_that_nobody_means_is_an_error_with_place_rule_and_fix(
    small: Callable[..., Composed], groups: list[str], address: str, rule: str, fix: str
) -> None:
    with expect_problem(".".join(filter(None, ("optimizer.groups", address))), rule, fix) as raised:
        check_remote_run(small("optimizer=adamw", "layers=2", *(f"+optimizer.groups.{group}" for group in groups)))
    assert raised.value.problems[0].place or raised.value.problems[0].origin


def test_a_group_that_is_null_is_left_out_and_a_rate_may_divide_by_the_layers_above(
    small: Callable[..., Composed],
) -> None:
    table = learned(settings(groups={"a": None, "b": {"where": {"node": "decoder"}, "rate": "1/(n-i)"}}))
    rates = [table[f"decoder.{layer}.ffn.block.out.weight"].rate for layer in range(3)]
    assert rates == pytest.approx([1 / 3, 1 / 2, 1]) and table["src_emb.block.weight"].group == "default"


def test_the_eps_of_adafactor_ends_in_a_number(small: Callable[..., Composed]) -> None:
    with pytest.raises(ConfigError, match=r"optimizer.eps.*must end in a number"):
        check_remote_run(small("optimizer=adafactor", "optimizer.eps=[null,null]"))


def test_the_base_of_adapters_keeps_its_dropout_and_a_frozen_part_loses_it() -> None:
    adapt = "model.adapt.a={where: {block: attention}, rank: 2, alpha: 2}"
    spec = compose_model("tiny", ["layers=2", "d_model=8", "d_ff=12", "heads=2", "vocab=30", "dropout=0.1", adapt])
    adapted = build_network(check_model(spec.model, spec.sources), seed=1)
    freeze(settings(), adapted)
    assert all(module.training for module in adapted.train().modules())
    freeze(settings(groups={"a": {"where": {"node": "encoder.0"}, "train": False}}), adapted)
    off = [name for name, module in adapted.train().named_modules() if not module.training]
    assert off and all(name.startswith("encoder.0.") and ".adapter" in name for name in off)


def test_a_group_of_weights_that_adapters_freeze_is_an_error(small: Callable[..., Composed]) -> None:
    adapt = "model.adapt.a={where: {block: attention}, rank: 2, alpha: 2}"
    group = "+optimizer.groups.head={where: {role: head}, rate: 2}"
    with pytest.raises(ConfigError, match=r"takes no weight: model.adapt freezes all its weights") as raised:
        check_remote_run(small("optimizer=adamw", "init_from=runs/base", adapt, group))
    assert "role: adapter" in raised.value.problems[0].help


def test_a_group_of_muon_sets_the_rate_and_the_decay_of_all_its_weights() -> None:
    groups = {
        "deep": {"where": {"node": "decoder"}, "rate": "0.9**(n-1-i)"},
        "flat": {"where": {"node": "encoder.0"}, "weight_decay": 0.3},
        "matrices": {"where": {"node": "encoder.1"}, "name": "muon", "rate": 3},
    }
    for frozen in (False, True):
        others = {"train": False} if frozen else {"name": "adamw", "rate": 0.5}
        table = learned(settings("muon", weight_decay=0.1, others=others, groups=groups))
        for layer, rate in enumerate((0.81, 0.9, 1.0)):
            assert table[f"decoder.{layer}.ffn.block.inner.weight"] == ("deep", "muon", pytest.approx(rate), 0.1)
            bias = table[f"decoder.{layer}.ffn.block.inner.bias"]
            assert bias == (("others", "frozen", 0, 0) if frozen else ("deep", "adamw", pytest.approx(rate / 2), 0.0))
        flat, rest = (table[f"encoder.{layer}.ffn.block.inner.bias"] for layer in (0, 1))
        assert frozen or (flat, rest) == (("flat", "adamw", 0.5, 0.3), ("others", "adamw", 0.5, 0.0))


def test_the_decay_of_the_others_of_muon_is_not_one_of_their_biases_and_gains() -> None:
    groups = {"deep": {"where": {"node": "decoder"}}, "flat": {"where": {"node": "encoder.0"}, "weight_decay": 0.3}}
    decays = {
        (one.group, one.weight.decays): one.learning.decay
        for one in assign(settings("muon", others={"weight_decay": 0.1}, groups=groups), network())
        if one.optimizer == "adamw"
    }
    assert decays == {("others", True): 0.1, ("others", False): 0, ("deep", False): 0, ("flat", False): 0.3}


def test_an_optimizer_of_all_weights_is_needed_for_the_others_of_muon() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.others.name: must be an optimizer of all weights"):
        learned(settings("muon", others={"name": "muon"}))


@pytest.mark.grid
def test_another_optimizer_of_the_others_of_muon_has_its_own_defaults(small: Callable[..., Composed]) -> None:
    def others(*overrides: str) -> Any:
        return (
            check_remote_run(small("optimizer=muon", *overrides))
            .with_vocab(299)
            .composed.mapping["optimizer"]["others"]
        )

    assert others("optimizer.others.name=sgd", "optimizer.others.rate=2") == {"name": "sgd", "rate": 2}
    assert others("optimizer.others.name=lion") == {"name": "lion", "rate": 1.0}
    assert others("optimizer.others.name=adamw") == others()
    assert others("+optimizer.others.train=false") == {"train": False}
    with pytest.raises(ConfigError, match=r"freezes its weights with train: false, but sets name"):
        others("+optimizer.others.train=false", "optimizer.others.name=sgd")
    with pytest.raises(ConfigError, match=r"optimizer\.others\.(sgd\.)?eps"):
        others("optimizer.others.name=sgd", "optimizer.others.eps=1e-8")


def test_settings_that_the_library_refuses_are_an_error_of_their_group(small: Callable[..., Composed]) -> None:
    with pytest.raises(ConfigError, match=r"optimizer.groups.a: sgd refuses its settings: Nesterov momentum"):
        group = "+optimizer.groups.a={where: {role: matrix}, name: sgd, momentum: 0.0, nesterov: true}"
        check_remote_run(small("optimizer=adamw", group))
    with pytest.raises(ConfigError, match="optimizer: sgd refuses") as raised:
        check_remote_run(small("optimizer=sgd", "optimizer.nesterov=true", "optimizer.momentum=0.0"))
    assert "optimizers.py" not in str(raised.value)


def step(optimizer: torch.optim.Optimizer, model: Network, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * group["rate"]
    optimizer.step()


def test_frozen_parts_have_no_gradient_and_no_state_and_their_dropout_is_off() -> None:
    model = network().train()
    chosen = settings(groups={"frozen": {"where": {"node": ["encoder", "src_emb"]}, "train": False}})
    freeze(chosen, model)
    optimizer = build_optimizer(chosen, model)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    step(optimizer, model)
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if name.startswith("decoder")} and moved
    assert len(optimizer.state) == len(moved)
    for mode in (True, False, True):
        model.train(mode)
        modes = {name: module.training for name, module in model.named_modules()}
        assert not any(trains for name, trains in modes.items() if name.startswith("encoder"))
        assert all(trains == mode for name, trains in modes.items() if name.startswith("decoder"))


STATES = {
    **{name: {"name": name} for name in ("adam", "adamw", "sgd", "adafactor", "lion", "muon")},
    "sgd without momentum": {"name": "sgd", "momentum": 0.0},
    "groups": {"name": "adamw", "groups": ISSUE},
}


@pytest.mark.parametrize("keys", STATES.values(), ids=STATES)
def test_the_state_that_each_optimizer_keeps_is_counted_without_a_step_of_the_model(keys: dict[str, Any]) -> None:
    """The state of a real step is the reference; frozen weights have none."""
    model, chosen = network(), settings(**keys)
    freeze(chosen, model)
    optimizer = build_optimizer(chosen, model)
    step(optimizer, model)
    kept = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    learned = assign(chosen, model)
    assert count_state(learned) == sum(value.numel() for value in kept if value.dim())
    assert count_trained(learned) == sum(one.numel() for one in model.parameters() if one.requires_grad)


def test_one_state_dict_of_several_optimizers_continues_bit_equal() -> None:
    chosen = settings(groups={name: ISSUE[name] for name in ("embeddings", "deep", "matrices")})
    model, other = network(), network()
    optimizer, resumed = build_optimizer(chosen, model), build_optimizer(chosen, other)
    assert isinstance(optimizer, JointOptimizer)
    for seed in range(3):
        step(optimizer, model, seed)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    for seed in range(3, 6):
        step(optimizer, model, seed)
        step(resumed, other, seed)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "adafactor", "lion", "muon"])
def test_a_step_whose_gradient_is_not_finite_changes_nothing(name: str) -> None:
    model = network()
    optimizer = build_optimizer(settings(name), model)
    for found, moves in ((0.0, True), (1.0, False), (0.0, True)):
        before = [weight.detach().clone() for weight in model.parameters()]
        optimizer.found_inf = torch.tensor(found)  # type: ignore[attr-defined]
        step(optimizer, model)
        assert all(torch.equal(*pair) != moves for pair in zip(before, model.parameters(), strict=True))


def test_a_parametrisation_multiplies_the_rate_decay_and_eps_of_a_group() -> None:
    """A matrix of four times the width of its base has a quarter of the rate and of eps, and four times the decay."""
    sizes = ["d_model=32", "d_ff=48", "heads=2", "layers=1", "vocab=30"]
    keys = ["model.parametrisation=mup", "model.base.d_model=8", "model.base.d_ff=12"]
    composed = compose_model("tiny", [*sizes, *keys])
    model, name = (
        build_network(check_model(composed.model, composed.sources), seed=1),
        "decoder.0.ffn.block.inner.weight",
    )
    chosen = settings(weight_decay=0.1, eps=1e-8, groups={"deep": {"where": {"node": "decoder"}, "rate": 3}})
    optimizer = build_optimizer(chosen, model)
    (group,) = [one for one in optimizer.param_groups if any(own is model.get_parameter(name) for own in one["params"])]
    assert (group["rate"], group["weight_decay"], group["eps"]) == (0.75, 0.4, 2.5e-9)
    assert sum(len(one["params"]) for one in optimizer.param_groups) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_cautious_decay_shrinks_only_weights_that_the_step_makes_smaller(name: str) -> None:
    plain, cautious = network(), network()
    step(build_optimizer(settings(name, weight_decay=0.0), plain), plain)
    step(build_optimizer(settings(name, weight_decay=0.5, cautious=True), cautious), cautious)
    decays = {weight.name for weight in list_weights(plain) if weight.decays}
    for (weight, undecayed), decayed, old in zip(
        plain.named_parameters(), cautious.parameters(), network().parameters(), strict=True
    ):
        shrinks = ((old - undecayed) * old >= 0) & torch.tensor(weight in decays)
        torch.testing.assert_close(decayed, undecayed - 0.01 * 0.5 * old * shrinks)


def test_independent_decay_is_the_weight_decay_at_the_peak_for_any_rate() -> None:
    for peak, factor in ((0.01, 1.0), (0.02, 4.0)):
        model = network()
        group = {"all": {"where": {"role": "matrix"}, "rate": factor, "independent_decay": True, "weight_decay": 0.1}}
        optimizer = build_optimizer(settings(groups=group), model, peak=peak)
        weight = model.get_parameter("decoder.0.ffn.block.inner.weight")
        before = weight.detach().clone()
        weight.grad = torch.zeros_like(weight)
        for one in optimizer.param_groups:
            one["lr"] = peak * one["rate"]
        optimizer.step()
        torch.testing.assert_close(weight.detach(), 0.9 * before)


@pytest.mark.parametrize("shape", [(3, 5, 4), (3, 4, 4), (2, 4, 7)])
def test_orthogonal_factors_are_near_those_of_the_singular_value_decomposition(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    y = orthogonal_factors(x, 10, [3.4445, -4.775, 2.0315])
    values = (u.mT @ y @ v.mT).diagonal(dim1=1, dim2=2)
    assert ((values > 0.6) & (values < 1.3)).all()
    torch.testing.assert_close(u @ torch.diag_embed(values) @ v, y, atol=1e-8, rtol=0)
    assert s.min() > 0


MIXTRAL: dict[str, Any] = {"model": "mixtral", "experts": 4, "top_k": 2}
EXPERTS = {"decoder.0.ffn.block.experts.inner.weight": 2}
GRIFFIN: dict[str, Any] = {"model": "probe_decoder", "mixer": "rg_lru"}


@pytest.mark.parametrize(
    ("knobs", "per_head", "maps"),
    [
        (MIXTRAL, False, {"decoder.0.self.block.qkv.weight": 3, **EXPERTS}),
        (MIXTRAL, True, {"decoder.0.self.block.qkv.weight": 6, **EXPERTS}),
        (GRIFFIN, False, {"decoder.0.self.block.input_gate": 1}),
    ],
)
def test_muon_orthogonalises_each_stacked_map_each_head_and_each_expert_separately(
    knobs: dict[str, Any], per_head: bool, maps: dict[str, int]
) -> None:
    model = tfm.build(**knobs, layers=1, d_model=8, d_ff=12, heads=2, vocab=30).double()
    before = {name: model.get_parameter(name).detach().clone() for name in maps}
    optimizer = build_optimizer(settings("muon", weight_decay=0.0, per_head=per_head, scale="1"), model)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    optimizer.step()
    for name, parts in maps.items():
        update = (before[name] - model.get_parameter(name).detach()).reshape(-1, *before[name].shape[-2:])
        for matrix in update:
            for part in matrix.chunk(parts):
                values = torch.linalg.svdvals(part)
                assert values.max() < 1.4 and values.median() > 0.4, name
