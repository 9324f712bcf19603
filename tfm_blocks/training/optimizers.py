"""The built-in optimizers, and several optimizers of one run as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from tfm_blocks.config.settings import Count, Fraction, RuleError
from tfm_blocks.devices import has_fast_bf16
from tfm_blocks.errors import run_error
from tfm_blocks.registry.optimizers import optimizer
from tfm_blocks.runs.checkpoints import OTHER_VERSION, OTHER_VERSION_HELP
from tfm_blocks.training.schedules import AtLeast0

Betas = Annotated[list[Fraction], Field(min_length=2, max_length=2)]


def _ends_in_a_number(eps: list[float | None]) -> list[float | None]:
    if eps[-1] is None:
        raise RuleError("must end in a number, the least root mean square of the weights", "write [null, 1e-3]")
    return eps


Epsilons = Annotated[list[float | None], Field(min_length=2, max_length=2), AfterValidator(_ends_in_a_number)]
Coefficients = Annotated[list[float], Field(min_length=3, max_length=3)]
Scale = Literal["0.2*max(out, in)**0.5", "max(1, out/in)**0.5", "(out/in)**0.5", "1"]
SPECTRAL = "(out/in)**0.5"
Groups = list[dict[str, Any]]


@optimizer("adam", source="Kingma and Ba 2015")
def adam(groups: Groups, *, betas: Betas = [0.9, 0.98], eps: AtLeast0 = 1e-9, weight_decay: AtLeast0 = 0.0) -> Adam:  # noqa: B006
    """Adam. Weight decay is added to the gradient."""
    return Adam(groups, 1.0, (betas[0], betas[1]), eps, fused=True)


@optimizer("adamw", source="Loshchilov and Hutter 2019", decoupled=True)
def adamw(groups: Groups, *, betas: Betas = [0.9, 0.98], eps: AtLeast0 = 1e-9, weight_decay: AtLeast0 = 0.01) -> AdamW:  # noqa: B006
    """Adam with decoupled weight decay."""
    return AdamW(groups, 1.0, (betas[0], betas[1]), eps, fused=True)


@optimizer("sgd", source="Sutskever et al. 2013")
def sgd(groups: Groups, *, momentum: Fraction = 0.9, nesterov: bool = False, weight_decay: AtLeast0 = 0.0) -> Optimizer:
    """Stochastic gradient descent with momentum. Weight decay is added to the gradient."""
    return SGD(groups, 1.0, momentum, weight_decay=weight_decay, nesterov=nesterov)


@optimizer("adafactor", source="Shazeer and Stern 2018", decoupled=True)
def adafactor(
    groups: Groups,
    *,
    beta2_decay: Annotated[float, Field(le=0)] = -0.8,
    eps: Epsilons = [None, 1e-3],  # noqa: B006
    d: Annotated[float, Field(ge=1)] = 1.0,
    weight_decay: AtLeast0 = 0.0,
) -> Optimizer:
    """Adam with factored second moments and without momentum: its state has the size of the sides of a matrix.

    The rate of a step is at most 1/√step, times the root mean square of the weights. `eps`: null is the precision of
    the numbers.
    """
    return Adafactor(groups, 1.0, beta2_decay, (eps[0], eps[1] or 0.0), d, weight_decay)


@optimizer("lion", source="Chen et al. 2023", decoupled=True)
class Lion(Optimizer):
    """The sign of the momentum: m ← β2 m + (1 - β2) g after w ← w - lr (sign(β1 m + (1 - β1) g) + weight_decay w)."""

    def __init__(self, groups: Groups, *, betas: Betas = [0.9, 0.99], weight_decay: AtLeast0 = 0.0) -> None:  # noqa: B006
        super().__init__(groups, {"lr": 1.0, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for weight, gradient in _with_gradients(group):
                momentum = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
                update = momentum.lerp(gradient, 1 - beta1).sign_()
                weight.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr)
                momentum.lerp_(gradient, 1 - beta2)


@optimizer("muon", source="Jordan et al. 2024", decoupled=True, roles=("matrix", "experts", "recurrent"))
class Muon(Optimizer):
    """Momentum whose singular values are set to 1, about, by the iteration of Newton and Schulz.

    Maps that are stacked in one weight, such as queries, keys and values, are orthogonalised separately, as are
    experts; with `per_head` also the maps of each attention head. `scale` multiplies the update of a map with `out`
    outputs and `in` inputs: with the default a rate and decay of AdamW apply (Liu et al. 2025); `max(1, out/in)**0.5`
    is the original. The iteration runs in bfloat16 on an accelerator that computes it natively, else in the precision
    of the weights.
    """

    def __init__(
        self,
        groups: Groups,
        *,
        momentum: Fraction = 0.95,
        nesterov: bool = True,
        scale: Scale = "0.2*max(out, in)**0.5",
        per_head: bool = False,
        iterations: Count = 5,
        coefficients: Coefficients = [3.4445, -4.775, 2.0315],  # noqa: B006
        weight_decay: AtLeast0 = 0.01,
    ) -> None:
        defaults: dict[str, Any] = {"lr": 1.0, "momentum": momentum, "nesterov": nesterov, "scale": scale}
        defaults |= {"iterations": iterations, "coefficients": coefficients, "weight_decay": weight_decay}
        super().__init__(groups, {**defaults, "parts": None})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for weight, gradient in _with_gradients(group):
                mean = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
                mean.lerp_(gradient, 1 - momentum)
                update = gradient.lerp(mean, momentum) if group["nesterov"] else mean
                weight.mul_(1 - lr * group["weight_decay"])
                weight.add_(_orthogonal_parts(update, group), alpha=-lr)


def _orthogonal_parts(update: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the scaled orthogonal factors of the maps that `update` stacks along its last axis but one.

    Of a sharded update, each process computes all of it and keeps its shard.
    """
    if isinstance(update, DTensor):
        whole = _orthogonal_parts(update.full_tensor(), group)
        return distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None)
    inputs, maps = update.shape[-1], list(torch.split(update, group["parts"] or update.shape[-2], -2))
    for outputs in {map.shape[-2] for map in maps}:
        places = [place for place, map in enumerate(maps) if map.shape[-2] == outputs]
        stack = torch.stack([maps[place] for place in places])
        factors = orthogonal_factors(stack.flatten(0, -3), group["iterations"], group["coefficients"])
        ratio = outputs / inputs
        squares = {"0.2*max(out, in)**0.5": 0.04 * max(outputs, inputs), "max(1, out/in)**0.5": max(1, ratio)}
        factors.mul_(math.sqrt({**squares, "(out/in)**0.5": ratio, "1": 1.0}[group["scale"]]))
        for place, factor in zip(places, factors.view_as(stack), strict=True):
            maps[place] = factor
    return torch.cat(maps, -2)


def orthogonal_factors(x_MOI: Tensor, iterations: int, coefficients: Sequence[float]) -> Tensor:
    """Return the orthogonal factor of each matrix, up to singular values of about 0.5 to 1.5: y_MOI.

    The iteration is x ← a x + (b A + c A²) x with A = x x^T, as in `torch.optim.Muon`, for several matrices at once.
    """
    a, b, c = coefficients
    x = x_MOI.bfloat16() if has_fast_bf16(x_MOI.device.type) else x_MOI
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(x_MOI.dtype)


def _with_gradients(group: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    return [(weight, weight.grad) for weight in group["params"] if weight.grad is not None]


def expect_equal_groups(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise RunError if the state in a checkpoint has groups of other numbers of weights than the optimizer."""
    both = state["param_groups"], optimizer.param_groups
    saved, own = ([len(group["params"]) for group in groups] for groups in both)
    if saved != own:
        rule = f"groups the weights differently from the checkpoint, which {OTHER_VERSION}"
        raise run_error("optimizer", rule, OTHER_VERSION_HELP)


class JointOptimizer(Optimizer):
    """Several optimizers with one state and one list of parameter groups, which is one optimizer to its users.

    If `found_inf` is not 0, a step does nothing; reading it waits for the device. In a group with a `cautious_decay`,
    a step subtracts lr · cautious_decay · w from the weights w that the step itself makes smaller.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = list(members)
        self.found_inf: Tensor | None = None
        super().__init__([group for member in members for group in member.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the members use the groups and the state of this optimizer."""
        groups = iter(self.param_groups)
        for member in self.members:
            member.param_groups = [next(groups) for _ in member.param_groups]
            member.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure() if closure else None
        if self.found_inf is not None and self.found_inf.item():
            return loss
        cautious = [group for group in self.param_groups if group.get("cautious_decay")]
        before = [(group, weight, weight.clone()) for group in cautious for weight, _ in _with_gradients(group)]
        for member in self.members:
            member.step()
        for group, weight, old in before:
            shrinks = (old - weight).mul_(old) >= 0
            weight.sub_(old.mul_(shrinks), alpha=group["lr"] * group["cautious_decay"])
        return loss
