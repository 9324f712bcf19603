"""Tables of weights: what a row means, and what is told where it does not fit."""

import pytest
import torch

from tests.oracles.weight_map import read_table, translate


def rows_of(folder, text):
    path = folder / "table.yaml"
    path.write_text(text)
    return read_table(path)


def test_names_with_alternatives_are_stacked_in_their_order(tmp_path):
    rows = rows_of(tmp_path, "a.{i}.{k,q}_map: b.{i}.qk")
    theirs = {f"a.{i}.{name}_map": torch.randn(2, 3) for i in (0, 1) for name in "qk"}
    found = translate(rows, theirs, {})
    assert found.keys() == {"b.0.qk", "b.1.qk"}
    assert torch.equal(found["b.1.qk"], torch.cat([theirs["a.1.k_map"], theirs["a.1.q_map"]]))


def test_rows_of_each_head_become_heads_of_each_part(tmp_path):
    rows = rows_of(tmp_path, "w: {regroup: [heads, 3], split: [2, 1], to: [ab, c]}")
    parts = torch.randn(3, 2, 4, 5)  # a, b and c of two heads of width 4
    by_head = torch.cat([parts[part, head] for head in range(2) for part in range(3)])
    found = translate(rows, {"w": by_head}, {"heads": 2})
    assert torch.equal(found["ab"], parts[:2].flatten(0, 2)) and torch.equal(found["c"], parts[2].flatten(0, 1))


def test_steps_are_done_in_the_order_written(tmp_path):
    written = "{skip: 1, transpose: [0, 1], reshape: [2 * d, -1], to: v}"
    rows = rows_of(tmp_path, f"w: {written}\nx: {{reshape: [-1, d], transpose: [0, 1], to: y}}\nz: null")
    w = torch.randn(4, 6)
    found = translate(rows, {"w": w, "x": w, "z": w}, {"d": 3})
    assert found.keys() == {"v", "y"}
    assert torch.equal(found["v"], w[1:].T.reshape(6, 3)) and torch.equal(found["y"], w.reshape(-1, 3).T)


def test_tensors_of_one_address_are_joined_along_the_axis_that_they_name(tmp_path):
    rows = rows_of(tmp_path, "a.{w,x}: {reshape: [2, -1, 3], axis: 1, to: v}")
    w, x = torch.randn(4, 3), torch.randn(6, 3)
    found = translate(rows, {"a.w": w, "a.x": x}, {})
    assert torch.equal(found["v"], torch.cat((w.view(2, 2, 3), x.view(2, 3, 3)), 1))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("a.{i}.w: b.{i}", "no row takes last"),
        ("a.{i}.w: b.{i}\nlast: b\nfirst: c", "first: no weight has the name first"),
        ("last: c\na.{i}.{w,v}: b.{i}", "a.{i}.{w,v}: no weight has the name a.{i}.v"),
        ("a.{i}.w: b.{i}\na.0.{any}: c\nlast: d", "a.0.{any}: a.0.w was taken by a row before"),
        ("a.{i}.w: {shape: 2, to: b}", "a.{i}.w: did you mean reshape"),
        ("a.{i}.w: {split: [1, 1], to: b}", "a.{i}.w: makes 2 of a.0.w, but its addresses are 1"),
        ("a.{i}.w: {split: [2, 1], to: [b, c]}", "a.{i}.w: 4 rows cannot be split into 2 and 1 shares"),
    ],
)
def test_a_table_that_does_not_fit_is_an_error(tmp_path, table, message):
    with pytest.raises(ValueError, match=message.replace("{", r"\{").replace("}", r"\}")):
        translate(rows_of(tmp_path, table), {"a.0.w": torch.ones(4, 2), "last": torch.ones(1)}, {})
