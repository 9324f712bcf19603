"""What runs on an accelerator, on a pretended one and on CUDA: values of the CPU, and no wait for the device.

The pretended device shows placement and traffic, not kernels. `pytest -m gpu -n 0` runs the rows of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import pretend
from tests.network.examples import ALL, build, has_target, inputs_of, sources_of
from tests.translation.test_any_graph import sharper
from tests.translation.test_search import bounds
from tfm_blocks.data.layout import Batch, batch_of
from tfm_blocks.language.spec import names
from tfm_blocks.network.call import losses_of
from tfm_blocks.network.graph import Network
from tfm_blocks.training.data import StepBatches
from tfm_blocks.training.loss import backward_scale
from tfm_blocks.training.metrics import StepSums, Throughput
from tfm_blocks.training.objective import Objective
from tfm_blocks.translation.beam import beam_search, gnmt
from tfm_blocks.translation.search import Bounds, chooser, likeliest, one_by_one
from tfm_blocks.translation.settings import Sampling

SEARCHED = {"decoder_only", "latent", "prefix", "recurrent", "switch", "two_sources"}  # their decoding states differ
without_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def each_device_and_model(default: Collection[str]) -> Any:
    """Parametrize by devices and models; models outside `default` run only in CI."""
    rows = []
    for path in ALL:
        marks = [] if path.stem in default else [pytest.mark.grid]
        rows.append(pytest.param("pretend", path, marks=marks, id=f"pretend-{path.stem}"))
        rows.append(pytest.param("cuda", path, marks=[pytest.mark.gpu, without_cuda], id=f"cuda-{path.stem}"))
    return pytest.mark.parametrize(("device", "path"), rows, indirect=["device"])


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return pretend.register() if request.param == pretend.NAME else torch.device(request.param)


def moved(value: Any, device: torch.device) -> Any:
    return pretend.there(value) if device.type == pretend.NAME else value.to(device)


@contextmanager
def waiting_for_nothing(device: torch.device) -> Iterator[None]:
    """Raise an error if the CPU waits for the device or sends it values."""
    if device.type == pretend.NAME:
        with pretend.traffic() as traffic:
            yield
        assert not traffic.reads and not traffic.sends
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def exact(path: Path, change: Callable[[Network], Network] = lambda network: network) -> tuple[Network, dict[str, Any]]:
    """Return a model in float64, so that rounding changes no choice, and its inputs."""
    network = change(build(path)).double().eval()
    inputs = inputs_of(network)
    return network, {name: one if one.dtype == torch.int64 else one.double() for name, one in inputs.items()}


@each_device_and_model(SEARCHED)
def test_logits_and_gradients_of_any_model_are_those_of_the_cpu(device: torch.device, path: Path) -> None:
    network, inputs = exact(path)
    other = moved(deepcopy(network), device)
    expected = network(**inputs)
    expected.sum().backward()
    there = {name: moved(value, device) for name, value in inputs.items()}
    with waiting_for_nothing(device):
        logits = other(**there)
        logits.sum().backward()
    torch.testing.assert_close(logits.detach().to("cpu"), expected.detach(), rtol=0, atol=1e-9)
    gradients = {name: parameter.grad for name, parameter in other.named_parameters()}
    for name, parameter in network.named_parameters():
        assert (parameter.grad is None) == (gradients[name] is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name].to("cpu"), parameter.grad, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("beam", [1, pytest.param(4, marks=pytest.mark.grid)])
@each_device_and_model(SEARCHED)
def test_searches_of_any_model_find_the_translations_of_the_cpu(device: torch.device, path: Path, beam: int) -> None:
    original, inputs = exact(path, sharper)
    if not has_target(original):
        pytest.skip("has no target")
    results = []
    for place in (torch.device("cpu"), device):
        network = moved(deepcopy(original), place)
        limits = Bounds(*(moved(one, place) for one in bounds([9, 12, 7])[:3]))
        read = {name: moved(one, place) for name, one in sources_of(inputs).items()}
        if beam == 1:
            results.append([one.ids for one in one_by_one(network, read, limits)])
        else:
            best = beam_search(network, read, limits, beam=beam, penalty=gnmt(0.6), nbest=beam)
            results.append([one.ids for hypotheses in best for one in hypotheses])
    assert results[0] == results[1]


def batch_for(network: Network) -> Batch:
    ids_BN = torch.randint(4, 30, (3, 8))
    ids_BN[1, 5:] = 0
    most = int(str(network.spec.sink.shape[-1])) - 1  # a classifier has few outputs
    return batch_of(dict.fromkeys(names(network.spec.inputs), ids_BN), ids_BN.clamp(max=most))


def take_step(network: Network, batch: Batch, there: Batch, steps: StepSums, pace: Throughput) -> None:
    """Run a training step without the optimizer and without logging; `there` is on the device."""
    loss, sums = Objective(network, 0.1).loss(there)
    (loss * backward_scale(loss, 0.1)).backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    steps.update(sums, StepBatches(21, [batch]), norm, ~norm.isfinite())
    pace.update(21, 0.1)


@each_device_and_model(SEARCHED)
def test_a_training_step_of_any_model_waits_for_nothing(device: torch.device, path: Path) -> None:
    """Use bf16, the precision of runs on accelerators; in float32 a mixture of experts waits."""
    network = build(path)
    if any(not one.tokens for one in network.spec.inputs):
        pytest.skip("reads vectors, and training reads text")
    batch, network = batch_for(network), moved(network.train(), device)
    there = batch.to(device)
    steps, pace = StepSums(losses_of(network.spec)).to(device), Throughput().to(device)
    with torch.autocast(device.type, torch.bfloat16):
        take_step(network, batch, there, steps, pace)  # the first step may wait
        with waiting_for_nothing(device):
            take_step(network, batch, there, steps, pace)
    assert {steps.sums.device.type, steps.last.device.type, pace.sums.device.type} == {device.type}


class Faulty(nn.Module):
    """A layer with a planted fault."""

    def __init__(self, fault: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x_BN: Tensor) -> Any:
        return self.fault(x_BN)


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "a condition": lambda x: x if (x > 0).any() else -x,
    "a list": lambda x: x[:, 0].tolist(),
    "a copy to the CPU": lambda x: x.cpu(),
    "a copy into a tensor of the CPU": lambda x: torch.empty(x.shape).copy_(x),
    "positions that are not zero": lambda x: x.nonzero(),
    "a boolean index": lambda x: x[x > 0],
    "an assignment at a boolean index": lambda x: x.clone().index_put_((x > 0,), torch.zeros((), device=x.device)),
    "a comparison": lambda x: torch.equal(x, x + 1),
    "different values": lambda x: x.unique(),
}
SENDS: dict[str, Callable[[Tensor], Any]] = {
    "a list of numbers": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "a mask of the CPU": lambda x: x * torch.ones(3, 4).to(x.device),
    "a copy from the CPU": lambda x: torch.empty_like(x).copy_(torch.ones(3, 4)),
}


@pytest.mark.parametrize("fault", WAITS)
def test_each_wait_for_the_device_is_recorded(fault: str) -> None:
    x_BN = pretend.there(torch.arange(12.0).reshape(3, 4) - 4)
    with pretend.traffic() as traffic:
        Faulty(WAITS[fault])(x_BN)
    assert traffic.reads


@pytest.mark.parametrize("fault", SENDS)
def test_each_tensor_from_the_host_is_recorded(fault: str) -> None:
    x_BN = pretend.there(torch.ones(3, 4))
    with pretend.traffic() as traffic:
        Faulty(SENDS[fault])(x_BN)
    assert traffic.sends and not traffic.reads


def test_numbers_are_on_the_device_of_a_with_statement() -> None:
    with torch.device("meta"):
        assert torch.tensor([1, 2]).is_meta and torch.as_tensor([1, 2]).is_meta


@pytest.mark.parametrize("other", [torch.ones(3, 4), torch.tensor([True, False, True])], ids=["values", "a mask"])
def test_tensors_of_two_devices_do_not_mix(other: Tensor) -> None:
    x_BN = pretend.there(torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        x_BN[other] if other.dtype == torch.bool else x_BN * other


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, generator: torch.rand(3, 4, device=x.device, generator=generator),
        lambda x, generator: x.clone().bernoulli_(0.5, generator=generator),
        lambda x, generator: torch.multinomial(x, 1, generator=generator),
    ],
    ids=["new", "in place", "of weights"],
)
def test_a_generator_of_the_cpu_does_not_draw_on_the_device(draw: Callable[[Tensor, torch.Generator], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="expected a generator of pretend"):
        draw(pretend.there(torch.ones(3, 4)), torch.Generator())


def test_a_checkpoint_is_on_its_device_and_one_on_the_cpu_does_not_mix(tmp_path: Path) -> None:
    weight_OI = pretend.there(torch.ones(3, 4))
    torch.save(weight_OI, tmp_path / "momentum")
    assert torch.load(tmp_path / "momentum").device == weight_OI.device
    momentum_OI = torch.load(tmp_path / "momentum", map_location="cpu")
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        weight_OI.lerp_(momentum_OI, 0.1)


def test_operations_on_the_device_alone_cause_no_traffic() -> None:
    layer, x_BN = pretend.there(nn.Linear(4, 4)), pretend.there(torch.ones(3, 4))
    with pretend.traffic() as traffic:
        layer(x_BN).softmax(-1).masked_fill(x_BN > 2, 0.0).sum().backward()
    assert traffic == pretend.Traffic()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_fused_cells_of_the_device_have_the_values_and_gradients_of_the_cpu(kind: type[nn.LSTM] | type[nn.GRU]) -> None:
    layer, x_NBD = kind(3, 5).double(), torch.randn(4, 2, 3, dtype=torch.float64)
    other = pretend.there(deepcopy(layer))
    layer(x_NBD)[0].square().sum().backward()
    other(pretend.there(x_NBD))[0].square().sum().backward()
    for one, same in zip(layer.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(same.grad.to("cpu"), one.grad)


@pytest.mark.grid
@pytest.mark.parametrize("search", ["greedy", "sampled", "beam"])
def test_a_step_of_search_reads_once_and_sends_only_the_sentences_that_continue(search: str) -> None:
    """The host must know which sentences ended, so one read per step is the fewest."""
    network, inputs = exact(next(path for path in ALL if path.stem == "base"), sharper)
    network = pretend.there(network.float())
    sources = {name: pretend.there(value) for name, value in sources_of(inputs).items()}
    limits = Bounds(*(pretend.there(one) for one in bounds([9, 12, 7])[:3]))
    with pretend.traffic() as traffic:
        if search == "beam":
            beam_search(network, sources, limits, beam=3, penalty=gnmt(0.6), patient=True)
        else:
            choose = likeliest
            if search == "sampled":
                choose = chooser(Sampling(seed=4, temperature=2.0), range(3), 12, pretend.register())
            one_by_one(network, sources, limits, choose)
    at_the_start, ended = 3, 2  # two sentences end before the last step
    numbers = search == "sampled"  # the random numbers of all steps
    assert (len(traffic.reads), len(traffic.sends)) == (12 + at_the_start, ended + numbers)


@pytest.mark.parametrize(
    ("model", "masks"),
    [
        ("base", {None: "causal", torch.bool: ""}),
        ("decoder_only", {None: "causal"}),
        ("alibi", {torch.bfloat16: "", torch.bool: ""}),
    ],
)
def test_only_causal_self_attention_has_no_mask(
    model: str, masks: dict[torch.dtype | None, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask keeps the flash kernel of CUDA away: docs/accelerators.md."""
    network = pretend.there(build(next(path for path in ALL if path.stem == model)))
    seen, original = {}, torch.nn.functional.scaled_dot_product_attention

    def attention(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, p: float = 0.0, causal: bool = False, **scale: Any
    ) -> Tensor:
        seen[mask if mask is None else mask.dtype] = "causal" if causal else ""
        return original(q, k, v, mask, p, causal, **scale)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    with torch.autocast(pretend.NAME, torch.bfloat16), torch.no_grad():
        network(**{name: pretend.there(value) for name, value in inputs_of(network).items()})
    assert seen == masks
