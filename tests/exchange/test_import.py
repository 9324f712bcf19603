"""Folders of published models become runs: equal logits, equal output, and back to the same bytes."""

import hashlib
import json
import shlex

import pytest
import torch
from transformers import AutoTokenizer

import tfm_blocks as tfm
from tests.exchange.published import FAMILIES, VOCAB, publish, without_ends
from tests.oracles.references import ENCODERS
from tests.oracles.test_hugging_face import far_apart
from tfm_blocks.cli import main
from tfm_blocks.data.tokenizer_files import read_tokenizer
from tfm_blocks.errors import RunError
from tfm_blocks.exchange import exporting
from tfm_blocks.exchange.exporting import export_run
from tfm_blocks.exchange.importing import import_folder
from tfm_blocks.translation.save import save_network
from tfm_blocks.translation.settings import Search

TOKENS = 20
TEXTS = [f"w{id} w{id + 9} w{2 * id - 1}" for id in range(3, 18, 2)]
DEFAULT = ("gpt2", "t5", "bert", "modernbert")


def each_family(*others):
    names = [*FAMILIES, *others]
    marks = {name: [] if name in DEFAULT else [pytest.mark.grid] for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in names])


def imported(name, folder, **options):
    theirs = publish(name, folder / "theirs", **options)
    import_folder(folder / "theirs", folder / "run")
    return theirs, tfm.load(folder / "run")


def random_ids(rows, length, seed=0):
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def own_ids(translator, ids_BN):
    return torch.tensor([translator.tokenizer.vocabulary.to_here(row) for row in ids_BN.tolist()])


def logits_of_both(theirs, translator, *, least=0):
    """Return our logits and theirs for the same ids, at least `least`, in the order of the published vocabulary."""
    src_BS, tgt_BT = (ids.clamp(min=least) for ids in (random_ids(3, 7), random_ids(3, 5, 1)))
    with torch.no_grad():
        if translator.inputs:
            expected = theirs(input_ids=src_BS, decoder_input_ids=tgt_BT).logits
            logits_BTV = translator.network(src=own_ids(translator, src_BS), tgt=own_ids(translator, tgt_BT))
        else:
            expected = theirs(input_ids=tgt_BT).logits
            logits_BTV = translator.network(tgt=own_ids(translator, tgt_BT))
    return logits_BTV[..., own_ids(translator, torch.arange(VOCAB)[None])[0]], expected


@torch.no_grad()
def logits_of_encoders(theirs, encoder):
    """Return our logits and theirs for rows of two lengths, in the order of the published vocabulary."""
    ids_BS, keep_BS = random_ids(3, 9).clamp(min=3), torch.arange(9) < torch.tensor([9, 5, 9])[:, None]
    expected = theirs(input_ids=ids_BS.where(keep_BS, theirs.config.pad_token_id), attention_mask=keep_BS.long()).logits
    logits_BSV = encoder.network(src=own_ids(encoder, ids_BS).where(keep_BS, 0))
    if expected.ndim == 2:  # of a discriminator
        return logits_BSV[..., -1][keep_BS], expected[keep_BS]
    return logits_BSV[..., own_ids(encoder, torch.arange(VOCAB)[None])[0]][keep_BS], expected[keep_BS]


def expect_restored(folder):
    """Export the run of an imported folder, compare its files with the published ones, and return the certificate."""
    _, certificate = export_run(folder / "run", folder / "back")
    back = {path.name: path.read_bytes() for path in (folder / "back").iterdir() if path.name != "certificate.json"}
    assert back == {path.name: path.read_bytes() for path in (folder / "theirs").iterdir()}
    return certificate


def greedy_of_both(theirs, translator, texts=TEXTS, tokens=TOKENS):
    """Return the texts of greedy search, ours and theirs, from models whose texts have no special tokens."""
    vocabulary, conventions = translator.tokenizer.vocabulary, translator.conventions
    if translator.inputs:
        ours = translator.translate(texts, longest=(0.0, tokens))
        read = torch.tensor([vocabulary.to_published(conventions.source(ids)) for ids in translator.encode(texts)])
    else:
        ours = [best.text.strip() for (best,) in translator.generate(texts, tokens, Search())]
        read = torch.tensor([[int(word[1:]) for word in text.split()] for text in texts])
    options = {"attention_mask": torch.ones_like(read), "max_new_tokens": tokens, "do_sample": False}
    new = theirs.generate(read, **options)[:, 1 if translator.inputs else read.shape[1] :]
    return list(ours), [" ".join(f"w{id}" for id in row) for row in new.tolist()]


def expect_equal_texts(theirs, translator, least=4):
    """Compare 20 tokens of greedy search for each of several texts, with at least `least` different tokens."""
    ours, expected = greedy_of_both(theirs, translator)
    assert ours == expected
    assert [len(text.split()) for text in expected] == [TOKENS] * len(TEXTS)
    assert len({word for text in expected for word in text.split()}) >= least


@each_family()
def test_logits_and_greedy_output_match_transformers(name, tmp_path):
    longer = {"n_positions": 24} if name == "gpt2" else {}
    theirs = publish(name, tmp_path / "theirs", **longer)
    without_ends(theirs, tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    ours = tfm.load(tmp_path / "run")
    assert far_apart(*logits_of_both(theirs, ours)) < 1e-5
    expect_equal_texts(theirs, ours)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("bert", "modernbert") else pytest.mark.grid) for name in ENCODERS]
)
def test_logits_of_encoders_match_transformers(name, tmp_path):
    theirs, encoder = imported(name, tmp_path)
    assert far_apart(*logits_of_encoders(theirs, encoder)) < 1e-5


@each_family(*ENCODERS)
def test_export_restores_every_byte(name, tmp_path):
    imported(name, tmp_path)
    expect_restored(tmp_path)


@pytest.mark.grid
def test_a_run_with_an_imported_tokenizer_is_exported_with_all_its_files(tmp_path):
    publish("gpt2", tmp_path / "theirs")
    texts = {
        "tokenizer_config.json": '{"eos_token": "w36", "pad_token": "w0"}',
        "chat_template.jinja": "{{ messages }}",
    }
    for name, text in texts.items():
        (tmp_path / "theirs" / name).write_text(text)
    import_folder(tmp_path / "theirs", tmp_path / "imported")
    tokenizer = read_tokenizer(str(tmp_path / "imported"))
    save_network(tfm.load(tmp_path / "imported").network, tmp_path / "tuned", tokenizer)
    for name in ("imported", "tuned"):
        export_run(tmp_path / name, tmp_path / f"{name}-back")
        for file in ("tokenizer.json", *texts):
            assert (tmp_path / f"{name}-back" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "tuned-back").pad_token == "w0"


def test_the_certificate_has_the_hashes_of_the_weights(tmp_path):
    imported("gpt2", tmp_path)
    export_run(tmp_path / "run", tmp_path / "back")
    digest = hashlib.sha256((tmp_path / "back" / "model.safetensors").read_bytes()).hexdigest()
    certificate = json.loads((tmp_path / "back" / "certificate.json").read_text())
    assert certificate["weights"] == {"model.safetensors": digest}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_that_differs_from_the_run_fails_and_leaves_no_folder(dtype, tmp_path, monkeypatch):
    imported("gpt2", tmp_path, dtype=dtype)
    write = exporting.write_tensors
    halved = lambda path, tensors, metadata: write(path, {name: t / 2 for name, t in tensors.items()}, metadata)  # noqa: E731
    monkeypatch.setattr(exporting, "write_tensors", halved)
    with pytest.raises(RunError, match="the export differs from the run: log probabilities by"):
        export_run(tmp_path / "run", tmp_path / "back")
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "run"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.grid)])
def test_sixteen_bit_weights_and_shards_are_restored(dtype, tmp_path):
    imported("gpt2", tmp_path, dtype=dtype, shard="4KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    expect_restored(tmp_path)


@pytest.mark.parametrize(
    ("name", "tie"), [("gpt2", False), *(pytest.param("llama", tie, marks=pytest.mark.grid) for tie in (True, False))]
)
def test_the_output_matrix_may_be_tied_or_not(name, tie, tmp_path):
    theirs, translator = imported(name, tmp_path, tie_word_embeddings=tie)
    assert ("logits.block.weight" in dict(translator.network.named_parameters())) is not tie
    assert far_apart(*logits_of_both(theirs, translator)) < 1e-5
    expect_restored(tmp_path)


def test_the_printed_command_quotes_its_paths(tmp_path, capsys):
    publish("gpt2", tmp_path / "theirs")
    main(["import", str(tmp_path / "theirs"), "-o", str(tmp_path / "a b")])
    command = shlex.split(capsys.readouterr().out.splitlines()[1])
    assert command[-3:-1] == [f"init_from={tmp_path / 'a b'}", f"data.tokenizer={tmp_path / 'a b'}"]


def test_import_prints_the_settings_of_greedy_search_that_generation_ignores(tmp_path, capsys):
    publish("gpt2", tmp_path / "theirs")
    settings = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 0, "begin_suppress_tokens": [5], "num_beams": 4}
    path = tmp_path / "theirs" / "generation_config.json"
    for given in (
        settings | {"bad_words_ids": [[3], [4, 5]]},
        {"repetition_penalty": 1.0, "begin_suppress_tokens": None},
    ):
        path.write_text(json.dumps({"eos_token_id": 2, **given}))
        main(["import", str(tmp_path / "theirs"), "-o", str(tmp_path / f"run{len(given)}")])
    ignored = [line for line in capsys.readouterr().out.splitlines() if line.startswith("generation ignores ")]
    values = "repetition_penalty: 1.5, begin_suppress_tokens: [5], bad_words_ids: [[4, 5]]"
    assert ignored == [f"generation ignores {values}"]


def test_the_commands_import_and_export(tmp_path, capsys):
    publish("gpt2", tmp_path / "theirs")
    main(["import", str(tmp_path / "theirs"), "-o", str(tmp_path / "run")])
    assert (
        f"model=gpt2 d_model=16 d_ff=28 heads=4 layers=2 max_length=20 first_id=2 init_from={tmp_path / 'run'}"
        in capsys.readouterr().out
    )
    main(["export", str(tmp_path / "run"), "--to", "huggingface", "-o", str(tmp_path / "back")])
    name, compared, outputs = capsys.readouterr().out.splitlines()
    assert name == f"{tmp_path / 'back'}: GPT2LMHeadModel" and compared.startswith("log probabilities of ")
    assert outputs.endswith(" of 4 outputs of AutoTokenizer and generate are equal")
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "run"), "--to", "huggingface", "-o", str(tmp_path / "back")])
    assert "exists already" in capsys.readouterr().err
