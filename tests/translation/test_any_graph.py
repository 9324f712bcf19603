"""Translating with several sources and without any, continuing prompts, and perplexity, against naive loops."""

import math
import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tfm_blocks as tfm
from tests.conftest import WORDS, published_words, sentences
from tests.network.small import network
from tfm_blocks.cli import main
from tfm_blocks.compose.model import compose_model
from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.encoding import write_packed
from tfm_blocks.data.layout import PlainText
from tfm_blocks.data.mix import Mix
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.vocabulary import BOS, EOS
from tfm_blocks.errors import DataError, RunError
from tfm_blocks.network.matching import weights_of
from tfm_blocks.runs.folder import TOKENIZER
from tfm_blocks.runs.model import write_model, write_weights
from tfm_blocks.scoring.perplexity import Perplexity, perplexity
from tfm_blocks.training.objective import Objective
from tfm_blocks.translation.settings import Sampling, Search
from tfm_blocks.translation.stream import Generating, Translating
from tfm_blocks.translation.translator import Translator

SIZES = {"d_model": 16, "d_ff": 16, "heads": 2, "layers": 2}
tokenizer = Tokenizer.train(sentences(200, 0), 300)


def sharper(network):
    """Enlarge the weights, so that the outputs of a random network are not nearly uniform."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.6)
    return network.eval()


@pytest.fixture(scope="module")
def one_sequence():
    network = sharper(tfm.build("decoder_only", vocab=tokenizer.size, **SIZES))
    return Translator(network, tokenizer, ("src", "tgt"))


@pytest.fixture(scope="module")
def two_sources():
    network = sharper(tfm.build("two_sources", vocab=tokenizer.size, **SIZES))
    return Translator(network, tokenizer)


@torch.no_grad()
def naive_greedy(network, before, most, **inputs):
    """Decode greedily with a full forward pass for each token."""
    ids = list(before)
    while len(ids) - len(before) < most:
        logits_V = network(tgt=torch.tensor([ids]), **inputs)[0, -1]
        logits_V[:EOS] = -math.inf
        ids.append(int(logits_V.argmax()))
        if ids[-1] == EOS:
            break
    return [id for id in ids[len(before) :] if id != EOS]


@pytest.mark.grid
def test_a_decoder_only_model_translates_after_source_eos_bos(one_sequence):
    texts = sentences(9, 3)
    for text, hypotheses in zip(texts, one_sequence.search(texts, Search()), strict=True):
        source = tokenizer.encode(text)
        expected = naive_greedy(one_sequence.network, [*source, EOS, BOS], 2 * (len(source) + 1) + 20)
        assert list(hypotheses[0].ids) == expected


@pytest.mark.grid
def test_prompts_of_unequal_length_give_the_same_in_one_batch_as_alone(one_sequence):
    texts = sentences(12, 4)
    together = one_sequence.search(texts, Search(beam=3, nbest=3))
    for text, hypotheses in zip(texts, together, strict=True):
        (alone,) = one_sequence.search([text], Search(beam=3, nbest=3))
        assert [one.ids for one in alone] == [one.ids for one in hypotheses]
        assert [one.log_p for one in alone] == pytest.approx([one.log_p for one in hypotheses], abs=1e-4)


@pytest.mark.grid
@torch.no_grad()
@pytest.mark.parametrize("beam", [1, 3])
def test_a_forced_prefix_is_counted_as_if_it_had_been_found(one_sequence, two_sources, beam):
    for translator, rows in ((one_sequence, ["Haus"]), (two_sources, [("Haus", "am Fluss")])):
        (best, *_), *_ = translator.search(rows, Search(beam=beam), prefixes=["zwei Kinder"])
        prefix = tokenizer.encode("zwei Kinder")
        assert list(best.ids[: len(prefix)]) == prefix
        ids = [tokenizer.encode(text) for text in ([rows[0]] if isinstance(rows[0], str) else rows[0])]
        inputs = {name: torch.tensor([[*one, EOS]]) for name, one in zip(translator.inputs, ids, strict=False)}
        before = [BOS] if inputs else [*ids[0], EOS, BOS]
        most = 2 * sum(len(one) + 1 for one in ids) + 20
        made = [*best.ids, *([EOS] if len(best.ids) < most else [])]
        logits_TV = translator.network(**inputs, tgt=torch.tensor([[*before, *made[:-1]]]))[0, len(before) - 1 :]
        log_p = logits_TV.log_softmax(1)[torch.arange(len(made)), torch.tensor(made)].sum().item()
        assert best.log_p == pytest.approx(log_p, abs=1e-4)


@pytest.mark.grid
def test_several_sources_come_in_order_by_name_or_with_tabs_between(two_sources):
    pairs = list(zip(sentences(6, 5), sentences(6, 6), strict=True))
    outputs = two_sources.translate(pairs)
    assert outputs == two_sources.translate([{"doc": doc, "src": src} for src, doc in pairs])
    lines = [f"{src}\t{doc}" for src, doc in pairs]
    made = Translating(two_sources, Search(), 500, strict=True).outputs(lines, [], 1)
    assert outputs == [one.text for (one,) in made]
    for (src, doc), text in zip(pairs, outputs, strict=True):
        inputs = {name: torch.tensor([[*tokenizer.encode(one), EOS]]) for name, one in (("src", src), ("doc", doc))}
        most = 2 * sum(value.shape[1] for value in inputs.values()) + 20
        assert text == tokenizer.decode(naive_greedy(two_sources.network, [BOS], most, **inputs))


def test_the_sum_of_sources_laid_end_to_end_must_fit():
    emb = {"block": "embedding"}
    graph = {
        "doc_emb": {**emb, "in": "doc"},
        "src_emb": {**emb, "in": "src"},
        "both": {"block": "concat_sequence", "in": ["doc_emb", "src_emb"]},
        "pos": {"block": "learned_position", "max_length": 8},
        "emb": {**emb, "in": "tgt"},
        "cross": {"block": "attention", "kv": "pos"},
        "logits": {"block": "unembed"},
    }
    inputs = {"doc": "B P", "src": "B S", "tgt": "B T"}
    concatenated = Translator(network(inputs, graph, vocab=tokenizer.size), tokenizer)
    assert len(concatenated.translate([("am", "am")])) == 1
    with pytest.raises(DataError, match=r"has 14 tokens with eos, but the model has 0 positions next to the 14 of src"):
        concatenated.translate([("am Fluss am Fluss", "am Fluss am Fluss")])


@pytest.mark.grid
def test_both_sources_matter(two_sources):
    assert two_sources.translate([("Haus", "am Fluss")]) != two_sources.translate([("Haus", "zwei Kinder spielen")])


def test_a_line_with_a_wrong_number_of_tabs_is_blank_with_a_warning_or_refused(two_sources, capsys):
    (first, second) = Translating(two_sources, Search(), 500, strict=False).outputs(["Haus", "am\tFluss"], [], 4)
    assert first[0].text == "" and second[0].text == two_sources.translate([("am", "Fluss")])[0]
    assert "stdin:4: the line has 1 tab-separated texts" in capsys.readouterr().err
    with pytest.raises(DataError, match="reads src, doc"):
        Translating(two_sources, Search(), 500, strict=True).outputs(["Haus"], [], 1)


@pytest.mark.parametrize("wrong", [["Haus"], [("a", "b", "c")], [{"src": "a"}], [{"src": "a", "doc": "b", "x": "c"}]])
def test_a_sentence_without_a_text_for_each_source_is_a_type_error(two_sources, wrong):
    with pytest.raises(TypeError, match="the model reads src, doc"):
        two_sources.translate(wrong)


def test_a_prompt_is_continued_as_by_one_forward_a_token(one_sequence):
    prompts = [*sentences(5, 8), "", WORDS[0]]
    outputs = one_sequence.generate(prompts, 7, Search())
    for prompt, (best,) in zip(prompts, outputs, strict=True):
        assert list(best.ids) == naive_greedy(one_sequence.network, [BOS, *tokenizer.encode(prompt)], 7)
    lines = Generating(one_sequence, Search(), 500, False, tokens=7).outputs(prompts, [], 1)
    assert [output.text for (output,) in lines] == [
        prompt + output.text for prompt, (output,) in zip(prompts, outputs, strict=True)
    ]


@pytest.mark.parametrize("search", [Search(), Search(max_tokens=9)], ids=["positions", "--max-tokens"])
def test_a_long_prompt_is_cut_with_a_warning_or_refused(search, run_of_64_positions, capsys):
    translator, long = tfm.load(run_of_64_positions), "zwei Kinder " * 50
    work = Generating(translator, search, 500, False, tokens=3)
    (short,), (output,) = work.outputs(["am Fluss", long], [], 1)
    assert short.text.startswith("am Fluss")
    most = min(search.max_tokens, 63)
    assert f"warning: stdin:2: the line has 101 tokens, but the maximum is {most}" in capsys.readouterr().err
    prompt = output.text.removesuffix(tokenizer.decode(output.ids))
    assert len(tokenizer.encode(prompt)) in (most - 1, most) and long.startswith(prompt)
    with pytest.raises(DataError, match=f"the maximum is {most}"):
        replace(work, strict=True).outputs(["am Fluss", long], [], 1)


def test_embed_names_the_line_of_its_file_and_refuses_another_suffix_before_it_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    network = tfm.build("bert", vocab=tokenizer.size, max_length=64, **SIZES)
    tfm.save(network, tmp_path / "run", tokenizer=tokenizer)
    (tmp_path / "films.txt").write_text("zwei Kinder\n" + "zwei Kinder " * 50 + "\n")
    for words, message in [
        ([], "--> films.txt:2\n"),
        (["-o", "films.train"], "-o: must be a .npy file in an existing folder, but is films.train"),
        (["-o", "."], "-o: must be a .npy file in an existing folder, but is ."),
        (["-o", "none/films.npy"], "-o: must be a .npy file in an existing folder"),
    ]:
        with pytest.raises(SystemExit):
            main(["embed", "run", "films.txt", *words])
        assert message in capsys.readouterr().err


def test_embed_reads_a_file_without_stdin_and_leaves_no_file_if_the_disk_is_full(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    network = tfm.build("bert", vocab=tokenizer.size, max_length=64, **SIZES)
    tfm.save(network, tmp_path / "run", tokenizer=tokenizer)
    (tmp_path / "films.txt").write_text("zwei Kinder\n")
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr("tfm_blocks.cli.close_output", lambda: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(SystemExit) as left:
            main(["embed", "run", "films.txt", "-o", "films.npy"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left.value.code == 1 and "films.npy: File too large" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["films.txt", "run"]


def test_a_number_of_tokens_that_no_memory_could_hold_is_refused(run_of_64_positions, capsys):
    with pytest.raises(SystemExit) as left:
        main(["generate", str(run_of_64_positions), "--tokens", "999999999999"])
    assert left.value.code == 2 and "--tokens: must be at most 1,000,000" in capsys.readouterr().err


def test_the_limit_of_a_long_line_is_max_tokens_for_a_model_without_positions(one_sequence, capsys):
    Translating(one_sequence, Search(max_tokens=5), 500, False).outputs(["zwei Kinder " * 9], [], 1)
    assert "the maximum is 5, by --max-tokens" in capsys.readouterr().err


def test_generated_text_ends_at_the_most_tokens_and_draws_alike_in_any_batch(one_sequence):
    search = Search(sampling=Sampling(seed=4, temperature=1.5))
    prompts = sentences(8, 9)
    outputs = one_sequence.generate(prompts, 5, search)
    assert all(len(one.ids) <= 5 for (one,) in outputs)
    assert outputs[3:4] == one_sequence.generate(prompts[3:4], 5, search, first_line=4)
    assert one_sequence.generate(prompts, 5, Search(beam=3, nbest=2))[0][1].text is not None
    with pytest.raises(ValueError, match=r"longest is \(0.0, 9\), but tokens, 5, .* leave longest out"):
        one_sequence.generate(prompts, 5, Search(longest=(0.0, 9)))


def test_a_model_with_sources_continues_no_prompts_and_one_of_plain_text_translates_nothing(one_sequence, two_sources):
    with pytest.raises(RunError, match="reads src, doc besides the target"):
        two_sources.generate(["Haus"], 5, Search())
    with pytest.raises(RunError, match="was trained on plain text"):
        Translator(one_sequence.network, tokenizer, ("tgt",)).translate(["Haus"])


@pytest.mark.parametrize("command", [["translate"], ["evaluate", "--src", "text", "--ref", "text"]])
def test_a_run_of_plain_text_has_attention_but_translates_nothing(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("Haus\n")
    knobs = [f"{name}={value}" for name, value in {**SIZES, "vocab": tokenizer.size}.items()]
    model = compose_model("decoder_only", knobs).model
    write_model(tmp_path, model, [], ["tgt"])
    write_weights(tmp_path, weights_of(tfm.build("decoder_only", vocab=tokenizer.size, **SIZES)))
    tokenizer.save(tmp_path / TOKENIZER)
    with pytest.raises(SystemExit) as left:
        main([command[0], str(tmp_path), *command[1:]])
    assert left.value.code == 1
    assert (
        "was trained on plain text, or to answer at positions of its input, so it cannot translate"
        in capsys.readouterr().err
    )
    main(["attention", str(tmp_path), "Haus", "-o", "out.html"])
    assert capsys.readouterr().out == "out.html\n"
    for wrong, rule in (
        (["Haus", "Haus"], "SENTENCE: has 2 texts, but the model reads one"),
        (["Haus", "--target", "house"], "--target: is a translation, but the model reads one text"),
    ):
        with pytest.raises(SystemExit):
            main(["attention", str(tmp_path), *wrong, "-o", "out.html"])
        assert rule in capsys.readouterr().err


@pytest.fixture
def run_of_64_positions(tmp_path):
    """Write a run of plain text whose model has 64 positions."""
    network = tfm.build("gpt2", vocab=tokenizer.size, max_length=64, **SIZES)
    tfm.save(network, tmp_path / "run", tokenizer=tokenizer)
    return tmp_path / "run"


def test_the_context_of_a_perplexity_is_at_most_the_positions(run_of_64_positions, tmp_path, capsys):
    (tmp_path / "text").write_text("zwei Kinder spielen am Fluss\n" * 20)
    command = ["evaluate", str(run_of_64_positions), "--text", str(tmp_path / "text")]
    main(command)
    default = capsys.readouterr().out
    main([*command, "--context", "64"])
    assert capsys.readouterr().out == default
    with pytest.raises(SystemExit) as left:
        main([*command, "--context", "65"])
    assert left.value.code == 2 and "--context: must be at most 64" in capsys.readouterr().err


@pytest.mark.parametrize("inside", [False, True])
def test_an_evaluation_predicts_the_tokens_of_training_in_the_same_rows(inside, tmp_path):
    """A bos inside a row, which a published tokenizer adds, is not predicted; the row of the second bos begins there."""
    published = published_words(before=(BOS,))
    texts = ["the house", "the boat", "a", "blue house a boat the red house"]
    write_packed(tmp_path, "tgt", texts, published, context=4, inside=inside)
    corpus = Mix({"one": Corpus(tmp_path, published)})
    batch = PlainText().batch(corpus, range(len(corpus)))
    expected = [len(corpus.ids("tgt", row)) - list(corpus.ids("tgt", row)).count(BOS) for row in range(len(corpus))]
    assert batch.counts_B.tolist() == PlainText().labels_N(corpus).tolist() == expected
    assert inside or sum(expected) < corpus.lengths_N("tgt").sum()
    network = tfm.build("decoder_only", vocab=published.size, **SIZES).eval()
    with torch.no_grad():
        _, nll, _ = Objective(network, 0.0).scores(batch)
    result = perplexity(Translator(network, published), texts, context=4, batch_tokens=8, inside=inside)
    assert (result.tokens, result.nll) == (batch.tokens, pytest.approx(float(nll)))


@torch.no_grad()
def test_perplexity_matches_every_token_after_those_before_it_in_its_row(one_sequence):
    lines = ["zwei Kinder spielen", "", "am Fluss steht ein Haus"]
    result = perplexity(one_sequence, lines, context=6, batch_tokens=14)
    ids = [id for line in lines if line for id in [*tokenizer.encode(line), EOS]]
    nll = 0.0
    for first in range(0, len(ids), 6):
        row = [BOS, *ids[first : first + 6]]
        for place in range(1, len(row)):
            logits_V = one_sequence.network(tgt=torch.tensor([row[:place]]))[0, -1]
            nll -= logits_V.log_softmax(0)[row[place]].item()
    assert result.nll == pytest.approx(nll, rel=1e-4)
    assert (result.tokens, result.words) == (len(ids), 3 + 5 + 2)
    assert result.bytes == sum(len(line) + 1 for line in lines if line)
    assert result.per_token == pytest.approx(math.exp(nll / len(ids)), rel=1e-4)
    assert result.bits_per_byte == pytest.approx(nll / math.log(2) / result.bytes, rel=1e-4)


def test_a_perplexity_that_overflows_is_infinite():
    result = Perplexity(nll=2000.0, tokens=2, words=2, bytes=300)
    assert (result.per_token, result.per_word) == (math.inf, math.inf) and result.bits_per_byte < 10
