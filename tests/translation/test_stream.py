"""`tfm translate`: lines in, lines out."""

import io
import os
import pty
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

import tfm_blocks as tfm
from tests.conftest import save, sentences
from tfm_blocks.errors import DataError
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.stream import BREAKING, Generating, Translating, chunks, fitting, stream
from tfm_blocks.translation.translator import Translator

ROOT = Path(__file__).parents[2]


GREEDY = Search()


def run(translator, data, *, prefix=None, search=GREEDY, strict=False, scores=False):
    target, progress = StringIO(), []
    source, put = os.pipe()
    os.write(put, data)
    os.close(put)
    with os.fdopen(source, "rb") as file:
        try:
            work = Translating(translator, search, 500, strict)
            read = chunks(file, "stdin", strict=strict)
            stream(work, read, target, prefix=prefix, scores=scores, tell=progress.append)
        except DataError as error:
            return target.getvalue(), str(error)
    return target.getvalue(), progress


def test_every_line_has_its_line_in_order_and_the_last_needs_no_end(translator):
    texts = [*sentences(20, 5), "", "am Fluss"]
    output, progress = run(translator, "\r\n".join(texts).encode())
    assert output.split("\n") == [*translator.translate(texts), ""]
    assert progress[-1] == 22


@pytest.mark.parametrize(("data", "line"), [(b"Haus\nam Fluss\n\xff\nund\n", 3), (b"\xef\xbb\xbfHaus\n\xc3", 2)])
def test_a_line_that_is_not_utf8_has_an_empty_line_or_is_refused(translator, data, line, capsys):
    output, progress = run(translator, data)
    texts = [text.decode("utf-8-sig", errors="replace") for text in data.rstrip(b"\n").split(b"\n")]
    texts[line - 1] = ""
    assert output.split("\n") == [*translator.translate(texts), ""] and progress[-1] == len(texts)
    assert (
        f"warning: stdin:{line}: the line is not UTF-8 text: it is read as an empty line\n" in capsys.readouterr().err
    )
    output, error = run(translator, data, strict=True)
    assert output.count("\n") == line - 1 and output.split("\n")[0] == translator.translate(["Haus"])[0]
    assert f"stdin:{line}" in error


def test_a_long_line_is_cut_with_a_warning_or_refused(translator, capsys):
    data = ("Haus " * 50 + "\nam Fluss\n").encode()
    output, _ = run(translator, data, search=Search(max_tokens=10))
    assert output.split("\n")[1] == translator.translate(["am Fluss"])[0]
    assert "warning: stdin:1: the line has" in capsys.readouterr().err
    _, error = run(translator, data, search=Search(max_tokens=10), strict=True)
    assert "the maximum is 10" in error and "--max-tokens" in error


def test_a_line_beyond_the_known_positions_is_cut_to_them_or_refused(translator, capsys):
    position = "{block: learned_position, max_length: 6}"
    knobs = {"layers": 1, "d_model": 16, "vocab": translator.tokenizer.size, "model.graph.src_pos": position}
    short = Translator(tfm.build("tiny", **knobs).eval(), translator.tokenizer)
    texts = ["am", "ein kleines Haus steht am Fluss und davor", "Haus"]
    data, ids = "\n".join(texts).encode(), translator.tokenizer.encode(texts[1])
    output, _ = run(short, data)
    expected = short.translate([texts[0], translator.tokenizer.decode(ids[:5]), texts[2]])
    assert output.split("\n") == [*(BREAKING.sub(" ", text) for text in expected), ""]
    assert f"warning: stdin:2: the line has {len(ids)} tokens, but the maximum is 5" in capsys.readouterr().err
    _, error = run(short, data, strict=True)
    assert "stdin:2" in error and "split the line" in error


def test_a_line_is_cut_between_characters(translator):
    """Part of a character would be decoded as another character with more tokens."""
    tokens = len(translator.tokenizer.encode("Haus"))
    for most in range(tokens + 1, tokens + 8):
        ((cut,),) = fitting([["Haus" + "€" * 9]], translator, Search(max_tokens=most), "stdin", strict=False)
        assert cut == "Haus" + "€" * ((most - tokens) // 3)


@pytest.mark.parametrize(
    ("lines", "message"), [("zwei\n", "ends after 1 line,"), ("zwei\n\nund\n", "more lines than the 2")]
)
def test_a_prefix_file_of_another_length_is_an_error(translator, tmp_path, lines, message):
    (tmp_path / "prefix").write_text(lines)
    assert message in run(translator, b"Haus\nFluss\n", prefix=tmp_path / "prefix")[1]


def test_the_prefix_of_a_blank_line_is_not_dropped_in_silence(translator, tmp_path, capsys):
    (tmp_path / "prefix").write_text("zwei\nzwei\n")
    output, _ = run(translator, b"Haus\n \n", prefix=tmp_path / "prefix")
    assert output.split("\n")[1] == "" and "stdin:2: the line is blank" in capsys.readouterr().err


def test_a_text_stays_within_its_line_and_column(translator, tmp_path):
    (tmp_path / "prefix").write_text("zwei\tund\x85Haus\u2028\n", encoding="utf-8", newline="")
    output, _ = run(translator, b"Haus\n", prefix=tmp_path / "prefix", scores=True)
    assert output.count("\t") == 1 and output.partition("\t")[2].startswith("zwei und Haus ")


def test_control_characters_of_a_prompt_are_printed_as_spaces_with_a_warning(translator, capsys):
    network = tfm.build("decoder_only", layers=1, d_model=16, d_ff=16, heads=2, vocab=translator.tokenizer.size)
    work = Generating(Translator(network.eval(), translator.tokenizer), Search(), 4096, False, 3)
    target = io.StringIO()
    stream(work, [["am\tFluss", "Haus"]], target, prefix=None, scores=False, tell=lambda count: None)
    assert target.getvalue().startswith("am Fluss")
    error = capsys.readouterr().err
    assert "warning: stdin:1: the prompt has control characters" in error and "stdin:2" not in error


def test_prefixes_are_taken_line_by_line(translator, tmp_path):
    (tmp_path / "prefix").write_text("zwei\n\n")
    one, two, _ = run(translator, b"Haus\nFluss\n", prefix=tmp_path / "prefix")[0].split("\n")
    assert one.startswith("zwei") and two == translator.translate(["Fluss"])[0]


def test_the_best_come_with_line_and_score(translator):
    output, _ = run(translator, b"Haus\n\n", search=Search(beam=3, nbest=3))
    rows = [row.split("\t") for row in output.splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "1", "2"]
    scores = [float(row[1]) for row in rows[:3]]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.grid
def test_output_starts_before_the_input_ends(translator, tmp_path):
    save(translator, tmp_path / "run")
    command = [sys.executable, "-m", "tfm_blocks", "translate", str(tmp_path / "run"), "--beam", "2", "--scores"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b"Haus\n")
        process.stdin.flush()
        score, text = process.stdout.readline().decode().rstrip("\n").split("\t")
        (best,) = translator.search(["Haus"], Search(beam=2))[0]
        assert (float(score), text) == (round(best.score, 4), best.text)
        process.stdin.close()
    assert process.returncode == 0


@pytest.mark.grid
def test_a_terminal_gets_a_prompt_and_each_answer_at_once(translator, tmp_path):
    save(translator, tmp_path / "run")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tfm_blocks", "translate", str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        assert "Ctrl-D ends" in until(ours, "> ")
        for text in ("Haus", "", "am Fluss"):
            os.write(ours, f"{text}\n".encode())
            assert f"{translator.translate([text])[0]}\r\n" in until(ours, "> ")
        os.write(ours, b"\x04")
    assert process.returncode == 0


def until(terminal, end):
    """Return the terminal output up to `end`."""
    shown = b""
    while not shown.decode(errors="replace").endswith(end):
        shown += os.read(terminal, 1024)
    return shown.decode()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_lines(translator, tmp_path):
    """With 100,000 lines, any memory kept per line would add up to megabytes."""
    save(translator, tmp_path / "run")
    program = """
import resource, sys
from tfm_blocks.cli import main
main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""

    def peak(lines):
        data = b"ein\nund\n" * (lines // 2)
        command = [sys.executable, "-c", program, "translate", str(tmp_path / "run"), "--max-tokens", "4"]
        done = subprocess.run(command, cwd=ROOT, input=data, capture_output=True, check=True)
        assert done.stdout.count(b"\n") == lines
        return int(done.stderr.split()[-1])

    assert peak(100_000) < peak(10_000) * 1.05
