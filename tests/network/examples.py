"""Every shipped and test model, small, with inputs that fit it."""

from pathlib import Path

import torch

import tfm_blocks as tfm
from tfm_blocks.compose.folders import CONF
from tfm_blocks.language.spec import TARGET, Axis

TESTS = sorted((Path(__file__).parents[1] / "models").glob("*.yaml"))
SHIPPED = sorted((CONF / "model").glob("*.yaml"))
ALL = [*TESTS, *SHIPPED]
LENGTHS = {"B": 3, "T": 6}
VOCAB = 30


def name(path):
    return path.stem


def build(path, seed=1, **knobs):
    layers = 4 if "at:" in path.read_text() else 2
    small = {"d_model": 16, "d_ff": 24, "heads": 2, "layers": layers, "vocab": VOCAB, "dropout": 0.0}
    return tfm.build(str(path), seed=seed, **small, **knobs)


def inputs_of(network, seed=0, **lengths):
    """Ids from 4 on, vectors from a normal distribution; each axis has a length of its own."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {**LENGTHS, **lengths}
    found = {}
    for one in network.spec.inputs:
        shape = [sizes.get(axis.name, 7) if isinstance(axis, Axis) else axis for axis in one.shape]
        if one.tokens:
            found[one.name] = torch.randint(4, VOCAB, shape, generator=generator)
        else:
            found[one.name] = torch.randn(shape, generator=generator)
    return found


def sources_of(inputs):
    return {name: value for name, value in inputs.items() if name != TARGET}


def has_target(network):
    return any(one.name == TARGET for one in network.spec.inputs)
