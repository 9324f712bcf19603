"""Attention over depth against a loop over positions and layers in float64, and its initial state."""

import pytest
import torch

from tests.blocks.naive import with_random_weights
from tests.network.examples import TESTS, build, inputs_of
from tfm_blocks.blocks.depth import DepthAttention

B, N, M, D = 2, 3, 4, 6
MODEL = next(path for path in TESTS if path.stem == "attention_residuals")


def in_a_loop(block, xs):
    """Return softmax(q · rmsnorm(x_m))-weighted sums, as in naive_attnres of fla."""
    rows = []
    for b in range(B):
        for n in range(N):
            vectors, logits = [x_BND[b, n] for x_BND in xs], []
            for x_D in vectors:
                rms = (sum(x * x for x in x_D) / D + 1e-6).sqrt()
                logits.append((block.query.weight[0] * x_D / rms * block.norm.weight).sum())
            total = sum(map(torch.exp, logits))
            rows.append(sum(torch.exp(z) / total * x_D for z, x_D in zip(logits, vectors, strict=True)))
    return torch.stack(rows).view(B, N, D)


@pytest.mark.parametrize("layers", [1, M])
def test_depth_attention_and_its_gradients_are_those_of_a_loop(layers):
    block = with_random_weights(DepthAttention(D)).double()
    xs = [torch.randn(B, N, D).double().requires_grad_() for _ in range(layers)]
    outputs = block(xs), in_a_loop(block, xs)
    torch.testing.assert_close(*outputs)
    sources = [*xs, *block.parameters()] if layers > 1 else xs
    gradients = [torch.autograd.grad(y_BND.square().sum(), sources, retain_graph=True) for y_BND in outputs]
    torch.testing.assert_close(*gradients)


@torch.no_grad()
def test_at_first_a_branch_reads_the_mean_of_all_earlier_outputs():
    network = build(MODEL).eval()
    outputs = {}
    for address in ("pos", "decoder.0.self", "decoder.0.ffn", "decoder.1.self.in_x"):
        node = network.get_submodule(address)
        node.block.register_forward_hook(lambda _, __, output, key=address: outputs.__setitem__(key, output))
    network(**inputs_of(network))
    mixed = outputs.pop("decoder.1.self.in_x")
    torch.testing.assert_close(mixed, sum(outputs.values()) / 3)
