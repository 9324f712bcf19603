"""Time the matrix products and the attention of a model on this CPU, in float32 and under autocast to bfloat16."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tfm_blocks.data.plan import Ranks
from tfm_blocks.layers.dot_product import dot_product_attention
from tfm_blocks.network.graph import Network
from tfm_blocks.training.data import PlannedCorpus

TOKENS = 1024  # of a micro-batch: enough for a product to reach its speed
WIDTH = 512  # of a weight: a wider one counts as several of this width
LIMIT = 0.5  # seconds after which no further round begins
ROUNDS = 3, 9  # the fewest and the most; the first one, in which kernels are compiled, does not count
PRECISIONS = ("fp32", "bf16")
PRODUCTS = {
    F.linear: F.linear,
    F.conv1d: F.conv1d,
    F.scaled_dot_product_attention: lambda q, k, v, mask=None, dropout=0.0, causal=False, scale=None: (
        dot_product_attention(q, k, v, mask, dropout=dropout, causal=causal, beta=scale)
    ),
    **{function: function for function in (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, torch.einsum)},
}


@dataclass(frozen=True)
class TensorShape:
    """The size and the type of a tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Return ones, in `dtype` and with a gradient if they are floats."""
        if not self.dtype.is_floating_point:
            return torch.ones(self.size, dtype=self.dtype)
        return torch.ones(self.size, dtype=dtype, requires_grad=True)


@dataclass(frozen=True)
class Product:
    """A call of `function`. `count` says how many calls of this size a forward pass contains."""

    function: Callable[..., Tensor]
    arguments: Any
    count: float = 1.0

    def tiled(self) -> Product:
        """Return a linear layer as calls with weights of at most WIDTH by WIDTH, and other products unchanged."""
        if self.function is not F.linear:
            return self
        positional, named = self.arguments
        x, weight, *bias = positional
        outputs, inputs = (min(one, WIDTH) for one in weight.size)
        tiles = weight.size[0] * weight.size[1] / (outputs * inputs)
        sizes = [(*x.size[:-1], inputs), (outputs, inputs), *[(outputs,) for one in bias if one is not None]]
        small = [replace(one, size=size) for one, size in zip(positional, sizes, strict=False)]
        return Product(self.function, (small, named), tiles)


class _Recorder(TorchFunctionMode):
    """Record the products that are computed inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.products: dict[str, Product] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in PRODUCTS:
            shapes = tree_map_only(Tensor, lambda one: TensorShape(tuple(one.shape), one.dtype), (args, kwargs))
            product = Product(function, shapes).tiled()
            key = repr((function, product.arguments))
            known = self.products.get(key, replace(product, count=0.0))
            self.products[key] = replace(known, count=known.count + product.count)
        return function(*args, **kwargs)


def time_products(network: Network, planned_corpus: PlannedCorpus, seed: int, threads: int) -> dict[str, float]:
    """Return the milliseconds of CPU time that the products of a small micro-batch take in each precision.

    `network` is on the meta device. Each figure is a sum over the products, forward and backward, of the median of
    alternating rounds. CPU time does not grow when other processes interrupt this one. The random state is kept.
    """
    with torch.random.fork_rng(devices=[]), _threads(threads):
        products = products_of(network, planned_corpus, seed)
        calls = [[_call(one, bf16) for bf16 in (False, True)] for one in products]
        rounds: list[list[list[float]]] = []
        begin = time.perf_counter()
        while len(rounds) < ROUNDS[0] or (len(rounds) < ROUNDS[1] and time.perf_counter() - begin < LIMIT):
            rounds.append([[call() for call in pair] for pair in calls])
    counts = [one.count for one in products]
    return {name: _milliseconds(rounds[1:], counts, side) for side, name in enumerate(PRECISIONS)}


def _milliseconds(rounds: list[list[list[float]]], counts: list[float], side: int) -> float:
    seconds = (count * median(one[index][side] for one in rounds) for index, count in enumerate(counts))
    return round(1e3 * sum(seconds), 3)


def products_of(network: Network, planned_corpus: PlannedCorpus, seed: int) -> list[Product]:
    """Return the distinct products of the first rows of the first step, at most TOKENS tokens or one row."""
    plan = planned_corpus.plan(seed=seed, epoch=0)
    rows_B = plan[0].share(0, 1)[0]
    fitting = int((plan.widths_NC[rows_B].sum(1).cumsum() <= TOKENS).sum())
    batch = planned_corpus.batch(plan[0], rows_B[: max(1, fitting)], Ranks())
    with _Recorder() as recorder:
        x_BTD, _ = network.trunk_with_losses({name: ids.to("meta") for name, ids in batch.inputs.items()})
        network.head(x_BTD)
    return list(recorder.products.values())


def _call(product: Product, bf16: bool) -> Callable[[], float]:
    """Return a function that computes the product, forward and backward, and returns its seconds of CPU time.

    A linear layer reads float32, as after a norm, and other products read what a linear layer returned.
    """
    dtype = torch.bfloat16 if bf16 and product.function is not F.linear else torch.float32
    args, kwargs = tree_map_only(TensorShape, lambda one: one.tensor(dtype), product.arguments)
    inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.requires_grad]
    function = PRODUCTS[product.function]

    def seconds() -> float:
        begin = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            y = function(*args, **kwargs)
        torch.autograd.grad(y, inputs, torch.ones_like(y))
        return time.process_time() - begin

    return seconds


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
