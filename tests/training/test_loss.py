from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tfm_blocks.training.loss import LossWeights, position_losses, smoothed_loss

N, D, V = 23, 7, 13


class Tied(nn.Module):
    """A matrix that is both the embedding and, within its head, the output."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(V, D, generator=generator).to(dtype))
        self.bias = nn.Parameter(torch.randn(V, generator=generator).to(dtype))
        self.ids_N = torch.randint(V, (N,), generator=generator)
        self.labels_N = torch.randint(V, (N,), generator=generator)

    def trunk(self) -> Tensor:
        return torch.tanh(F.embedding(self.ids_N, self.weight))

    def head(self, x_ND: Tensor) -> Tensor:
        return F.linear(x_ND, self.weight, self.bias)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, [self.weight, self.bias]))


def ours(model: Tied, smoothing: float, chunk: int) -> tuple[Tensor, ...]:
    return smoothed_loss(
        model.head, [model.weight, model.bias], model.trunk(), model.labels_N, smoothing=smoothing, chunk=chunk
    )


@pytest.mark.parametrize("chunk", [1, 5, N, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_values_and_gradients_with_tied_weights_match_torch_cross_entropy(
    chunk: int, smoothing: float, dtype: torch.dtype, tolerance: float
) -> None:
    model = Tied(dtype)
    loss, nll, correct, *_ = ours(model, smoothing, chunk)
    logits_NV = model.head(model.trunk())
    expected = F.cross_entropy(logits_NV, model.labels_N, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        nll, F.cross_entropy(logits_NV, model.labels_N, reduction="sum"), rtol=tolerance, atol=0.0
    )
    assert correct.item() == (logits_NV.argmax(1) == model.labels_N).sum().item()
    for grad, theirs in zip(model.gradients(loss / 3), model.gradients(expected / 3), strict=True):
        torch.testing.assert_close(grad, theirs, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_z_loss_is_the_weighted_square_of_the_log_of_the_sum_of_exponentials(
    chunk: int, smoothing: float, weighted: bool
) -> None:
    model = Tied(torch.float64)
    weights_N = torch.linspace(0.5, 3, N, dtype=torch.float64) if weighted else torch.ones(N, dtype=torch.float64)
    sums = smoothed_loss(
        model.head,
        [model.weight, model.bias],
        model.trunk(),
        model.labels_N,
        smoothing=smoothing,
        chunk=chunk,
        weights=LossWeights(z_loss=0.03),
        weights_N=weights_N if weighted else None,
    )
    logits_NV = model.head(model.trunk())
    expected_N = F.cross_entropy(logits_NV, model.labels_N, label_smoothing=smoothing, reduction="none")
    expected, z = weights_N @ expected_N, weights_N @ logits_NV.logsumexp(1).square()
    torch.testing.assert_close([sums.squares, sums.loss, sums.total], [z, expected, expected + 0.03 * z])
    for grad, theirs in zip(model.gradients(sums.total), model.gradients(expected + 0.03 * z), strict=True):
        torch.testing.assert_close(grad, theirs)


def test_without_gradients_the_sums_are_the_same() -> None:
    model = Tied(torch.float64)
    with_gradients = ours(model, 0.1, 5)
    with torch.no_grad():
        without = ours(model, 0.1, 5)
    assert [one.item() for one in with_gradients] == [one.item() for one in without]
    assert not without[0].requires_grad


def test_a_label_that_shares_the_largest_logit_counts_as_in_the_test_if_it_is_the_first() -> None:
    labels_N, x_ND = torch.tensor([0, 1, 2, 0]), torch.ones(4, D)
    options: dict[str, Any] = {"smoothing": 0.0, "chunk": 3}

    def head(x_nD: Tensor) -> Tensor:
        return torch.zeros(len(x_nD), V)

    correct = smoothed_loss(head, [], x_ND, labels_N, **options).correct
    _, _, best_N = position_losses(head, x_ND, labels_N, **options)
    assert correct.item() == (best_N == labels_N).sum().item() == 2


class Operators(TorchDispatchMode):
    """Record the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_without_gradients_no_gradient_of_the_logits_is_computed() -> None:
    logits_NV, labels_N = torch.randn(3, 7), torch.tensor([1, 4, 6])
    with torch.no_grad(), Operators() as validation:
        smoothed_loss(lambda x: x, [], logits_NV, labels_N, smoothing=0.1, chunk=2)
    with Operators() as training:
        smoothed_loss(lambda x: x, [], logits_NV.requires_grad_(), labels_N, smoothing=0.1, chunk=2)
    assert training.names - validation.names >= {"scatter_add_", "sub_"}


def test_no_positions_give_zero_loss_and_zero_gradients() -> None:
    model = Tied(torch.float32)
    x_ND = torch.zeros(0, D, requires_grad=True)
    loss, nll, correct, *_ = smoothed_loss(
        model.head, [model.weight, model.bias], x_ND, model.labels_N[:0], smoothing=0.1, chunk=4
    )
    assert (loss.item(), nll.item(), correct.item()) == (0, 0, 0)
    gradients = torch.autograd.grad(loss, [x_ND, model.weight, model.bias])
    assert all(not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("chunk", [5, 100])
def test_a_parameter_that_the_head_does_not_use_gets_a_zero_gradient(chunk: int) -> None:
    model, unused = Tied(torch.float64), nn.Parameter(torch.ones(3))
    loss, *_ = smoothed_loss(
        model.head, [model.weight, unused], model.trunk(), model.labels_N, smoothing=0.1, chunk=chunk
    )
    expected = F.cross_entropy(model.head(model.trunk()), model.labels_N, label_smoothing=0.1, reduction="sum")
    grad, zero = torch.autograd.grad(loss, [model.weight, unused])
    torch.testing.assert_close(grad, torch.autograd.grad(expected, model.weight)[0])
    assert torch.equal(zero, torch.zeros(3))


def test_frozen_head_still_pulls_back_to_x() -> None:
    weight = torch.randn(V, D, dtype=torch.float64)
    x_ND = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    labels_N = torch.arange(N) % V
    loss, *_ = smoothed_loss(lambda x: F.linear(x, weight), [weight], x_ND, labels_N, smoothing=0.1, chunk=6)
    expected = F.cross_entropy(F.linear(x_ND, weight), labels_N, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(torch.autograd.grad(loss, x_ND), torch.autograd.grad(expected, x_ND))


def test_far_apart_logits_stay_exact() -> None:
    logits_NV = torch.tensor([[200.0, -200.0, 0.0]])
    loss, nll, *_ = smoothed_loss(lambda x: x, [], logits_NV, torch.tensor([1]), smoothing=0.1, chunk=1)
    expected = F.cross_entropy(logits_NV, torch.tensor([1]), label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)
    assert nll.item() == 400.0


def test_bfloat16_autocast_keeps_the_sums_and_gradients_near_those_of_float32() -> None:
    model = Tied(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, *_ = ours(model, 0.1, 5)
        gradients = model.gradients(loss)
    exact, *_ = ours(model, 0.1, 5)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.01, atol=0.0)
    for grad, theirs in zip(gradients, model.gradients(exact), strict=True):
        assert (grad - theirs).norm() < 0.02 * theirs.norm()


def test_a_head_that_computes_in_float32_under_autocast_has_float32_gradients() -> None:
    model = Tied(torch.float32)

    def head(x_ND: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(x_ND, model.weight, model.bias)

    options: dict[str, Any] = {"smoothing": 0.1, "chunk": 5}
    losses = []
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses.append(
                smoothed_loss(head, [model.weight, model.bias], model.trunk(), model.labels_N, **options).total
            )
    for grad, theirs in zip(*map(model.gradients, losses), strict=True):
        assert torch.equal(grad, theirs)


@pytest.mark.parametrize("chunk", [5, 100])
def test_losses_of_positions_match_torch_cross_entropy(chunk: int) -> None:
    model = Tied(torch.float64)
    loss_N, nll_N, best_N = position_losses(model.head, model.trunk(), model.labels_N, smoothing=0.1, chunk=chunk)
    logits_NV = model.head(model.trunk())
    for actual_N, smoothing in ((loss_N, 0.1), (nll_N, 0.0)):
        expected_N = F.cross_entropy(logits_NV, model.labels_N, label_smoothing=smoothing, reduction="none")
        torch.testing.assert_close(actual_N, expected_N)
    assert torch.equal(best_N, logits_NV.argmax(1))


def test_a_rank_without_positions_has_no_losses() -> None:
    model = Tied(torch.float32)
    losses = position_losses(model.head, model.trunk()[:0], model.labels_N[:0], smoothing=0.1, chunk=5)
    assert [len(one_N) for one_N in losses] == [0, 0, 0]


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_ids_without_a_logit_take_no_part_in_the_loss(smoothing: float) -> None:
    model, first = Tied(torch.float64), 2

    def head(x_ND: Tensor) -> Tensor:
        return F.pad(model.head(x_ND), (first, 0), value=-torch.inf)

    x_ND, parameters = model.trunk(), [model.weight, model.bias]
    options = {"smoothing": smoothing, "chunk": 5, "first": first}
    loss, *_ = smoothed_loss(head, parameters, x_ND, model.labels_N + first, **options)
    expected = F.cross_entropy(model.head(model.trunk()), model.labels_N, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.gradients(loss), model.gradients(expected))
    loss_N, _, _ = position_losses(head, x_ND, model.labels_N + first, **options)
    torch.testing.assert_close(loss_N.sum(), expected)
