"""What every block keeps, whoever wrote it: it is what its declaration says, at any length and in any batch."""

from dataclasses import dataclass

import pytest
import torch

import tfm_blocks.blocks  # noqa: F401
from tests.decoding import check_steps
from tests.plugged import PLUGGED
from tfm_blocks.errors import ConfigError
from tfm_blocks.language.spec import Axis
from tfm_blocks.network import incremental
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.signature import is_letter

EVERY = {**REGISTRY.blocks, **PLUGGED}
ALL = {name: one for name, one in EVERY.items() if is_letter(one.signature.output[0])}  # others have no batch
GIVEN = {"vocab": 11, "d_model": 8, "factor": 2.0}  # values that others depend on
BY_KIND = {"int": 2, "float": 0.5, "rate": 0.25, "bool": True, "str": "text"}
WIDTHS = {"D": 8, "E": 12}
LENGTHS = {"B": 3, "N": 5, "T": 5, "S": 7}


@pytest.fixture(autouse=True)
def _plugged(monkeypatch):
    monkeypatch.setattr(REGISTRY, "blocks", dict(EVERY))


@dataclass(frozen=True)
class Case:
    """A block with some of its optional ports, and with `mask: causal` or not."""

    name: str
    ports: tuple[str, ...]
    causal: bool

    def __str__(self):
        return "-".join([self.name, *self.ports[1:], *["causal"] * self.causal])

    @property
    def info(self):
        return ALL[self.name]

    @property
    def arguments(self):
        values = {}
        for argument in self.info.arguments.values():
            if argument.required:
                kind = argument.kind
                options = kind.options or (REGISTRY.members(kind.category) if kind.category else [])
                values[argument.name] = GIVEN.get(argument.name, options[0] if options else BY_KIND[kind.name])
            if self.causal and "causal" in argument.kind.options:
                values[argument.name] = "causal"
        return values

    def inputs(self):
        """Axes by name of input, and which inputs each port reads: two where it takes several."""
        axes, read = {}, {}
        for port in self.info.signature.ports:
            if port.name not in self.ports:
                continue
            read[port.name] = [f"{port.name}_{one}" for one in range(1 + port.many)]
            for number, name in enumerate(read[port.name]):
                axes[name] = " ".join(self._axis(port, place, axis, number) for place, axis in enumerate(port.axes))
        return axes, read

    def _axis(self, port, place, axis, number):
        sequence = axis in self.info.signature.sequences
        if not is_letter(axis):
            return str(self.arguments[axis])
        if place == 0:
            return axis
        if axis in port.sums:
            return "SP"[number] if sequence else str(8 + 4 * number)
        return axis if sequence else str(WIDTHS.get(axis, 16))

    def node(self, read):
        first, *others = self.info.signature.ports
        wired = {"in": read[first.name]} | {one.name: read[one.name] for one in others if one.name in read}
        several = {one.name if one is not first else "in" for one in self.info.signature.ports if one.many}
        lists = {key: value if key in several else value[0] for key, value in wired.items()}
        return {"block": self.name, **lists, **self.arguments}

    def alone(self, seed=1):
        """The block as a model of its own, which reads inputs."""
        axes, read = self.inputs()
        return network({"inputs": axes, "graph": {"node": self.node(read)}}, seed)


def network(model, seed=1):
    return build_network(check_model(model), seed=seed).eval()


def cases():
    for name, info in ALL.items():
        ports = [port for port in info.signature.ports if is_letter(port.axes[0])]
        wanted = tuple(port.name for port in ports if not port.optional)
        masked = any("causal" in argument.kind.options for argument in info.arguments.values())
        for given in dict.fromkeys([wanted, tuple(port.name for port in ports)]):
            yield Case(name, given, False)
        if masked:
            yield Case(name, wanted, True)


def tensors(net, seed=0, **lengths):
    generator, sizes, found = torch.Generator().manual_seed(seed), {**LENGTHS, "P": 4, **lengths}, {}
    for one in net.spec.inputs:
        shape = [sizes.get(axis.name, 6) if isinstance(axis, Axis) else axis for axis in one.shape]
        ids = torch.randint(4, 11, shape, generator=generator)
        found[one.name] = ids if one.tokens else torch.randn(shape, generator=generator)
    return found


each = pytest.mark.parametrize("case", list(cases()), ids=str)


@each
@torch.no_grad()
def test_the_real_shape_is_the_declared_one_at_two_lengths(case):
    net = case.alone()
    for longer in (0, 3):
        sizes = {name: size + longer for name, size in {**LENGTHS, "P": 4}.items()}
        inputs = tensors(net, **sizes)
        declared = [
            sum(sizes[part] for part in size.name.split("+")) if isinstance(size, Axis) else size
            for size in net.spec.sink.shape
        ]
        assert list(net(**inputs).shape) == declared


def changed(before, after):
    """Which positions of the output differ, in any row or number."""
    return (before - after).abs().flatten(2).amax((0, 2)) > 1e-6


@each
@torch.no_grad()
def test_an_output_position_sees_no_more_of_a_port_than_is_declared(case):
    net, info = case.alone(), case.info
    inputs, (_, read) = tensors(net), case.inputs()
    before = net(**inputs)
    for port in info.signature.ports:
        aligned = port.name in read and [
            axis for axis in port.axes[1:2] if axis in info.signature.output and axis not in port.sums
        ]
        sight = info.sight(port.name, read, net.spec.sink.arguments)
        if not aligned or sight == "all":
            continue
        for name in read[port.name]:
            for position in range(inputs[name].shape[1]):
                other = inputs[name].clone()
                other[:, position] = 14 - other[:, position] if other.ndim == 2 else other[:, position] + 1
                moved = changed(before, net(**{**inputs, name: other}))
                allowed = torch.arange(len(moved)) >= position
                if sight == "itself":
                    allowed &= torch.arange(len(moved)) == position
                assert not (moved & ~allowed).any(), f"{name} at {position} moves {moved.nonzero()[:, 0].tolist()}"


@each
def test_a_port_whose_sequence_is_not_in_the_output_is_declared_as_seen(case):
    """Otherwise pass 4 would take the node to see nothing of the target through it."""
    signature = case.info.signature
    for port in signature.ports:
        if (port.letters & signature.sequences) - set(signature.output) - port.sums:
            assert case.info.sight(port.name, [port.name], {"mask": None}) != "itself"


def decoder(case):
    """tgt, the block, and an unembed; further ports read src, or the same where they lie on the target's axis.

    None where the block reads ids or makes no vectors of positions.
    """
    info = case.info
    first, *others = info.signature.ports
    if first.ids or len(info.signature.output) != 3 or first.axes[1] != info.signature.output[1] or first.sums - {"D"}:
        return None
    given = {"vocab": 11, "block": "embedding"}
    wide = 12 if any("E" in port.axes for port in others) else 8
    graph = {"src_emb": {**given, "d_model": wide, "in": "src"}, "emb": {**given, "d_model": 8, "in": "tgt"}}
    read = {first.name: ["emb"] * (1 + first.many)}
    for port in others:
        if port.name in case.ports:
            read[port.name] = ["emb" if port.axes[1] == first.axes[1] else "src_emb"] * (1 + port.many)
    graph["node"] = case.node(read)
    graph["logits"] = {"block": "unembed", "vocab": 11}
    inputs = {"src": "B S", "tgt": "B T"}
    if not any("src_emb" in names for names in read.values()):
        del inputs["src"], graph["src_emb"]
    return network({"inputs": inputs, "graph": graph})


def decoded():
    for case in cases():
        attends = [port for key in case.info.sees for port in key.split("|") if port in case.ports][:1]
        first = case.info.signature.ports[0].name
        if attends != [first] or case.info.sight(first, attends, {"mask": "causal" if case.causal else None}) != "all":
            yield case


steps = pytest.mark.parametrize("case", list(decoded()), ids=str)


@steps
@torch.no_grad()
def test_a_step_equals_the_forward_however_many_tokens_were_read_before(case):
    net = decoder(case)
    if net is None:
        pytest.skip("makes no vectors of the target's positions")
    inputs = tensors(net)
    sources = {name: value for name, value in inputs.items() if name == "src"}
    if sources:
        sources["src"][1, 4:] = 0
    check_steps(net, sources, inputs["tgt"], net(**inputs), range(5))


@steps
@torch.no_grad()
def test_a_hypothesis_goes_on_from_the_one_that_it_is_given(case):
    net = decoder(case)
    if net is None:
        pytest.skip("makes no vectors of the target's positions")
    sources = {name: value for name, value in tensors(net).items() if name == "src"}
    wide = {name: value.repeat_interleave(2, 0) for name, value in sources.items()}
    tgt_BMT = torch.randint(4, 11, (3, 2, 6), generator=torch.Generator().manual_seed(3))
    tgt_BMT[:, :, :2] = tgt_BMT[:, :1, :2]
    decoding = incremental.start(net, sources, 6, sentences=3)
    _, decoding = incremental.prefill(net, tgt_BMT[:, 0, :2], decoding)
    decoding = incremental.spread(decoding, 2)
    for position in range(2, 6):
        x_RD, decoding = incremental.step(net, tgt_BMT[:, :, position].flatten(), decoding)
        whole_RTV = net(**wide, tgt=tgt_BMT[:, :, : position + 1].flatten(0, 1))
        torch.testing.assert_close(net.head(x_RD), whole_RTV[:, -1], rtol=0, atol=1e-5)
        if position == 3:
            chosen = torch.tensor([2, 0])
            decoding, tgt_BMT = incremental.select(decoding, chosen), tgt_BMT[chosen]
            wide = {name: value[chosen].repeat_interleave(2, 0) for name, value in sources.items()}
        origin_BM = torch.tensor([[1, 0], [0, 0], [1, 1]])[: len(tgt_BMT)]
        incremental.reorder(decoding, origin_BM)
        tgt_BMT[:, :, : position + 1] = tgt_BMT[:, :, : position + 1].take_along_dim(origin_BM[:, :, None], 1)


@each
@torch.no_grad()
def test_what_stands_in_padding_changes_no_real_position(case):
    net = case.alone()
    if any(size.joined for size in net.spec.sink.shape if isinstance(size, Axis)):
        pytest.skip("padding stands in the middle: see tests/network/test_grammar.py")
    alone = net(**tensors(net))
    lengths = {name: LENGTHS[name] + 3 for name in "NTSP" if name in LENGTHS}
    garbage, padded, keep = tensors(net, 5, **lengths), {}, {}
    for name, value in tensors(net).items():
        length = value.shape[1]
        padded[name] = garbage[name] * (0 if value.ndim == 2 else 1e3)
        padded[name][:, :length] = value
        keep[name] = torch.arange(padded[name].shape[1]).expand(3, -1) < length
    found = net(keep=keep, **padded)
    assert found.isfinite().all()
    torch.testing.assert_close(found[:, : alone.shape[1]], alone, rtol=1e-4, atol=1e-5)


@each
@torch.no_grad()
def test_a_row_is_the_same_whatever_the_others_hold(case):
    net = case.alone()
    inputs = tensors(net)
    alone = net(**{name: value[1:2] for name, value in inputs.items()})
    for value in inputs.values():
        value[0], value[2] = (float("nan"), float("inf")) if value.is_floating_point() else (0, 0)
    torch.testing.assert_close(net(**inputs)[1:2], alone, rtol=1e-4, atol=1e-5)


@each
def test_starting_values_are_finite_and_follow_from_the_seed(case):
    one, again, other = (dict(case.alone(seed).named_parameters()) for seed in (1, 1, 2))
    for name, parameter in one.items():
        assert parameter.isfinite().all() and torch.equal(parameter, again[name])
        constant = set(parameter.flatten().tolist()) <= {0.0, 1.0} or parameter.min() == parameter.max()
        assert constant or not torch.equal(parameter, other[name])


@each
def test_buffers_are_as_the_module_makes_them(case):
    net = case.alone()
    block, node = net["node"].block, net.spec.sink
    made = case.info.cls(*(node.axes.get(letter) for letter in case.info.sizes), **node.arguments)
    for name, buffer in made.named_buffers():
        assert torch.equal(block.get_buffer(name), buffer)


@each
@torch.no_grad()
def test_ports_go_by_name_whatever_their_order(case):
    axes, read = case.inputs()
    node = case.node(read)
    turned = {"block": node.pop("block"), **dict(reversed(node.items()))}
    one, two = case.alone(), network({"inputs": dict(reversed(axes.items())), "graph": {"node": turned}})
    assert torch.equal(one(**tensors(one)), two(**tensors(one)))


@each
@torch.no_grad()
def test_the_same_module_called_again_reads_its_ports_by_name(case):
    axes, read = case.inputs()
    node = case.node(read)
    again = {"same": "node", **{key: value for key, value in reversed(node.items()) if key in {"in", *read}}}
    join = "concat_sequence" if len(case.info.signature.output) == 3 else None
    if join is None:
        pytest.skip("its output cannot be joined")
    graph = {"node": node, "again": again, "both": {"block": join, "in": ["node", "again"]}}
    net = network({"inputs": axes, "graph": graph})
    one_BND, two_BND = net(**tensors(net)).chunk(2, 1)
    assert torch.equal(one_BND, two_BND)


def test_of_two_optional_ports_the_second_alone_is_read_as_the_second():
    model = {"inputs": {"x": "B T 4", "y": "B T 4"}, "graph": {"node": {"block": "blend", "in": "x", "b": "y"}}}
    x_BTD, y_BTD = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    torch.testing.assert_close(network(model)(x=x_BTD, y=y_BTD), x_BTD + 3 * y_BTD)


def out_of_range():
    wrong = {"int": [0, -1, 2.5, "many", 2**41], "float": [float("nan"), float("inf")], "rate": [1, -0.1, "x"]}
    for case in cases():
        for argument in case.info.arguments.values():
            for value in [*wrong.get(argument.kind.name, []), *(["nothing"] if argument.kind.options else [])]:
                if value != 0 or f"{argument.name} >= 0" not in case.info.where:
                    yield pytest.param(case, argument.name, value, id=f"{case}-{argument.name}={value}")


@pytest.mark.parametrize(("case", "name", "value"), list(out_of_range()))
def test_an_argument_out_of_range_is_refused(case, name, value):
    axes, read = case.inputs()
    with pytest.raises(ConfigError) as caught:
        check_model({"inputs": axes, "graph": {"node": {**case.node(read), name: value}}})
    assert all(name in problem.rule and problem.help for problem in caught.value.problems)


@pytest.mark.parametrize("name", ALL)
def test_every_dropout_is_a_rate(name):
    for argument in ALL[name].arguments.values():
        if argument.name.endswith("dropout") or argument.name == "droppath":
            assert argument.kind.name == "rate"


@pytest.mark.parametrize("name", ALL)
def test_every_number_has_a_rule_or_a_bound(name):
    """A width or a count of 0 or less is refused by a sentence, so each has one in `where`."""
    info = ALL[name]
    for argument in info.arguments.values():
        assert argument.kind.name not in ("int", "float") or any(argument.name in rule for rule in info.where)
