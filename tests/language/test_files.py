"""Model files are read as plain YAML first; hostile or unusual content is refused with its line."""

import re
from itertools import product

import pytest

from tfm_blocks.compose.command_line import parse_request
from tfm_blocks.compose.model import compose_model
from tfm_blocks.compose.overrides import parse_overrides
from tfm_blocks.errors import ConfigError
from tfm_blocks.language.files import read_model_file, read_yaml_file
from tfm_blocks.network.build import check_model
from tfm_blocks.scaling.step_plan import read_card

HEADER = "# @package _global_\n"


def refused(tmp_path, text, header=HEADER):
    file = tmp_path / "mine.yaml"
    file.write_bytes((header + text).encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as caught:
        composed = compose_model(str(file))
        check_model(composed.model, composed.sources)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        ("hydra: {launcher: {_target_: os.system}}\n", "root key 'hydra'", 2),
        (
            "defaults: [base, _self_]\nmodel: {graph: {x: {_target_: os.system, block: ffn}}}\n",
            "unknown key '_target_'",
            3,
        ),
        ("a: &a [x]\nb: *a\n", "alias or anchor", 2),
        ("model: {args: {x: '${oc.env:HOME}'}}\n", "resolver", 2),
        ("x: oc.env\ny: '${${x}:HOME}'\n", "more than one ${knob}", 3),
        ("a: 1\nb: '${a}${a}'\n", "more than one ${knob}", 3),
        ("# @package hydra.callbacks\nmodel: {_target_: os.system}\n", "directive '# @package hydra.callbacks'", 2),
        ("_target_: os.system\n", "cannot set '_target_'", 2),
        ("model: !!python/object/apply:os.system ['true']\n", "YAML tag", 2),
        ("plugins: evil\n", "cannot set 'plugins'", 2),
        ("seed: 4\n", "cannot set 'seed'", 2),
        ("'seed': 4\n", "cannot set 'seed'", 2),
        ("heads: 4\nheads: 8\n", "'heads' twice", 3),
        ("model:\n  graph: {encoder: {at: {0: {ffn: null}, 0x0: {attn: null}}}}\n", "has the key '0x0'", 3),
        ("model: {graph: {encoder: {at: {'0': {ffn: null}}}}}\n", "a decimal number without quotes", 2),
        ("on: 4\n", "has 'on', which YAML 1.1 and YAML 1.2 read as different values", 2),
        ("true: 4\n", "does not read as a name", 2),
        ("defaults: [{override /data: x}]\n", "lists names of models", None),
        ("defaults: [../../etc/passwd]\n", "lists names of models", None),
        ("defaults: [_self_, base]\n", "_self_ before a parent", None),
        ("defaults: [base, _self_, _self_]\n", "_self_ twice", None),
        ("defaults: base\n", "defaults must be a list of models, but is 'base'", None),
        ("defaults:\n", "defaults must be a list of models", None),
        ("defaults: [tiny, _self_]\nheads: ???\n", "heads: is ???, which does not replace the value", 3),
        ("defaults: [tiny, _self_]\nmodel:\n  args: {heads: '???'}\n", "model.args.heads: is ???", 4),
        ("model: {graph: [\n", "is not YAML", 3),
        ("model:\n\tgraph: 1\n", "indent with spaces", 3),
        ("model: {<<: {args: 1}}\n", "write the keys out", 2),
        ("defaults: [nothere, _self_]\n", "no model is called 'nothere'", 2),
        ("model: " + "[" * 40 + "]" * 40 + "\n", "deeper than 32", 2),
        ("x: " + "y" * 70_000 + "\n", "at most 64 KB", None),
        ("\ufeff# @package _global_\nheads: 4\n".encode(), "begins with a byte order mark", 1),
        ("just text\n", "must be a mapping", None),
        (b"\xff\xfe\x00", "is not UTF-8", 1),
        ("defaults: [base, _self_]\nmodel: [1, 2]\n", "model: is a list in one file and a mapping in another", 3),
        ("defaults: [base, _self_]\nmodel:\n  graph: [1]\n", "model.graph: is a list", 4),
        (f"heads: {'9' * 5000}\n", "an integer of 5000 characters", 2),
        (f"heads: 0x{'f' * 5000}\n", "an integer of 5002 characters", 2),
        (f"model: {{graph: {{{'9' * 500}: 1}}}}\n", "an integer of 500 characters", 2),
        ("[1, 2]: 3\n", "has a list or a mapping as a key", 2),
        ("layers: 2\nmodel: {graph: {encoder: {repeat: ${layers}}}}\n", 'quote it: "${layers}"', 3),
        ("layers: 2\nmodel: {args: {x: '${layers}', y: [${layers}, 3]}}\n", 'quote it: "${layers}"', 3),
    ],
)
def test_a_file_that_is_no_plain_model_file_is_refused_with_its_line(tmp_path, text, rule, line):
    message = refused(tmp_path, text)
    assert rule in message and len(message) < 2000
    assert f"mine.yaml:{line}" in message if line else "mine.yaml" in message


YAML_1_2 = {  # the core schema of https://yaml.org/spec/1.2.2/#1032-tag-resolution
    "bool": re.compile("true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
}
NUMBERS = [
    "".join(parts) for parts in product(("", "-", "+"), ("0", "8", "09", "010", "0x1F", "0o17", "0b11", "1_000", "1:30", "12"),
                                        ("", ".5", "_0", ":30", "e3", "e-3"))
]  # fmt: skip


def yaml_1_2(text):
    """Return the value of a plain scalar in YAML 1.2."""
    kind = next((kind for kind, pattern in YAML_1_2.items() if pattern.fullmatch(text)), "str")
    if kind == "int":
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    return {"bool": lambda text: text.lower() == "true", "float": float, "str": str}[kind](text)


@pytest.mark.parametrize(
    "text", [*NUMBERS, "yes", "No", "on", "OFF", "y", "true", "FALSE", "~", "2_layers", "x_1", "1.2.3"]
)
def test_a_model_file_has_the_value_that_yaml_1_2_reads_or_is_refused(tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(f"{HEADER}x: {text}\nother: '{text}'\n")
    try:
        value = read_model_file(file, ()).value["x"]
    except ConfigError as error:
        assert f"has {text!r}, which YAML 1.1 and YAML 1.2" in str(error) and "mine.yaml:2" in str(error)
        assert re.search("[0-9]", text) is None or not re.fullmatch(r"[-+]?[1-9][0-9]*(\.[0-9]+)?", text)
    else:
        expected = None if text == "~" else yaml_1_2(text)
        assert value == expected or (isinstance(expected, float) and float(value) == expected)  # 1e3 is arithmetic


@pytest.mark.parametrize("text", ["010", "1:30", "0b11", "0o17", "1_000", "-0x1F", "09", "yes", "off"])
def test_a_number_of_yaml_1_1_in_a_config_file_a_card_or_an_override_is_refused_with_its_place(tmp_path, text):
    (tmp_path / "data").mkdir()
    config, card = tmp_path / "data" / "mine.yaml", tmp_path / "card.yaml"
    config.write_text(f"defaults: [dates, _self_]\ntrain: {text}\n")
    card.write_text(f"name: mine\nmemory: {text}\n")
    with pytest.raises(ConfigError, match=f"has '{text}', which YAML 1.1(.|\n)*mine.yaml:2"):
        parse_request(["--config-dir", str(tmp_path), "data=mine"])
    with pytest.raises(ConfigError, match=f"has '{text}', which YAML 1.1(.|\n)*card.yaml:2"):
        read_card(str(card))
    for value in (text, f"[1,{text}]", f"{{a:[{text}]}}", f"1,{text}") if text not in ("yes", "off", "1:30") else ():
        with pytest.raises(ConfigError, match=f"heads: has the number '{text}'"):
            parse_overrides([f"heads={value}"])
    with pytest.raises(ConfigError, match="heads: has the number '1:30'"):
        parse_overrides(["heads=1:30"])


def test_text_that_looks_like_a_number_can_be_quoted_in_an_override():
    assert compose_model("tiny", ['model.args.x="010"']).model["args"]["x"] == "010"
    assert [item.value() for item in parse_overrides(["a={1:30}", "b=runs/2024_01", "c=1e-3"])][2] == 1e-3


def test_an_alias_bomb_is_refused_without_building_it(tmp_path):
    levels = "\n".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]" for n in range(30))
    assert "alias or anchor" in refused(tmp_path, f"a0: &a0 [x]\n{levels}\n")


def test_a_file_without_the_header_is_refused_with_the_line_to_add(tmp_path):
    assert "begin the file with # @package _global_" in refused(tmp_path, "heads: 3\n", header="")


def test_a_header_below_a_comment_is_refused_because_hydra_would_ignore_it(tmp_path):
    header = "# a comment\n# @package _global_\n"
    assert "begin the file with # @package _global_" in refused(tmp_path, "heads: 3\n", header=header)


def test_a_model_that_inherits_itself_is_refused(tmp_path):
    assert "inherits itself" in refused(tmp_path, "defaults: [mine, _self_]\n")


def test_an_unknown_parent_has_the_nearest_model(tmp_path):
    assert "did you mean base?" in refused(tmp_path, "defaults: [bsae, _self_]\n")


def test_parents_are_sought_beside_the_file_first(tmp_path):
    (tmp_path / "prenorm.yaml").write_text(HEADER + "defaults: [tiny, _self_]\nheads: 2\n")
    (tmp_path / "mine.yaml").write_text(HEADER + "defaults: [prenorm, _self_]\n")
    assert compose_model(str(tmp_path / "mine.yaml")).mapping["heads"] == 2


def test_a_parent_is_read_once_and_a_second_inheritance_refused(tmp_path):
    (tmp_path / "mine0.yaml").write_text(HEADER + "defaults: [tiny, _self_]\n")
    for level in range(1, 30):
        parent = f"mine{level - 1}"
        (tmp_path / f"mine{level}.yaml").write_text(HEADER + f"defaults: [{parent}, {parent}, _self_]\n")
    with pytest.raises(ConfigError, match="mine0 is inherited twice"):
        compose_model(str(tmp_path / "mine29.yaml"))


def test_two_parents_of_one_origin_are_refused_since_the_second_would_undo_the_first(tmp_path):
    (tmp_path / "narrow.yaml").write_text(HEADER + "defaults: [tiny, _self_]\nheads: 2\n")
    (tmp_path / "deep.yaml").write_text(HEADER + "defaults: [tiny, _self_]\nlayers: 8\n")
    assert "tiny is inherited twice" in refused(tmp_path, "defaults: [narrow, deep, _self_]\n")
    (tmp_path / "deep.yaml").write_text(HEADER + "layers: 8\n")
    (tmp_path / "mine.yaml").write_text(HEADER + "defaults: [narrow, deep, _self_]\n")
    mapping = compose_model(str(tmp_path / "mine.yaml")).mapping
    assert (mapping["heads"], mapping["layers"]) == (2, 8)


def test_a_file_that_changes_is_read_again(tmp_path):
    file = tmp_path / "mine.yaml"
    for text, value in (("x: 1e-3", 1e-3), ("x: 2024-01-01", "2024-01-01"), ("x: [1]", [1])):
        file.write_text(text)
        assert read_yaml_file(file).value == {"x": value} and read_yaml_file(file) is read_yaml_file(file)
