"""All blocks of the contract on the pretended device: values of the CPU within 1e-5, or 1e-6 near 0, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
from torch import Tensor

import tfm_blocks as tfm
from tests import pretend
from tests.blocks.test_contract import CASES
from tfm_blocks.language.spec import TARGET, Axis
from tfm_blocks.network import incremental
from tfm_blocks.network.attention_maps import attention_nodes, attention_weights
from tfm_blocks.network.contract.case import BATCH, PADDING, SOURCE, Case
from tfm_blocks.network.contract.expectations import FIRST, LENGTH
from tfm_blocks.network.graph import Network
from tfm_blocks.network.packed import packed
from tfm_blocks.training.loss import smoothed_loss

TO = Callable[[Tensor], Tensor]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
FIRST_OF_FILE = {case.info.cls.__module__: case for case in reversed(CASES)}.values()
pytestmark = pytest.mark.usefixtures("plugged")


def expect_equal(answers: Callable[[Network, TO], Iterator[Tensor]], network: Network) -> None:
    """Expect the same values from a network of the CPU and from its copy on the device."""
    expected = list(answers(network, lambda tensor: tensor))
    found = list(answers(pretend.there(deepcopy(network)), pretend.there))
    assert len(found) == len(expected)
    for value, other in zip(found, expected, strict=True):
        assert isinstance(value, pretend.Pretend)
        torch.testing.assert_close(value.detach().to("cpu"), other.detach(), **TOLERANCE)


def kept(network: Network, inputs: dict[str, Tensor], keep: dict[str, Tensor]) -> Tensor | slice:
    """Return the mask of the positions of the output that are not padding."""
    axis = network.spec.sink.shape[1]
    return network.keep_masks(inputs, keep).masks[axis.name] if isinstance(axis, Axis) else slice(None)


def wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in FIRST_OF_FILE else pytest.mark.grid, id=str(case)) for case in CASES],
)
def test_a_block_computes_on_the_device_and_its_gradients_are_there(case: Case) -> None:
    """The inputs end in padding, except ids, in which no id is 0."""
    drawn = {name: wide(value) for name, value in case.tensors(longer=PADDING).items()}
    lengths = {name: value.shape[1] for name, value in case.tensors().items()}
    masks = case.masks(
        {name: (torch.arange(x.shape[1]) < lengths[name]).expand(len(x), -1).clone() for name, x in drawn.items()}
    )

    def answers(network: Network, to: TO) -> Iterator[Tensor]:
        inputs, keep = ({name: to(one) for name, one in values.items()} for values in (drawn, masks))
        with torch.no_grad():
            yield network(keep=keep, **inputs)[kept(network, inputs, keep)]  # the CPU skips padding
        x, losses = network.trunk_with_losses(inputs)
        out = network.head(x)
        yield out
        yield from losses.values()
        parameters = list(network.parameters())
        if parameters:
            weights = to(torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
            yield from torch.autograd.grad(
                (out * weights).sum() + sum(one.sum() for one in losses.values()), parameters
            )

    expect_equal(answers, deepcopy(case.network).double())


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_a_block_decodes_on_the_device(case: Case) -> None:
    """Cover the forward pass, prefill, steps, spread and reordered hypotheses, ended sentences, and attention maps."""
    decoder = case.decoder
    if decoder is None or decoder.longest(TARGET).tokens < LENGTH:
        pytest.skip("sees later positions, or makes no vectors of the target's positions")
    ids = case.decoder_tensors(LENGTH)
    tgt = torch.randint(1, 11, (BATCH, 2, LENGTH), generator=torch.Generator().manual_seed(3))

    def answers(network: Network, to: TO) -> Iterator[Tensor]:
        inputs, tgt_BMT = {name: to(value) for name, value in ids.items()}, to(tgt)
        yield network(**inputs)
        yield from attention_weights(network, attention_nodes(network), **inputs).values()
        sources = {name: value for name, value in inputs.items() if name == SOURCE}
        decoding = incremental.start(network, sources, LENGTH, sentences=BATCH)
        x_BPD, decoding = incremental.prefill(network, tgt_BMT[:, 0, :FIRST], decoding)
        yield network.head(x_BPD)
        decoding = incremental.spread(decoding, 2)
        for position in range(FIRST, LENGTH):
            x_RD, decoding = incremental.step(network, tgt_BMT[:, :, position].flatten(), decoding)
            yield network.head(x_RD)
            if position == FIRST + 1:
                chosen = to(torch.tensor([2, 0]))
                decoding, tgt_BMT = incremental.select(decoding, chosen), tgt_BMT[chosen]
            incremental.reorder(decoding, to(torch.tensor([[1, 0], [0, 0], [1, 1]])[: len(tgt_BMT)]))

    scores = case.info.category == "router" and not case.part  # which are float32 in any precision
    expect_equal(answers, decoder if scores else deepcopy(decoder).double())


@torch.no_grad()
def test_maps_on_the_device_are_not_packed() -> None:
    """Packed weights are in a format of the CPU."""
    network = tfm.build("tiny", layers=1, d_model=256, vocab=200).eval()
    ids_BN = torch.randint(4, 200, (2, 5))
    expected = network(src=ids_BN, tgt=ids_BN)
    there, ids_BN = pretend.there(network), pretend.there(ids_BN)
    with packed(there):
        logits = there(src=ids_BN, tgt=ids_BN)
    torch.testing.assert_close(logits.to("cpu"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [3, 100])
def test_a_loss_in_chunks_on_the_device_is_that_of_the_cpu(chunk: int) -> None:
    weight, x_ND, labels_N = torch.randn(30, 8).double(), torch.randn(11, 8).double(), torch.randint(30, (11,))
    found = []
    for to in (lambda tensor: tensor, pretend.there):
        head, x = to(weight.clone()).requires_grad_(), to(x_ND.clone()).requires_grad_()
        loss, nll, correct, *_ = smoothed_loss(
            lambda x, head=head: x @ head.mT, [head], x, to(labels_N), smoothing=0.1, chunk=chunk
        )
        loss.backward()
        found.append([one.detach().to("cpu") for one in (loss, nll, correct, head.grad, x.grad)])
    torch.testing.assert_close(found[1], found[0], **TOLERANCE)
