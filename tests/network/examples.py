"""Every shipped and test model in a small size, with fitting inputs."""

from functools import cache
from pathlib import Path

import pytest
import torch

import tfm_blocks as tfm
from tfm_blocks.compose.folders import CONF
from tfm_blocks.language.spec import TARGET, Axis

TESTS = sorted((Path(__file__).parents[1] / "models").glob("*.yaml"))
SHIPPED = sorted((CONF / "model").glob("*.yaml"))
ALL = [*TESTS, *SHIPPED]
# One model of each structure; the others differ in a block, which tests/blocks/test_contract.py tests separately.
DEFAULT = {
    "conv", "decoder_only", "encoder_only", "gated_delta_rule", "grouped", "latent", "mla", "moe", "prefix", "prenorm", "recurrent", "sink",
    "switch", "transparent", "two_sources", "universal", "value_residual", "vectors",
}  # fmt: skip
LENGTHS = {"B": 3, "T": 6}
VOCAB = 30


def name(path):
    return path.stem


def each(paths, default=DEFAULT):
    """Parametrize by the models; models outside `default` run only in CI."""
    marks = {path: [] if path.stem in default else [pytest.mark.grid] for path in paths}
    return pytest.mark.parametrize("path", [pytest.param(path, marks=marks[path], id=path.stem) for path in paths])


def build(path, seed=1, **knobs):
    layers = 4 if "at:" in path.read_text() else 2
    small = {"d_model": 16, "d_ff": 24, "heads": 2, "layers": layers, "vocab": VOCAB, "dropout": 0.0}
    return tfm.build(str(path), seed=seed, **small, **knobs)


@cache
def evaluated(path):
    """Return a network in eval mode, which tests share and do not change."""
    return build(path).eval()


def inputs_of(network, seed=0, **lengths):
    """Return random ids from 4 on and normally distributed vectors; each axis has a different length."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {**LENGTHS, **lengths}
    inputs = {}
    for one in network.spec.inputs:
        shape = [sizes.get(axis.name, 7) if isinstance(axis, Axis) else axis for axis in one.shape]
        if one.tokens:
            inputs[one.name] = torch.randint(4, VOCAB, shape, generator=generator)
        else:
            inputs[one.name] = torch.randn(shape, generator=generator)
    return inputs


def sources_of(inputs):
    return {name: value for name, value in inputs.items() if name != TARGET}


def has_target(network):
    return any(one.name == TARGET for one in network.spec.inputs)
