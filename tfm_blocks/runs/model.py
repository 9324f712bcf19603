"""A model on disk: `model.json`, which says how it is built, and `weights.safetensors`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tfm_blocks.errors import ConfigError, Place, Problem, RunError, suggest
from tfm_blocks.network.build import build_network, check_model, network_without_values
from tfm_blocks.network.graph import Network
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.runs.folder import MODEL, WEIGHTS, expect_folder, read_json, write_json

FORMAT = 1


def write_model(folder: Path, model: Mapping[str, Any], plugins: Sequence[str]) -> None:
    """`model.json`: the resolved model mapping and the plug-in modules that its blocks come from."""
    write_json(folder / MODEL, {"format": FORMAT, "model": model, "plugins": list(plugins)})


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """`weights.safetensors`, from tensors by address."""
    write_tensors(folder / WEIGHTS, tensors)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, whole or not at all."""
    part = path.with_name(path.name + ".part")
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, part)
    part.replace(path)


def weights_of(network: Network) -> dict[str, Tensor]:
    """Parameters by address; a tied or shared one once, at its source."""
    return {name: parameter.detach() for name, parameter in network.named_parameters()}


def expect_weights(network: Network, tensors: Mapping[str, Tensor], where: str) -> None:
    """Raises RunError unless names and shapes are exactly the network's, and the values finite numbers."""
    own = dict(network.named_parameters())
    missing, extra = own.keys() - tensors.keys(), tensors.keys() - own.keys()
    for name in sorted(missing):
        raise RunError(Problem(where, f"has no weights for {name}", help=suggest(name, extra)))
    for name in sorted(extra):
        raise RunError(Problem(where, f"has weights for {name}, which the model lacks"))
    for name, parameter in own.items():
        if parameter.shape != tensors[name].shape:
            shapes = f"{list(tensors[name].shape)}, but the model has {list(parameter.shape)}"
            raise RunError(Problem(where, f"{name} has the shape {shapes}"))
        if not tensors[name].is_floating_point() or not tensors[name].isfinite().all():
            raise RunError(Problem(where, f"{name} is damaged: it does not hold finite numbers"))


def read_network(folder: Path, plugins: Sequence[str] = ()) -> Network:
    """The trained network of a run folder, in evaluation mode, on the processor. Raises RunError."""
    expect_folder(folder)
    record = read_json(folder / MODEL)
    where = str(folder / MODEL)
    if record.get("format") != FORMAT:
        rule = f"has the format {record.get('format')!r}, and this version reads {FORMAT}"
        raise RunError(Problem(where, rule, help="use the version of tfm-blocks that wrote it, or a newer one"))
    _need(record.get("plugins"), plugins, where)
    load_plugins(plugins)
    try:
        spec = check_model(record.get("model") or {})
    except ConfigError as error:
        raise RunError([Problem(where, f"{problem.address}: {problem.rule}") for problem in error.problems]) from None
    tensors = read_tensors(folder / WEIGHTS)
    expect_weights(network_without_values(spec), tensors, str(folder / WEIGHTS))  # before anything is allocated
    network = build_network(spec, seed=0)
    fill(network, tensors)
    return network.eval()


@torch.no_grad()
def fill(network: Network, tensors: Mapping[str, Tensor]) -> None:
    """Gives every parameter the values of the tensor of its name."""
    for name, parameter in network.named_parameters():
        parameter.copy_(tensors[name])


def _need(recorded: Any, given: Sequence[str], where: str) -> None:
    """A run folder never imports anything: who loads it names the plug-ins."""
    if not isinstance(recorded, list) or not all(isinstance(module, str) for module in recorded):
        raise RunError(Problem(where, "is damaged: plugins must be a list of module names"))
    for module in recorded:
        if module not in given:
            rule = f"the model uses blocks of the plug-in {module!r}"
            raise RunError(Problem(where, rule, help=f"name it: --plugins {module}, or plugins=[{module!r}] in Python"))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name. Raises RunError."""
    if not path.is_file():
        raise RunError(
            Problem(str(path), "the file is missing: the training did not finish", help="train it to the end")
        )
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise RunError(Problem(str(path), f"is damaged: {error}", Place(str(path)))) from None
