"""The weights of a run's validations: the best ones, the last ones, and those that a resume needs.

A resume continues from a checkpoint, which is older than the newest validations. Files that the final weights of the
resumed run need are therefore kept, even if a later validation replaced them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from tfm_blocks.runs.checkpoints import list_checkpoints
from tfm_blocks.runs.folder import BEST, step_file, step_files, step_of
from tfm_blocks.runs.model import write_tensors

NEVER = -1  # the step of the newest or the best validation, before the first one


def replace_best(checkpoints: Path, tensors: Mapping[str, Tensor], step: int, previous: int) -> None:
    """Write the best weights, of the validation after `step`, to `best.safetensors`.

    The best weights so far, of step `previous`, become `best-N.safetensors` if a resume needs them. If the process dies
    at any moment, `restore_weights` finds the best weights of each checkpoint.
    """
    best, replaced = checkpoints / BEST, step_file(checkpoints, previous, "best")
    files = {step_of(path): path for path in step_files(checkpoints, "best")} | {previous: best}
    needed = _last_before(files, 1, _checkpoint_steps(checkpoints))
    for old in files.keys() - needed - {previous}:
        files[old].unlink()
    new = step_file(checkpoints, step, "best")
    write_tensors(new, tensors)
    if previous in needed and best.is_file():
        best.replace(replaced)
    new.replace(best)


def delete_old_weights(checkpoints: Path, keep_last: int, average: int) -> None:
    """Delete weights of validations, except the last `keep_last`, and the last `average` before each checkpoint."""
    files = {step_of(path): path for path in step_files(checkpoints)}
    kept = _last_before(files, keep_last, [max(files)])
    kept |= _last_before(files, average, _checkpoint_steps(checkpoints))
    for step in files.keys() - kept:
        files[step].unlink()


def restore_weights(checkpoints: Path, validated: int, best: int) -> None:
    """Restore the files of a checkpoint whose newest validation was after step `validated`, and its best after `best`.

    Later files are deleted, because a run with other settings may not validate at these steps.
    """
    later = [path for path in step_files(checkpoints) if step_of(path) > validated]
    later += [path for path in step_files(checkpoints, "best") if step_of(path) > best]
    for path in later:
        path.unlink()
    if best == NEVER:
        (checkpoints / BEST).unlink(missing_ok=True)
    elif (replaced := step_file(checkpoints, best, "best")).is_file():
        replaced.replace(checkpoints / BEST)


def _checkpoint_steps(checkpoints: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(checkpoints)]


def _last_before(steps: Iterable[int], count: int, ends: Iterable[int]) -> set[int]:
    """Return the last `count` of the steps up to each of `ends`."""
    ordered = sorted(steps, reverse=True)
    return {step for end in ends for step in [step for step in ordered if step <= end][:count]}
