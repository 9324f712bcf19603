"""A model on disk: `model.json`, which says how it is built, and `weights.safetensors`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tfm_blocks.errors import ConfigError, Place, Problem, RunError, shown, suggest
from tfm_blocks.language.spec import Spec
from tfm_blocks.network.build import build_network, check_model, network_without_values
from tfm_blocks.network.graph import Network
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.runs.files import damaged, read_json
from tfm_blocks.runs.folder import MODEL, WEIGHTS, expect_folder, kept_weights, settle, write_json
from tfm_blocks.runs.formats import FORMAT, READABLE, upgrade_model
from tfm_blocks.runs.status import expect_finished


def write_model(folder: Path, model: Mapping[str, Any], plugins: Sequence[str], columns: Sequence[str] = ()) -> None:
    """`model.json`: the resolved model mapping, the plug-in modules that its blocks come from, and the columns of the
    text that it was trained on.
    """
    record = {"format": FORMAT, "model": model, "plugins": list(plugins), "columns": list(columns)}
    write_json(folder / MODEL, record)


def read_text_columns(folder: Path) -> tuple[str, ...]:
    """The columns of the text that the model was trained on, where its folder says. Raises RunError."""
    columns = read_json(folder / MODEL).get("columns", [])
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        raise damaged(folder / MODEL, "columns must be a list of names")
    return tuple(columns)


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """`weights.safetensors`, from tensors by address."""
    write_tensors(folder / WEIGHTS, tensors)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, whole or not at all, with the permissions that every new file gets. Raises RunError."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    part.touch()
    mode = part.stat().st_mode  # safetensors makes its files unreadable to others, whatever the umask
    try:
        save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, part)
    except SafetensorError as error:
        part.unlink(missing_ok=True)
        raise RunError(Problem(str(path), f"cannot be written: {error}", help="make room on the disk")) from None
    part.chmod(mode)
    settle(part, path)


def weights_of(network: Network) -> dict[str, Tensor]:
    """Parameters and persistent buffers by address; a tied or shared one once, at its source."""
    kept = network.state_dict().keys()
    buffers = {name: buffer for name, buffer in network.named_buffers() if name in kept}
    return {name: tensor.detach() for name, tensor in (*network.named_parameters(), *buffers.items())}


def expect_weights(network: Network, tensors: Mapping[str, Tensor], where: str) -> None:
    """Raises RunError unless names, shapes and kinds are exactly the network's, and the values finite numbers."""
    own = weights_of(network)
    missing, extra = own.keys() - tensors.keys(), tensors.keys() - own.keys()
    for name in sorted(missing):
        raise RunError(Problem(where, f"has no weights for {name}", help=suggest(name, extra)))
    for name in sorted(extra):
        raise RunError(Problem(where, f"has weights for {name}, which the model lacks"))
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            shapes = f"{list(tensors[name].shape)}, but the model has {list(tensor.shape)}"
            raise RunError(Problem(where, f"{name} has the shape {shapes}"))
        if tensor.is_floating_point() != tensors[name].is_floating_point() or not tensors[name].isfinite().all():
            raise RunError(Problem(where, f"{name} is damaged: it does not hold finite numbers"))


def read_network(folder: Path, plugins: Sequence[str] = (), checkpoint: str | int | None = None) -> Network:
    """The trained network of a run folder, in evaluation mode, on the processor. Raises RunError.

    With `checkpoint` its weights are those of a validation, as `kept_weights` names them.
    """
    spec = read_spec(folder, plugins)
    if checkpoint is None:
        expect_finished(folder)
    path = folder / WEIGHTS if checkpoint is None else kept_weights(folder, str(checkpoint))
    tensors = read_tensors(path)
    expect_weights(network_without_values(spec), tensors, str(path))  # before anything is allocated
    network = build_network(spec, seed=0)
    fill(network, tensors)
    return network.eval()


def read_spec(folder: Path, plugins: Sequence[str] = ()) -> Spec:
    """The model of a run folder, checked. Raises RunError."""
    expect_folder(folder)
    record = read_json(folder / MODEL)
    where = str(folder / MODEL)
    if record.get("format") not in READABLE:
        known = " and ".join(map(str, READABLE))
        rule = f"has the format {shown(record.get('format'))}, and this version reads {known}"
        raise RunError(Problem(where, rule, help="use the version of tfm-blocks that wrote it, or a newer one"))
    _need(record.get("plugins"), plugins, where)
    load_plugins(plugins)
    try:
        return check_model(upgrade_model(record))
    except ConfigError as error:
        problems = [Problem(where, f"{one.address}: {one.rule}", help=one.help) for one in error.problems]
        raise RunError(problems) from None


@torch.no_grad()
def fill(network: Network, tensors: Mapping[str, Tensor]) -> None:
    """Gives every parameter and persistent buffer the values of the tensor of its name."""
    for name, tensor in weights_of(network).items():
        tensor.copy_(tensors[name])


def _need(recorded: Any, given: Sequence[str], where: str) -> None:
    """A run folder never imports anything: who loads it names the plug-ins."""
    if not isinstance(recorded, list) or not all(isinstance(module, str) for module in recorded):
        raise RunError(Problem(where, "is damaged: plugins must be a list of module names", help="restore it"))
    for module in recorded:
        if module not in given:
            rule = f"the model uses blocks of the plug-in {shown(module)}"
            raise RunError(Problem(where, rule, help=f"name it: --plugins {module}, or plugins=[{module!r}] in Python"))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name. Raises RunError."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise RunError(Problem(str(path), f"is damaged: {error}", Place(str(path)))) from None
