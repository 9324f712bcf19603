from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tfm_blocks.blocks.layers.banded import banded_attention

Triple = tuple[Tensor, Tensor, Tensor]


def random_inputs(batch: int, length: int, heads: int = 2, width: int = 5) -> Triple:
    generator = torch.Generator().manual_seed(length)
    q, k, v = torch.randn(3, batch, heads, length, width, generator=generator)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def kept(length: int, *lengths: int) -> Tensor:
    return torch.arange(length) < torch.tensor(lengths)[:, None]


def allowed_pairs(keep_BT: Tensor, r: int, causal: bool) -> Tensor:
    """Return the whole n × n mask by definition: B1TS."""
    T = keep_BT.shape[1]
    distance_TS = torch.arange(T) - torch.arange(T)[:, None]
    first, last = (-(r - 1), 0) if causal else (-(r // 2), (r - 1) // 2)
    band_TS = (distance_TS >= first) & (distance_TS <= last)
    return ((band_TS & keep_BT[:, None]) | (distance_TS == 0))[:, None]


def assert_equals_dense(inputs: Triple, keep_BT: Tensor, r: int, causal: bool) -> None:
    dense = functional.scaled_dot_product_attention(*inputs, attn_mask=allowed_pairs(keep_BT, r, causal))
    banded = banded_attention(*inputs, keep_BT, r=r, causal=causal, dropout=0.0)
    weight = torch.randn(dense.shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(banded, dense, rtol=0, atol=1e-5)
    expected = torch.autograd.grad(dense, inputs, weight)
    torch.testing.assert_close(torch.autograd.grad(banded, inputs, weight), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("r", [1, 7, 65, *(pytest.param(r, marks=pytest.mark.grid) for r in (2, 3, 64, 128, 400))])
@pytest.mark.parametrize(
    "n", [1, 33, 128, 257, *(pytest.param(n, marks=pytest.mark.grid) for n in (2, 31, 64, 129, 400))]
)
def test_output_and_gradients_equal_dense_attention_under_the_band(n: int, r: int, causal: bool) -> None:
    keep_BT = kept(n, n, -(-n // 2), 1)  # whole, half padding, one word
    assert_equals_dense(random_inputs(3, n), keep_BT, r, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_equals_dense_attention_with_padded_gaps_and_padded_sequences(causal: bool) -> None:
    keep_BT = torch.rand(3, 150, generator=torch.Generator().manual_seed(1)) < 0.5
    keep_BT[1] = False
    assert_equals_dense(random_inputs(3, 150), keep_BT, 70, causal)


def test_queries_keys_and_values_may_be_views_of_one_projection() -> None:
    qkv = torch.randn(2, 90, 3, 4, 6, requires_grad=True)
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    assert_equals_dense((q, k, v), kept(90, 90, 41), 16, False)


@pytest.mark.parametrize("causal", [False, True])
def test_padded_tail_longer_than_the_band_is_finite_and_gets_finite_gradients(causal: bool) -> None:
    inputs = random_inputs(2, 300)
    y = banded_attention(*inputs, kept(300, 5, 300), r=8, causal=causal, dropout=0.0)
    assert y.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.sum(), inputs))


def test_other_sequences_of_the_batch_and_padding_leave_the_output_bit_for_bit() -> None:
    q, k, v = random_inputs(3, 100)
    keep_BT = kept(100, 100, 60, 100)
    together = banded_attention(q, k, v, keep_BT, r=20, causal=False, dropout=0.0)
    others = torch.tensor([1.0, 0.0, 1.0])[:, None, None, None] * 7
    padding = (~keep_BT)[:, None, :, None] * 9
    moved = banded_attention(q, k + others + padding, v + others + padding, keep_BT, r=20, causal=False, dropout=0.0)
    assert torch.equal(together[1, :, :60], moved[1, :, :60])


def test_dropout_drops_weights_and_keeps_their_mean() -> None:
    n, r = 4000, 10
    keep_BT = kept(n, n)
    q = torch.zeros(1, 1, n, 1)
    y = banded_attention(q, q, torch.ones(1, 1, n, 1), keep_BT, r=r, causal=True, dropout=0.5)
    dropped = y[0, 0, r:, 0] * r / 2  # how many of the r equal weights were kept
    torch.testing.assert_close(dropped, dropped.round())
    assert 0 < dropped.std() < r
    assert abs(y.mean() - 1) < 0.05


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest storage that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


def largest_tensor(n: int, r: int, dropout: float = 0.0) -> int:
    inputs = random_inputs(1, n, heads=2, width=8)
    with LargestTensor() as largest:
        y = banded_attention(*inputs, kept(n, n), r=r, causal=False, dropout=dropout)
        torch.autograd.grad(y, inputs, torch.ones_like(y))
    return largest.elements


def test_no_tensor_of_16384_positions_reaches_n_squared_elements() -> None:
    n, r = 16384, 128
    assert n * r <= largest_tensor(n, r) <= 2 * n * r < n * n


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_largest_tensor_grows_linearly(dropout: float) -> None:
    assert largest_tensor(4096, 32, dropout) <= 2 * largest_tensor(2048, 32, dropout)


class Banded(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep_BT: Tensor) -> Tensor:
        return banded_attention(q, k, v, keep_BT, r=12, causal=True, dropout=0.0)


@pytest.mark.grid
def test_compiles_to_one_graph_with_its_gradients() -> None:
    torch.compiler.reset()
    compiled = torch.compile(Banded(), fullgraph=True, backend="eager")
    for n in (40, 75, 91):
        inputs, keep_BT = random_inputs(2, n), kept(n, n, 30)
        plain, traced = Banded()(*inputs, keep_BT), compiled(*inputs, keep_BT)
        torch.testing.assert_close(traced, plain)
        expected = torch.autograd.grad(plain.sum(), inputs)
        torch.testing.assert_close(torch.autograd.grad(traced.sum(), inputs), expected)


@pytest.mark.grid
def test_exports_with_a_fixed_length() -> None:
    inputs = (*random_inputs(2, 45), kept(45, 45, 30))
    torch.testing.assert_close(torch.export.export(Banded(), inputs).module()(*inputs), Banded()(*inputs))


def test_exports_with_a_free_number_of_whole_blocks() -> None:
    free = 32 * torch.export.Dim("blocks", min=2, max=512)
    inputs = (*random_inputs(2, 128), kept(128, 128, 30))
    shapes = ({2: free}, {2: free}, {2: free}, {1: free})
    exported = torch.export.export(Banded(), inputs, dynamic_shapes=shapes).module()
    for n in (64, 96, 320):
        other = (*random_inputs(2, n), kept(n, n, 1))
        torch.testing.assert_close(exported(*other), Banded()(*other))


def test_runs_without_data_on_the_meta_device() -> None:
    q = torch.empty(2, 3, 77, 5, device="meta", requires_grad=True)
    y = banded_attention(q, q, q, torch.ones(2, 77, dtype=torch.bool, device="meta"), r=9, causal=False, dropout=0.1)
    y.sum().backward()
    assert y.shape == q.shape and q.grad is not None and q.grad.shape == q.shape


def test_bf16_autocast_stays_near_fp32() -> None:
    inputs, keep_BT = random_inputs(2, 100), kept(100, 100, 60)
    exact = banded_attention(*inputs, keep_BT, r=16, causal=False, dropout=0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = banded_attention(*inputs, keep_BT, r=16, causal=False, dropout=0.0)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=0, atol=0.05)
    gradients = torch.autograd.grad(y.float().sum(), inputs)
    torch.testing.assert_close(gradients, torch.autograd.grad(exact.sum(), inputs), rtol=0, atol=0.1)


def test_gradients_agree_with_finite_differences_to_second_order() -> None:
    inputs = tuple(part.detach().double().requires_grad_() for part in random_inputs(1, 6, heads=1, width=2))
    keep_BT = kept(6, 4)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return banded_attention(q, k, v, keep_BT, r=3, causal=False, dropout=0.0)

    assert torch.autograd.gradcheck(attend, inputs)
    assert torch.autograd.gradgradcheck(attend, inputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("r", [3, 40, 128])
@pytest.mark.parametrize("n", [20, 64, 400])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_non_finite_values_stay_in_their_sequence_forward_and_backward(
    n: int, r: int, causal: bool, wrong: float
) -> None:
    inputs, keep_BT = random_inputs(3, n), kept(n, n, n - 5, n)
    plain = banded_attention(*inputs, keep_BT, r=r, causal=causal, dropout=0.0)
    plain_grads = torch.autograd.grad(plain.sum(), inputs)
    poison = torch.zeros_like(inputs[0])
    poison[1] = wrong
    y = banded_attention(*(part + poison for part in inputs), keep_BT, r=r, causal=causal, dropout=0.0)
    assert torch.equal(y[[0, 2]], plain[[0, 2]]) and not y[1].isfinite().any()
    for grad, plain_grad in zip(torch.autograd.grad(y.sum(), inputs), plain_grads, strict=True):
        assert torch.equal(grad[[0, 2]], plain_grad[[0, 2]])
