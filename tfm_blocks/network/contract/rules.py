"""The rules of the contract: each checks one property of a case and raises BreachError."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Axis
from tfm_blocks.network.build import build_network
from tfm_blocks.network.contract.case import BATCH, PADDING, Case
from tfm_blocks.network.contract.expectations import (
    BreachError,
    differing,
    expect_close,
    largest_difference,
    require_finite,
    steps_as_it_reads,
    steps_in_a_search,
)
from tfm_blocks.network.trace import describe_failure, trace
from tfm_blocks.registry.signature import Port

Rule = Callable[[Case], None]
GARBAGE = 1e3  # scale of the random vectors at padded positions
MASK = (
    "take the keep mask of the axis as a keyword-only parameter of forward, such as keep_BT for the axis T, "
    "and ignore the positions where it is false"
)
FINITE = "return finite values even if no position is kept, for example divide by keep.cumsum(1).clamp(min=1)"
DECLARED = {
    "nothing": "sees declares that the output sees nothing",
    "itself": "without an entry in sees, an output position sees only the same position",
    "past": "sees declares that an output position sees only the same and earlier positions",
}
RETURNED = "return what the signature declares, or change the signature"
FIXES = {
    "the parameter ": "use every parameter in forward, without detach or .data",
    **dict.fromkeys(("its forward ", "its output ", "its loss "), RETURNED),
}
META = "compare the axes that each operation reads with its tensors, and let nothing depend on the values of a tensor"


@torch.no_grad()
def ignores_padding_that_comes_last(case: Case) -> None:
    """Check that garbage after the sequences does not change the output at kept positions."""
    inputs, longer = case.tensors(), case.tensors(seed=5, longer=PADDING)
    alone = case.network(**inputs)
    padded = {name: _garbage(value) for name, value in longer.items()}
    for name, value in inputs.items():
        padded[name][:, : value.shape[1]] = value
    keep = {name: _first(padded[name], inputs[name].shape[1]) for name in inputs}
    output = case.network(keep=case.masks(keep), **padded)
    require_finite(output, "with padding after the sequences", FINITE)
    expect_close(output[:, : alone.shape[1]], alone, "the content of padding changes kept positions", case.fix(MASK))


@torch.no_grad()
def ignores_padding_that_comes_first(case: Case) -> None:
    """Check that garbage before the sequences does not change the output at kept positions."""
    inputs = case.tensors(longer=PADDING)
    lengths = {name: value.shape[1] for name, value in case.tensors().items()}
    keep = {name: _first(value, lengths[name]).flip(1) for name, value in inputs.items()}
    outputs = []
    for seed in (5, 6):
        garbage = {name: _garbage(value) for name, value in case.tensors(seed, PADDING).items()}
        over = {name: keep[name].view(*keep[name].shape, *[1] * (value.ndim - 2)) for name, value in inputs.items()}
        mixed = {name: torch.where(over[name], value, garbage[name]) for name, value in inputs.items()}
        outputs.append(case.network(keep=case.masks(keep), **mixed))
        require_finite(outputs[-1], "with padding before the sequences", FINITE)
    axis = case.spec.sink.shape[1]
    kept = case.network.keep_masks(inputs, case.masks(keep)).masks[axis.name] if isinstance(axis, Axis) else slice(None)
    first, second = (output[kept] for output in outputs)
    expect_close(second, first, "the content of padding before the sequences changes kept positions", case.fix(MASK))


@torch.no_grad()
def ignores_padding_in_a_decoder(case: Case) -> None:
    """Check that padding with id 0 after the ids does not change the logits of a decoder."""
    if case.decoder is None:
        return
    network, ids, padded = case.decoder, case.decoder_tensors(), {}
    alone = network(**ids)
    for name, value in ids.items():
        added = int(min(PADDING, network.longest(name).tokens - value.shape[1]))
        padded[name] = F.pad(value, (0, added))
    output = network(**padded)
    require_finite(output, "with padding after the ids", FINITE)
    expect_close(output[:, : alone.shape[1]], alone, "in a decoder, padding changes kept positions", case.fix(MASK))


def _garbage(value: Tensor) -> Tensor:
    return value * GARBAGE if value.is_floating_point() else value


def _first(value: Tensor, length: int) -> Tensor:
    """Return a keep mask that is true at the first `length` positions."""
    return torch.arange(value.shape[1]).expand(value.shape[0], -1) < length


def runs_on_the_meta_device(case: Case) -> None:
    """Check that the block runs on the meta device at two lengths, and that every parameter gets a gradient."""
    for problem in trace(case.spec, Sources()):
        fix = next((fix for begin, fix in FIXES.items() if problem.rule.startswith(begin)), META)
        raise BreachError(f"{problem.rule} (on the meta device)", fix)


def has_no_weights_if_weightless(case: Case) -> None:
    """Check that a block declared weightless has no parameters and no persistent buffers."""
    names = [name.rpartition("block.")[2] for name in case.network.state_dict()]
    if case.info.weightless and names:
        measured = f"declares weightless=True, but has {', '.join(names)}"
        raise BreachError(
            measured, "remove weightless=True, since layers that share their weights do not share such a block"
        )


@torch.no_grad()
def has_the_declared_shape(case: Case) -> None:
    """Check that the output has the axes of the signature, at two lengths."""
    for longer in (0, 3):
        sizes = case.sizes(longer)
        declared = [size.length(sizes) if isinstance(size, Axis) else size for size in case.spec.sink.shape]
        shape = list(case.network(**case.tensors(longer=longer)).shape)
        if shape != declared:
            measured = f"its output is {shape}, but the signature {case.info.signature.text} declares {declared}"
            raise BreachError(measured, "return these axes, or change the signature")


@torch.no_grad()
def gives_finite_numbers(case: Case) -> None:
    """Check that no output is NaN or infinite."""
    fix = "guard divisions, logarithms and roots against 0 and negative numbers"
    require_finite(case.network(**case.tensors()), "for normally distributed inputs", fix)


@torch.no_grad()
def repeats_itself(case: Case) -> None:
    """Check that two calls in eval mode return the same."""
    inputs = case.tensors()
    first = case.network(**inputs)
    fix = "draw at random only if self.training, and keep nothing between calls"
    expect_close(case.network(**inputs), first, "two calls in eval mode differ", fix)


@torch.no_grad()
def sees_no_more_than_declared(case: Case) -> None:
    """Check that an output position depends only on the positions of a port that `sees` declares."""
    inputs = case.tensors()
    before = case.network(**inputs)
    for port in case.info.signature.ports:
        declared = case.info.sight(port.name, case.ports, case.spec.sink.arguments)
        sight = "itself" if case.positionwise_part else declared
        if port.name in case.ports and sight != "all" and _is_aligned(case, port):
            for name in case.reads[port.name]:
                for position in range(inputs[name].shape[1]):
                    after = case.network(**{**inputs, name: _changed(case, inputs[name], position)})
                    _expect_unseen(case, before, after, name, position, sight)


def _is_aligned(case: Case, port: Port) -> bool:
    """Return True if the port has the sequence axis of the output."""
    axes = port.axes[1:2]
    return bool(axes) and axes == case.info.signature.output[1:2] and not set(axes) & port.sums


def _changed(case: Case, value: Tensor, position: int) -> Tensor:
    other = value.clone()
    other[:, position] = (
        other[:, position] + 1 if value.is_floating_point() else value[:, position] % (case.vocab - 1) + 1
    )
    return other


def _expect_unseen(case: Case, before: Tensor, after: Tensor, name: str, position: int, sight: str) -> None:
    places = torch.arange(before.shape[1])
    moved = differing(after, before).flatten(2).any(2).any(0)
    seen = {"nothing": places < 0, "itself": places == position, "past": places >= position}
    unseen = moved & ~seen[sight]
    if not unseen.any():
        return
    port = name.rpartition("_")[0]
    size = largest_difference(after[:, unseen], before[:, unseen])
    measured = (
        f"changing {port} at position {position} changes the output at positions {places[unseen].tolist()} {size}, "
        f"but {DECLARED[sight]} of {port}"
    )
    declare = f"declare it: sees={{'{port}': 'past'}} or 'all', with start and step"
    raise BreachError(measured, case.fix(declare if sight == "itself" else "mask later positions in forward"))


@torch.no_grad()
def keeps_rows_apart(case: Case) -> None:
    """Check that a row of the output depends only on the same row of the inputs."""
    inputs = case.tensors()
    alone = case.network(**{name: value[1:2] for name, value in inputs.items()})
    for value in inputs.values():
        value[0], value[BATCH - 1] = (torch.nan, torch.inf) if value.is_floating_point() else (0, 0)
    mixed = case.network(**inputs)[1:2]
    fix = "compute nothing over the batch axis; in eval mode use stored statistics"
    expect_close(
        mixed, alone, "a row changes with the other rows of the batch, which held NaN, infinity or padding,", fix
    )


def gives_gradients(case: Case) -> None:
    """Check that every parameter, and every input of floats that the output depends on, gets a finite gradient."""
    network, inputs = case.network, case.tensors()
    floats = {name: value.requires_grad_() for name, value in inputs.items() if value.is_floating_point()}
    with torch.enable_grad():
        x, losses = network.trunk_with_losses(inputs)
        out = network.head(x)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        total = (out * weights).sum() + sum(loss.sum() for loss in losses.values())
    parameters = dict(network.named_parameters())
    sources = [*parameters.values(), *floats.values()]
    gradients: Sequence[Tensor | None] = [None] * len(sources)
    if total.requires_grad:
        gradients = torch.autograd.grad(total, sources, allow_unused=True)
    for name, gradient in zip((*parameters, *floats), gradients, strict=True):
        what = f"parameter {name.removeprefix(f'{case.spec.sink.address}.block.')}"
        what = f"input {name.rpartition('_')[0]}" if name in floats else what
        if gradient is not None:
            fix = "avoid a root or a logarithm at 0, whose slope is infinite"
            require_finite(gradient, f"in the gradient of its {what}", fix)
        elif name in parameters or _depends(case, inputs, name, out):
            raise BreachError(f"its {what} gets no gradient", "use it in forward, without detach, .data or no_grad")


@torch.no_grad()
def _depends(case: Case, inputs: Mapping[str, Tensor], name: str, output: Tensor) -> bool:
    """Return True if other values of an input change the output; a bias, for example, reads its length alone."""
    other = case.network(**{**inputs, name: case.tensors(seed=6)[name]})
    return bool(differing(other, output).any())


def starts_from_the_seed(case: Case) -> None:
    """Check that initial values are finite, and equal for equal seeds."""
    first, second = (dict(build_network(case.spec, seed=seed).named_parameters()) for seed in (1, 1))
    for address, parameter in first.items():
        name = address.removeprefix(f"{case.spec.sink.address}.block.")
        fix = f"fill {name} in initialise(name, generator), with random values from this generator"
        require_finite(parameter, f"in the initial values of {name}", fix)
        if not torch.equal(parameter, second[address]):
            raise BreachError(
                f"its parameter {name} has different initial values when built twice with the same seed", fix
            )


BEFORE_A_RUN: Sequence[Rule] = (
    gives_finite_numbers,
    repeats_itself,
    sees_no_more_than_declared,
    ignores_padding_that_comes_last,
    ignores_padding_in_a_decoder,
    steps_as_it_reads,
)
ALL: Sequence[Rule] = (
    runs_on_the_meta_device,
    has_no_weights_if_weightless,
    has_the_declared_shape,
    starts_from_the_seed,
    *BEFORE_A_RUN,
    ignores_padding_that_comes_first,
    keeps_rows_apart,
    gives_gradients,
    steps_in_a_search,
)


@dataclass(frozen=True)
class Breach:
    """The case in which a rule is broken; `measured` completes a sentence that begins with the block's name."""

    case: Case
    measured: str
    fix: str


def first_breach(cases: Iterable[Case], rules: Sequence[Rule] = ALL) -> Breach | None:
    """Check the rules on each case and return the first breach, or None. The caller's random state is preserved."""
    with torch.random.fork_rng(devices=[]):
        for case in cases:
            for rule in rules:
                try:
                    rule(case)
                except BreachError as error:
                    return Breach(case, error.measured, error.fix)
                except (Exception, SystemExit) as error:  # whatever the code of a plug-in raises
                    measured = f"fails on float32 tensors on the CPU: {describe_failure(error)}"
                    fix = f"call the block in Python with small tensors; the rule is {rule.__name__}"
                    return Breach(case, measured, fix)
    return None
