"""Average the weights of a run's last validations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tfm_blocks.errors import Problem, RunError
from tfm_blocks.runs.files import read_bytes
from tfm_blocks.runs.folder import CHECKPOINTS, MODEL, TOKENIZER, expect_folder, new_folder, numbered_names, step_files
from tfm_blocks.runs.model import read_tensors, write_weights
from tfm_blocks.runs.records import Status


def average(run: Path, last: int) -> Path:
    """Create the run folder `RUN-averageN` with the mean of the last N kept weights (Vaswani et al. 2017, section 6.1).

    Raises RunError if fewer weights exist, or if they belong to different models.
    """
    expect_folder(run)
    kept = step_files(run / CHECKPOINTS)
    if not 1 <= last <= len(kept):
        rule = f"has the weights of {len(kept)} validations, so the last {last} cannot be averaged"
        help = "average fewer, or train with a larger trainer.keep_last or a smaller trainer.validate_every"
        raise RunError(Problem(str(run), rule, help=help))
    weights = mean_weights(kept[-last:])
    files = {name: read_bytes(run / name) for name in (MODEL, TOKENIZER)}
    names = numbered_names(f"{run.name}-average{last}")
    folder = next(path for path in map(run.parent.joinpath, names) if not path.exists())
    with new_folder(folder) as part:
        for name, content in files.items():
            (part / name).write_bytes(content)
        write_weights(part, weights)
        Status("averaged", of=tuple(f"{run.name}/{path.name}" for path in kept[-last:])).write(part)
    return folder


def mean_weights(files: Sequence[Path]) -> dict[str, Tensor]:
    """Return the float32 mean of each tensor over files of one model. Integer tensors come from the newest file.

    Raises RunError for files of different models.
    """
    *others, newest = files
    sums = {
        name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in read_tensors(newest).items()
    }
    shapes = {name: tensor.shape for name, tensor in sums.items()}
    for path in others:
        tensors = read_tensors(path)
        if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
            raise RunError(Problem(str(path), f"has other weights than {newest.name}", help="restore it"))
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                sums[name] += tensor
    return {
        name: (total / len(files)).to(torch.float32) if total.is_floating_point() else total
        for name, total in sums.items()
    }
