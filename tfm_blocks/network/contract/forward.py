"""Rules on `forward`: shapes, finite values, visible positions, independent rows, gradients, seeds."""

from __future__ import annotations

import torch
from torch import Tensor

from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Axis
from tfm_blocks.network.build import build_network
from tfm_blocks.network.contract.breach import BreachError, differing, expect_close, largest_difference, require_finite
from tfm_blocks.network.contract.case import BATCH, Case
from tfm_blocks.network.trace import trace
from tfm_blocks.registry.signature import Port

DECLARED = {
    "itself": "without an entry in sees, an output position sees only the same position",
    "past": "sees declares that an output position sees only the same and earlier positions",
}
META = "use every parameter in forward, without detach or .data, and let nothing depend on the values of a tensor"


def runs_on_the_meta_device(case: Case) -> None:
    """Check that the block runs on the meta device at two lengths, and that every parameter gets a gradient."""
    for problem in trace(case.spec, Sources()):
        raise BreachError(f"{problem.rule} (on the meta device)", META)


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
        declared = [
            sum(sizes[part] for part in size.name.split("+")) if isinstance(size, Axis) else size
            for size in case.spec.sink.shape
        ]
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
    unseen = moved & ((places != position) if sight == "itself" else (places < position))
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
    """Check that every parameter gets a finite gradient."""
    network = case.network
    with torch.enable_grad():
        x, losses = network.trunk_with_losses(case.tensors())
        out = network.head(x)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        parameters = dict(network.named_parameters())
        total = (out * weights).sum() + sum(loss.sum() for loss in losses.values())
        if not parameters:
            return
        gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    for name, gradient in zip(parameters, gradients, strict=True):
        parameter = name.removeprefix(f"{case.spec.sink.address}.block.")
        if gradient is None:
            raise BreachError(
                f"its parameter {parameter} gets no gradient", "use it in forward, without detach or .data"
            )
        require_finite(
            gradient, f"in the gradient of {parameter}", "avoid a root or a logarithm at 0, whose slope is infinite"
        )


def starts_from_the_seed(case: Case) -> None:
    """Check that initial values are finite, and equal for equal seeds."""
    first, again = (dict(build_network(case.spec, seed=seed).named_parameters()) for seed in (1, 1))
    for address, parameter in first.items():
        name = address.removeprefix(f"{case.spec.sink.address}.block.")
        fix = f"fill {name} in initialise(name, generator), with random values from this generator"
        require_finite(parameter, f"in the initial values of {name}", fix)
        if not torch.equal(parameter, again[address]):
            raise BreachError(f"its parameter {name} has other initial values when built again with the same seed", fix)
