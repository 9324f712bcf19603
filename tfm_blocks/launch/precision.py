"""Choose the floating-point format that a run computes with, on a CPU by timing the products of its model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tfm_blocks.data.cache import cache_folder, cache_key, find_or_build
from tfm_blocks.data.plan import Ranks
from tfm_blocks.distributed.threads import set_threads
from tfm_blocks.layers.dot_product import dot_product_attention
from tfm_blocks.network.build import choose_device
from tfm_blocks.network.graph import Network
from tfm_blocks.training.data import PlannedCorpus
from tfm_blocks.training.settings import RunSettings

TOKENS = 1024  # of a micro-batch: enough for a product to reach its speed
WIDTH = 512  # of a weight: a wider one counts as several of this width
LIMIT = 0.5  # seconds after which no further round begins
ROUNDS = 3, 9  # the fewest and the most; the first one, in which kernels are compiled, does not count
PRECISIONS = ("fp32", "bf16")
PRODUCTS = {
    F.linear: F.linear,
    F.conv1d: F.conv1d,
    F.conv2d: F.conv2d,
    F.scaled_dot_product_attention: lambda q, k, v, mask=None, dropout=0.0, causal=False, scale=None: (
        dot_product_attention(q, k, v, mask, dropout=dropout, causal=causal, beta=scale)
    ),
    **{function: function for function in (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, torch.einsum)},
}


@dataclass(frozen=True)
class Product:
    """A call of `function` with tensors on the meta device. A forward pass has `count` calls of this size."""

    function: Callable[..., Tensor]
    arguments: Any
    count: float = 1.0

    def tiled(self) -> Product:
        """Return a linear layer as calls with weights of at most WIDTH by WIDTH, and other products unchanged."""
        if self.function is not F.linear:
            return self
        positional, named = self.arguments
        x, weight, *bias = positional
        outputs, inputs = (min(size, WIDTH) for size in weight.shape)
        sizes = [(*x.shape[:-1], inputs), (outputs, inputs), *[(outputs,) for tensor in bias if tensor is not None]]
        small = [tensor.new_empty(size) for tensor, size in zip(positional, sizes, strict=False)]
        return Product(self.function, (small, named), weight.numel() / (outputs * inputs))


class _Recorder(TorchFunctionMode):
    """Record the products that are computed inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.products: dict[str, Product] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in PRODUCTS:
            product = Product(function, tree_map_only(Tensor, Tensor.detach, (args, kwargs))).tiled()
            key = repr((function, product.arguments))
            known = self.products.get(key, replace(product, count=0.0))
            self.products[key] = replace(known, count=known.count + product.count)
        return function(*args, **kwargs)


def time_products(network: Network, planned_corpus: PlannedCorpus, seed: int) -> dict[str, float]:
    """Return the milliseconds of CPU time that the products of a small micro-batch take in each precision.

    `network` is on the meta device. Each figure is a sum over the products, forward and backward, of the median of
    alternating rounds. The random state is kept.

    One thread computes them, because its CPU time does not grow when other processes interrupt it. Several threads wait
    for each other, and use the CPU while they wait.
    """
    with torch.random.fork_rng(devices=[]), _one_thread():
        products = products_of(network, planned_corpus, seed)
        calls = [[_call(product, bf16) for bf16 in (False, True)] for product in products]
        rounds: list[list[list[float]]] = []
        begin = time.perf_counter()
        while len(rounds) < ROUNDS[0] or (len(rounds) < ROUNDS[1] and time.perf_counter() - begin < LIMIT):
            rounds.append([[call() for call in pair] for pair in calls])
    seconds = dict.fromkeys(PRECISIONS, 0.0)
    for product, *pairs in zip(products, *rounds[1:], strict=True):
        for name, times in zip(PRECISIONS, zip(*pairs, strict=True), strict=True):
            seconds[name] += product.count * median(times)
    return {name: round(1e3 * total, 3) for name, total in seconds.items()}


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

    def ones(like: Tensor) -> Tensor:
        kind = dtype if like.is_floating_point() else like.dtype
        return torch.ones(like.shape, dtype=kind, requires_grad=like.is_floating_point())

    args, kwargs = tree_map_only(Tensor, ones, product.arguments)
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    function = PRODUCTS[product.function]

    def seconds() -> float:
        begin = time.thread_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            y = function(*args, **kwargs)
        torch.autograd.grad(y, inputs, torch.ones_like(y))
        return time.thread_time() - begin

    return seconds


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)


BF16_PROCESSORS = ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16")  # names of torch.cpu.get_capabilities
GAIN = 1.05  # bf16 must be faster by this factor, since it rounds more
Timings = Mapping[str, float]
UNMEASURED: Timings = MappingProxyType({})
FILE = "timings.json"  # in the cache


@dataclass(frozen=True)
class Precision:
    """`name` is `bf16` (autocast with float32 weights) or `fp32`; `timings` are milliseconds by name, if measured."""

    name: Literal["bf16", "fp32"]
    reason: str
    timings: Timings = field(default_factory=dict)

    @property
    def lightning(self) -> Literal["bf16-mixed", "32-true"]:
        """Return the name that Lightning's Trainer uses."""
        return "bf16-mixed" if self.name == "bf16" else "32-true"

    @property
    def fact(self) -> dict[str, Any]:
        """Return the choice as run.json holds it."""
        return {"name": self.name, "reason": self.reason, "milliseconds": dict(self.timings)}

    def __str__(self) -> str:
        return f"precision: {self.name} ({self.reason})"


def choose_precision(
    requested: Literal["auto", "bf16", "fp32"], device: str, timings: Timings = UNMEASURED
) -> Precision:
    """Return the requested precision, or for `auto` the faster one on `device` (cpu, cuda).

    On a CPU the `timings` decide; without timings the CPU has no bf16 instructions. A CUDA device uses bf16 if it
    supports bf16 natively.
    """
    if requested != "auto":
        return Precision(requested, f"trainer.precision={requested}")
    if device == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return Precision("bf16" if native else "fp32", torch.cuda.get_device_name())
    if not timings:
        return Precision("fp32", "this CPU: no bf16 instructions")
    faster: Literal["bf16", "fp32"] = "bf16" if timings["fp32"] > GAIN * timings["bf16"] else "fp32"
    measured = f"measured on this CPU: fp32 {timings['fp32']:.1f} ms, bf16 {timings['bf16']:.1f} ms"
    return Precision(faster, measured, timings)


def measure_precision(network: Network, planned_corpus: PlannedCorpus, settings: RunSettings) -> Timings:
    """Return the timings that `choose_precision` needs, or UNMEASURED if it needs none.

    `network` is on the meta device. The timings of a model are kept in the cache, so that all its runs on a kind of
    machine, such as the seeds of a sweep, get the same precision.
    """
    trainer = settings.trainer
    if trainer.precision != "auto" or choose_device(trainer.accelerator) != "cpu" or not _computes_bf16():
        return UNMEASURED
    machine = torch.__version__, sorted(torch.cpu.get_capabilities().items())
    cached = cache_folder(settings.data.cache) / "precision" / cache_key(machine, network.spec.mapping)

    def build(folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(time_products(network, planned_corpus, settings.seed)))

    timings: Timings = json.loads((find_or_build(cached, build) / FILE).read_text())
    return timings


def _computes_bf16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in BF16_PROCESSORS)
