import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
CODE = """
import ctypes, os, sys, torch
from tfm_blocks.devices import set_threads
mkl = ctypes.CDLL(sys.argv[1])
for call in sys.argv[2:]:
    if not os.fork():
        exec(call)
        numbers = torch.get_num_threads(), mkl.MKL_Get_Max_Threads(), bool(mkl.mkl_serv_get_dynamic())
        print(*numbers, flush=True)
        os._exit(0)
    os.wait()
"""


def numbers_after(*calls: str) -> list[str]:
    """Return the threads of torch and of MKL after each call, and whether MKL uses fewer in parallel regions."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MKL_")}
    code = [sys.executable, "-c", CODE, str(LIBRARY), *calls]
    return subprocess.run(code, check=True, capture_output=True, text=True, env=environment).stdout.splitlines()


@pytest.mark.grid
@pytest.mark.skipif(
    not LIBRARY.is_file() or not hasattr(ctypes.CDLL(str(LIBRARY)), "mkl_serv_get_dynamic"), reason="torch has no MKL"
)
def test_set_threads_sets_torch_and_mkl_and_keeps_the_default_of_mkl_in_parallel_regions() -> None:
    before, *numbers = numbers_after("", "torch.set_num_threads(2)", "set_threads(2)", "set_threads(1)")
    assert before.endswith("True")
    assert numbers == ["2 2 False", "2 2 True", "1 1 True"]
