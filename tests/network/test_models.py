"""Properties of every valid model, tested on all shipped models and test models."""

import pytest
import torch
from torch.nn import functional as F

from tests.network.examples import ALL, TESTS, build, each, evaluated, has_target, inputs_of, name, sources_of
from tfm_blocks.language.spec import TARGET
from tfm_blocks.network import incremental
from tfm_blocks.network.contract.expectations import expect_steps

LONGEST = 29  # lines of a test model: all of RWKV-7

models = each(
    ALL, {"decoder_only", "gated_delta_rule", "grouped", "latent", "prefix", "recurrent", "switch", "two_sources"}
)


@pytest.mark.parametrize("path", TESTS, ids=name)
def test_a_variant_is_written_in_a_few_lines(path):
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) <= LONGEST


@each(TESTS, {"gated_delta_rule", "latent"})  # test_shipped_models.py tests further properties of the shipped ones
def test_training_lowers_the_loss_and_reaches_every_parameter(path):
    network = build(path)
    inputs = inputs_of(network)
    labels = torch.randint(4, 30, network(**inputs).shape[:2], generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(network(**inputs).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in network.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def decoder_of(path):
    """Return the network and its inputs; skip the test of a model that decodes nothing."""
    network = evaluated(path)
    if not has_target(network):
        pytest.skip("nothing to decode")
    return network, inputs_of(network)


@models
@torch.no_grad()
def test_a_step_equals_the_forward_whether_the_first_tokens_were_read_at_once_or_not(path):
    network, inputs = decoder_of(path)
    for one in sources_of(inputs).values():
        if not one.is_floating_point():
            one[1, 4:] = 0
    expect_steps(network, inputs, (0, 1, 4))


@models
@torch.no_grad()
def test_a_hypothesis_of_a_beam_continues_its_parent(path):
    network, inputs = decoder_of(path)
    sources = sources_of(inputs)
    tgt_BMT = torch.randint(4, 30, (3, 2, 6), generator=torch.Generator().manual_seed(3))
    tgt_BMT[:, :, :2] = tgt_BMT[:, :1, :2]
    decoding = incremental.start(network, sources, 6, sentences=3)
    _, decoding = incremental.prefill(network, tgt_BMT[:, 0, :2], decoding)
    decoding = incremental.spread(decoding, 2)
    for position in range(2, 6):
        x_RD, decoding = incremental.step(network, tgt_BMT[:, :, position].flatten(), decoding)
        wide = {name: value.repeat_interleave(2, 0) for name, value in sources.items()}
        whole_RTV = network(**wide, tgt=tgt_BMT[:, :, : position + 1].flatten(0, 1))
        torch.testing.assert_close(network.head(x_RD), whole_RTV[:, -1], rtol=0, atol=1e-5)
        origin_BM = torch.tensor([[1, 0], [0, 0], [1, 1]])
        incremental.reorder(decoding, origin_BM)
        tgt_BMT[:, :, : position + 1] = tgt_BMT[:, :, : position + 1].take_along_dim(origin_BM[:, :, None], 1)


@models
@torch.no_grad()
def test_a_later_target_token_leaves_earlier_outputs_unchanged(path):
    network, inputs = decoder_of(path)
    before = network(**inputs)
    for position in range(1, 6):
        changed = inputs[TARGET].clone()
        changed[:, position:] = 4 + (changed[:, position:] + 3) % 26
        after = network(**{**inputs, TARGET: changed})
        torch.testing.assert_close(before[:, :position], after[:, :position], rtol=0, atol=1e-6)
        assert not torch.allclose(before[:, position:], after[:, position:])


@models
@torch.no_grad()
def test_padding_leaves_the_outputs_of_real_positions_unchanged(path):
    network = evaluated(path)
    inputs = inputs_of(network)
    alone = network(**inputs)
    padded = {}
    keep = {}
    for number, (key, value) in enumerate(inputs.items(), 2):
        padding = (0, number) if value.ndim == 2 else (0, 0, 0, number)
        padded[key] = F.pad(value, padding)
        if value.ndim > 2:
            keep[key] = torch.arange(padded[key].shape[1]).expand(3, -1) < value.shape[1]
    logits = network(keep=keep, **padded)[:, : alone.shape[1]]
    torch.testing.assert_close(alone, logits, rtol=1e-4, atol=1e-5)


@models
@torch.no_grad()
def test_the_output_of_a_sentence_does_not_depend_on_its_batch(path):
    network = evaluated(path)
    inputs = inputs_of(network)
    for number, value in enumerate(inputs.values(), 2):
        if not value.is_floating_point():
            value[0, number:] = 0
    together = network(**inputs)
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(network(**{key: value[order] for key, value in inputs.items()}), together[order])
    for row in range(3):
        alone = network(**{key: value[row : row + 1] for key, value in inputs.items()})
        torch.testing.assert_close(alone[0], together[row], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@models
def test_the_graph_compiles_without_a_break_and_exports(path):
    torch.compiler.reset()
    network = build(path).eval()
    inputs = inputs_of(network)
    expected = network(**inputs)
    torch.testing.assert_close(torch.compile(network, fullgraph=True, backend="eager")(**inputs), expected)
    torch.testing.assert_close(torch.export.export(network, (), inputs).module()(**inputs), expected)
