"""Families of one's own: the table of docs/families.md has the logits of transformers, and errors name line and remedy."""

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, Jais2Config, Jais2ForCausalLM

import tfm_blocks as tfm
from tests.exchange.published import write_tokenizer
from tests.exchange.test_import import far_apart, logits_of_both
from tests.oracles.references import PLAIN, scatter
from tfm_blocks.cli import main
from tfm_blocks.errors import ConfigError, RunError
from tfm_blocks.exchange.exporting import export_run
from tfm_blocks.exchange.family import families
from tfm_blocks.exchange.importing import import_folder
from tfm_blocks.exchange.own_family import read_own_family

PAGE = Path(__file__).parent.parent.parent / "docs" / "families.md"
TABLE = "my_conf/jais2_family.yaml"


@pytest.fixture
def conf(tmp_path, monkeypatch):
    """Write the two files of the page."""
    monkeypatch.chdir(tmp_path)
    for text in re.findall(r"```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        path = tmp_path / re.search(r"# (my_conf/\S+)", text)[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def publish_jais2(folder, **config):
    sizes = {name: value for name, value in PLAIN.items() if name != "rms_norm_eps"}
    theirs = Jais2ForCausalLM(Jais2Config(**{**sizes, **config})).eval()
    scatter(theirs)
    theirs.save_pretrained(folder)
    write_tokenizer(folder)
    return theirs


@pytest.mark.parametrize("tie", [True, pytest.param(False, marks=pytest.mark.grid)])
def test_the_table_of_the_page_has_the_logits_of_transformers(tie, conf, capsys):
    theirs = publish_jais2(conf / "theirs", tie_word_embeddings=tie, layer_norm_eps=1e-3)
    main(["import", "theirs", "--family", TABLE, "-o", "run"])
    assert "--config-dir=my_conf model=jais2 d_model=16" in capsys.readouterr().out
    ours = tfm.load("run")
    assert far_apart(*logits_of_both(theirs, ours)) < 1e-5
    export_run(Path("run"), conf / "back")
    back = AutoModelForCausalLM.from_pretrained(conf / "back", trust_remote_code=True)
    assert far_apart(logits_of_both(back.eval(), ours)[1], logits_of_both(theirs, ours)[1]) < 1e-5


@pytest.mark.grid
def test_a_table_with_a_shipped_model_is_exported_as_the_shipped_family(conf):
    """A table with other names for the tensors of a shipped family."""
    from tests.exchange.published import publish

    theirs = publish("llama", conf / "theirs")
    text = (files("tfm_blocks.exchange") / "families" / "llama.yaml").read_text("utf-8")
    Path("other.yaml").write_text(
        text.replace("model.norm.weight", "model.final.weight").replace("LlamaFor", "OtherFor")
    )
    config = json.loads((conf / "theirs" / "config.json").read_text())
    (conf / "theirs" / "config.json").write_text(json.dumps(config | {"architectures": ["OtherForCausalLM"]}))
    with pytest.raises(RunError, match=r"has the tensor model\.norm\.weight, which the model lacks"):
        import_folder(conf / "theirs", conf / "run", read_own_family(Path("other.yaml")))
    Path("other.yaml").write_text(text)
    import_folder(conf / "theirs", conf / "run", read_own_family(Path("other.yaml")))
    export_run(conf / "run", conf / "back")
    back = AutoModelForCausalLM.from_pretrained(conf / "back").eval()
    assert far_apart(*(logits_of_both(model, tfm.load("run"))[1] for model in (back, theirs))) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("config:\n", "configs:\n"), "configs: is not a key of a family\n  --> {table}:6:1   configs:\n  help: did you mean config?"),
        (("model: jais2\n", ""), "model: is missing in the table of the family\n  help: the name of a model"),
        (("model: jais2\n", "model: jais\n"), "no model is called 'jais'"),
        (("model: jais2\n", "model: base\n"), "model: base lacks the knob first_id\n  --> {table}:5:1   model: base\n  help: the number"),
        (("prefix: model", "prefix: [model]"), "prefix: must be text, but is ['model']\n  --> {table}:25:1"),
        (("hidden_size: d_model", "hidden_size: d_modell"), "config.hidden_size: the model has no knob 'd_modell'\n  --> {table}:7:3   hidden_size: d_modell\n  help: did you mean d_model?"),
        (("missing: 1.0e-5}", "mising: 1.0e-5}"), "config.layer_norm_eps: has the unknown option 'mising'\n  --> {table}:13:3   layer_norm_eps: {{knob: eps, mising: 1.0e-5}}\n  help: did you mean missing?"),
        (('"= heads"', '"= head"'), "= head reads head, which no earlier row has\n  --> {table}:11:3   num_key_value_heads: {{knob: kv_heads, missing: \"= head\"}}\n  help: did you mean heads?"),
        (("output: {lm_head.weight: tie}", "output: {lm_head.weight: tied}"), "output.lm_head.weight: the model has no knob 'tied'"),
        (("decoder.last.norm.{kind}", "decoder.lst.norm.{kind}"), "weights.model.norm.{{kind}}: the model has no weight decoder.lst.norm.{{kind}}\n  --> {table}:34:3"),
        (("  model.layers.{i}.mlp.up_proj.{kind}: decoder.{i}.ffn.block.inner.{kind}\n", ""), "weights: no row has the weight decoder.0.ffn.block.inner.bias of the model and 63 more\n  --> {table}:26:1   weights:\n  help: add a row: NAME OF THE TENSOR: decoder.{{i}}.ffn.block.inner.bias"),
        (("{vocabulary: true, to: emb", "{vocabluary: true, to: emb"), "weights.model.embed_tokens.weight: did you mean vocabulary?"),
        (("model.layers.{i}.mlp.up_proj", "model.layers.{j}.mlp.up_proj"), "{{i}} stands in the address only\n  --> {table}:30:3"),
        (("  model.norm", "  - model.norm"), "is not YAML"),
        (("hidden_size: d_model", "hidden_size: [d_model]"), "config.hidden_size: must name text, but names ['d_model']\n  --> {table}:7:3"),
        (("hidden_size: d_model", "7: d_model"), "config.7: must name text, but names 7"),
        (("prefix: model", "prefix: model\ncomputed: {7: 1}"), "computed.7: must name text, but names 7"),
        (("prefix: model", "prefix: model\nimplied: {head_dim: d_modell//heads}"), "implied.head_dim: d_modell//heads reads d_modell, which no earlier row has\n  --> {table}:26:1"),
        (("prefix: model", "prefix: model\nimplied: {head_dim: d_model//}"), "implied.head_dim: "),
        (("{lm_head.weight: tie}", "{lm_head.weight: [tie]}"), "output.lm_head.weight: must name text, but names ['tie']"),
        (("decoder.last.norm.{kind}", "5"), "weights.model.norm.{{kind}}: must name text, but names 5"),
        (("{vocabulary: true, to: emb", "{vocabulary: true, regroup: heads, to: emb"), "weights.model.embed_tokens.weight: regroup must be two values, [GROUPS, SHARES], but is 'heads'"),
        (("{vocabulary: true, to: emb", "{transpose: 0, to: emb"), "weights.model.embed_tokens.weight: transpose must be two axes, but is 0"),
        (("prefix: model", "prefix: model\nrope: true"), "jais2.yaml lacks the knobs attention_factor, factor, fast, rope"),
        (("prefix: model", "prefix: model\nrope: [longrope]"), "lacks the knobs attention_factor, factor, factors, max_length, rope"),
        (("prefix: model", "prefix: model\nrope: [longrop]"), "rope: has the unknown type 'longrop'"),
        (("prefix: model", "prefix: model\nrope: 3"), "rope: must be true, false or a list of types, but is 3"),
        (("hidden_size: d_model", "hidden_size: {knob: d_model, layers: 3}"), "config.hidden_size: layers must be a list of two kinds or empty, but is 3"),
        (("hidden_size: d_model", "hidden_size: {knob: d_model, layers: [conv]}"), "config.hidden_size: layers must be a list of two kinds or empty, but is ['conv']"),
        (("hidden_size: d_model", "hidden_size: {knob: d_model, each: true}"), "config.hidden_size: reads the number of layers, which no earlier row has"),
        (("decoder.last.norm.{kind}", "decoder.last.norm.{i j}"), "has braces that do not contain one name"),
        (("decoder.last.norm.{kind}", "decoder.last.norm.{}"), "has braces that do not contain one name"),
    ],
)  # fmt: skip
def test_a_table_is_checked_like_a_model(change, message, conf):
    path = conf / TABLE
    lines = path.read_text().split("\n", 2)[2]  # without the comments of the page
    text = "# The weights and config.json of Jais 2.\n# " + TABLE + "\n" + lines
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(ConfigError) as error:
        read_own_family(Path(TABLE))
    assert message.format(table=TABLE) in str(error.value)


def test_synonyms_and_architectures_are_separated_by_commas_with_or_without_spaces(conf):
    table, other = conf / TABLE, conf / "my_conf" / "other.yaml"
    text = table.read_text()
    assert "rope_theta, rope_theta" in text and "\narchitecture: " in text
    other.write_text(
        text.replace("rope_theta, rope", "rope_theta,rope").replace("\narchitecture: ", "\narchitecture: A,")
    )
    family, spaced = read_own_family(other), read_own_family(Path(TABLE))
    assert family.config == spaced.config and family.architectures == ["A", *spaced.architectures]


def test_an_operation_that_does_not_fit_the_tensors_names_the_table(conf):
    publish_jais2(conf / "theirs", tie_word_embeddings=True)
    path = conf / TABLE
    path.write_text(path.read_text().replace("parts: [heads, kv_heads, kv_heads]", "parts: [heads, 5, hed]"))
    with pytest.raises(RunError, match=r"family jais2_family: weights: there is no knob 'hed'(.|\n)*docs/families"):
        import_folder(conf / "theirs", conf / "run", read_own_family(Path(TABLE)))
    assert not (conf / "run").exists()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "gemma2" else [pytest.mark.grid]) for name in families()]
)
def test_the_tables_of_shipped_families_pass_the_check(name):
    path = Path(str(files("tfm_blocks.exchange") / "families" / f"{name}.yaml"))
    assert read_own_family(path).weights == families()[name].weights
