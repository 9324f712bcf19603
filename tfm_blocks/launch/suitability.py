"""Whether the data, the objective and the optimizer of a run suit its model, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tfm_blocks.compose.resolve import SOURCE_VOCAB
from tfm_blocks.data.objectives import (
    HidingSettings,
    LabelSettings,
    NoisyPairSettings,
    ObjectiveSettings,
    SeveralTokensSettings,
)
from tfm_blocks.data.probe_settings import ProbeSettings
from tfm_blocks.data.settings import DataSettings, LabelsSettings, columns_of
from tfm_blocks.errors import Problem, listed, shown, suggest
from tfm_blocks.language.check import sight_of
from tfm_blocks.language.spec import TARGET, Axis, Spec, format_shape, names
from tfm_blocks.network.call import losses_of
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.training.groups import Learned, coupled_decays, find_followers_problems, wrong_scales
from tfm_blocks.training.objective import AHEAD
from tfm_blocks.training.optimizer_settings import names_used
from tfm_blocks.training.optimizers import SPECTRAL
from tfm_blocks.training.schedules import NoamSettings
from tfm_blocks.training.settings import RunSettings

DISTIL = "objective=distil objective.teacher=RUN"
REPLACED = "objective=replaced_token objective.generator={model: NAME}"
PARTS_NEED = {
    "ahead": "objective=several_tokens",
    "ce": DISTIL,
    "kl": DISTIL,
    "hidden": f"{DISTIL} objective.hidden={{NODE: NODE}}",
    "generator": REPLACED,
    "replaced": REPLACED,
}


def find_data_problems(spec: Spec, data: DataSettings | None, objective: ObjectiveSettings) -> Iterator[Problem]:
    """Yield a problem unless each input is a column of the data, and the data can train such a model."""
    if mismatch := _objective_problem(data, objective):
        yield mismatch
        return
    inputs, sources = names(spec.inputs), names(spec.sources)
    if isinstance(objective, HidingSettings):
        yield from find_hiding_problems(spec, objective.name)
    elif isinstance(objective, NoisyPairSettings):
        yield from _pair_problems(spec, objective)
    elif isinstance(objective, LabelSettings):
        yield from _label_problems(spec, data, objective)
    elif TARGET not in inputs and not isinstance(data, ProbeSettings):
        rule = f"training predicts {TARGET}, but the inputs are {', '.join(inputs)}"
        help = "objective=masked trains an encoder on text, and probe tasks, such as data=parity, a model without tgt"
        yield Problem("model.inputs", rule, help=help)
    yield from _ahead_problems(spec, objective)
    if isinstance(data, ProbeSettings):
        yield from _probe_problems(spec, data)
    columns = columns_of(data) if data else ()
    if isinstance(objective, NoisyPairSettings) or (isinstance(objective, HidingSettings) and len(columns) == 1):
        columns = (*columns, *sources)  # the objective makes the source, or a text has one column
    reads_all = not isinstance(objective, HidingSettings | NoisyPairSettings | LabelSettings)
    unread = [name for name in columns if name not in (TARGET, *sources)]
    if reads_all and sources and unread and {*sources} < {*columns}:
        rule = f"has the column {unread[0]}, but the model reads {', '.join(inputs)}"
        yield Problem("data.train", rule, help=f"leave {unread[0]} out of all splits, or use a model with this input")
    for source in spec.sources:
        address = f"model.inputs.{source.name}"
        if not source.tokens:
            rule = "is an input of vectors, but training reads text"
            yield Problem(address, rule, help="such a model can be checked, shown and built, but not trained")
        elif data and source.name not in columns:
            rule = f"is not a column of the data, which has {', '.join(columns)}"
            files = " ".join(f"data.{split}.{source.name}=FILE" for split in ("train", "val", "test"))
            help = (
                "name the input src" if data.kind == "probe" else f"data=text reads a file for each input: add {files}"
            )
            yield Problem(address, rule, help=help)


def _objective_problem(data: DataSettings | None, objective: ObjectiveSettings) -> Problem | None:
    """Return the problem of an objective that cannot train any model on the data, or None."""
    name, labels = objective.name, isinstance(objective, LabelSettings)
    if isinstance(objective, HidingSettings | NoisyPairSettings) and isinstance(data, ProbeSettings):
        rule = f"objective={name} reads a text, but data={data.task} is a probe task, which has its own answers"
        return Problem("objective", rule, help="write data=lm or data=text, or objective=next_token")
    if isinstance(data, LabelsSettings) and not labels:
        rule = f"data.kind=labels has labels, but objective={name} reads a text"
        return Problem("objective", rule, help="write objective=label, or data=text")
    if labels and data is not None and not isinstance(data, LabelsSettings):
        rule = f"objective=label predicts labels, but data.kind={data.kind} has none"
        return Problem("objective", rule, help="write data=labels, or objective=next_token")
    return None


def find_vocabulary_problems(
    spec: Spec, data: DataSettings | None, objective: ObjectiveSettings | None, vocab: int, source_vocab: int
) -> Iterator[Problem]:
    """Yield a problem unless a model can read sources with a separate vocabulary, and has a table for each."""
    inputs, help = names(spec.inputs), "write model=base, or another model without the knob source_vocab"
    if TARGET not in inputs or not spec.sources:
        rule = f"is a vocabulary of sources separate from {TARGET}'s, but the model reads {', '.join(inputs)}"
        yield Problem(SOURCE_VOCAB, rule, help=help)
        return
    if isinstance(data, ProbeSettings):
        rule = f"is a separate vocabulary of sources, but the probe task {data.task} has one alphabet"
        yield Problem(SOURCE_VOCAB, rule, help=help)
    if isinstance(objective, NoisyPairSettings):
        rule = f"is a separate vocabulary of sources, but objective={objective.name} makes them from the target"
        yield Problem(SOURCE_VOCAB, rule, help=f"{help}, or objective=next_token")
    owners = {node.address: node for node in spec.nodes}
    table_of = {node.address: owners[node.owner].tie or node.owner for node in spec.nodes}
    of_sources = {table_of[node.address]: (node, name) for node, name in spec.tables if name != TARGET}
    for node in (*(node for node, name in spec.tables if name == TARGET), spec.sink):
        if node_and_name := of_sources.get(table_of[node.address]):
            source, name = node_and_name
            rule = f"has the weights of {source.address}, whose rows are ids of {name}, not of {TARGET}"
            own = f"{{same: null, block: {node.block}}}"
            place, own = (node.key, own) if node.shares else (f"{node.key}.tie", "null")
            yield Problem(place, rule, help=f"write {place}={own}")
    for node, name in spec.tables:
        size, knob = (vocab, "vocab") if name == TARGET else (source_vocab, SOURCE_VOCAB)
        if node.arguments["vocab"] != size and not node.shares:
            rule = f"has {node.arguments['vocab']} ids, but {name} has {size}"
            yield Problem(f"{node.key}.vocab", rule, help=f"write {node.key}.vocab='${{{knob}}}'")


def find_small_tables(spec: Spec, vocab: int) -> Iterator[Problem]:
    """Yield a problem for each node whose `vocab` is below the number of ids of the input that it reads."""
    inputs = names(spec.inputs)
    for key, node in {node.key: node for node in spec.nodes if not node.shares}.items():
        name = next((name for name in node.read if name in inputs), None)
        size = node.arguments.get("vocab", vocab)
        if name and size < vocab and node.arguments.get("unknown_id") is None:
            help = f"write {key}.vocab='${{vocab}}'"
            yield Problem(f"{key}.vocab", f"has {size} ids, but {name} has {vocab}", help=help)


def _pair_problems(spec: Spec, objective: NoisyPairSettings) -> Iterator[Problem]:
    """Yield a problem unless a model generates a target, from at most one source."""
    name, inputs = f"objective={objective.name}", names(spec.inputs)
    if TARGET not in inputs:
        rule = f"{name} predicts {TARGET} from left to right, but the model reads {', '.join(inputs)}"
        yield Problem(
            "model.inputs", rule, help="write model=base or model=decoder_only; objective=masked trains this model"
        )
    elif len(inputs) > 2:
        rule = f"{name} makes one source of each row, but the model reads {', '.join(names(spec.sources))}"
        yield Problem("model.inputs", rule, help="leave the other inputs out")


def _ahead_problems(spec: Spec, objective: ObjectiveSettings) -> Iterator[Problem]:
    """Yield a problem unless the node before the head is predict_ahead, if and only if the objective trains it."""
    nodes = [node for node in spec.nodes if node.block == AHEAD]
    if not isinstance(objective, SeveralTokensSettings):
        for node in nodes:
            rule = f"predicts later tokens, which objective={objective.name} does not train"
            help = "write objective=several_tokens, or remove the node and its branches with null"
            yield Problem(node.key, rule, help=help)
    elif TARGET not in names(spec.inputs):
        rule = (
            f"objective=several_tokens predicts tokens of {TARGET}, but the model reads {', '.join(names(spec.inputs))}"
        )
        yield Problem("model.inputs", rule, help="write model=decoder_only or model=base, with a block predict_ahead")
    elif not nodes:
        rule = "objective=several_tokens predicts later tokens, but no node has the block predict_ahead"
        help = "write NAME: {block: predict_ahead, in: NODE, ahead: [NODES]} before the output, or objective=next_token"
        yield Problem("model.graph", rule, help=help)
    elif len(nodes) > 1 or nodes[0] != spec.nodes[-spec.head - 1]:
        rule = "is not the node before the output, whose input the later tokens share"
        yield Problem(nodes[0].key, rule, help="write one predict_ahead, before the unembed")


def find_hiding_problems(spec: Spec, objective: str) -> Iterator[Problem]:
    """Yield a problem unless a model predicts at the positions of its one input, and sees both sides of each."""
    name, inputs = f"objective={objective}", names(spec.inputs)
    if TARGET in inputs:
        rule = f"{name} predicts hidden tokens from both sides, but the model reads {TARGET} from left to right"
        help = "write model=encoder_only, or inputs: {tgt: null, src: B S}; objective=next_token trains this model"
        yield Problem("model.inputs", rule, help=help)
    elif len(inputs) != 1:
        rule = f"{name} predicts tokens of one input, but the model has {', '.join(inputs)}"
        yield Problem("model.inputs", rule, help="leave the other inputs out")
    elif spec.sink.shape[:-1] != spec.sources[0].shape:
        rule = f"the output has the axes {format_shape(spec.sink.shape)}, but {name} predicts at each position of"
        rule += f" {inputs[0]}, {format_shape(spec.sources[0].shape)}"
        yield Problem("model.graph", rule, help=_position_help(spec))
    elif sight_of(spec, inputs[0], REGISTRY) != "all":
        rule = f"{name} predicts from both sides, but no output position sees later tokens of {inputs[0]}"
        yield Problem("model.graph", rule, help="write mask: null at the attention, in place of causal")


def _position_help(spec: Spec) -> str:
    """Return how the output of a model with one input gets the positions of this input."""
    axis = spec.sink.shape[1]
    if isinstance(axis, Axis) and axis.parts[1:] == spec.sources[0].shape[1:2]:
        return f"write {{block: drop_tokens, tokens: {axis.parts[0]}}} before the output"
    return f"end the graph with an unembed at each position of {spec.sources[0].name}"


def _label_problems(spec: Spec, data: DataSettings | None, objective: LabelSettings) -> Iterator[Problem]:
    """Yield a problem unless the data has labels, and the model an output for each at positions of its input."""
    inputs, sink = names(spec.inputs), spec.sink
    if TARGET in inputs:
        rule = f"objective=label reads a text from both sides, but the model reads {TARGET} from left to right"
        yield Problem("model.inputs", rule, help="write model=classifier, or inputs: {tgt: null, src: B S}")
    elif len(inputs) != 1:
        rule = f"objective=label predicts the label of one input, but the model has {', '.join(inputs)}"
        yield Problem("model.inputs", rule, help="leave the other inputs out")
    elif sink.shape[:-1] != spec.sources[0].shape:
        rule = f"the output has the axes {format_shape(sink.shape)}, not the positions of {inputs[0]}"
        yield Problem("model.graph", rule, help=_position_help(spec))
    if not isinstance(data, LabelsSettings) or TARGET in inputs:
        return
    outputs, first = sink.shape[-1], sink.arguments.get("first_id", 0)
    if first != 1 or outputs != data.coder.outputs + 1:
        what = f"the {len(data.coder.names)} of data.labels" if data.labels else "a number"
        need = f"for each of {what}" if data.labels else f"for {what}"
        count = int(str(outputs)) - first
        rule = f"has {count} outputs from the id {first} on, but needs one {need}, from the id 1 on"
        help = (
            f"write classes={data.coder.outputs}, and at the last node block: unembed, vocab: classes + 1, first_id: 1"
        )
        yield Problem(sink.key, rule, help=help)
    yield from _weight_problems(data, objective)
    if data.predict != "words" and sight_of(spec, inputs[0], REGISTRY) != "all":
        rule = f"the label is predicted at the first position, which sees no later tokens of {inputs[0]}"
        yield Problem(
            "model.graph", rule, help="write mask: null at the attention, or {block: pool_positions} before the output"
        )
    pooled = next(
        (node for node in spec.nodes if node.block == "pool_positions" and node.arguments["kind"] != "none"), None
    )
    if data.predict == "words" and pooled:
        rule = f"gives all words the same vector ({pooled.arguments['kind']}), but data.predict=words labels each word"
        yield Problem(pooled.key, rule, help="write pooling=none")


def _weight_problems(data: LabelsSettings, objective: LabelSettings) -> Iterator[Problem]:
    """Yield a problem unless each class has a weight, if there are weights."""
    weights, labels = objective.weights, set(data.labels or ())
    if isinstance(weights, dict) and weights.keys() != labels:
        wrong = [f"{shown(label)} has none" for label in sorted(labels - weights.keys())]
        wrong += [f"{shown(label)} is not a label" for label in sorted(weights.keys() - labels)]
        rule = f"must have a weight for each of data.labels and no others, but {listed(wrong, 3)}"
        yield Problem("objective.weights", rule, help="write objective.weights={CLASS: WEIGHT}, or balanced, or null")
    elif weights and data.predict == "number":
        rule = f"is {weights}, but data.predict=number has no classes"
        yield Problem("objective.weights", rule, help="write objective.weights=null")


def find_loss_problems(spec: Spec, run: RunSettings) -> Iterator[Problem]:
    """Yield a problem for each part of a loss that the model or the objective does not have."""
    losses, objective = run.losses, f"objective={run.objective.name}"
    for name, needed in PARTS_NEED.items():
        if getattr(losses, name) is not None and name not in run.objective.losses:
            rule = f"is a weight of {needed.partition(' ')[0]}, but {objective} has no such loss"
            yield Problem(f"losses.{name}", rule, help=f"leave it out, or write {needed}")
    if isinstance(run.objective, LabelSettings) and losses.has_z_loss:
        yield Problem("losses.z_loss", f"is a loss of predicted tokens, but {objective} has none", help="write 0")
    predict = getattr(run.data, "predict", "class")
    if predict in ("several", "number") and run.label_smoothing:
        rule = f"is a part of the cross-entropy of classes, but data.predict={predict} has none"
        yield Problem("label_smoothing", rule, help="write label_smoothing=0")
    blocks = losses_of(spec)
    for name in losses.blocks or ():
        if not any(f"{address}.".startswith(f"{name}.") for address in blocks):
            known = f"the blocks with a loss are {', '.join(blocks)}" if blocks else "no block has a loss"
            rule = f"names {name}, but {known}"
            yield Problem("losses.blocks", rule, help=suggest(name, blocks) or "leave it out")


def find_optimizer_problems(spec: Spec, run: RunSettings, learned: Sequence[Learned]) -> Iterator[Problem]:
    """Yield problems of the optimizer with shards, and if the parametrisation has no rule for it or the schedule."""
    if run.trainer.strategy == "fsdp2" and "adafactor" in names_used(run.optimizer):
        rule = "is fsdp2, but adafactor cannot divide its state among processes"
        yield Problem("trainer.strategy", rule, help="write trainer.strategy=ddp, or another optimizer")
    yield from find_followers_problems(run.schedule, learned)
    if spec.base is None:
        return
    name, base = spec.parametrisation, spec.mapping["base"]
    unknown = sorted(names_used(run.optimizer) - {"adam", "adamw", "muon"})
    if unknown:
        rule = f"{name} has rules for adam, adamw and muon, but not for {', '.join(unknown)}"
        yield Problem("optimizer", rule, help="write optimizer=adamw, or model.parametrisation=standard")
    for address, scale in wrong_scales(learned).items():
        rule = f"is {scale}, with which the best rate depends on the width, but {name} keeps it constant"
        yield Problem(address, rule, help=f"write \"{address}='{SPECTRAL}'\"")
    for address, decay in coupled_decays(learned).items():
        rule = f"is added to the gradient, for which {name} has no rule, but is {decay:g}"
        help = f"use adamw, whose decay is apart from the gradient, or write {address}=0"
        yield Problem(address, rule, help=help)
    schedule = run.schedule
    if isinstance(schedule, NoamSettings) and schedule.d_model != (width := base.get("d_model", schedule.d_model)):
        rule = (
            f"is {schedule.d_model}, which scales the rate by the width a second time: {name} does it for each weight"
        )
        yield Problem("schedule.d_model", rule, help=f"write schedule.d_model={width}, the width of the base")


def _probe_problems(spec: Spec, data: ProbeSettings) -> Iterator[Problem]:
    """Yield a problem if the task does not suit the shape of the model."""
    sources = names(spec.sources)
    if sources and data.probe.shows_answers:
        rule = f"reads all of {sources[0]}, which shows each answer of {data.task} one position later, so it would copy"
        yield Problem("model.inputs", rule, help="use a decoder-only model: model=probe_decoder")
    if TARGET in names(spec.inputs):
        return
    if len(sources) != 1:
        rule = f"a model without {TARGET} answers at the positions of one input, but has {', '.join(sources)}"
        yield Problem("model.inputs", rule, help="leave the other inputs out, or add tgt")
    elif spec.sink.shape[:2] != spec.sources[0].shape:
        rule = f"the output has the axes {format_shape(spec.sink.shape)}, but {sources[0]} has"
        rule += f" {format_shape(spec.sources[0].shape)}"
        yield Problem("model.graph", rule, help=_position_help(spec))
