"""Losses of positions, in chunks: label-smoothed cross entropy, z-loss, and the divergence from a teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tfm_blocks.devices import without_autocast

Head = Callable[[Tensor], Tensor]


class Sums(NamedTuple):
    """Sums over positions. `total` is differentiable: the weighted sum of the other losses.

    `nll` is -log p(label), and `correct` the number of labels with the largest logit. `squares` are log² Z for z-loss,
    `loss` the smoothed loss, and `divergence` the divergence from a teacher, times T².
    """

    total: Tensor
    nll: Tensor
    correct: Tensor
    squares: Tensor
    loss: Tensor
    divergence: Tensor


class Lesson(NamedTuple):
    """The distribution that a model learns from its teacher. `logits` are the teacher's, at a slice of the positions.

    It is the softmax of logits / `temperature`, over the ids from `first` on.
    """

    logits: Callable[[slice], Tensor]
    temperature: float
    first: int


class LossWeights(NamedTuple):
    """The weights of the smoothed loss, of z-loss, and of the divergence from a teacher."""

    ce: float = 1.0
    z_loss: float = 0.0
    kl: float = 0.0


PLAIN = LossWeights()


def smoothed_loss(
    head: Head,
    parameters: Sequence[Tensor],
    x_ND: Tensor,
    labels_N: Tensor,
    *,
    smoothing: float,
    chunk: int,
    first: int = 0,
    weights: LossWeights = PLAIN,
    weights_N: Tensor | None = None,
    lesson: Lesson | None = None,
) -> Sums:
    """Return the sums of the losses over N.

    z-loss is log² Z, for Z the sum of the exponentials of the logits (Chowdhery et al. 2022, section 5), which keeps
    logits from drifting. The divergence from a teacher is T² KL(p ‖ q), for the distributions p of the teacher and q of
    the model at temperature T (Hinton et al. 2015, section 2). `weights_N` are factors of the smoothed loss, z-loss
    and -log p. With gradients, a label that shares the largest logit counts. Without them, as in validation, it counts
    only if it is the first token with this logit, as in `position_losses`.

    Each chunk runs forward and backward before the next begins, so that its logits stay in the cache and memory never
    holds the logits of all positions. `head` maps x_ND -> logits_NV and uses only `parameters`. Sums are float32 or
    wider. Labels are smoothed as in `F.cross_entropy`: mass 1 - s on the label, and s spread over all V tokens. The ids
    below `first` have logits of -inf, and no part of s.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if torch.is_grad_enabled() and (x_ND.requires_grad or trainable):
        options = smoothing, first, chunk, weights, weights_N, lesson
        return Sums(*_Fused.apply(head, labels_N, options, x_ND, *trainable))  # type: ignore[no-untyped-call]
    totals = _zeros(x_ND)
    for rows in _chunks(len(labels_N), chunk):
        logits_NV = head(x_ND[rows])
        weights_n = None if weights_N is None else weights_N[rows]
        sums, *_ = _cross_entropy(logits_NV, labels_N[rows], smoothing, first, weights, weights_n)
        sums = sums._replace(correct=(logits_NV.argmax(1) == labels_N[rows]).sum())
        if lesson is not None:
            sums = _taught(sums, logits_NV, lesson, rows, weights.kl)[0]
        _add(totals, sums)
    return totals


def position_losses(
    head: Head, x_ND: Tensor, labels_N: Tensor, *, smoothing: float, chunk: int, first: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the smoothed loss, -log p(label) and the most probable token of each position, without gradients."""
    chunks = _chunks(max(1, len(labels_N)), chunk)  # an idle rank has no labels
    parts = []
    for rows in chunks:
        logits_NV = head(x_ND[rows])
        log_p_NV = torch.log_softmax(logits_NV, 1, dtype=torch.promote_types(logits_NV.dtype, torch.float32))
        label_N = log_p_NV.gather(1, labels_N[rows][:, None])[:, 0]
        loss_N = -(1 - smoothing) * label_N - smoothing * log_p_NV[:, first:].mean(1)
        parts.append((loss_N, -label_N, logits_NV.argmax(1)))
    loss_N, nll_N, best_N = (torch.cat(values) for values in zip(*parts, strict=True))
    return loss_N, nll_N, best_N


@torch.no_grad()
def sample_ids(head: Head, x_ND: Tensor, uniforms_N: Tensor, *, chunk: int) -> Tensor:
    """Return a token of each position, drawn from the softmax of its logits: the first whose cumulated p exceeds u."""
    ids = []
    for rows in _chunks(max(1, len(x_ND)), chunk):  # an idle rank has no positions
        cumulated_NV = torch.softmax(head(x_ND[rows]).float(), 1).cumsum(1)
        limit_N1 = uniforms_N[rows, None] * cumulated_NV[:, -1:]
        ids.append(torch.searchsorted(cumulated_NV, limit_N1, right=True)[:, 0].clamp(max=cumulated_NV.shape[1] - 1))
    return torch.cat(ids)


class _Fused(torch.autograd.Function):
    """The forward pass computes the gradients of x and the parameters; the backward pass scales them in place, once."""

    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        labels_N: Tensor,
        options: tuple[float, int, int, LossWeights, Tensor | None, Lesson | None],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        smoothing, first, chunk, weights, weights_N, lesson = options
        x_ND, *parameters = (tensor.detach() for tensor in tensors)
        slope_ND = torch.zeros_like(x_ND)
        slopes: Sequence[Tensor] = []
        totals = _zeros(x_ND)
        for rows in _chunks(len(labels_N), chunk):
            with torch.enable_grad():
                x_nD = x_ND[rows].detach().requires_grad_()
                logits_nV = head(x_nD)
            settings = smoothing, first, weights, None if weights_N is None else weights_N[rows]
            sums, slope_nV = _cross_entropy_and_grad(logits_nV.detach(), labels_N[rows], *settings)
            if lesson is not None:
                sums, taught_nV = _taught(sums, logits_nV.detach(), lesson, rows, weights.kl)
                slope_nV[:, lesson.first :] += taught_nV.to(slope_nV.dtype)
            read = [x_nD, *tensors[1:]]  # a plug-in may not use them all
            with without_autocast(x_ND.device):
                gradients = torch.autograd.grad(logits_nV, read, slope_nV, allow_unused=True, materialize_grads=True)
            slope_ND[rows] = gradients[0]
            pairs = zip(slopes, gradients[1:], strict=True)
            slopes = [total.add_(part) for total, part in pairs] if slopes else gradients[1:]
            _add(totals, sums)
        ctx.gradients = [slope_ND, *(slopes or (torch.zeros_like(parameter) for parameter in parameters))]
        ctx.mark_non_differentiable(*totals[1:])
        return tuple(totals)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        del ctx.gradients
        return (None, None, None, *(gradient.mul_(scale) for gradient in gradients))


def _cross_entropy_and_grad(
    logits_NV: Tensor, labels_N: Tensor, smoothing: float, first: int, weights: LossWeights, weights_N: Tensor | None
) -> tuple[Sums, Tensor]:
    """Return the sums, and the gradient of the total by the logits: softmax minus the smoothed label, and of z-loss."""
    sums, slope_NV, normaliser_N = _cross_entropy(logits_NV, labels_N, smoothing, first, weights, weights_N)
    weight_N1 = weights.ce if weights_N is None else weights.ce * weights_N[:, None]
    if weights.z_loss or weights.ce != 1 or weights_N is not None:
        slope_NV.mul_(weight_N1 + 2 * weights.z_loss * weigh(normaliser_N, weights_N)[:, None])
    slope_NV.sub_(weight_N1 * (smoothing / (logits_NV.shape[1] - first)))
    slope_NV.scatter_add_(1, labels_N[:, None], weight_N1 * slope_NV.new_full((len(labels_N), 1), smoothing - 1))
    return sums, slope_NV.to(logits_NV.dtype)


def _cross_entropy(
    logits_NV: Tensor, labels_N: Tensor, smoothing: float, first: int, weights: LossWeights, weights_N: Tensor | None
) -> tuple[Sums, Tensor, Tensor]:
    """Return the sums, the softmax p_NV in float32 or wider, and log Z of each position.

    On CPUs `amax`, `sum` and `softmax` are vectorised, but `argmax` and `exp` after `log_softmax` cost more than
    softmax itself. The largest probability is at least 1/V, so the log-normaliser computed from it is exact.
    """
    vocab = logits_NV.shape[1] - first
    wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    p_NV = torch.softmax(wide_NV, 1)
    best_N = wide_NV.amax(1)
    normaliser_N = best_N - p_NV.amax(1).log()
    label_N = wide_NV.gather(1, labels_N[:, None])[:, 0]
    nll = weigh(normaliser_N - label_N, weights_N).sum()
    spread = weigh(normaliser_N, weights_N).sum() - weigh(wide_NV[:, first:], weights_N).sum() / vocab
    loss, squares = (1 - smoothing) * nll + smoothing * spread, weigh(normaliser_N.square(), weights_N).sum()
    total = loss if weights.ce == 1 else weights.ce * loss
    total = total + weights.z_loss * squares if weights.z_loss else total
    return Sums(total, nll, (label_N >= best_N).sum(), squares, loss, torch.zeros_like(loss)), p_NV, normaliser_N


def _taught(sums: Sums, logits_NV: Tensor, lesson: Lesson, rows: slice, weight: float) -> tuple[Sums, Tensor]:
    """Add the divergence from a teacher to the sums; also return its weighted gradient by the logits from `first` on.

    The gradient of T² KL(p ‖ q) is T (q - p).
    """
    log_p_NV, log_q_NV = (
        torch.log_softmax(z_NV[:, lesson.first :].to(sums.total.dtype) / lesson.temperature, 1)
        for z_NV in (lesson.logits(rows), logits_NV)
    )
    p_NV, scale = log_p_NV.exp(), lesson.temperature**2
    divergence = scale * (p_NV * (log_p_NV - log_q_NV)).sum()
    slope_NV = (log_q_NV.exp() - p_NV).mul_(weight * lesson.temperature)
    return sums._replace(total=sums.total + weight * divergence, divergence=divergence), slope_NV


def weigh(x_N: Tensor, weights_N: Tensor | None) -> Tensor:
    """Return the products of the first axis and the weights."""
    return x_N if weights_N is None else x_N * weights_N.view(-1, *(1,) * (x_N.dim() - 1))


def chunk_size(x_ND: Tensor) -> int:
    """Return the number of positions of a chunk: few on a CPU, for its cache, and else many, for large products.

    3,072 positions of width 128, 10,000 tokens, float32, one core: chunks of 64 take 353 ms, of 256 310 ms, of 1,024
    406 ms; `F.cross_entropy` with its backward takes 550 ms. Each chunk also adds V·D floats to the weights' gradient,
    so it should have at least as many logits.
    """
    return max(256, x_ND.shape[1]) if x_ND.device.type == "cpu" else 4096


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, length, chunk)]


def _zeros(x_ND: Tensor) -> Sums:
    wide = torch.float64 if x_ND.dtype == torch.float64 else torch.float32
    dtypes = [torch.int64 if name == "correct" else wide for name in Sums._fields]
    return Sums(*(torch.zeros((), dtype=dtype, device=x_ND.device) for dtype in dtypes))


def _add(totals: Sums, parts: Sums) -> None:
    for total, part in zip(totals, parts, strict=True):
        total.add_(part)


def backward_scale(loss: Tensor, scale: float) -> Tensor:
    """Return `scale`, or NaN if the loss is not finite, so that the gradient becomes NaN on all ranks."""
    return 0 * loss.detach() + scale
