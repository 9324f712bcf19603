"""Read and write a model: its definition in `model.json`, and its weights in `weights.safetensors`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tfm_blocks.errors import ConfigError, Place, Problem, RunError
from tfm_blocks.language.spec import Spec
from tfm_blocks.network.build import build_network, check_model, network_without_values
from tfm_blocks.network.graph import Network
from tfm_blocks.network.matching import expect_weights, fill
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.runs.files import written_beside
from tfm_blocks.runs.folder import MODEL, WEIGHTS, expect_utf8, kept_weights
from tfm_blocks.runs.records import FORMAT, SavedModel, read_saved_model
from tfm_blocks.runs.saved_run import SavedRun


def write_model(folder: Path, model: Mapping[str, Any], plugins: Sequence[str], columns: Sequence[str] = ()) -> None:
    """Write `model.json`."""
    SavedModel(FORMAT, model, tuple(plugins), tuple(columns)).write(folder)


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `weights.safetensors` from tensors by address."""
    write_tensors(folder / WEIGHTS, tensors)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically, with the default permissions of new files. Raises RunError."""
    with written_beside(path) as part:
        part.unlink(missing_ok=True)
        part.touch()
        mode = part.stat().st_mode  # safetensors ignores the umask and makes files unreadable to others
        try:
            copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
            save_file(copies, part, dict(metadata) if metadata else None)
        except SafetensorError as error:
            raise RunError(Problem(str(path), f"cannot be written: {error}", help="free disk space")) from None
        part.chmod(mode)


def read_network(folder: Path, plugins: Sequence[str] = (), checkpoint: str | int | None = None) -> Network:
    """Return the trained network of a run folder, in evaluation mode, on the CPU. Raises RunError.

    `checkpoint` selects the weights of a validation: `last`, `best` or a step.
    """
    spec = read_spec(folder, plugins)
    if checkpoint is None:
        SavedRun(folder).expect_finished()
    path = folder / WEIGHTS if checkpoint is None else kept_weights(folder, str(checkpoint))
    tensors = read_tensors(path)
    expect_weights(network_without_values(spec), tensors, str(path))  # before anything is allocated
    network = build_network(spec, seed=0)
    fill(network, tensors)
    return network.eval()


def read_spec(folder: Path, plugins: Sequence[str] = ()) -> Spec:
    """Return the checked model of a run folder. Raises RunError."""
    load_plugins(plugins)
    file = read_saved_model(folder)
    try:
        return check_model(file.model)
    except ConfigError as error:
        problems = [
            Problem(str(folder / MODEL), f"{item.address}: {item.rule}", help=item.help) for item in error.problems
        ]
        raise RunError(problems) from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name. Raises RunError."""
    expect_utf8(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise RunError(Problem(str(path), f"is damaged: {error}", Place(str(path)))) from None
