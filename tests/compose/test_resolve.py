"""Every `${…}` is resolved, or reported as an error."""

import pytest

from tfm_blocks.compose.command_line import compose_arguments
from tfm_blocks.compose.model import compose_model
from tfm_blocks.compose.run import compose_run
from tfm_blocks.errors import ConfigError

WINDOW = """# @package _global_
defaults: [tiny, _self_]
layers: 1
model: {graph: {encoder: {at: {0: {attn: {block: restricted_attention, r: 8}}}}}}
"""


def test_a_knob_that_nothing_reads_is_an_error(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("# @package _global_\ndefaults: [tiny, _self_]\nheds: 2\n")
    with pytest.raises(ConfigError, match="nothing reads the knob 'heds'"):
        compose_model(str(file))


def test_an_interpolation_of_a_missing_key_is_an_error_with_its_line(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("# @package _global_\ndefaults: [tiny, _self_]\nmodel: {args: {d_ff: '${dff}'}}\n")
    with pytest.raises(ConfigError) as caught:
        compose_model(str(file))
    (problem,) = caught.value.problems
    assert (problem.address, problem.place.line) == ("model.args.d_ff", 3)
    assert "did you mean d_ff?" in problem.help


@pytest.mark.parametrize(
    ("override", "layer"),
    [
        ("at.0.attn.r=4", {"attn": {"block": "restricted_attention", "r": 4}}),
        ("at.0.ffn.d_ff=64", {"attn": {"block": "restricted_attention", "r": 8}, "ffn": {"d_ff": 64}}),
        ("at={0: {attn: {r: 4}}}", {"attn": {"block": "restricted_attention", "r": 4}}),
    ],
)
def test_an_override_of_at_is_merged_into_the_change_of_the_file_in_tfm_and_in_a_run(tmp_path, override, layer):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "window.yaml").write_text(WINDOW)
    override = f"model.graph.encoder.{override}"
    run = compose_run(compose_arguments(["--config-dir", str(tmp_path), "model=window", override]))
    for composed in (compose_model("window", [override], tmp_path), run):
        assert list(composed.model["graph"]["encoder"]["at"].values()) == [layer]
        (raw,) = composed.raw.model.graph.encoder.at.values()
        assert raw == layer  # a sweep writes it for its jobs


def test_indices_of_layers_are_integers_in_files_and_overrides(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "window.yaml").write_text(WINDOW)
    composed = compose_model("window", ["model.graph.encoder.at.1.attn.heads=2"], tmp_path)
    assert list(composed.model["graph"]["encoder"]["at"]) == [0, 1]
