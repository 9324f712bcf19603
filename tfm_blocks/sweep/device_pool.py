"""What the jobs that run at a time share: the processor's cores, and the CUDA devices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

THREADS = "OMP_NUM_THREADS"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_OF_ANOTHER = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(LOCAL|GROUP|ROLE|NODE)_(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)"
    r"|(TORCHELASTIC|PL|OMPI_COMM)_.*|WANDB_(SERVICE|RUN_ID|RESUME)"
)


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what a launcher, or a run in this process, has said of itself."""
    return {name: value for name, value in environment.items() if not _OF_ANOTHER.fullmatch(name)}


class DevicePool:
    """Who has which device. A job takes those that the fewest others have; cores are shared out evenly.

    Where there is one job at a time, or the user has set OMP_NUM_THREADS, threads stay as they are.
    """

    def __init__(self, environment: Mapping[str, str], parallel: int, cores: int, devices: int) -> None:
        self.environment = clean(environment)
        if parallel > 1:
            self.environment.setdefault(THREADS, str(max(1, cores // parallel)))
        visible = environment.get(VISIBLE)
        names = [str(number) for number in range(devices)] if visible is None else visible.split(",")
        self.load = Counter(dict.fromkeys(names[:devices], 0))

    def take(self, count: int) -> list[str]:
        """The names of so many devices, which are this job's until it gives them back."""
        taken = sorted(self.load, key=lambda name: self.load[name])[:count]
        self.load.update(taken)
        return taken

    def give_back(self, devices: Sequence[str]) -> None:
        self.load.subtract(devices)

    def environment_with(self, devices: Sequence[str]) -> dict[str, str]:
        """That of a job. Its log gets every line when it is said, so that a killed job has told all."""
        seen = {VISIBLE: ",".join(devices)} if devices else {}
        return {**self.environment, **seen, "PYTHONUNBUFFERED": "1"}
