from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer

import tfm_blocks as tfm
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.graph import Network
from tfm_blocks.network.weights import list_weights
from tfm_blocks.registry.optimizers import OPTIMIZERS, OptimizerInfo
from tfm_blocks.registry.optimizers import optimizer as optimizer_of_plugin
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.training.groups import assign, build_optimizer, expect_optimizers
from tfm_blocks.training.optimizer_settings import OptimizerSettings, settings_type
from tfm_blocks.training.optimizers import Muon


def settings(name: str, decay: float = 0.1, **keys: Any) -> OptimizerSettings:
    return TypeAdapter(settings_type()).validate_python({"name": name, "weight_decay": decay, **keys})


def network_with_gradients(gradient: float) -> Network:
    network = tfm.build("tiny", layers=1, d_model=8, d_ff=12, heads=2, vocab=30).double()
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    return network


def test_adam_takes_the_steps_of_kingma_and_ba() -> None:
    network = network_with_gradients(0.0)
    weight = network.get_parameter("encoder.0.ffn.block.inner.weight")
    optimizer = build_optimizer(settings("adam", 0.0), network)
    expected = weight.detach().clone()
    mean, square = torch.zeros_like(expected), torch.zeros_like(expected)
    for step in range(1, 4):
        gradient = torch.full_like(expected, float(step))
        weight.grad = gradient.clone()
        optimizer.step()
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.98 * square + 0.02 * gradient**2
        expected -= (mean / (1 - 0.9**step)) / ((square / (1 - 0.98**step)).sqrt() + 1e-9)
    torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_matrices_and_embeddings_are_decayed_but_no_bias_gain_or_scalar(name: Literal["adam", "adamw"]) -> None:
    network = network_with_gradients(0.0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(2.0)
    build_optimizer(settings(name, 0.1), network).step()
    moved = {name for name, parameter in network.named_parameters() if not torch.all(parameter == 2.0)}
    assert moved == {name for name, parameter in network.named_parameters() if parameter.ndim == 2} and moved


def test_adamw_shrinks_a_weight_without_gradient_by_the_decay() -> None:
    network = network_with_gradients(0.0)
    weight = network.get_parameter("encoder.0.attn.block.out.weight")
    before = weight.detach().clone()
    build_optimizer(settings("adamw", 0.1), network).step()
    torch.testing.assert_close(weight.detach(), before * 0.9)


RATE = 1e-3


class ReferenceLion(Optimizer):
    """Algorithm 2 of Chen et al. 2023."""

    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__(groups, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                m = self.state[weight].get("m", torch.zeros_like(weight))
                c = beta1 * m + (1 - beta1) * weight.grad
                weight -= group["lr"] * (torch.sign(c) + group["weight_decay"] * weight)
                self.state[weight]["m"] = beta2 * m + (1 - beta2) * weight.grad


REFERENCES: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"betas": (0.9, 0.98), "eps": 1e-9}),
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.98), "eps": 1e-9}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "adafactor": (torch.optim.Adafactor, {}),
    "lion": (ReferenceLion, {"betas": (0.9, 0.99)}),
}


def random_gradients(network: Network, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def steps_of(optimizer: Optimizer, network: Network, count: int = 20) -> None:
    for step in range(count):
        random_gradients(network, step)
        for group in optimizer.param_groups:
            group["lr"] = RATE * (step + 1) * group.get("rate", 1.0)
        optimizer.step()


def expect_equal(network: Network, other: Network, tolerance: float = 1e-9) -> None:
    for (name, weight), theirs in zip(network.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(weight, theirs, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("name", REFERENCES)
def test_twenty_steps_equal_those_of_the_library(name: str) -> None:
    network, other = network_with_gradients(0.0), network_with_gradients(0.0)
    steps_of(build_optimizer(settings(name), network), network)
    make, options = REFERENCES[name]
    decays = {parameter.ndim > 1 for parameter in other.parameters()}
    groups = [
        {"params": [one for one in other.parameters() if (one.ndim > 1) == matrix], "weight_decay": 0.1 * matrix}
        for matrix in decays
    ]
    steps_of(make(groups, lr=1.0, **options), other)
    expect_equal(network, other)


@pytest.mark.parametrize(("make", "message"), [
    (lambda groups: None, "refuses its settings: TypeError: must return an optimizer of torch, but returns None"),
    (lambda groups: {}["x"], "refuses its settings: KeyError: 'x'"),
    (lambda groups: SGD([torch.zeros(1)]), "refuses its settings: returns an optimizer of other weights"),
    (lambda groups: LBFGS(groups[0]["params"]), "fails in a step: TypeError: "),
])  # fmt: skip
def test_an_optimizer_of_a_plugin_that_fails_is_an_error_before_training(
    make: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make.__doc__ = "Fails."
    monkeypatch.setitem(OPTIMIZERS, "fails", OptimizerInfo("fails", make, {}, "a test", False, ()))
    learned = assign(settings("sgd"), network_with_gradients(0.0))
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        expect_optimizers([replace(one, optimizer="fails", settings={}) for one in learned])
    (problem,) = raised.value.problems
    assert problem.help.endswith(f"or correct the plug-in {__name__}")


def test_an_optimizer_has_the_settings_of_the_constructor_that_it_inherits() -> None:
    @optimizer_of_plugin("inherits", source="a test")
    class Inherits(torch.optim.AdamW):
        """AdamW."""

    assert OPTIMIZERS.pop("inherits").settings["maximize"] == (bool, False)


def test_an_optimizer_of_a_plugin_may_read_the_widths_of_stacked_maps_but_have_no_setting_of_their_name() -> None:
    @optimizer_of_plugin("inherits", source="a test", roles=("matrix",))
    class Inherits(Muon):
        """Muon."""

    try:
        expect_optimizers(assign(settings("inherits"), network_with_gradients(0.0)))
    finally:
        del OPTIMIZERS["inherits"]

    def with_parts(groups: Any, *, parts: int = 1) -> None:
        """Have a setting of the name of a key of torch's parameter groups."""

    with pytest.raises(TypeError, match="parts has a reserved name"):
        optimizer_of_plugin("parts", source="a test", roles=("matrix",))(with_parts)


def test_an_optimizer_of_a_package_takes_its_own_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("pytorch_optimizer")
    page = Path(__file__).parents[2] / "docs" / "training.md"
    (example,) = re.findall(r"cat > packaged.py <<END\n(.*?)\nEND\n", page.read_text("utf-8"), re.DOTALL)
    (tmp_path / "packaged.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    load_plugins(["packaged"])
    try:
        network, other = network_with_gradients(0.0), network_with_gradients(0.0)
        steps_of(build_optimizer(settings("adabelief"), network), network)
    finally:
        del OPTIMIZERS["adabelief"], sys.modules["packaged"]
    groups = [
        {"params": [one for one in other.parameters() if (one.ndim > 1) == matrix], "weight_decay": 0.1 * matrix}
        for matrix in (True, False)
    ]
    steps_of(package.AdaBelief(groups, 1.0, betas=(0.9, 0.999), eps=1e-16), other)
    expect_equal(network, other)


@pytest.fixture
def wide_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's Muon iterate in the precision of the weights, as ours does on a CPU."""
    monkeypatch.setattr(Tensor, "bfloat16", lambda tensor: tensor.clone())


SCALES = {"max(1, out/in)**0.5": "original", "0.2*max(out, in)**0.5": "match_rms_adamw"}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.usefixtures("wide_muon")
def test_twenty_steps_of_muon_equal_those_of_torch_for_each_stacked_map(scale: str, nesterov: bool) -> None:
    network, other = network_with_gradients(0.0), network_with_gradients(0.0)
    steps_of(build_optimizer(settings("muon", scale=scale, nesterov=nesterov), network), network)
    by_name = {weight.name: weight for weight in list_weights(other)}
    matrices, rest = {}, {True: [], False: []}
    for name, parameter in other.named_parameters():
        if by_name[name].roles == ("matrix",):
            matrices[name] = [part.detach().clone() for part in parameter.split(list(by_name[name].parts))]
        else:
            rest[by_name[name].decays].append(parameter)
    options = {"weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": SCALES[scale]}
    muon = torch.optim.Muon([part for parts in matrices.values() for part in parts], lr=1.0, **options)
    groups = [{"params": own, "weight_decay": 0.1 * decays} for decays, own in rest.items()]
    adamw = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    for step in range(20):
        random_gradients(other, step)
        for name, parts in matrices.items():
            for part, gradient in zip(
                parts, other.get_parameter(name).grad.split([len(one) for one in parts]), strict=True
            ):
                part.grad = gradient
        for optimizer in (muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = RATE * (step + 1)
            optimizer.step()
    with torch.no_grad():
        for name, parts in matrices.items():
            other.get_parameter(name).copy_(torch.cat(parts))
    expect_equal(network, other, 1e-7)
