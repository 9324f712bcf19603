"""Bits per byte of language models: recomputed document by document, and compared between tokenizers."""

import contextlib
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F

import tfm_blocks as tfm
from tests.conftest import COMPOSER, sentences
from tfm_blocks.cli import main
from tfm_blocks.compose.run import compose_job
from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.encoding import write_packed
from tfm_blocks.data.mix import Mix
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.launch.check import check_run
from tfm_blocks.launch.job import train
from tfm_blocks.runs.metrics import read_last_row
from tfm_blocks.runs.row_results import read_losses

CONTEXT = 7
TEXTS = [*sentences(12, 3), "", "Ä¿😀 ñ", *sentences(3, 9), "   ", "x"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Write three splits of lines, some of them blank, and return their folder."""
    folder = tmp_path / "text"
    folder.mkdir()
    for split, lines in (("train", [*sentences(200, 1), *TEXTS]), ("val", sentences(5, 2)), ("test", TEXTS)):
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def train_on(text: Path, name: str, *overrides: str) -> Path:
    """Train a small language model for few steps, and return its run."""
    sizes = ["d_model=16", "d_ff=24", "heads=2", "layers=1", "vocab=270", "trainer.steps=3", "trainer.validate_every=2"]
    data = [f"data.dir={text}", f"data.cache={text / 'cache'}", f"data.context={CONTEXT}", "data.step_tokens=60"]
    files = [f"data.{split}=[{split}.txt]" for split in ("train", "val", "test")]
    options = [
        "model=decoder_only",
        "data=lm",
        "logger=csv",
        "trainer.precision=fp32",
        *sizes,
        *data,
        *files,
        f"name={name}",
        *overrides,
    ]
    composed = compose_job(list({option.partition("=")[0]: option for option in options}.values()), COMPOSER)
    train(check_run(composed), text)
    return text / name


@torch.no_grad()
def naive(run: Path, texts: list[str]) -> list[tuple[float, int, int]]:
    """Return -log p, the tokens and the bytes of each document, one packed row at a time."""
    model = tfm.load(run)
    documents = [text for text in texts if text.strip()]
    ids = [(id, number) for number, text in enumerate(documents) for id in (*model.tokenizer.encode(text), 2)]
    sums = [[0.0, 0, len(text.encode()) + 1] for text in documents]
    for start in range(0, len(ids), CONTEXT):
        row = ids[start : start + CONTEXT]
        logits_TV = model.network(tgt=torch.tensor([[1, *(id for id, _ in row[:-1])]]))[0]
        for (id, number), logits_V in zip(row, logits_TV, strict=True):
            sums[number][0] += float(F.cross_entropy(logits_V[None], torch.tensor([id])))
            sums[number][1] += 1
    return [(nll, tokens, size) for nll, tokens, size in sums]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.grid)])
def test_losses_of_documents_equal_a_naive_loop(text: Path, devices: int) -> None:
    run = train_on(text, "run", f"trainer.devices={devices}", "data.batch_tokens=40")
    expected, losses_N6 = naive(run, TEXTS), read_losses(run)
    assert losses_N6 is not None and losses_N6[:, 1:4].tolist() == pytest.approx(np.array(expected), rel=1e-4)
    nll, _, size = np.sum(expected, 0)
    scores = json.loads((run / "status.json").read_text())["scores"]
    assert scores["test/bits_per_byte"] == pytest.approx(nll / size / math.log(2), rel=1e-4)
    losses_D, sizes_D, score = losses_N6[:, 1], losses_N6[:, 3], scores["test/bits_per_byte"]
    without_D = [np.delete(losses_D, d).sum() / np.delete(sizes_D, d).sum() / math.log(2) for d in range(len(losses_D))]
    half = jackknife_half(np.array(without_D))
    (row,) = reported(run)["groups"][0]["runs"]
    assert row["halves"]["bits_per_byte"] == pytest.approx(half, rel=1e-3)
    assert row["halves"].keys() == {"loss", "perplexity", "bits_per_byte"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["compare", str(run)])
    assert f"{score:.3f} ± {half:.3f}" in out.getvalue()
    last = read_last_row(run / "metrics.csv")["val/bits_per_byte"]
    nll, _, size = np.sum(naive(run, sentences(5, 2)), 0)
    assert last == pytest.approx(nll / size / math.log(2), rel=1e-4)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["evaluate", str(run), "--text", str(text / "test.txt"), "--context", str(CONTEXT), "--json"])
    assert json.loads(out.getvalue())["bits_per_byte"] == pytest.approx(scores["test/bits_per_byte"], rel=1e-4)


def reported(*arguments: object) -> dict:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["compare", *map(str, arguments), "--json"])
    return json.loads(out.getvalue())


def jackknife_half(without_N: np.ndarray) -> float:
    """Return half of the 95 % interval of a score from its values without each text."""
    count = len(without_N)
    error = math.sqrt((count - 1) ** 2 / count * np.var(without_N, ddof=1))
    return float(scipy.stats.t.ppf(0.975, count - 1) * error)


def expect_test(row: dict, before_N: np.ndarray, after_N: np.ndarray, sizes_N: np.ndarray) -> None:
    """Compare the difference of two means of a quantity, its interval and its p-value with scipy's."""
    gaps_N, count = after_N - before_N, len(sizes_N)
    assert row["difference"] == pytest.approx(gaps_N.sum() / sizes_N.sum(), rel=1e-3)

    def difference(first_N: np.ndarray, second_N: np.ndarray) -> float:
        return float((first_N - second_N).sum() / sizes_N.sum())

    options = {"permutation_type": "samples", "n_resamples": 20_000, "rng": 1}
    theirs = scipy.stats.permutation_test((gaps_N, 0 * gaps_N), difference, **options)
    assert row["sentences"] == pytest.approx(theirs.pvalue, abs=0.02)
    low, high = row["sentences_interval"]
    without_N = [np.delete(gaps_N, n).sum() / np.delete(sizes_N, n).sum() for n in range(count)]
    assert (high - low) / 2 == pytest.approx(jackknife_half(np.array(without_N)), rel=1e-3)


@pytest.mark.grid
def test_the_scores_of_each_corpus_equal_a_naive_loop_and_are_tested_over_its_documents(text: Path) -> None:
    more, mix = [*sentences(4, 5), "", "ñ"], "{a: {}, b: {val: [more.txt], test: [more.txt]}}"
    (text / "more.txt").write_text("\n".join(more) + "\n")
    sizes = {"base": "vocab=270", "vocab": "vocab=330", "wide": "d_ff=32"}
    runs = {name: train_on(text, name, f"data.mix={mix}", size) for name, size in sizes.items()}
    sums = {name: {"a": np.array(naive(run, TEXTS)), "b": np.array(naive(run, more))} for name, run in runs.items()}
    for name, run in runs.items():
        scores = json.loads((run / "status.json").read_text())["scores"]
        for corpus, sums_N3 in sums[name].items():
            nll, _, size = sums_N3.sum(0)
            assert scores[f"test/bits_per_byte/{corpus}"] == pytest.approx(nll / size / math.log(2), rel=1e-4)
        logged = read_last_row(run / "metrics.csv")["val/bits_per_byte/b"]
        assert logged == pytest.approx(scores["test/bits_per_byte/b"], rel=1e-4)
    cells = reported(runs["base"], runs["vocab"], "--metric", "bits_per_byte/b")["matrix"]
    totals = [sums[name]["b"].sum(0) for name in ("base", "vocab")]
    values = sorted(nll / size / math.log(2) for nll, _, size in totals)
    assert sorted(cell["mean"] for cell in cells) == pytest.approx(values, rel=1e-4)
    for other, measured in (("vocab", {"bits_per_byte"}), ("wide", {"bits_per_byte", "loss", "perplexity"})):
        rows = {row["score"]: row for row in reported(runs["base"], runs[other], "--baseline", "base")["against"]}
        assert set(rows) == {f"{name}{corpus}" for name in measured for corpus in ("", "/a", "/b")}
        for corpus in ("a", "b"):
            (before_N, tokens_N, sizes_N), (after_N, *_) = (sums[name][corpus].T for name in ("base", other))
            in_bits = [side_N / math.log(2) for side_N in (before_N, after_N)]
            expect_test(rows[f"bits_per_byte/{corpus}"], *in_bits, sizes_N)
            if other == "wide":
                expect_test(rows[f"loss/{corpus}"], before_N, after_N, tokens_N)


def test_models_of_different_tokenizers_are_tested_over_documents(
    text: Path,
) -> None:
    sizes = ((270, 7), (330, 9))
    runs = [train_on(text, f"vocab{vocab}", f"vocab={vocab}", f"data.context={context}") for vocab, context in sizes]
    losses = [read_losses(run) for run in runs]
    before, after = losses
    assert before is not None and after is not None and before[:, 3].tolist() == after[:, 3].tolist()
    assert before[:, 2].tolist() != after[:, 2].tolist()
    (row,) = reported(*runs, "--baseline", "vocab270")["against"]  # losses per token are not compared
    assert row["score"] == "bits_per_byte"
    expect_test(row, before[:, 1] / math.log(2), after[:, 1] / math.log(2), before[:, 3])


def test_documents_of_a_mix_and_ends_inside_a_document(tmp_path: Path) -> None:
    """A published tokenizer can read an end of text that is written in a text."""

    class Ending(Tokenizer):
        def encode_batch(self, texts):
            return [[Tokenizer.EOS if id == 4 else id for id in ids] for ids in super().encode_batch(texts)]

    tokenizer = Ending.of_words(["end", "a", "b"])
    parts = {}
    for name, texts in {"first": ["a b", "a end b end a", "b"], "second": ["", "end", "a a a a b"]}.items():
        (tmp_path / name).mkdir()
        write_packed(tmp_path / name, "tgt", texts, tokenizer, context=3)
        parts[name] = Corpus(tmp_path / name, tokenizer)
    mix = Mix(parts)
    assert mix.documents is not None
    texts = ["a b", "a end b end a", "b", "end", "a a a a b"]
    assert mix.documents.bytes_D.tolist() == [len(text) + 1 for text in texts]
    read = dict.fromkeys(range(len(texts)), 0)
    for row, piece in enumerate(mix.documents.first_R.tolist()):
        for id in mix.ids("tgt", row).tolist():
            read[int(mix.documents.document_P[piece])] += 1
            piece += id == Tokenizer.EOS
    assert list(read.values()) == [len(text.split()) + 1 for text in texts]
