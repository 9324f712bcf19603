import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
CODE = """
import ctypes, torch
from tfm_blocks.distributed.threads import set_threads
{call}
mkl = ctypes.CDLL({library!r})
print(torch.get_num_threads(), mkl.MKL_Get_Max_Threads(), bool(mkl.mkl_serv_get_dynamic()))
"""


def numbers_after(call: str) -> str:
    """Return the threads of torch and of MKL after a call, and whether MKL uses fewer in parallel regions."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MKL_")}
    code = [sys.executable, "-c", CODE.format(call=call, library=str(LIBRARY))]
    return subprocess.run(code, check=True, capture_output=True, text=True, env=environment).stdout.strip()


@pytest.mark.skipif(
    not LIBRARY.is_file() or not hasattr(ctypes.CDLL(str(LIBRARY)), "mkl_serv_get_dynamic"), reason="torch has no MKL"
)
def test_set_threads_sets_torch_and_mkl_and_keeps_the_default_of_mkl_in_parallel_regions() -> None:
    assert numbers_after("").endswith("True")
    assert numbers_after("torch.set_num_threads(2)") == "2 2 False"
    assert numbers_after("set_threads(2)") == "2 2 True"
    assert numbers_after("set_threads(1)") == "1 1 True"
