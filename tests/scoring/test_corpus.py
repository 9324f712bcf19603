"""`tfm evaluate` against sacreBLEU's own command."""

import json

import pytest

from tests.conftest import save, sentences
from tests.preloaded import run_python
from tests.run_folders import garbled
from tfm_blocks.cli import main
from tfm_blocks.scoring.corpus import TOKENISED, metrics, score
from tfm_blocks.scoring.paired_test import compare


def sacrebleu(tmp_path, outputs, references, *options):
    (tmp_path / "ref").write_text("\n".join(references) + "\n")
    (tmp_path / "out").write_text("\n".join(outputs) + "\n")
    done = run_python(["-m", "sacrebleu", tmp_path / "ref", "-i", tmp_path / "out", *options])
    return json.loads(done.stdout)


@pytest.mark.grid
def test_scores_intervals_and_signatures_match_sacrebleus_command(tmp_path):
    references = sentences(60, 7)
    outputs = garbled(references, 0.2, 8)
    options = ["-m", "bleu", "chrf", "ter", "--confidence", "-w", "6", "--force"]
    theirs = sacrebleu(tmp_path, outputs, references, *options)
    for own, other in zip(score(outputs, references, metrics("13a", tokenised=False)), theirs, strict=True):
        assert (own.value, own.interval) == pytest.approx((other["score"], other["confidence_var"]), abs=1e-5)
        print(own.signature, other["signature"])
        assert own.signature == other["signature"]


def test_a_text_whose_resamples_score_0_now_and_then_has_an_interval():
    references = sentences(30, 7)
    outputs = [*references[:1], *["nichts"] * 29]
    assert all(one.interval > 0 for one in score(outputs, references, metrics("13a", tokenised=False)))


def test_the_tokenised_number_ignores_case_and_keeps_the_tokens(tmp_path):
    references = ["Ein Haus , das am Fluss steht .", "Zwei Kinder spielen davor ."]
    (tokenised,) = (
        one
        for one in score([one.lower() for one in references], references, metrics("13a", tokenised=True))
        if one.name == TOKENISED
    )
    assert (
        tokenised.value == pytest.approx(100) and "case:lc" in tokenised.signature and "tok:none" in tokenised.signature
    )


@pytest.mark.grid
def test_the_paired_test_distinguishes_a_better_run_from_an_equal_one():
    references = sentences(80, 7)
    good, bad = garbled(references, 0.1, 1), garbled(references, 0.4, 2)
    before, after = compare(bad, good, references, metrics("13a", tokenised=False))
    assert after[0].value > before[0].value and after[0].p < 0.01 and before[0].p is None
    low, high = after[0].difference_interval
    assert low < after[0].difference == after[0].value - before[0].value < high and low > 0
    _, same = compare(good, garbled(references, 0.1, 3), references, metrics("13a", tokenised=True))
    assert all(one.p > 0.05 and one.p > one.p_sacrebleu for one in same)
    _, equal = compare(good, good, references, metrics("13a", tokenised=False))
    assert [one.p for one in equal] == [1, 1, 1]


def test_two_runs_of_the_same_score_have_p_1_whatever_they_say():
    references = sentences(40, 7)
    _, differences = compare(["x"] * 40, ["y"] * 40, references, metrics("13a", tokenised=False))
    assert differences[0].value == 0 and [one.p for one in differences] == [1, 1, 1]
    shouted = [text.upper() for text in references]
    lower_p = compare(["x"] * 40, shouted, references, metrics("13a", tokenised=False))[1]
    assert lower_p[1].value > 0 and lower_p[1].p < 0.01


def test_a_run_is_not_compared_with_itself_and_long_lines_are_cut_as_in_translate(translator, tmp_path, capsys):
    save(translator, tmp_path / "run")
    for name in ("src", "ref"):
        (tmp_path / name).write_text("Haus " * 50 + "\n")
    command = ["evaluate", str(tmp_path / "run"), "--src", str(tmp_path / "src"), "--ref", str(tmp_path / "ref")]
    with pytest.raises(SystemExit):
        main([*command, "--against", str(tmp_path / "run" / "..") + "/run/"])
    assert "--against: must be a different run" in capsys.readouterr().err
    main([*command, "--max-tokens", "10", "--beam", "2", "--patient"])
    shown = capsys.readouterr()
    assert "src:1: the line has" in shown.err and "1 line" in shown.out
    with pytest.raises(SystemExit):
        main([*command, "--max-tokens", "10", "--strict"])


def test_the_command_scores_the_translations_of_the_run(translator, tmp_path, capsys):
    texts = sentences(12, 9)
    (tmp_path / "src").write_text("\n".join(texts) + "\n")
    (tmp_path / "ref").write_text("\n".join(translator.translate(texts)) + "\n")
    save(translator, tmp_path / "run")
    main(["evaluate", str(tmp_path / "run"), "--src", str(tmp_path / "src"), "--ref", str(tmp_path / "ref"), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["lines"] == {str(tmp_path / "run"): 12} and [
        one["value"] for one in shown["runs"][str(tmp_path / "run")]
    ] == pytest.approx([100, 100, 0])
    main(
        [
            "evaluate",
            str(tmp_path / "run"),
            "--src",
            str(tmp_path / "src"),
            "--ref",
            str(tmp_path / "src"),
            "--tokenised",
        ]
    )
    assert "TER" in (table := capsys.readouterr().out) and TOKENISED in table


def test_texts_of_unequal_length_are_an_error(translator, tmp_path, capsys):
    (tmp_path / "src").write_text("Haus\nFluss\n")
    (tmp_path / "ref").write_text("Haus\n")
    with pytest.raises(SystemExit):
        main(["evaluate", str(tmp_path), "--src", str(tmp_path / "src"), "--ref", str(tmp_path / "ref")])
    assert "they have 1 and 2" in capsys.readouterr().err
