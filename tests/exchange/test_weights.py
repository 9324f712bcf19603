"""Tables of weights: the meaning of each row, and the errors for rows that do not fit."""

import pytest
import torch
import yaml

from tfm_blocks.exchange.weights import Conversion, read_weight_table


def conversion(text, sizes=None, front=()):
    return Conversion(read_weight_table(yaml.safe_load(text)), sizes or {}, front)


def test_names_with_alternatives_are_stacked_in_their_order():
    rows = conversion("a.{i}.{k,q}_map: b.{i}.qk")
    theirs = {f"a.{i}.{name}_map": torch.randn(2, 3) for i in (0, 1) for name in "qk"}
    tensors, _ = rows.to_ours(theirs)
    assert tensors.keys() == {"b.0.qk", "b.1.qk"}
    assert torch.equal(tensors["b.1.qk"], torch.cat([theirs["a.1.k_map"], theirs["a.1.q_map"]]))


def test_rows_of_each_head_become_heads_of_each_part():
    rows = conversion("w: {regroup: [heads, 3], split: [2, 1], to: [ab, c]}", {"heads": 2})
    parts = torch.randn(3, 2, 4, 5)  # a, b and c of two heads of width 4
    by_head = torch.cat([parts[part, head] for head in range(2) for part in range(3)])
    tensors, _ = rows.to_ours({"w": by_head})
    assert torch.equal(tensors["ab"], parts[:2].flatten(0, 2)) and torch.equal(tensors["c"], parts[2].flatten(0, 1))


def test_rows_of_each_group_of_heads_become_heads_of_each_part():
    """Two groups of two heads of width 2, as Falcon 40B and Qwen3-Next store them: shares of 2, 1 and 3 rows."""
    rows = conversion("w: {regroup: [heads, [2, 1, 3]], to: a}", {"heads": 2})
    tensors, _ = rows.to_ours({"w": torch.tensor([0, 1, 4, 6, 7, 8, 2, 3, 5, 9, 10, 11])})
    assert tensors["a"].tolist() == list(range(12))


def test_steps_are_done_in_the_order_written():
    written = "{skip: 1, transpose: [0, 1], unflatten: [d, 2], to: v}"
    rows = conversion(f"w: {written}\nx: {{unflatten: [d, -1], transpose: [0, 1], to: y}}\nz: null", {"d": 3})
    w = torch.randn(6, 6)
    tensors, leftovers = rows.to_ours({"w": w, "x": w, "z": w})
    assert torch.equal(leftovers["w"], w[:1]) and torch.equal(leftovers["z"], w)
    assert tensors.keys() == {"v", "y"}
    assert torch.equal(tensors["v"], w[1:].T.reshape(3, 2, 5)) and torch.equal(
        tensors["y"], w.reshape(3, 2, 6).transpose(0, 1)
    )


def test_tensors_of_one_address_are_joined_along_the_axis_that_they_name():
    rows = conversion("a.{w,x}: {unflatten: [2, -1], axis: 1, to: v}")
    w, x = torch.randn(4, 3), torch.randn(6, 3)
    tensors, _ = rows.to_ours({"a.w": w, "a.x": x})
    assert torch.equal(tensors["v"], torch.cat((w.view(2, 2, 3), x.view(2, 3, 3)), 1))


def test_the_first_row_takes_a_tensor_and_a_row_of_several_names_takes_only_those_that_have_all_of_them():
    rows = conversion("a.0.{kind}: first.{kind}\na.{i}.{q,k}: qk.{i}\na.{i}.q: q.{i}\na.{i}.v: v.{i}")
    theirs = {name: torch.randn(2, 3) for name in ("a.0.q", "a.0.k", "a.1.q", "a.1.k", "a.2.q")}
    tensors, _ = rows.to_ours(theirs)
    assert tensors.keys() == {"first.q", "first.k", "qk.1", "q.2"}
    assert torch.equal(tensors["qk.1"], torch.cat((theirs["a.1.q"], theirs["a.1.k"])))
    assert rows.to_theirs(tensors).keys() == theirs.keys()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("a.{i}.w: b.{i}", "no row takes last"),
        ("last: c\na.{i}.{w,v}: b.{i}", "no row takes a.0.w"),
        ("a.{i}.w: {permutes: 2, to: b}", "a.{i}.w: did you mean permute"),
        ("a.{i}.w: {split: [1, 1], to: b}", "a.{i}.w: makes 2 of a.0.w, but its addresses are 1"),
        ("a.{i}.w: {split: [2, 1], to: [b, c]}", "a.{i}.w: 4 rows cannot be split into 2 and 1 shares"),
    ],
)
def test_a_table_that_does_not_fit_is_told(table, message):
    with pytest.raises(ValueError, match=message.replace("{", r"\{").replace("}", r"\}")):
        conversion(table).to_ours({"a.0.w": torch.ones(4, 2), "last": torch.ones(1)})


TABLES = {
    "rename": ("a.{i}.{kind}: b.{i}.{kind}", {"a.0.w": (4, 3), "a.1.w": (4, 3), "a.1.v": (4,)}),
    "transpose": ("w: {transpose: [0, 1], to: a}", {"w": (4, 3)}),
    "equal parts": ("w.{k,v}: a", {"w.k": (4, 3), "w.v": (4, 3)}),
    "unequal parts": ("w.{q,k}: {parts: [heads, 1], to: a}", {"w.q": (6, 3), "w.k": (2, 3)}),
    "another axis": ("w.{q,k}: {axis: 1, to: a}", {"w.q": (2, 3), "w.k": (2, 3)}),
    "stack": ("e.{e}.{w,v}: {stack: e, to: a}", {f"e.{e}.{name}": (2, 3) for e in range(11) for name in "wv"}),
    "split": ("w: {split: [1, heads], to: [a, b]}", {"w": (8, 3)}),
    "regroup": ("w: {regroup: [heads, 2], to: a}", {"w": (12, 3)}),
    "regroup by shares": ("w: {regroup: [heads, [1, 3]], to: a}", {"w": (24, 2)}),
    "permute": ("w: {permute: [2, 0, 1], to: a}", {"w": (4, 3, 2)}),
    "unflatten": ("w: {unflatten: [heads, 4], to: a}", {"w": (12, 2)}),
    "flatten": ("w: {flatten: [heads, 4], to: a}", {"w": (3, 4, 2)}),
    "squeeze": ("w: {squeeze: 0, to: a}", {"w": (1, 4)}),
    "skip": ("w: {skip: 2, to: a}", {"w": (4, 3)}),
    "no counterpart": ("w: null\nv: a", {"w": (4, 3), "v": (2,)}),
    "vocabulary": ("w: {vocabulary: true, to: a}", {"w": (9, 2)}),
    "several operations": ("w: {squeeze: 0, vocabulary: true, to: a}", {"w": (1, 9)}),
}


@pytest.mark.parametrize("front", [(), (5,), (7, 1), (0, 8)])
@pytest.mark.parametrize("name", TABLES)
def test_the_inverse_restores_every_tensor(name, front):
    table, shapes = TABLES[name]
    rows, generator = conversion(table, {"heads": 3}, front), torch.Generator().manual_seed(1)
    theirs = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    restored = rows.to_theirs(*rows.to_ours(theirs))
    assert restored.keys() == theirs.keys()
    assert all(torch.equal(restored[key], theirs[key]) for key in theirs)


def test_the_rows_of_begin_and_end_come_first():
    ours, _ = conversion("w: {vocabulary: true, to: a}", front=(3, 0)).to_ours({"w": torch.arange(6)})
    assert ours["a"].tolist() == [3, 0, 1, 2, 4, 5]
