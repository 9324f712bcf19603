"""Every `${…}` is resolved, or reported as an error."""

import pytest

from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError


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
