"""`tfm blocks --test MODULE`: a line for each block of a plug-in, and an exit status."""

import shutil
from pathlib import Path

import pytest

from tests.preloaded import run_python

TESTS = Path(__file__).parent
NEEDS = """
from torch import Tensor, nn
from tfm_blocks.registry.blocks import block

@block("needs", "x: B T D -> B T D", where={"D % groups == 0": "groups must divide the width"}, source="none")
class Needs(nn.Module):
    def __init__(self, D: int, *, file: str, groups: int) -> None:
        super().__init__()
        if file != "right.txt":
            raise ValueError(f"there is no file {file}")

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD
"""


@pytest.fixture
def tfm_blocks(tmp_path):
    """Run `tfm blocks` in a folder with plug-ins: its exit status, the lines of its output, and its errors."""
    for name in ("wrong_blocks", "plugged"):
        shutil.copy(TESTS / f"{name}.py", tmp_path)
    (tmp_path / "plugged.py").write_text((tmp_path / "plugged.py").read_text().partition("\nPLUGGED =")[0])
    (tmp_path / "needs.py").write_text(NEEDS)
    (tmp_path / "empty.py").touch()

    def run(*arguments):
        done = run_python(["-m", "tfm_blocks", "blocks", *arguments], tmp_path)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout.splitlines(), done.stderr

    return run


def test_each_block_has_a_line_and_one_that_breaks_a_rule_makes_the_status_1(tfm_blocks):
    status, lines, _ = tfm_blocks("--test", "wrong_blocks")
    assert status == 1
    lines = dict(line.split(": ", 1) for line in lines)
    assert len(lines) == 21 and lines.pop("right") == "pass"
    assert all(". Fix: " in line for line in lines.values())
    assert lines["leaks"].startswith(
        "with mask: causal: changing x at position 1 changes the output at positions [0] by"
    )
    assert lines["other_axis"].startswith("in attention: the content of padding changes kept positions by up to ")


@pytest.mark.grid
def test_blocks_that_keep_the_contract_make_the_status_0(tfm_blocks):
    passed = [f"{name}: pass" for name in ("shift", "tally", "tally_all", "pool", "blend", "counted")]
    status, lines, notes = tfm_blocks("--test", "plugged")
    assert (status, lines) == (0, passed)
    assert notes.splitlines() == [
        "note: shift: share has the role gain, which follows from its shape and name",
        '  help: weight_roles = {"share": "gain"} in Shift declares this or another role',
    ]
    assert tfm_blocks("right", "--test", "wrong_blocks")[:2] == (0, ["right: pass"])


@pytest.mark.grid
def test_arguments_and_widths_can_be_given(tfm_blocks):
    status, lines, errors = tfm_blocks("--test", "needs")
    assert (status, lines) == (2, [])
    assert "needs: no value can be guessed for the required argument file (str)" in errors
    assert "help: pass a value: needs.file=VALUE" in errors
    status, _, errors = tfm_blocks("--test", "needs", "needs.file=wrong.txt")
    assert status == 2 and "groups: 2: there is no file wrong.txt (needs.py:" in errors
    status, _, errors = tfm_blocks("--test", "needs", "needs.file=right.txt", "needs.groups=3")
    assert status == 2 and "D % groups == 0" in errors
    arguments = ["needs.file=right.txt", "needs.groups=3", "needs.D=6"]
    assert tfm_blocks("--test", "needs", *arguments) == (0, ["needs: pass"], "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "the module 'nowhere' cannot be imported"),
        (["empty"], "the module 'empty' registers no block"),
        (["wrong_blocks", "leeks"], "did you mean leaks?"),
        (["wrong_blocks", "leaks.musk=causal"], "did you mean mask?"),
        (["wrong_blocks", "leaks.mask"], "must be BLOCK or BLOCK.ARGUMENT=VALUE"),
        (["wrong_blocks", "leaks.mask=["], "its value is not YAML"),
    ],
)
def test_wrong_usage_makes_the_status_2(tfm_blocks, arguments, message):
    status, _, errors = tfm_blocks("--test", *arguments)
    assert status == 2 and message in errors


ROLES = """
from typing import ClassVar
import torch
from torch import Tensor, nn
from tfm_blocks.registry.blocks import block

class Table(nn.Embedding):
    pass

class Declared(Table):
    weight_roles: ClassVar = {"weight": "position"}

@block("tables", "x: B T D -> B T D", source="none")
class Tables(nn.Module):
    def __init__(self, D: int) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(D, D), nn.LayerNorm(D)
        self.table, self.known = Table(3, D), Declared(3, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.norm(self.map(x_BTD)) + self.table.weight.sum(0) + self.known.weight.sum(0)
"""


def test_a_note_names_each_weight_whose_role_only_its_shape_tells(tmp_path, tfm_blocks):
    (tmp_path / "roles.py").write_text(ROLES)
    status, lines, notes = tfm_blocks("--test", "roles")
    assert (status, lines) == (0, ["tables: pass"])
    assert notes.splitlines() == [
        "note: tables: table.weight has the role matrix, which follows from its shape and name",
        '  help: weight_roles = {"weight": "matrix"} in Table declares this or another role',
    ]


def test_declared_roles_exist_and_belong_to_weights(tmp_path, tfm_blocks):
    declared = "{self}    weight_roles: ClassVar = {roles}\n".format
    head = "class Tables(nn.Module):\n"
    for module, roles in (("typo", '{"table.weight": "matrx"}'), ("other", '{"tables.weight": "matrix"}')):
        (tmp_path / f"{module}.py").write_text(ROLES.replace(head, declared(self=head, roles=roles)))
    status, _, errors = tfm_blocks("--test", "typo")
    assert status == 2 and "table.weight: weight_roles declares the role 'matrx', which does not exist" in errors
    assert "did you mean matrix?" in errors
    status, _, notes = tfm_blocks("--test", "other")
    assert status == 0 and "weight_roles of Tables names tables.weight, which is not a weight of Tables" in notes
    assert "did you mean table.weight?" in notes
