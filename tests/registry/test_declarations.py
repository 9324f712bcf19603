"""The declarations of shipped blocks agree with their classes."""

from dataclasses import replace

import pytest

from tests.network.examples import ALL, each
from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError
from tfm_blocks.language.check import check
from tfm_blocks.network.build import read_model
from tfm_blocks.registry.blocks import REGISTRY, Registry
from tfm_blocks.registry.declarations import read_declarations


@each(ALL)
def test_a_model_has_the_same_spec_by_declarations_as_by_classes_and_no_warning(path):
    composed = compose_model(str(path))
    spec = read_model(composed.model, composed.sources)
    nodes = tuple(replace(node, quantized={}) for node in spec.nodes)  # which maps these are is known from the modules
    declared = check(composed.model, read_declarations(), composed.sources)
    assert declared == replace(spec, nodes=nodes) and spec.warnings == ()


def test_every_shipped_block_is_declared():
    declared = read_declarations()
    assert set(declared.blocks) == {name for name, info in REGISTRY.blocks.items() if info.shipped}
    assert declared.reserved == REGISTRY.reserved
    for block, info in declared.blocks.items():
        known = REGISTRY.blocks[block]
        assert (info.arguments, info.alone, info.shipped) == (known.arguments, known.alone, True), block


@pytest.mark.parametrize("override", ["heads=7", "model.add_norm=past", "model.graph.encoder.layer.ffn.block=fnn"])
def test_a_mistake_has_the_same_message_by_declarations_as_by_classes(override):
    composed = compose_model("base", [override])
    shipped = {name: info for name, info in REGISTRY.blocks.items() if info.shipped}
    messages = []
    for registry in (read_declarations(), Registry(shipped, REGISTRY.reserved)):
        with pytest.raises(ConfigError) as caught:
            check(composed.model, registry, composed.sources)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
