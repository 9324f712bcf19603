"""The command `tfm`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tfm_blocks.cli import main


def test_check_of_a_good_model_says_so(capsys):
    main(["check", "base", "heads=4"])
    assert capsys.readouterr().out == "base: fine, 35 nodes\n"


def test_check_of_a_wrong_model_prints_the_problem_and_leaves_with_2(capsys):
    with pytest.raises(SystemExit) as left:
        main(["check", "base", "heads=7"])
    assert left.value.code == 2
    assert "D % heads == 0" in capsys.readouterr().err


def test_show_lists_layers_once_with_shapes_and_counts(capsys):
    main(["show", "tiny", "vocab=9720"])
    shown = capsys.readouterr().out
    assert "66,304 × 4" in shown and "B T 9720" in shown
    assert "2,569,216 parameters" in shown
    assert "encoder.1.attn " not in shown.split("reads")[1].split("decoder.0.self")[0].replace("encoder.1.ffn", "")


def test_show_of_a_model_of_ones_own_folder(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("# @package _global_\ndefaults: [tiny, _self_]\nlayers: 1\n")
    main(["show", "mine", "--config-dir", str(tmp_path)])
    assert "model mine" in capsys.readouterr().out


def test_blocks_lists_every_block_with_its_signature(capsys):
    main(["blocks"])
    assert "x: B T D, kv?: B S E -> B T D" in capsys.readouterr().out


def test_blocks_of_one_tells_arguments_and_source(capsys):
    main(["blocks", "ffn"])
    shown = capsys.readouterr().out
    assert "d_ff" in shown and "relu | gelu" in shown and "section 3.3" in shown


def test_blocks_of_an_unknown_name_suggests_the_nearest(capsys):
    with pytest.raises(SystemExit) as left:
        main(["blocks", "atention"])
    assert left.value.code == 2
    assert "did you mean attention?" in capsys.readouterr().err


def test_translate_of_a_folder_that_is_not_there_is_told(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main(["translate", str(tmp_path / "nothing")])
    assert left.value.code == 1
    assert "there is no such run folder" in capsys.readouterr().err


def test_options_of_sampling_without_it_are_told(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["translate", "run", "--top-k", "3", "--seed", "2"])
    assert caught.value.code == 2 and "--top-k, --seed: nothing is drawn without --sample" in capsys.readouterr().err


def test_a_full_disk_is_told_without_a_traceback():
    run = Path(__file__).parent / "runs" / "format_1"
    command = f"echo Haus | {sys.executable} -m tfm_blocks translate {run} > /dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1].startswith("error: output: No space left")


def test_an_average_of_no_run_folder_is_told(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["average", str(tmp_path / "nosuch")])
    assert "there is no such run folder" in capsys.readouterr().err
