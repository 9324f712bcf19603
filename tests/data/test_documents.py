"""Documents of plain text: the documents of each kind of file, and the errors of invalid files."""

import gzip
import json

import pytest
import torch

from tests.data.conftest import read_data
from tfm_blocks.compose.model import compose_model
from tfm_blocks.data import encoding as encoding_module
from tfm_blocks.data import prepare as prepare_module
from tfm_blocks.data.documents import find_document_splits, read_in_format_of
from tfm_blocks.data.layout import PlainText
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import prepare
from tfm_blocks.errors import ConfigError, DataError
from tfm_blocks.language.sources import Sources
from tfm_blocks.network.build import build_network, read_model
from tfm_blocks.training.data import EvalStream, PlannedCorpus

TEXTS = ["the boat\nis blue", "the house", " a  garden \n\tis  green\nthe end"]


@pytest.fixture
def plain(tmp_path):
    """Return a function that writes files and returns settings that read them."""

    def write(files, **changes):
        for name, content in files.items():
            raw = content if isinstance(content, bytes) else content.encode()
            (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        kept = {"val": "train.txt", "test": None, "cache": str(tmp_path / "cache")}
        sizes = {"step_tokens": 64, "batch_tokens": 64, "context": 8}
        return read_data({"kind": "lm", "dir": str(tmp_path), "train": "train.txt"} | kept | sizes | changes)

    return write


def documents(settings):
    return [text for (text,) in find_document_splits(settings)["train"].rows()]


def jsonl(texts, key="text"):
    return "".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts)


def test_paragraphs_keep_their_line_breaks_and_json_objects_their_texts(plain):
    paragraphs = "\n\n" + "\n \n\n".join(TEXTS)
    assert documents(plain({"train.txt": paragraphs}, documents="blank_lines")) == TEXTS
    assert documents(plain({"train.txt": f"{paragraphs}\n\n"}, documents="blank_lines")) == TEXTS
    assert documents(plain({"train.txt": jsonl(TEXTS)}, documents="jsonl")) == TEXTS
    assert documents(plain({"train.txt": jsonl(TEXTS, "body")}, documents="jsonl", text_key="body")) == TEXTS


def test_the_name_of_json_lines_decides_their_format(plain):
    settings = plain({"train.jsonl": jsonl(TEXTS), "train.txt": "a\n"}, train=["train.jsonl", "train.txt"])
    assert documents(settings) == [*TEXTS, "a"]


def test_a_text_is_read_in_the_format_of_the_corpus_of_a_mix_that_has_such_files(tmp_path):
    (tmp_path / "x.jsonl").write_text(jsonl(["a", "b"], "body"))
    (tmp_path / "x.txt").write_text("c\nd\n")
    mix = {"own": {"documents": "jsonl", "text_key": "body"}, "web.2": {"dir": "web"}}
    config = {"data": {"documents": "lines", "text_key": "text", "mix": mix}}
    assert list(read_in_format_of(config, tmp_path / "x.jsonl", "--text")) == ["a", "b"]
    assert list(read_in_format_of(config, tmp_path / "x.txt", "--text")) == ["c", "d"]
    assert list(read_in_format_of({}, tmp_path / "x.txt", "--text")) == ["c", "d"]
    mix["news"] = {"documents": "blank_lines"}
    with pytest.raises(DataError, match=r"the corpora of data\.mix have different formats"):
        list(read_in_format_of(config, tmp_path / "x.txt", "--text"))


@pytest.mark.parametrize("kind", ["lines", "blank_lines", "jsonl"])
def test_equal_bytes_with_other_documents_have_another_fingerprint(plain, kind):
    content = '{"text": "a"}\n\n{"text": "b"}\n'
    splits = [
        find_document_splits(plain({name: content}, train=name, val=name, documents=kind))["train"]
        for name in ("x.txt", "x.jsonl")
    ]
    rows = [list(split.rows()) for split in splits]
    assert rows[0] == rows[1] or splits[0].fingerprint != splits[1].fingerprint
    assert (rows[0] == rows[1]) == (kind == "jsonl")


def test_lines_are_documents_by_default(plain):
    assert documents(plain({"train.txt": "the boat\n\nis blue"})) == ["the boat", "", "is blue"]


def test_windows_line_ends_and_a_byte_order_mark_change_nothing(plain):
    text = "\n\n".join(TEXTS).replace("\n", "\r\n")
    assert documents(plain({"train.txt": b"\xef\xbb\xbf" + text.encode()}, documents="blank_lines")) == TEXTS
    lines = jsonl(TEXTS).replace("\n", "\r\n").encode()
    assert documents(plain({"train.txt": b"\xef\xbb\xbf" + lines}, documents="jsonl")) == TEXTS


def test_files_of_a_pattern_are_read_by_name_and_files_of_a_list_in_its_order(plain, tmp_path):
    files = {"part-2.txt": "c\nd\n", "part-10.txt.gz": "b\n", "part-1.txt": "a\n", "other.txt": "e\n"}
    assert documents(plain(files, train="part-*.txt*", val="other.txt")) == ["a", "b", "c", "d"]
    assert documents(plain(files, train=["other.txt", "part-?.txt"], val="other.txt")) == ["e", "a", "c", "d"]
    assert documents(plain(files, train=str(tmp_path / "part-?.txt"), val="other.txt")) == ["a", "c", "d"]


def test_a_document_ends_with_its_file(plain):
    settings = plain({"1.txt": "a\n\nb", "2.txt": "c\n\nd"}, train="?.txt", val="1.txt", documents="blank_lines")
    assert documents(settings) == ["a", "b", "c", "d"]


def test_missing_and_repeated_files_are_errors_with_their_key(plain, tmp_path):
    settings = plain({"a.txt": "a"}, train=["a.txt", "none-*.txt", "*.txt"], val="none.txt")
    with pytest.raises(ConfigError) as error:
        find_document_splits(settings)
    rules = {problem.rule: problem.address for problem in error.value.problems}
    assert rules == {
        f"no file matches {tmp_path / 'none-*.txt'}": "data.train",
        f"names a file more than once: {tmp_path / 'a.txt'}": "data.train",
        f"there is no file {tmp_path / 'none.txt'}": "data.val",
    }
    assert "a.txt" in error.value.problems[0].help


def test_files_are_a_text_or_a_list_of_texts(plain):
    for wrong in (5, [], ["a", 5]):
        with pytest.raises(ConfigError, match=r"data\.train: must"):
            plain({}, train=wrong)


@pytest.mark.parametrize(
    ("kind", "content", "line", "rule"),
    [
        ("jsonl", jsonl(["a"]) + "the boat\n", 2, "expects a JSON object, but the line is the boat"),
        ("jsonl", "[1]\n", 1, "expects a JSON object"),
        ("jsonl", "[" * 100_000 + "\n", 1, "expects a JSON object"),
        ("jsonl", jsonl(["a"]) + '{"txt": "b", "id": 2}\n', 2, "has no key 'text'; its keys: 'txt', 'id'"),
        ("jsonl", '{"text": null}\n', 1, "'text' must be a string, but is None"),
        ("jsonl", '{"text": "\\ud800"}\n', 1, "half of a surrogate pair"),
        ("blank_lines", "a\nb\nc\n", 3, "expects blank lines between documents, but all 3 lines have text"),
        ("blank_lines", "\n \n", 1, "the file has no documents"),
        ("blank_lines", "", 1, "the file has no documents"),
        ("jsonl", "", 1, "the file has no documents"),
        ("lines", "", 1, "the file is empty"),
        ("lines", b"a\n\xff\n", 2, "must be UTF-8"),
    ],
)
def test_invalid_files_are_errors_with_file_and_line(plain, tmp_path, kind, content, line, rule):
    with pytest.raises(DataError) as error:
        documents(plain({"train.txt": content}, documents=kind))
    assert rule in str(error.value) and f"{tmp_path / 'train.txt'}:{line}" in str(error.value)
    assert error.value.problems[0].help


def naive_ids(texts, tokenizer):
    """Return the ids of a whole text, each document encoded in one piece."""
    return [id for text in texts if text.strip() for id in [*tokenizer.encode(text), tokenizer.EOS]]


def ids_of(corpus):
    return [id for row in range(len(corpus)) for id in corpus.ids("tgt", row).tolist()]


@pytest.mark.parametrize("size", [1, 30, 1 << 22])
def test_pieces_of_any_size_give_the_tokens_of_the_whole_text(plain, monkeypatch, size):
    monkeypatch.setattr(encoding_module, "CHUNK_SIZE", size)
    texts = [*TEXTS, "", "the boat is blue " * 50, *TEXTS] * 3
    files = {"1.jsonl": jsonl(texts[:9]), "2.jsonl.gz": jsonl(texts[9:])}
    lines = []
    settings = plain(files, train="*.jsonl*", val="1.jsonl", documents="jsonl")
    data = prepare(settings, 300, lines.append)
    assert ids_of(data.train) == naive_ids(texts, data.tokenizer)
    assert all(len(data.train.ids("tgt", row)) == 8 for row in range(len(data.train) - 1))
    assert any("train rows of 8 tokens (skipped: 3 blank documents)" in line for line in lines)


def test_each_kind_of_documents_has_its_own_cache(plain):
    content = "the boat\nis blue\n\nthe house\n"
    data = {kind: prepare(plain({"train.txt": content}, documents=kind), 300) for kind in ("lines", "blank_lines")}
    assert ids_of(data["lines"].train) == naive_ids(content.split("\n"), data["lines"].tokenizer)
    assert ids_of(data["blank_lines"].train) == naive_ids(content.strip().split("\n\n"), data["blank_lines"].tokenizer)


def test_of_each_split_the_first_documents_are_read(plain):
    settings = plain({"train.txt": "a\nb\n\nc\n\nd"}, documents="blank_lines", first=2)
    data = prepare(settings, 300)
    assert ids_of(data.train) == naive_ids(["a\nb", "c"], data.tokenizer)


def test_the_tokenizer_learns_a_sample_of_long_documents(plain, monkeypatch):
    monkeypatch.setattr(prepare_module, "SAMPLE_CHARACTERS", 200)
    texts = ["early early early early"] * 10 + ["between between"] + ["lateword lateword late"] * 9
    tokenizer = prepare(plain({"train.txt": jsonl(texts)}, documents="jsonl"), 300).tokenizer
    assert len(tokenizer.encode("lateword")) == len(tokenizer.encode("early")) == 1
    assert len(tokenizer.encode("between")) > 1, "the third document and each third after it, which this is not"


INSIDE = "the boat is blue\n\nthe house\na garden is green and the boat is in the garden of the house\nthe boat\n"
KNOBS = [
    ["attention_position=rotary"],
    ["attention_position=null", "position=learned_position"],
    ["attention_position=null", "position=sinusoidal"],
    ["attention_position=alibi", "near=none"],
    ["mixer=lstm"],
    ["mixer=gated_delta_rule"],
]


def test_rows_inside_documents_have_each_token_once_and_one_document(plain):
    settings = plain({"train.txt": INSIDE}, inside_documents=True, context=12)
    lines = []
    train = prepare(settings, 300, lines.append).train
    texts = [line for line in INSIDE.splitlines() if line]
    expected = [[*train.tokenizer.encode(text), 2] for text in texts]
    pieces = [ids[first : first + 12] for ids in expected for first in range(0, len(ids), 12)]
    assert [train.ids("tgt", row).tolist() for row in range(len(train))] == pieces and len(pieces) > len(texts)
    assert f"data: {len(pieces)} train rows of at most 12 tokens (skipped: 1 blank lines)" in lines
    packed = prepare(plain({"train.txt": INSIDE}, context=12), 300, lines.append).train
    assert len(packed) < len(train) and packed.lengths_NC.sum() == train.lengths_NC.sum()


@pytest.mark.parametrize("knobs", KNOBS)
def test_logits_of_a_document_in_a_batch_are_those_of_the_document_alone(plain, knobs):
    settings = plain({"train.txt": INSIDE}, inside_documents=True, context=40, step_tokens=400, batch_tokens=400)
    train = prepare(settings, 300, lambda text: None).train
    sizes = ["d_model=16", "d_ff=24", "heads=2", "layers=2", f"vocab={train.tokenizer.size}"]
    network = build_network(
        read_model(compose_model("probe_decoder", [*sizes, *knobs]).model, Sources()), seed=1
    ).eval()
    (batch,) = EvalStream(PlannedCorpus(train, PlainText(), settings), Ranks())
    with torch.no_grad():
        logits_BTV = network(**batch.inputs)
        for row, logits_TV in zip(batch.rows, logits_BTV, strict=True):
            ids = train.ids("tgt", row).tolist()
            alone_TV = network(tgt=torch.tensor([[1, *ids[:-1]]]))[0]
            torch.testing.assert_close(logits_TV[: len(ids), 1:], alone_TV[:, 1:], atol=1e-5, rtol=1e-5)


def test_a_text_without_words_is_not_said_to_be_too_long(plain):
    with pytest.raises(DataError) as error:
        prepare(plain({"train.txt": "\n \n"}), 300, lambda text: None)
    assert error.value.problems[0].help == "the text is empty or blank"
