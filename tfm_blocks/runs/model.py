"""Read and write a model: its definition in `model.json`, and its weights in `weights.safetensors`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tfm_blocks.errors import ConfigError, Place, Problem, RunError
from tfm_blocks.language.spec import Spec
from tfm_blocks.network.adapters import merge_adapters, without_adapters
from tfm_blocks.network.build import build_network, check_model, network_without_values
from tfm_blocks.network.graph import GENERATOR, Network
from tfm_blocks.network.matching import expect_weights, fill
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.runs.files import written_beside
from tfm_blocks.runs.folder import MODEL, WEIGHTS, expect_folder, expect_utf8, kept_weights
from tfm_blocks.runs.records import FORMAT, Base, SavedModel, read_saved_model
from tfm_blocks.runs.saved_run import SavedRun


def write_model(
    folder: Path,
    model: Mapping[str, Any],
    plugins: Sequence[str],
    columns: Sequence[str] = (),
    base: Base = Base(),  # noqa: B008  it is frozen
) -> None:
    """Write `model.json`."""
    SavedModel(FORMAT, model, tuple(plugins), tuple(columns), base).write(folder)


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

    Adapters are added to the weights of their base. `checkpoint` selects the weights of a validation: `last`, `best` or
    a step.
    """
    spec = read_spec(folder, plugins)
    if checkpoint is None:
        SavedRun(folder).expect_finished()
    path = folder / WEIGHTS if checkpoint is None else kept_weights(folder, str(checkpoint))
    tensors = without_generator(folder, read_tensors(path))
    expect_weights(network_without_values(spec), tensors, str(path))  # before anything is allocated
    network = build_network(spec, seed=0)
    if spec.adapted:
        fill(network, read_base(network, folder))
    fill(network, tensors)
    return (merge_adapters(network) if spec.adapted else network).eval()


def has_base(run: Path) -> bool:
    """Return True for a run of adapters. Raises RunError if it is damaged."""
    expect_folder(run)
    return (run / MODEL).is_file() and SavedModel.read(run).base != Base()


def find_base(spec: Spec, run: Path) -> Base:
    """Return the record of the run as the base of adapters. Raises RunError if its weights are not of this model."""
    expect_folder(run)
    SavedRun(run).expect_finished()
    expect_weights(network_without_values(without_adapters(spec)), read_tensors(run / WEIGHTS), str(run / WEIGHTS))
    return Base(os.path.abspath(run), hash_weights(run))  # noqa: PTH100  keeps symbolic links


def read_base(network: Network, folder: Path) -> dict[str, Tensor]:
    """Return the weights of the base of a run of adapters. Raises RunError if it is missing or has changed.

    The base is in the folder that model.json names, or beside the run under the same name.
    """
    base, where = SavedModel.read(folder).base, str(folder / MODEL)
    runs = (Path(base.run), folder.parent / Path(base.run).name) if base.run else ()
    paths = [run / WEIGHTS for run in runs if run.resolve() != folder.resolve()]
    path = next((path for path in paths if os.path.isfile(path)), None)  # noqa: PTH113  False for a name that is too long
    if path is None:
        rule = f"its adapters change the weights of {base.run or 'a run that it does not name'}, which do not exist"
        raise RunError(Problem(where, rule, help="restore that run, or write its new folder to base.run"))
    if hash_weights(path.parent) != base.sha256:
        rule = f"its adapters were trained on weights that differ from the current weights of {path.parent}"
        raise RunError(Problem(where, rule, help=f"restore the weights of that run: their SHA-256 is {base.sha256}"))
    tensors = read_tensors(path)
    expect_weights(network_without_values(without_adapters(network.spec)), tensors, str(path))
    return tensors


def hash_weights(run: Path) -> str:
    """Return the SHA-256 of the final weights of a run."""
    with (run / WEIGHTS).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def without_generator(run: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a validation, without those of the generator, which the model of the run lacks."""
    own = (run / MODEL).is_file() and GENERATOR in SavedModel.read(run).model.get("graph", {})
    return {name: tensor for name, tensor in tensors.items() if own or not name.startswith(f"{GENERATOR}.")}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name. Raises RunError."""
    expect_utf8(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise RunError(Problem(str(path), f"is damaged: {error}", Place(str(path)))) from None
