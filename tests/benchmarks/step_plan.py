"""Compare the planned peak memory of training steps on the CPU with the measured peak, each in a fresh process.

    python tests/benchmarks/step_plan.py tiny base swiglu --tokens 2048

A step is forward, loss, backward and fused Adam, in float32. Print the peak in MB of the plan, of torch's allocator and
of the process. The peak of the process is the growth of its resident memory since before the network existed. Print
the ratio of each measured peak to the plan. A line with `recomputed` measures activation checkpointing.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.scaling.real_step import RealStep, batching_of, spec_of
from tfm_blocks.scaling.step_plan import StepSettings, plan_steps, read_card


def measure(model: str, tokens: int, recomputes: bool) -> str:
    spec = spec_of(model)
    batching = batching_of(spec, tokens // batching_of(spec, 1).row_tokens)
    settings = StepSettings("fp32", "ddp", recomputes)
    (plan,) = plan_steps(spec, batching, settings, read_card("cpu"), [1])
    small = spec_of(model, "d_model=64", "d_ff=64", "heads=2", "layers=1", "vocab=100")
    RealStep(small, batching_of(small, 1), bf16=False, recomputes=recomputes)  # load the kernels
    before = _resident()
    real = RealStep(spec, batching, bf16=False, recomputes=recomputes)
    real.run()
    process = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    allocator = real.peak()
    equal = "equal" if real.multiply_adds() == plan.multiply_adds else "DIFFERENT"
    name = f"{model}{' recomputed' if recomputes else ''}"
    return (
        f"{name:20} plan {plan.peak / 1e6:7,.0f} MB, allocator {allocator / 1e6:7,.0f} ({allocator / plan.peak:.3f}), "
        f"process {process / 1e6:7,.0f} ({process / plan.peak:.3f}); multiply-adds {equal}"
    )


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tokens", type=int, default=4096, help="set the tokens of a batch, over all inputs")
    parser.add_argument("--recomputed", action="store_true", help="measure activation checkpointing, with --side")
    parser.add_argument("--side", action="store_true", help="measure in this process")
    arguments = parser.parse_args()
    if arguments.side:
        print(measure(arguments.models[0], arguments.tokens, arguments.recomputed))
        sys.exit()
    for model in arguments.models:
        for recomputed in ([], ["--recomputed"]):
            command = [sys.executable, __file__, model, "--tokens", str(arguments.tokens), "--side", *recomputed]
            print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="", flush=True)
