"""The decoding state on the meta device: formulas of the papers, and the tensors of a real decoding."""

import pytest
import torch

from tests.network.examples import SHIPPED, build, name
from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError
from tfm_blocks.language.spec import TARGET, names
from tfm_blocks.network.build import check_model, network_without_values
from tfm_blocks.network.cost import axis_lengths, decoding_state
from tfm_blocks.network.incremental import start, step

WITHOUT_TARGET = ("encoder", "bert", "electra")  # parts of the names of models without a target
WITH_TARGET = [path for path in SHIPPED if not any(part in path.stem for part in WITHOUT_TARGET)]
SIZES = ["d_model=48", "d_ff=24", "heads=4", "layers=3", "vocab=30"]


def state(model, lengths, *overrides):
    config = compose_model(model, [*SIZES, *overrides])
    network = network_without_values(check_model(config.model, config.sources))
    return decoding_state(network, axis_lengths(network, lengths))


@pytest.mark.parametrize(("src", "tgt"), [(7, 11), (32, 5)])
def test_attention_keeps_the_keys_and_values_of_the_target_and_of_the_source(src, tgt):
    assert state("base", {"src": src, "tgt": tgt}) == 3 * 2 * 48 * (src + tgt)
    assert state("decoder_only", {"tgt": tgt}) == 3 * 2 * 48 * tgt


def test_grouped_queries_keep_fewer_keys_and_values():
    assert state("gqa", {"src": 7, "tgt": 11}, "kv_heads=2") == 3 * 2 * 24 * (7 + 11)


def test_retention_keeps_a_state_that_does_not_grow_with_the_target():
    short, long = (state("retention", {"src": 7, "tgt": tgt}) for tgt in (3, 300))
    assert short == long


def test_a_model_without_a_target_keeps_nothing():
    assert state("encoder_only", {"src": 9}) == 0


@pytest.mark.grid
@pytest.mark.parametrize("path", WITH_TARGET, ids=name)
def test_it_counts_the_tensors_of_a_real_decoding(path):
    network = build(path).eval()
    lengths = axis_lengths(network, dict.fromkeys(names(network.spec.inputs), 6))
    sources = {name: torch.ones(1, 6, dtype=torch.int64) for name in names(network.spec.sources)}
    with torch.no_grad():
        decoding = start(network, sources, lengths[str(network.spec.input(TARGET).shape[1])], sentences=1)
        for _ in range(3):
            _, decoding = step(network, torch.tensor([5]), decoding)
    kept = [decoding.values]
    kept += [part for one in decoding.states.values() for part in (one.fixed, one.caches, one.moving)]
    counted = sum(tensor.numel() for part in kept for tensor in part.values() if tensor.is_floating_point())
    with torch.device("meta"):
        assert decoding_state(network.to("meta"), lengths) == counted


def test_the_default_length_is_within_the_positions_of_the_model_and_a_longer_one_is_refused():
    config = compose_model("gpt2", [*SIZES, "max_length=20"])
    network = network_without_values(check_model(config.model, config.sources))
    assert axis_lengths(network, {}) == {"T": 20}
    with pytest.raises(ConfigError, match="has 20 positions, but tgt has 30"):
        axis_lengths(network, {"tgt": 30})
