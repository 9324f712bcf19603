import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tfm_blocks as tfm
from tfm_blocks.launch.process_settings import (
    freeze_loaded_objects,
    keep_freed_memory,
    pause_garbage_collection,
    return_freed_memory,
    set_library_defaults,
)

ROOT = Path(__file__).parents[2]
NAMES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")


def page_faults(*, kept: bool) -> int:
    """Return the page faults of a process in the last two of five training steps."""
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
    code = f"from tests.launch.test_process_settings import page_faults; print(page_faults(kept={kept}))"
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


@pytest.mark.grid
@pytest.mark.skipif(sys.platform != "linux", reason="the C library may be another")
def test_freed_memory_is_reused_without_a_system_call() -> None:
    assert in_a_process(kept=True) * 4 < in_a_process(kept=False)


def resident() -> int:
    """Return the pages in use after returning freed memory; `getrusage` of a child starts at its parent's peak."""
    return_freed_memory()
    return int(Path("/proc/self/statm").read_text().split()[1])


def growth() -> int:
    """Return the additional pages for bfloat16 products of 400 shapes after 300 other shapes."""
    weight_FD, begin = torch.ones(512, 128, dtype=torch.bfloat16), 0
    for rows in range(1000, 1700):
        if rows == 1300:
            begin = resident()
        torch.nn.functional.linear(torch.ones(rows, 128, dtype=torch.bfloat16), weight_FD)
    return resident() - begin


def with_caches(code: str, **sizes: str) -> str:
    """Return the output of `code` in a new process whose environment has only these cache sizes."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | sizes
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.grid
@pytest.mark.skipif(
    sys.platform != "linux" or not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="there may be nothing to keep"
)
def test_new_shapes_of_products_cost_no_memory() -> None:
    code = "from tests.launch.test_process_settings import growth, set_library_defaults; {}print(growth())"
    assert int(with_caches(code.format("set_library_defaults(); "))) * 4 < int(with_caches(code.format("")))


@pytest.mark.parametrize(
    ("variables", "sizes"),
    [
        ({}, ["128", "128", None]),
        ({"LRU_CACHE_CAPACITY": "7"}, ["7", "128", None]),
        ({"DNNL_PRIMITIVE_CACHE_CAPACITY": "8"}, ["128", None, "8"]),
    ],
)
def test_settings_of_the_environment_are_kept(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], sizes: list[str | None]
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "", prepend=None)
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    set_library_defaults()
    assert [os.environ.get(name) for name in NAMES] == sizes


@pytest.mark.parametrize("command", [["train.py", "--help"], pytest.param(["tfm", "blocks"], marks=pytest.mark.grid)])
def test_commands_keep_few_primitives(command: list[str]) -> None:
    run = "main()" if command[0] == "tfm" else "runpy.run_path('train.py', run_name='__main__')"
    code = f"""
import os, runpy, sys
from tfm_blocks.cli import main
sys.argv = {command}
try:
    {run}
except SystemExit:
    pass
print(os.environ["LRU_CACHE_CAPACITY"], os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"])
"""
    assert with_caches(code) == "128 128"


@pytest.mark.grid
@pytest.mark.skipif(sys.platform != "linux", reason="torch uses GNU OpenMP on Linux")
def test_openmp_reads_the_number_of_turns_of_a_waiting_loop() -> None:
    command = [sys.executable, "-m", "tfm_blocks", "average", "no-such-run"]
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment["OMP_DISPLAY_ENV"] = "verbose"  # GNU OpenMP prints its settings when torch is imported
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert "GOMP_SPINCOUNT = '30000'" in done.stderr


def test_garbage_is_collected_again_once_the_loaded_objects_are_frozen() -> None:
    pause_garbage_collection()
    assert not gc.isenabled()
    with freeze_loaded_objects():
        assert gc.isenabled()
    assert gc.isenabled()


def test_loaded_objects_are_frozen_for_garbage_collection_until_the_end() -> None:
    with pytest.raises(KeyError), freeze_loaded_objects():
        assert gc.get_freeze_count() > 100_000
        raise KeyError
    assert gc.get_freeze_count() == 0
