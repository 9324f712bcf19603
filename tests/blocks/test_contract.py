"""The contract of blocks: each block matches its declaration at every length and in every batch."""

from dataclasses import replace

import pytest
import torch

import tfm_blocks.blocks  # noqa: F401
from tests.plugged import PLUGGED
from tfm_blocks.errors import ConfigError
from tfm_blocks.language.check import check
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.network.contract.case import cases_of
from tfm_blocks.network.contract.rules import first_breach
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.signature import is_letter

EVERY = {**REGISTRY.blocks, **PLUGGED}
ALL = {name: one for name, one in EVERY.items() if is_letter(one.signature.output[0])}  # others have no batch
pytestmark = pytest.mark.usefixtures("plugged")


def network(inputs, graph):
    """Build a network without a head, as the cases do."""
    return build_network(replace(check({"inputs": inputs, "graph": graph}, REGISTRY), head=0), seed=1).eval()


def cases():
    """Return the cases of every block, and of every part inside a block."""
    before = dict(REGISTRY.blocks)
    REGISTRY.blocks.update(PLUGGED)
    all_cases = [case for info in EVERY.values() for case in cases_of(info)]
    REGISTRY.blocks = before
    return all_cases


CASES = cases()
LAST = {case.arguments[case.part]["block"]: case for case in CASES if case.part}.values()  # the last host of each part
each = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.grid if case.part and case not in LAST else [], id=str(case))
        for case in CASES
    ],
)


@each
def test_a_block_keeps_every_rule(case):
    breach = first_breach([case])
    assert breach is None, breach and f"{breach.measured}. Fix: {breach.fix}"


def test_a_port_whose_sequence_is_not_in_the_output_is_declared_as_seen():
    """Otherwise pass 4 would assume that the node sees nothing of the target through this port."""
    ports = [
        (info, port.name)
        for info in {case.info.name: case.info for case in CASES}.values()
        for port in info.signature.ports
        if (port.letters & info.signature.sequences) - set(info.signature.output) - port.sums
    ]
    assert {"attention", "pool"} <= {info.name for info, _ in ports}
    for info, name in ports:
        assert info.sight(name, [name], {"mask": None}) != "itself", (info.name, name)


def test_starting_values_of_two_seeds_differ():
    drawn = set()
    for case in CASES:
        one, other = (dict(build_network(case.spec, seed=seed).named_parameters()) for seed in (1, 2))
        for name, parameter in one.items():
            constant = name == "node.block.fade" and case.info.name == "mamba"  # the rates of all channels: 1, 2, 3, …
            constant |= set(parameter.flatten().tolist()) <= {0.0, 1.0} or parameter.min() == parameter.max()
            assert constant or not torch.equal(parameter, other[name]), (str(case), name)
            drawn |= set() if constant else {case.info.name}
    assert len(drawn) > len(EVERY) / 3


def test_buffers_are_as_the_module_makes_them():
    compared = set()
    for case in CASES:
        block, node = case.network["node"].block, case.spec.sink
        made = case.info.make(*(node.axes.get(letter) for letter in case.info.sizes), **node.arguments)
        for name, buffer in made.named_buffers():
            assert torch.equal(block.get_buffer(name), buffer), (str(case), name)
            compared.add(case.info.name)
    assert compared


@each
@torch.no_grad()
def test_ports_are_passed_by_name_in_any_order(case):
    node = case.node()
    turned = {"block": node.pop("block"), **dict(reversed(node.items()))}
    two = network(dict(reversed(case.inputs.items())), {"node": turned})
    two.load_state_dict(case.network.state_dict())
    assert torch.equal(case.network(**case.tensors()), two(**case.tensors()))


@each
@torch.no_grad()
def test_the_same_module_called_again_reads_its_ports_by_name(case):
    node = case.node()
    again = {"same": "node", **{key: value for key, value in reversed(node.items()) if key in {"in", *case.ports}}}
    join = "concat_sequence" if len(case.info.signature.output) == 3 else None
    if join is None:
        pytest.skip("its output cannot be joined")
    graph = {"node": node, "again": again, "both": {"block": join, "in": ["node", "again"]}}
    one_BND, two_BND = network(case.inputs, graph)(**case.tensors()).chunk(2, 1)
    assert torch.equal(one_BND, two_BND)


def test_of_two_optional_ports_the_second_alone_is_read_as_the_second():
    blend = network({"x": "B T 4", "y": "B T 4"}, {"node": {"block": "blend", "in": "x", "b": "y"}})
    x_BTD, y_BTD = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    torch.testing.assert_close(blend(x=x_BTD, y=y_BTD), x_BTD + 3 * y_BTD)


def out_of_range():
    """Yield invalid values of each argument of each block, in its first case; by default, once per name and kind."""
    shown = set()
    wrong = {"int": [0, -1, 2.5, "many", 2**41], "float": [float("nan"), float("inf")], "rate": [1, -0.1, "x"]}
    for case in {case.info.name: case for case in reversed(CASES)}.values():
        for argument in case.info.arguments.values():
            values = [*wrong.get(argument.kind.name, []), *(["nothing"] if argument.kind.options else [])]
            values = [value for value in values if value != 0 or f"{argument.name} >= 0" not in case.info.where]
            if values:
                marks = pytest.mark.grid if (argument.name, argument.kind.name) in shown else []
                shown.add((argument.name, argument.kind.name))
                yield pytest.param(case, argument.name, values, id=f"{case}-{argument.name}", marks=marks)


@pytest.mark.parametrize(("case", "name", "values"), list(out_of_range()))
def test_an_argument_out_of_range_is_refused(case, name, values):
    for value in values:
        with pytest.raises(ConfigError) as caught:
            check_model({"inputs": case.inputs, "graph": {"node": {**case.node(), name: value}}})
        assert all(name in problem.rule and problem.help for problem in caught.value.problems), value


def test_every_dropout_is_a_rate_and_every_other_number_has_a_rule():
    """Widths and counts of 0 or less are refused with a rule of `where`."""
    for info in ALL.values():
        for name, argument in info.arguments.items():
            assert argument.kind.name == "rate" or not (name.endswith("dropout") or name == "droppath"), info.name
            assert argument.kind.name not in ("int", "float") or any(name in rule for rule in info.where), info.name


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("pool_positions", {"kind": kind}) for kind in ("max", "first", "none")),
        ("gated_delta_rule", {"decay": "channel", "d_key": 1}),
        ("restricted_global_attention", {"first": 2, "separate": True, "mask": None}),
    ],
)
def test_a_block_keeps_every_rule_with_these_arguments(name, arguments):
    breach = first_breach(cases_of(REGISTRY.blocks[name], arguments))
    assert breach is None, breach and breach.measured
