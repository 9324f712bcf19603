"""The CPU cores and CUDA devices that concurrent jobs share."""

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
    """Return the environment without the variables of a launcher or of a run in this process."""
    return {name: value for name, value in environment.items() if not _OF_ANOTHER.fullmatch(name)}


class DevicePool:
    """Assign devices to jobs. A job takes the devices with the fewest other jobs; all jobs get equally many threads.

    The number of threads does not change if there is one job at a time, or if the user set OMP_NUM_THREADS.
    """

    def __init__(self, environment: Mapping[str, str], parallel: int, cores: int, devices: int) -> None:
        self.environment = clean(environment)
        if parallel > 1:
            self.environment.setdefault(THREADS, str(max(1, cores // parallel)))
        visible = environment.get(VISIBLE)
        names = [str(number) for number in range(devices)] if visible is None else visible.split(",")
        self.load = Counter(dict.fromkeys(names[:devices], 0))

    def take(self, count: int) -> list[str]:
        """Return the names of `count` devices, which the job holds until `give_back`."""
        taken = sorted(self.load, key=lambda name: self.load[name])[:count]
        self.load.update(taken)
        return taken

    def give_back(self, devices: Sequence[str]) -> None:
        self.load.subtract(devices)

    def environment_with(self, devices: Sequence[str]) -> dict[str, str]:
        """Return the environment of a job. Its output is unbuffered, so that the log of a killed job is complete."""
        seen = {VISIBLE: ",".join(devices)} if devices else {}
        return {**self.environment, **seen, "PYTHONUNBUFFERED": "1"}
