"""The affine map with the project's initialisation, and a dropout that draws few random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

Product = Callable[[Tensor], Tensor]
"""x_NI -> x W^T + b: y_NO, where N stands for any leading axes. A product for decoding on the CPU has no gradients."""


class StackedMaps(nn.Module):
    """Linear maps of the same input, which are stacked along the output axis of W. `parts` are their widths.

    W is initialised Xavier-uniform (Glorot and Bengio 2010, equation 16), each part by its own fan; biases with 0. The
    parts `depth_scaled` lie on the path to the residual, so deepnorm scales their initial values down. A map whose
    weight is read without `forward`, as by a convolution, has `selectable` False. `round_weight` and `round_input`
    round W and x in the forward pass.
    """

    weight: Tensor
    selectable = True

    def __init__(self, *arguments: Any, parts: Sequence[int], depth_scaled: Sequence[int]) -> None:
        super().__init__(*arguments)
        self.parts, self.depth_scaled = list(parts), tuple(depth_scaled)
        self.adapter: LowRank | None = None
        self.round_weight: Callable[[Tensor, list[int]], Tensor] | None = None
        self.round_input: Callable[[Tensor], Tensor] | None = None

    def adapt(self, parts: Sequence[int], rank: int, scale: float, dropout: float) -> None:
        """Add an adapter to some of the `parts`."""
        *stack, _, inputs = self.weight.shape
        self.adapter = LowRank(inputs, self.parts, parts, rank, scale, dropout, stack)

    def rounded_input(self, x: Tensor) -> Tensor:
        """Return x, rounded if the activations are quantised. Rounding a rounded x has no effect."""
        return x if self.round_input is None else self.round_input(x)

    def rounded_weight(self) -> Tensor:
        """Return W, rounded if the weights are quantised."""
        return self.weight if self.round_weight is None else self.round_weight(self.weight, self.parts)

    def merged_weight(self) -> Tensor:
        """Return the rounded W plus the adapter's product of matrices."""
        return self.rounded_weight() if self.adapter is None else self.rounded_weight() + self.adapter.product()

    def initialise(self, name: str, generator: Generator) -> None:
        if name.endswith("bias"):
            nn.init.zeros_(self.get_parameter(name))
        for part in chain.from_iterable(self._matrices()) if name == "weight" else ():
            nn.init.xavier_uniform_(part, generator=generator)

    def shrink(self, factor: float) -> None:
        """Multiply the initial values of the parts `depth_scaled`."""
        for parts in self._matrices():
            for part in self.depth_scaled:
                parts[part].mul_(factor)

    def _matrices(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the parts of W, or of the W of each expert."""
        for weight_OI in self.weight.view(-1, *self.weight.shape[-2:]):
            yield torch.split(weight_OI, self.parts)


class Linear(StackedMaps, nn.Linear):
    """x W^T + b. `parts` stacks several maps of the same input: a number of equal maps, or their widths.

    `heads` is the number of attention heads in each part.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        parts: int | Sequence[int] = 1,
        bias: bool = True,
        depth_scaled: Sequence[int] = (),
        heads: Sequence[int] = (),
    ) -> None:
        widths = [outputs // parts] * parts if isinstance(parts, int) else parts
        super().__init__(inputs, outputs, bias, parts=widths, depth_scaled=depth_scaled)
        self.heads = tuple(heads) or (1,) * len(self.parts)
        self.packed: Product | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.rounded_input(x)
        if self.packed is not None:
            return self.packed(x)
        y = F.linear(x, self.rounded_weight(), self.bias)
        return y if self.adapter is None else y + self.adapter(x, F.linear)

    def pack(self, make: Callable[[Tensor, Tensor | None], Product]) -> None:
        """Let `forward` call the product that `make` returns for the weight and bias, until `packed` is set to None."""
        self.packed = make(self.merged_weight().detach(), None if self.bias is None else self.bias.detach())

    def reset_parameters(self) -> None:
        """Do nothing: `initialise` fills the parameters, each from its own generator."""


class PartlyBiased(Linear):
    """x W^T + b, where one of the stacked maps, at the place `unbiased`, has no bias: x_NI -> y_NO."""

    weight_roles: ClassVar = {"part_bias": "bias"}

    def __init__(self, inputs: int, parts: Sequence[int], unbiased: int, **options: Any) -> None:
        super().__init__(inputs, sum(parts), parts=parts, bias=False, **options)
        self.unbiased = unbiased
        self.part_bias = nn.Parameter(torch.empty(sum(parts) - parts[unbiased]))

    def forward(self, x: Tensor) -> Tensor:
        first = sum(self.parts[: self.unbiased])
        zeros = self.part_bias.new_zeros(self.parts[self.unbiased])
        return super().forward(x) + torch.cat((self.part_bias[:first], zeros, self.part_bias[first:]))


class LowRank(nn.Module):
    """scale · B A dropout(x), the adapter of a linear map: x_NI -> y_NO. Source: Hu et al. 2021 (LoRA), section 4.1.

    The map stacks maps of the widths `widths`. The maps `parts` of them have separate A and B, and the others have no
    adapter. `stack` are the leading axes of the weight, such as the number of experts. As in the package peft, A is
    initialised uniformly within ±1/√I, and B with 0.
    """

    weight_roles: ClassVar = {"a": "adapter", "b": "adapter"}

    def __init__(
        self,
        inputs: int,
        widths: Sequence[int],
        parts: Sequence[int],
        rank: int,
        scale: float,
        dropout: float,
        stack: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.widths, self.parts, self.rank, self.scale = list(widths), list(parts), rank, scale
        self.dropout = Dropout(dropout)
        self.a = nn.Parameter(torch.empty(*stack, len(self.parts) * rank, inputs))
        self.b = nn.Parameter(torch.empty(*stack, sum(self.widths[part] for part in self.parts), rank))

    def initialise(self, name: str, generator: Generator) -> None:
        if name == "b":
            nn.init.zeros_(self.b)
        else:
            bound = 1 / math.sqrt(self.a.shape[-1])  # kaiming_uniform_ with a = √5, for any number of leading axes
            nn.init.uniform_(self.a, -bound, bound, generator=generator)

    def forward(self, x: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the term that the adapter adds; `product` multiplies rows by a matrix like this module's."""
        h = product(self.dropout(x), self.a)
        return self._join(map(product, torch.split(h, self.rank, -1), self._split_b()), -1)

    def product(self) -> Tensor:
        """Return scale · B A in the shape of the map's weight."""
        return self._join(map(torch.matmul, self._split_b(), torch.split(self.a, self.rank, -2)), -2)

    def _split_b(self) -> Sequence[Tensor]:
        return torch.split(self.b, [self.widths[part] for part in self.parts], -2)

    def _join(self, chosen: Iterable[Tensor], axis: int) -> Tensor:
        """Stack the products of the parts along an axis, with zeros for the other maps, and scale them."""
        products = dict(zip(self.parts, chosen, strict=True))
        zero = torch.zeros_like(products[self.parts[0]].narrow(axis, 0, 1))
        of_all = [products.get(part, zero.repeat_interleave(n, axis)) for part, n in enumerate(self.widths)]
        return (torch.cat(of_all, axis) if len(of_all) > 1 else of_all[0]) * self.scale


def fill_normal(module: nn.Module, name: str, generator: Generator) -> None:
    """Initialise with N(0, 1/width), where the width is the last axis: an embedding times √width has unit variance."""
    weight = module.get_parameter(name)
    nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[-1]), generator=generator)


def fill_zeros(module: nn.Module, name: str, generator: Generator) -> None:
    """Initialise with 0."""
    nn.init.zeros_(module.get_parameter(name))


def fill_ones(module: nn.Module, name: str, generator: Generator) -> None:
    """Initialise with 1."""
    nn.init.ones_(module.get_parameter(name))


class ZeroLinear(Linear):
    """A linear map whose weights start at 0."""

    initialise = fill_zeros


LEVELS = 2**16  # a rate is rounded to 1/65536


class Dropout(nn.Module):
    """In training, set each element to 0 with probability `rate`, and divide the others by 1 - rate; any shape.

    On the CPU, torch draws a random number for each element, one after the other. This draws 64 bits for four elements.
    Source: Srivastava et al. 2014.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def extra_repr(self) -> str:
        return f"{self.rate}"

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.rate)
        dropped = min(round(self.rate * LEVELS), LEVELS - 1)
        levels = levels_like(x) if torch.compiler.is_compiling() else random_levels(x.numel()).view(x.shape)
        kept = (levels >= dropped - LEVELS // 2).view(torch.uint8)  # uint8 converts faster than bool
        return x * kept.to(x.dtype).mul_(LEVELS / (LEVELS - dropped))


def random_levels(count: int) -> Tensor:
    """Draw `count` uniform int16 values from torch's generator."""
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    return words.view(torch.int16)[:count]


@torch.library.custom_op("tfm_blocks::levels_like", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def levels_like(x: Tensor) -> Tensor:
    """Draw a level for each element, as a custom operator because the compiler cannot view int64 as int16."""
    return random_levels(x.numel()).view(x.shape)


@levels_like.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.int16, device=x.device)
