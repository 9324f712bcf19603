"""A test case of a block: two small models, the block alone and the block in a decoder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from tfm_blocks.errors import ConfigError, Problem, shown, suggest
from tfm_blocks.language.check import check
from tfm_blocks.language.spec import TARGET, Axis, Spec
from tfm_blocks.network.build import build_network
from tfm_blocks.network.call import module_of
from tfm_blocks.network.graph import Network
from tfm_blocks.network.trace import describe_failure
from tfm_blocks.registry.blocks import REGISTRY, BlockInfo
from tfm_blocks.registry.signature import Argument, Port, is_letter

NODE = "node"
BATCH = 3
LENGTHS = (5, 7, 4, 6)  # of the sequences, in the order of the ports
PADDING = 3  # padded positions that a test adds
SOURCE = "src"
SOURCE_LENGTH = 7
TARGET_LENGTH = 5
VOCAB = 11  # vocabulary of the decoder
FEWEST_IDS = 3  # vocabulary of an embedding without an argument `vocab`: ids 1 and 2

PARTS = {
    "norm": "compute a norm from the vector of each position alone",
    "activation": "compute an activation from the vector of each position alone",
    "position": "rotate each vector by its own position alone, and let a bias depend on the distance alone",
    "scores": "normalize along the last axis, the keys, and give masked keys, which have the least score, the weight 0",
    "selection": "choose among the keys that the mask allows, by their contents and places, for each query separately",
    "gate": "compute the factors of each position from the vector of that position alone",
    "router": "compute the scores and weights of the experts from the logits of each position alone",
}
NAMED = {"vocab": VOCAB, "d_model": 8, "factor": 2.0, "factors": [2.0]}  # values that other arguments depend on
BY_KIND = {"int": 2, "float": 0.5, "rate": 0.25, "bool": True}
WIDTHS = {"D": 8, "E": 12}
OTHER_WIDTH = 16
HOSTS = {
    "activation": "ffn",
    "position": "attention",
    "scores": "attention",
    "selection": "relative_attention",  # which reads one sequence
    "gate": "attention",
    "router": "moe",
}  # the block that a part is tested in

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """A block with its arguments, and the axes of each input by port.

    `part` names the argument whose value is tested inside the block, such as a position inside attention. `note`
    distinguishes cases of the same block, such as `mask: causal`.
    """

    info: BlockInfo
    arguments: Mapping[str, Any]
    ports: Mapping[str, tuple[str, ...]]
    part: str = ""
    note: str = ""

    def __str__(self) -> str:
        part = f"{self.part}={self.arguments[self.part]['block']}" if self.part in self.arguments else ""
        return "-".join(filter(None, [self.info.name, *list(self.ports)[1:], part, self.note.replace(": ", "=")]))

    @property
    def reads(self) -> dict[str, list[str]]:
        return {port: [f"{port}_{number}" for number in range(len(axes))] for port, axes in self.ports.items()}

    @property
    def inputs(self) -> dict[str, str]:
        return {
            name: axes for port, names in self.reads.items() for name, axes in zip(names, self.ports[port], strict=True)
        }

    def node(self, reads: Mapping[str, list[str]] | None = None) -> dict[str, Any]:
        """Return the node as a model file writes it; `reads` replaces the inputs."""
        first, *others = self.info.signature.ports
        known = reads or self.reads
        connected = {port: known[port.name] for port in (first, *others) if port.name in known}
        keys: dict[str, Any] = {
            ("in" if port is first else port.name): names if port.many else names[0]
            for port, names in connected.items()
        }
        for axis in self.info.signature.output:
            if "-" in axis:  # removes positions, which another block must have added
                tokens = _size(self.info, self.arguments, axis.partition("-")[2])
                keys["in"] = {"block": "learned_tokens", "tokens": tokens, "in": keys["in"]}
        return {"block": self.info.name, **keys, **self.arguments}

    @property
    def _ids_inputs(self) -> set[str]:
        """Return the inputs of token ids."""
        return {name for port in self.info.signature.ports if port.ids for name in self.reads.get(port.name, [])}

    @cached_property
    def spec(self) -> Spec:
        """Return the spec of the block alone. Raises ConfigError if the checker rejects the arguments."""
        spec = check({"inputs": self.inputs, "graph": {NODE: self.node()}}, REGISTRY)
        return replace(spec, head=0)  # a head flattens the rows of a batch

    @cached_property
    def network(self) -> Network:
        return _network(self.spec)

    @cached_property
    def decoder(self) -> Network | None:
        """Return a decoder with the block between embedding and unembed, in eval mode; None if it does not fit."""
        signature = self.info.signature
        first = signature.ports[0]
        # the first port and the output must be vectors of the same positions, and all inputs vectors or ids
        same = len(signature.output) == 3 and not first.ids and first.axes[1:2] == signature.output[1:2]
        ids = self._ids_inputs
        vectors = all(
            name in ids or (len(axes.split()) == 3 and axes.split()[-1].isdecimal())
            for name, axes in self.inputs.items()
        )
        aligned = [name for name in self.ports if signature.port(name).axes[1:2] == first.axes[1:2]]
        sights = {self.info.sight(port, self.ports, self.spec.sink.arguments) for port in aligned}
        if not (same and vectors) or first.sums & signature.sequences or "all" in sights:
            return None
        return _network(check(self._decoder_model(aligned), REGISTRY))

    def _decoder_model(self, aligned: Collection[str]) -> dict[str, Any]:
        """Return a model whose `aligned` ports read tgt, and the other ports src; vectors come from an embedding."""
        read = {name: TARGET if port in aligned else SOURCE for port, names in self.reads.items() for name in names}
        graph: dict[str, Any] = {}
        sources = {name: read[name] for name in self._ids_inputs}
        for name, axes in self.inputs.items():
            if name not in sources:
                width, sources[name] = int(axes.split()[-1]), f"{name}_emb"
                graph[sources[name]] = {"block": "embedding", "vocab": VOCAB, "d_model": width, "in": read[name]}
        graph[NODE] = self.node({port: [sources[name] for name in names] for port, names in self.reads.items()})
        graph["logits"] = {"block": "unembed", "vocab": VOCAB}
        inputs = {name: axes for name, axes in ((SOURCE, "B S"), (TARGET, "B T")) if name in read.values()}
        return {"inputs": inputs, "graph": graph}

    def fix(self, text: str) -> str:
        """Return the remedy for a block that mixes positions: `text`, or the sentence for its category of part."""
        return PARTS.get(self.part or self.info.category, text) if self.part or self.positionwise_part else text

    @property
    def positionwise_part(self) -> bool:
        """Return True for a norm or an activation, which must treat each position separately."""
        return self.info.category in ("norm", "activation")

    def masks(self, keep: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the masks of the inputs that set the padding of their axes."""
        first = {name for tensor in self.spec.inputs for axis in tensor.sequences for name in axis.inputs}
        return {name: mask for name, mask in keep.items() if name in first}

    def sizes(self, longer: int) -> dict[str, int]:
        """Return the batch size and the length of each sequence by axis, within the block's `max_length`."""
        axes = [axis.name for tensor in self.spec.inputs for axis in tensor.shape[1:] if isinstance(axis, Axis)]
        longest = self.network.longest(self.spec.inputs[0].name).tokens
        lengths = {
            axis: int(min(length, max(1, longest - PADDING)))
            for axis, length in zip(dict.fromkeys(axes), cycle(LENGTHS))
        }
        batch = self.spec.inputs[0].shape[0]
        return {str(batch): BATCH} | {axis: int(min(length + longer, longest)) for axis, length in lengths.items()}

    def tensors(self, seed: int = 0, longer: int = 0) -> dict[str, Tensor]:
        """Draw random inputs: ids above 0, or normally distributed vectors."""
        generator, sizes = torch.Generator().manual_seed(seed), self.sizes(longer)
        drawn = {}
        for tensor in self.spec.inputs:
            shape = [sizes[axis.name] if isinstance(axis, Axis) else axis for axis in tensor.shape]
            ids = torch.randint(1, self.vocab, shape, generator=generator)
            drawn[tensor.name] = ids if tensor.tokens else torch.randn(shape, generator=generator)
        return drawn

    def decoder_tensors(self, target: int = TARGET_LENGTH) -> dict[str, Tensor]:
        """Draw random ids for the decoder, which must exist, within its `max_length`."""
        assert self.decoder is not None
        generator, lengths = torch.Generator().manual_seed(0), {TARGET: target, SOURCE: SOURCE_LENGTH}
        drawn = {}
        for tensor in self.decoder.spec.inputs:
            length = int(min(lengths[tensor.name], self.decoder.longest(tensor.name).tokens))
            drawn[tensor.name] = torch.randint(1, VOCAB, (BATCH, length), generator=generator)
        return drawn

    @property
    def vocab(self) -> int:
        vocab = self.spec.sink.arguments.get("vocab")
        return min(vocab, VOCAB) if isinstance(vocab, int) and vocab > 1 else FEWEST_IDS


def _network(spec: Spec) -> Network:
    """Build a network in eval mode, with random values for parameters that start at 0, which would hide their input."""
    network = build_network(spec, seed=1).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1, generator=generator)
    return network


def cases_of(info: BlockInfo, overrides: Arguments | None = None) -> Iterator[Case]:
    """Yield the cases of a block with the arguments and widths `overrides`; other required ones are guessed.

    Raises ConfigError if an argument cannot be guessed, or if the block rejects the arguments.
    """
    overrides = overrides or {}
    for name in overrides:
        if name not in info.arguments and name not in info.signature.letters:
            help = suggest(name, [*info.arguments, *info.signature.letters])
            raise ConfigError(
                Problem(f"{info.name}.{name}", f"{info.name} has no argument or letter {shown(name)}", help=help)
            )
    arguments = {name: value for name, value in overrides.items() if name in info.arguments} | _guesses(info, overrides)
    cases = [*_alone(info, arguments, overrides)]
    if info.category in HOSTS:
        host = REGISTRY.blocks[HOSTS[info.category]]
        inside = {**_guesses(host, {}), info.category: {"block": info.name, **arguments}}
        cases += [replace(case, part=info.category) for case in _alone(host, inside, overrides)]
    for case in cases:
        _expect_made(case, info)
        yield case


def _alone(info: BlockInfo, arguments: Arguments, overrides: Arguments) -> Iterator[Case]:
    if not is_letter(info.signature.output[0]):
        return  # without a batch
    ports = [port for port in info.signature.ports if is_letter(port.axes[0])]
    required = [port for port in ports if not port.optional]
    yield _case(info, required, arguments, overrides)
    if len(ports) > len(required):
        yield _case(info, ports, arguments, overrides)
    masks = {
        one.name: "causal"
        for one in info.arguments.values()
        if "causal" in one.kind.options and one.name not in overrides
    }
    if masks:
        yield _case(info, required, {**arguments, **masks}, overrides, _note(masks))


def _note(arguments: Arguments) -> str:
    return ", ".join(f"{name}: {value}" for name, value in arguments.items())


def _case(info: BlockInfo, ports: list[Port], arguments: Arguments, overrides: Arguments, note: str = "") -> Case:
    axes = {
        port.name: tuple(_axes(info, port, number, arguments, overrides) for number in range(1 + port.many))
        for port in ports
    }
    return Case(info, arguments, axes, note=note)


def _axes(info: BlockInfo, port: Port, number: int, arguments: Arguments, overrides: Arguments) -> str:
    """Return the axes of one input of a port; inputs that the port concatenates differ in that axis."""
    words = []
    for place, axis in enumerate(port.axes):
        if not is_letter(axis):
            words.append(str(_size(info, arguments, axis)))
        elif place == 0 or axis in info.signature.sequences:
            words.append(f"{axis}{number}" if axis in port.sums else axis)
        else:
            width = overrides.get(axis, WIDTHS.get(axis, OTHER_WIDTH))
            words.append(str(width + 4 * number if axis in port.sums else width))
    return " ".join(words)


def _size(info: BlockInfo, arguments: Arguments, name: str) -> Any:
    """Return the value of an argument that is a size in the signature."""
    return arguments.get(name, info.arguments[name].default)


def _guesses(info: BlockInfo, overrides: Arguments) -> dict[str, Any]:
    required = [
        argument for argument in info.arguments.values() if argument.required and argument.name not in overrides
    ]
    return {argument.name: guess(info, argument) for argument in required}


def guess(info: BlockInfo, argument: Argument) -> Any:
    """Return a value for a required argument. Raises ConfigError if its type has no default guess."""
    kind = argument.kind
    options = kind.options or (REGISTRY.members(kind.category) if kind.category else ())
    if argument.name in NAMED or options:
        return NAMED.get(argument.name, options[0] if options else None)
    if kind.name not in BY_KIND:
        rule = f"no value can be guessed for the required argument {argument.name} ({kind})"
        raise ConfigError(Problem(info.name, rule, help=f"pass a value: {info.name}.{argument.name}=VALUE"))
    return BY_KIND[kind.name]


def _expect_made(case: Case, info: BlockInfo) -> None:
    """Raise ConfigError if the checker or the constructor rejects the arguments."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            module_of(case.spec.sink)
        return
    except ConfigError as error:
        reason = error.problems[0].rule
    except Exception as error:  # whatever a constructor raises
        reason = describe_failure(error)
    rule = f"cannot be built for the test with {_note(case.arguments) or 'no arguments'}: {reason}"
    arguments = sorted(info.arguments.values(), key=lambda argument: not argument.required)
    example = [*(argument.name for argument in arguments), *info.sizes, "D"][0]
    raise ConfigError(Problem(info.name, rule, help=f"pass other values, such as {info.name}.{example}=VALUE"))
