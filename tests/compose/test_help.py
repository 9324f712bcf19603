"""train.py --help."""

import pytest

from tfm_blocks.compose.help import help_text
from tfm_blocks.errors import ConfigError


def test_help_names_the_options_the_groups_and_every_key_with_its_value(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("# @package _global_\ndefaults: [tiny]\n")
    text = help_text(["--help", "--config-dir", str(tmp_path), "heads=2"])
    assert "--multirun" in text
    assert "\n  model: base, big, mine, prenorm, restricted, tiny\n" in text
    assert "\n  heads: 2\n" in text
    assert "\n  label_smoothing: 0.1\n" in text


def test_help_of_a_sweep_shows_its_first_run():
    assert "\n  heads: 2\n" in help_text(["-m", "heads=2,4", "-h"])


def test_help_refuses_what_could_not_be_trained():
    with pytest.raises(ConfigError, match="haeds"):
        help_text(["--help", "haeds=3"])
