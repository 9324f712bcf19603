"""Model files are read as plain YAML first; hostile or unusual content is refused with its line."""

import pytest

from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.build import check_model

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
        ("heads: 4\nheads: 8\n", "'heads' twice", 3),
        ("model:\n  graph: {encoder: {at: {0: {ffn: null}, 0x0: {attn: null}}}}\n", "has the key '0x0'", 3),
        ("model: {graph: {encoder: {at: {'0': {ffn: null}}}}}\n", "a decimal number without quotes", 2),
        ("on: 4\n", "does not read as a name", 2),
        ("defaults: [{override /data: x}]\n", "lists names of models", None),
        ("defaults: [../../etc/passwd]\n", "lists names of models", None),
        ("defaults: [_self_, base]\n", "_self_ before a parent", None),
        ("defaults: [base, _self_, _self_]\n", "_self_ twice", None),
        ("defaults: base\n", "defaults must be a list of models, but is 'base'", None),
        ("defaults:\n", "defaults must be a list of models", None),
        ("defaults: [tiny, _self_]\nheads: ???\n", "heads: is ???, which does not replace the value", 3),
        ("defaults: [tiny, _self_]\nmodel:\n  args: {heads: '???'}\n", "model.args.heads: is ???", 4),
        ("model: {graph: [\n", "is not YAML", 3),
        ("model: " + "[" * 40 + "]" * 40 + "\n", "deeper than 32", 2),
        ("x: " + "y" * 70_000 + "\n", "at most 64 KB", None),
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


def test_an_alias_bomb_is_refused_without_building_it(tmp_path):
    levels = "\n".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]" for n in range(30))
    assert "alias or anchor" in refused(tmp_path, f"a0: &a0 [x]\n{levels}\n")


def test_a_file_without_the_header_is_refused_with_the_line_to_add(tmp_path):
    assert "begin the file with # @package _global_" in refused(tmp_path, "heads: 3\n", header="")


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
