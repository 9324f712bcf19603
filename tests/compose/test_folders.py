"""User folders and files."""

import pytest

from tfm_blocks.compose.command_line import compose_arguments, parse_request
from tfm_blocks.compose.comments import describe_models
from tfm_blocks.compose.folders import CONF, config_folders, group_files, list_options, model_chain
from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError


@pytest.mark.parametrize("file", ["conf/model/base", "families/model/apertus", "conf/experiment/probe/parity"])
def test_a_file_with_the_name_of_a_built_in_file_is_refused_by_train_and_by_tfm(file, tmp_path):
    path = tmp_path / file.partition("/")[2]
    path.parent.mkdir(parents=True)
    path.with_suffix(".yaml").write_text("# @package _global_\ndefaults: [tiny, _self_]\n")
    (tmp_path / "apertus.yaml").write_text("a table of a family, which no name of a config file means\n")
    with pytest.raises(ConfigError, match=rf"has the name of the built-in file {file}\.yaml"):
        parse_request(["--config-dir", str(tmp_path), "model=tiny"])
    with pytest.raises(ConfigError, match=rf"has the name of the built-in file {file}\.yaml"):
        compose_model("tiny", conf=tmp_path)


def test_a_parent_is_looked_up_next_to_the_file_that_inherits_it(tmp_path):
    """The parent of a built-in file is never a user's file."""
    (tmp_path / "mine.yaml").write_text("# @package _global_\ndefaults: [glm4, _self_]\n")
    (tmp_path / "glm.yaml").write_text("# @package _global_\ndefaults: [tiny, _self_]\n")
    chain = model_chain(str(tmp_path / "mine.yaml"), config_folders(None))
    assert chain[:-1] == model_chain("glm4", config_folders(None))


def test_a_file_of_a_subfolder_is_an_option_and_its_parents_come_before_it():
    folder = CONF / "experiment" / "probe"
    assert list_options("experiment", [CONF])["probe/mqar"] == folder / "mqar.yaml"
    files = [folder / f"{name}.yaml" for name in ("lite", "mqar", "mqar_paper")]
    assert group_files("experiment", "probe/mqar_paper", [CONF]) == files


def test_a_file_with_an_underscore_is_inherited_but_cannot_be_chosen():
    assert "_probe" not in list_options("data", [CONF])
    assert [path.stem for path in group_files("data", "parity", [CONF])] == ["_probe", "parity"]
    with pytest.raises(ConfigError, match="no data is called '_probe'"):
        parse_request(["data=_probe"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heads: 4\n", "begin the file with # @package _global_"),
        ("# a comment\n# @package _global_\nheads: 4\n", "begin the file with # @package _global_"),
        ("\ufeff# @package _global_\nheads: 4\n", "begins with a byte order mark, which hides its first line"),
        ("# @package _global_\nhydra: {run: {dir: x}}\n", "write hydra.… on the command line"),
        ("# @package _global_\nheads: [4\n", "is not YAML"),
        ("# @package _global_\nseed: 1\ntrainer: {steps: 1, steps: 2}\n", "the key 'steps' is written twice"),
        ("# @package _global_\ndefaults: 3\n", "must be a list"),
        ("# @package _global_\ndefaults: [{'': base}]\n", "must be a list of entries NAME or GROUP: NAME"),
        ("# @package _global_\ndefaults: [{/: base}]\n", "must be a list of entries NAME or GROUP: NAME"),
        ("# @package _global_\ndefaults: [{'model/ ': base}]\n", "must be a list of entries NAME or GROUP: NAME"),
        ("# @package _global_\ndefaults: [mine]\n", "take mine out of the defaults of"),
        ("# @package _global_\ndefaults: [{/experiment: mine}]\n", "inherits itself through entries GROUP: NAME"),
        (f"# @package _global_\ntrainer: {'[' * 60_000}{']' * 60_000}\n", "nests deeper than 32"),
        ("# @package _global_\ntrainer: [1]\n", "a list and a mapping cannot be merged"),
        (f"# @package _global_\ntrainer: {{steps: {'9' * 5000}}}\n", "has a value that cannot be read"),
        ("# @package _global_\ntrainer: {steps: ${seed}}\n", 'quote it: "${seed}"'),
        ("# @package _global_\ndefaults: [{override /data: multi}]\n", "Could not find 'data/multi'"),
        ("# @package _global_\ndefaults: [{override /model: bsae}]\n", "did you mean base?"),
    ],
)
def test_an_experiment_whose_settings_would_have_no_effect_is_refused(text, message, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose_arguments(["--config-dir", str(tmp_path), "experiment=mine"])
    assert message in str(caught.value)


def test_data_that_inherit_themselves_through_another_file_are_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one.yaml").write_text("defaults: [two]\n")
    (tmp_path / "data" / "two.yaml").write_text("defaults: [/data/one, _self_]\n")
    with pytest.raises(ConfigError, match=r"one inherits itself\n  --> .*two\.yaml"):
        parse_request(["--config-dir", str(tmp_path), "data=one"])


def test_models_in_subfolders_are_not_listed_because_no_command_can_name_them(tmp_path):
    (tmp_path / "model" / "sub").mkdir(parents=True)
    for name in ("mine", "sub/deep"):
        (tmp_path / "model" / f"{name}.yaml").write_text("# @package _global_\ndefaults: [tiny]\n")
    names = {entry.name for entry in describe_models(tmp_path)}
    assert "mine" in names and "sub/deep" not in names
