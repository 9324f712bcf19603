import resource
import subprocess
import sys

import pytest
import torch

import tfm_blocks as tfm
from tfm_blocks.network.memory import keep_freed_memory


def page_faults(*, kept: bool) -> int:
    """Pages that a process asks the system for in the last two of five training steps."""
    if kept:
        keep_freed_memory()
    model = tfm.build("tiny", vocab=10_000, layers=1)
    begin = 0
    for step, length in enumerate((32, 30, 28, 26, 24)):
        if step == 3:
            begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        ids = torch.ones(40, length, dtype=torch.int64)
        model(src=ids, tgt=ids).sum().backward()
        model.zero_grad()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin


def in_a_process(*, kept: bool) -> int:
    code = f"from tests.network.test_memory import page_faults; print(page_faults(kept={kept}))"
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the C library may be another")
def test_freed_memory_is_used_again_without_asking_the_system() -> None:
    assert in_a_process(kept=True) * 4 < in_a_process(kept=False)
