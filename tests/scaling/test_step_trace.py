"""The trace of a training step equals what torch counts in a real one on the CPU."""

import pytest

from tests.scaling.real_step import RealStep, batching_of, spec_of
from tfm_blocks.scaling.step_trace import trace_step

SMALL = ("d_model=48", "d_ff=80", "heads=4", "layers=2", "vocab=300")
WITHIN = 0.1  # the largest relative difference of the peak memory
grid = pytest.mark.grid


def traced(spec, rows, *, device="cpu", bf16=False, recomputes=False):
    return trace_step(spec, batching_of(spec, rows), device=device, bf16=bf16, recomputes=recomputes)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        "base",
        *[
            pytest.param(name, marks=grid)
            for name in (
                "llama",
                "conv",
                "prenorm",
                "gqa",
                "t5",
                "swiglu",
                "universal",
                "retention",
                "gpt2",
                "decoder_only",
                "mla",
            )
        ],
    ],
)
def test_multiply_adds_are_those_of_a_real_forward_and_backward_pass(model, recomputes):
    spec = spec_of(model, *SMALL)
    real = RealStep(spec, batching_of(spec, 3), bf16=False, recomputes=recomputes)
    assert traced(spec, 3, recomputes=recomputes).multiply_adds == real.multiply_adds()


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("model", ["base", *(pytest.param(name, marks=grid) for name in ("llama", "gpt2"))])
def test_the_kernels_of_cuda_need_the_same_multiply_adds(model, recomputes):
    spec = spec_of(model, *SMALL)
    cpu, cuda = (traced(spec, 3, device=device, recomputes=recomputes) for device in ("cpu", "cuda"))
    assert cpu.multiply_adds == cuda.multiply_adds


@pytest.mark.parametrize(
    ("model", "overrides", "recomputes"),
    [
        pytest.param("tiny", (), False, marks=grid),
        ("tiny", (), True),
        *[
            pytest.param(model, overrides, recomputes, marks=grid)
            for model, overrides in (
                ("base", ()),
                ("gpt2", ("layers=4", "vocab=10000")),
                ("llama", ("d_model=512", "d_ff=1376", "heads=8", "layers=6")),
            )
            for recomputes in (False, True)
        ],
    ],
)
def test_peak_memory_is_within_a_tenth_of_what_the_allocator_reports(model, overrides, recomputes):
    spec = spec_of(model, *overrides)
    real = RealStep(spec, batching_of(spec, 16), bf16=False, recomputes=recomputes)
    trace = traced(spec, 16, recomputes=recomputes)
    assert trace.peak + real.moments == pytest.approx(real.peak(), rel=WITHIN)


@grid
@pytest.mark.parametrize("recomputes", [False, True])
def test_peak_memory_under_autocast_is_within_a_tenth_of_what_the_allocator_reports(recomputes):
    spec = spec_of("tiny")
    real = RealStep(spec, batching_of(spec, 16), bf16=True, recomputes=recomputes)
    trace = traced(spec, 16, bf16=True, recomputes=recomputes)
    assert trace.peak + real.moments == pytest.approx(real.peak(), rel=WITHIN)


def test_activation_checkpointing_keeps_less_and_computes_the_layers_twice():
    spec = spec_of("tiny")
    plain, recomputed = (traced(spec, 16, device="cuda", recomputes=recomputes) for recomputes in (False, True))
    assert recomputed.kept < plain.kept / 5
    assert plain.multiply_adds < recomputed.multiply_adds < 4 / 3 * plain.multiply_adds


def test_bf16_keeps_less_than_float32_for_a_long_batch():
    spec = spec_of("llama", *SMALL)
    wide, narrow = (traced(spec, 64, device="cuda", bf16=bf16) for bf16 in (False, True))
    assert narrow.kept < wide.kept
    assert narrow.multiply_adds == wide.multiply_adds
