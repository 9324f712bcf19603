"""All jobs of a sweep are checked before the first one starts."""

from pathlib import Path

import pytest

from tests.conftest import refused
from tfm_blocks.cli import main
from tfm_blocks.compose.command_line import parse_request
from tfm_blocks.compose.folders import CONF
from tfm_blocks.compose.overrides import parse_overrides
from tfm_blocks.compose.sweep import combinations, list_parts, read_sweep
from tfm_blocks.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_jobs_are_every_combination_in_hydras_order():
    jobs = combinations(list_parts(parse_overrides(["heads=2,4", "seed=1", "model.add_norm=pre,post"]), [CONF]))
    assert jobs == [
        [f"heads={heads}", "seed=1", f"model.add_norm={add_norm}"] for heads in (2, 4) for add_norm in ("pre", "post")
    ]


def test_a_pattern_stands_for_the_options_of_its_group():
    request = read_sweep(parse_request(["-m", "model=glob(*norm,exclude=[deep*])", "logger=csv"]))
    assert combinations(request.parts) == [["model=prenorm", "logger=csv"]]


def test_an_interval_has_no_list_of_jobs():
    with pytest.raises(ConfigError, match=r"schedule\.scale: is an interval from 0\.1 to 2"):
        combinations(list_parts(parse_overrides(["schedule.scale=interval(0.1,2)"]), [CONF]))


@pytest.mark.grid
def test_check_lists_the_parameters_of_each_job_and_invalid_combinations(capsys):
    with pytest.raises(SystemExit) as left:
        main(["check", "tiny,prenorm", "-m", "heads=2,7", "layers=1", "d_model=64"])
    out, err = capsys.readouterr()
    assert left.value.code == 2
    assert out.count("fine") == 2 and out.count("D % heads == 0") == 2
    assert err.startswith("error: sweep: 2 of 4 jobs cannot start") and "help: leave out heads=7" in err


def test_a_sweep_whose_jobs_can_all_start_is_fine(capsys):
    main(["check", "tiny", "-m", "heads=2,4", "layers=1"])
    assert capsys.readouterr().out.count("fine") == 2


@pytest.mark.grid
def test_a_sweep_over_the_mixer_of_one_model_file_has_models_of_different_blocks(capsys):
    main(["check", "probe_decoder", "-m", "mixer=attention,retention,gated_delta_rule,lstm,rnn", "layers=1"])
    assert capsys.readouterr().out.count("fine") == 5
    assert "1 of 2 jobs cannot start" in refused(
        "check", "probe_decoder", "-m", "mixer=attention,embedding", "layers=1"
    )
