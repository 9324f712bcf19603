"""train.py --help."""

import pytest

from tfm_blocks.compose.command_line import parse_request
from tfm_blocks.compose.folders import CONF, FAMILIES
from tfm_blocks.compose.help import help_text
from tfm_blocks.errors import ConfigError


def test_help_names_the_options_the_groups_and_every_key_with_its_value(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("# @package _global_\ndefaults: [tiny]\n")
    text = help_text(parse_request(["--help", "--config-dir", str(tmp_path), "heads=2"]), "tfm train")
    assert "\n  tfm train model=base heads=8 layers=6\n" in text
    assert "--multirun" in text
    models = sorted(["mine", *(path.stem for folder in (CONF, FAMILIES) for path in (folder / "model").glob("*.yaml"))])
    assert f"\n  model: {', '.join(models)}\n" in text
    assert "\n  heads: 2 " in text
    assert "\n  label_smoothing: null " in text


def test_help_names_the_files_of_the_config_in_the_order_of_composition(tmp_path):
    text = help_text(
        parse_request(["--help", "model=prenorm", "experiment=multi30k", "debug=fast", "data.dir=x"]), "tfm train"
    )
    files = text.partition("Files, in merge order\n")[2].partition("\n\nKeys")[0].split()
    names = [file.removesuffix(".yaml").partition("conf/")[2] for file in files]
    assert names[:3] == ["train", "model/base", "model/prenorm"]
    assert names[-2:] == ["experiment/multi30k", "debug/fast"]
    assert {"data/text", "data/multi30k", "schedule/linear", "trainer/default", "logger/csv"} <= set(names)


def test_help_of_a_sweep_shows_its_first_run():
    assert "\n  heads: 2 " in help_text(parse_request(["-m", "heads=2,4", "-h"]), "tfm train")
    assert "model/prenorm.yaml" in help_text(
        parse_request(["-m", "model=glob(*norm,exclude=[deep*])", "-h"]), "tfm train"
    )


def test_help_refuses_a_config_that_cannot_train():
    with pytest.raises(ConfigError, match="haeds"):
        help_text(parse_request(["--help", "haeds=3"]), "tfm train")


def keys(*arguments):
    text = help_text(parse_request(["--help", *arguments]), "tfm train").partition("\nKeys\n")[2]
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_key_has_the_comment_of_the_file_that_gives_it():
    assert "heads: 4 # attention heads; d_model is divided among them" in keys()
    assert "clip: null # maximum norm of the gradient; null: no clipping, as in Vaswani et al. 2017" in keys(
        "trainer.clip=null"
    )
    wu = keys("experiment=multi30k", "data.dir=x")
    assert "dropout: 0.3 # the paper, for 29,000 pairs" in wu
    assert "validate_every: 350 # steps; the last step is always validated" in wu, "the experiment has no comment on it"
    assert "max_length: 128 # tokens per side; longer training pairs are skipped and counted" in wu, (
        "multi30k inherits text"
    )


def test_a_group_has_the_comment_that_its_file_begins_with():
    lines = keys("optimizer=adamw")
    assert lines[lines.index("optimizer:") - 1].startswith("# Loshchilov and Hutter 2019")
    assert not any("@package" in line for line in lines)


def test_long_lists_are_shown_cut():
    assert max(map(len, (line.partition("#")[0] for line in keys()))) < 120
