"""Damaged or malicious folders: one error sentence each, and no code in them is executed."""

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.exchange.published import publish
from tests.preloaded import run_python
from tfm_blocks.cli import main
from tfm_blocks.data.tokenizer_format import LARGEST_FILE
from tfm_blocks.errors import RunError
from tfm_blocks.exchange.exporting import export_run
from tfm_blocks.exchange.importing import import_folder

ROOT = Path(__file__).parent.parent.parent
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    publish("gpt2", folder)
    return folder


@pytest.fixture
def folder(published, tmp_path):
    """Return a copy that a test may damage."""
    copy = tmp_path / "theirs"
    copy.mkdir()
    for path in published.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def refused(folder, *parts):
    with pytest.raises(RunError) as error:
        import_folder(folder, folder.parent / "run")
    text = str(error.value)
    assert all(part in text for part in parts), text
    assert text.count("error:") == 1 and not (folder.parent / "run").exists()


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def index(folder, files):
    (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


class Harm:
    def __reduce__(self):
        return os.system, (f"touch {Path.cwd() / 'harmed'}",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"])
def test_a_pickle_is_refused_and_not_read(folder, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(pickle.dumps(Harm()))
    refused(folder, name, "a pickle, which can execute any code", "save_pretrained")
    assert not (tmp_path / "harmed").exists()


EVIL = "open('harmed', 'w')\nclass Evil:\n    pass\n"
CODE = {"AutoConfig": "theirs--evil.Evil", "AutoModelForCausalLM": "evil.Evil"}


@pytest.mark.parametrize(  # by default each file and each key once
    ("file", "keys"),
    [
        pytest.param(file, keys, id=f"{next(iter(keys))}-{file}", marks=[pytest.mark.grid] * (place != number))
        for place, file in enumerate(["config.json", "tokenizer_config.json", "generation_config.json"])
        for number, keys in enumerate(
            [
                {"auto_map": CODE},
                {"custom_pipelines": {"evil": {"impl": "evil.Evil"}}},
                {"_attn_implementation": "theirs/evil"},
            ]
        )
    ],
)
def test_keys_that_name_code_are_not_kept_and_nothing_is_run(folder, file, keys, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (folder / "evil.py").write_text(EVIL)
    path = folder / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **keys}))
    main(["import", str(folder), "-o", "run"])
    assert f"not kept, because it names code: {file}: {next(iter(keys))}" in capsys.readouterr().out
    main(["export", "run", "--to", "huggingface", "-o", "new"])
    assert json.loads((tmp_path / "new" / file).read_text()).keys().isdisjoint(keys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "run", "theirs"]


@pytest.mark.parametrize("key", ["suppress_tokens", "bad_words_ids"])
def test_a_list_of_tokens_that_is_no_list_is_an_error_with_its_place(folder, key, tmp_path):
    (folder / "generation_config.json").write_text(json.dumps({key: 5}))
    with pytest.raises(RunError, match=rf"generation_config\.json: {key}: must be a list, but is 5"):
        import_folder(folder, tmp_path / "run")


FOREIGN_NAMES = [
    "../x",
    "{}/x",
    "evil.py",
    "modeling_tfm_blocks.py",
    "model.py",
    "config.json/x",
    "certificate.json",
    "",
]


def spoiled_texts(record, name):
    record["texts"][name] = "{}"


def spoiled_tensors(record, name):
    record["tensors"]["transformer.ln_f.bias"][0] = name


def spoiled_files(record, name):
    record["files"][name] = EVIL


SPOILED = {
    "texts": ("published.json", spoiled_texts, ["huggingface"]),
    "tensors": ("published.json", spoiled_tensors, ["huggingface"]),
    "files": ("tokenizer.json", spoiled_files, ["huggingface", "ctranslate2", "onnx"]),
}


@pytest.mark.parametrize(
    ("file", "change", "formats", "name"),
    [
        pytest.param(*row, name, id=f"{kind}-{name}", marks=[pytest.mark.grid] * (kind != "files" and name != "../x"))
        for kind, row in SPOILED.items()
        for name in FOREIGN_NAMES
    ],
)
def test_names_of_files_in_a_run_folder_are_a_closed_list(folder, file, change, formats, name, tmp_path, capsys):
    import_folder(folder, run := tmp_path / "run")
    record = json.loads((run / file).read_text())
    change(record, name.format(tmp_path))
    (run / file).write_text(json.dumps(record))
    for to in formats:
        with pytest.raises(SystemExit):
            main(["export", str(run), "--to", to, "-o", str(tmp_path / "new")])
        printed = capsys.readouterr().err
        assert f"{run / file}: " in printed and printed.count("error:") == 1, printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "theirs"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("config.json", {"auto_map": CODE}),
        ("config.json", {"n_embd": 10**9}),
        ("config.json", {"n_layer": 1}),
        ("generation_config.json", {"custom_generate": "theirs/evil"}),
    ],
)
def test_a_config_of_a_run_folder_that_names_code_or_another_model_is_refused(folder, name, values, tmp_path):
    import_folder(folder, run := tmp_path / "run")
    record = json.loads((run / "published.json").read_text())
    record["texts"][name] = json.dumps(json.loads(record["texts"].get(name, "{}")) | values)
    (run / "published.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match=r"published\.json: .*(names code|of another model)"):
        export_run(run, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def sound(folder, count, seed):
    """Try hostile folders in a separate process, because an audit hook cannot be removed."""
    done = run_python(["-m", "tests.exchange.hostile", folder, str(count), str(seed)], ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert not report["faults"], "\n".join(report["faults"][:5])
    assert report["folders"] == count + 1 and all(tries > 2 for tries in report["commands"].values())


@pytest.mark.grid
def test_hostile_folders_run_no_code_and_write_nothing_elsewhere(tmp_path):
    sound(tmp_path, 30, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_hostile_folders_run_no_code_and_write_nothing_elsewhere_at_length(seed, tmp_path):
    sound(tmp_path, 300, seed)


def test_a_pickle_beside_safetensors_is_not_read(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harm()))
    import_folder(folder, tmp_path / "run")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("transformer.ln_f.bias"), "lacks the tensor transformer.ln_f.bias"),
        (lambda t: t.update({"more": torch.zeros(2)}), "has the tensor more, which the model lacks"),
        (lambda t: t.update({"transformer.ln_f.bias": torch.zeros(2)}), "has the shape [2], but config.json gives [16]"),
        (lambda t: t["transformer.ln_f.bias"].fill_(torch.nan), "transformer.ln_f.bias has values that are not finite"),
        (lambda t: t["transformer.wte.weight"][5].fill_(torch.inf), "transformer.wte.weight has values that are not"),
        (lambda t: t.update({"transformer.ln_f.bias": torch.zeros(16).to(torch.int8)}), "has the type I8"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(folder, change, message):
    change_weights(folder, change)
    refused(folder, message)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "is damaged"),
        (b"{", "is damaged"),
        (b"[" * 100_000, "is damaged"),
        (json.dumps({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 8]}}).encode(), "is damaged"),
        (json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 2**60]}}).encode(), "is damaged"),
    ],
)
def test_a_damaged_header_is_refused(folder, header, message):
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    refused(folder, message)


def test_a_header_that_promises_a_terabyte_is_refused(folder):
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 40) + b"{")
    refused(folder, "is damaged")


@pytest.mark.grid
def test_a_header_of_very_many_tensors_is_refused(folder):
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{number}": entry for number in range(200_001)}).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)
    refused(folder, "has 200,001 tensors, but at most 200,000 are read")


@pytest.mark.parametrize(
    "file",
    ["../../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "model.bin", ".safetensors", 3, None, ["a"]],
)
def test_an_index_names_only_files_of_its_folder(folder, file):
    index(folder, {"transformer.wte.weight": file})
    refused(folder, "which is not the name of a file here")


def test_a_missing_shard_is_refused(folder):
    index(folder, {"transformer.wte.weight": "model-00002-of-00002.safetensors"})
    refused(folder, "model-00002-of-00002.safetensors: the file is missing")


def test_a_tensor_in_two_shards_is_refused(folder):
    other = "model-00002-of-00002.safetensors"
    save_file({"transformer.ln_f.bias": torch.zeros(16)}, folder / other)
    index(folder, {"a": "model-00001-of-00001.safetensors", "b": other})
    refused(folder, "has the tensor transformer.ln_f.bias, which model-00001-of-00001.safetensors has too")


@pytest.mark.parametrize(
    ("values", "messages"),
    [
        ({"architectures": ["Evil"]}, ("architectures: cannot be imported: ['Evil']", "BertForMaskedLM")),
        ({"architectures": None, "model_type": "evil"}, ("model_type: cannot be imported: 'evil'", "gpt2", "llama")),
        ({"model_type": "llama"}, ("model_type: is 'llama', but architectures is ['GPT2LMHeadModel']",)),
        ({"activation_function": "relu"}, ("activation_function: must be 'gelu_new' for our blocks, but is 'relu'",)),
        ({"rope_scaling": {"factor": 8.0}}, ("rope_scaling.factor: has no counterpart in our blocks: 8.0",)),
        ({"n_layer": 10**9}, ("n_layer: is 1000000000, but there are only 28 tensors",)),
        ({"n_embd": 10**12}, ("n_embd: must be a whole number from 1 to 2147483647",)),
        ({"n_embd": 2**30}, ("config.json: model.graph",)),
        ({"n_embd": "__import__('os').system('touch harmed')"}, ("n_embd: must be a number",)),
        ({"n_embd": True}, ("n_embd: must be a number, but is True",)),
        ({"n_head": 3}, ("config.json",)),
        ({"vocab_size": -1}, ("vocab_size: must be a whole number",)),
        ({"vocab_size": 2**30}, ("but config.json gives",)),
        ({"quantization_config": {"bits": 4}}, ("quantization_config.bits: has no counterpart", "dequantize()")),
        ({"attention_sinks": 4}, ("attention_sinks: has no counterpart in our blocks: 4", "delete the key", "--family")),
        ({"bos_token_id": 37}, ("bos_token_id: must be a whole number from 0 to 36, but is 37",)),
        ({"layer_norm_epsilon": "${oc.env:HOME}"}, ("layer_norm_epsilon: must be a number",)),
        ({"tie_word_embeddings": "${oc.env:HOME}"}, ("tie_word_embeddings: must be true or false",)),
    ],
)  # fmt: skip
def test_a_config_that_our_blocks_cannot_express_is_refused_by_key(folder, values, messages):
    change_config(folder, **values)
    refused(folder, *messages)


@pytest.mark.parametrize("ids", [[37, -1], None, [], "2"])
def test_a_model_whose_texts_never_end_is_refused(ids, folder):
    (folder / "generation_config.json").unlink()
    change_config(folder, eos_token_id=ids)
    refused(
        folder, f"eos_token_id: must be a whole number from 0 to 36, but is {ids!r}", "write the right eos_token_id"
    )


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 10_000, '{"a":' * 100 + "1" + "}" * 100, "\x00", '"\ud800"'])
def test_a_config_that_is_not_a_json_object_is_refused(folder, text):
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(folder, "config.json")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_huge_json_is_refused_before_it_is_read(folder, name):
    with (folder / name).open("wb") as file:
        file.truncate(LARGEST_FILE + 1)
    refused(folder, name, "bytes, but at most")


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"model": {"type": "BPE", "vocab": {"a": 99}, "merges": []}}', "{" * 9999]
)
def test_a_damaged_tokenizer_is_refused(folder, text):
    (folder / "tokenizer.json").write_text(text)
    refused(folder, "tokenizer.json")


def test_a_folder_without_tokenizer_or_weights_or_itself_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    refused(folder, "has no tokenizer.json and no model", "tokenizer.save_pretrained")
    (folder / WEIGHTS).unlink()
    refused(folder, "has no model.safetensors")
    refused(folder / "none", "there is no such folder")
    os.mkfifo(folder / WEIGHTS)  # opening it would wait forever
    refused(folder, "has no model.safetensors")
