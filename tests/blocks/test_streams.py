"""Hyper-connections against a loop over positions and streams in float64, transformers' DeepSeek-V4, and residuals."""

import pytest
import torch
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

from tests.network.examples import ALL, build, inputs_of
from tfm_blocks.blocks.streams import ReadStreams, SumStreams, WriteStreams

B, N, M, D = 2, 3, 4, 6
MODELS = {path.stem: path for path in ALL}


def both(kind):
    """Return a reader and a writer with random weights, and random streams and outputs of a branch."""
    torch.manual_seed(1)
    read, write = ReadStreams(M * D, d_out=D, kind=kind).double(), WriteStreams(M * D, D, kind=kind).double()
    for weight in (*read.parameters(), *write.parameters()):
        weight.normal_()
    return read, write, torch.randn(B, N, M * D).double(), torch.randn(B, N, D).double()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_streams_are_read_and_written_as_in_a_loop(kind):
    read, write, x_BNX, y_BND = both(kind)
    read_BND, written_BNX = read(x_BNX), write(x_BNX, [y_BND])
    for b in range(B):
        for n in range(N):
            streams = [x_BNX[b, n, m * D : (m + 1) * D] for m in range(M)]
            alpha, mix, beta = read.static[:, 0].clone(), write.static[:, :M].clone(), write.static[:, M].clone()
            for m, x in enumerate(streams if kind == "dynamic" else []):
                normed = (x - x.mean()) / (x.var(correction=0) + 1e-6).sqrt()
                alpha[m] += read.scales[0] * torch.tanh(read.map.weight[0] @ normed)
                mix[m] += write.scales[0] * torch.tanh(write.map.weight[:M] @ normed)
                beta[m] += write.scales[1] * torch.tanh(write.map.weight[M] @ normed)
            torch.testing.assert_close(read_BND[b, n], sum(alpha[m] * streams[m] for m in range(M)))
            for m in range(M):
                expected = sum(mix[j, m] * streams[j] for j in range(M)) + beta[m] * y_BND[b, n]
                torch.testing.assert_close(written_BNX[b, n, m * D : (m + 1) * D], expected)


@torch.no_grad()
def test_the_manifold_is_that_of_deepseek_v4():
    read, write, x_BNX, y_BND = (part.float() for part in both("manifold"))
    config = DeepseekV4Config(hidden_size=D, hc_mult=M, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6)
    other = DeepseekV4HyperConnection(config)
    mix, beta = torch.unflatten(write.map.weight, 0, (M, M + 1)).split([M, 1], 1)
    other.fn.copy_(torch.cat((read.map.weight, beta.flatten(0, 1), mix.flatten(0, 1))))
    other.base.copy_(torch.cat((read.static[:, 0], write.static[:, M], write.static[:, :M].flatten())))
    other.scale.copy_(torch.stack((read.scales[0], write.scales[1], write.scales[0])))
    x_BNMD = x_BNX.view(B, N, M, D)
    post_BNM, comb_BNMM, read_BND = other(x_BNMD)
    expected_BNMD = post_BNM[..., None] * y_BND[:, :, None] + comb_BNMM.mT @ x_BNMD
    torch.testing.assert_close(read(x_BNX), read_BND, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(write(x_BNX, [y_BND]), expected_BNMD.flatten(2), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_rows_and_columns_of_the_manifold_sum_to_1():
    write = both("manifold")[1]
    own = write._doubly_stochastic(torch.randn(B, N, M, M).double())
    torch.testing.assert_close(own.sum(2), torch.ones(B, N, M).double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(own.sum(3), torch.ones(B, N, M).double(), rtol=0, atol=1e-4)
    assert (own > 0).all()


def test_sums_of_streams():
    x_BNX = torch.randn(B, N, M * D)
    torch.testing.assert_close(SumStreams(d_out=D)(x_BNX), sum(x_BNX.split(D, 2)))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_model_begins_with_the_residual_connections_of_pre_norm(kind):
    """All streams are equal at first, so that their sum is a multiple of the stream, which the norm removes."""
    own = build(MODELS["hyper_connections"], kind=kind).eval()
    plain = build(MODELS["decoder_only"]).eval()
    renamed = {"decoder.last.norm": "logits.in_x.block", ".self.": ".self.attn.", ".ffn.": ".ffn.ffn."}
    values = dict(own.named_parameters())
    for name, weight in plain.named_parameters():
        for before, after in renamed.items():
            name = name.replace(before, after, 1)
        weight.copy_(values[name])
    inputs = inputs_of(own)
    torch.testing.assert_close(own(**inputs), plain(**inputs), rtol=1e-4, atol=1e-4)
