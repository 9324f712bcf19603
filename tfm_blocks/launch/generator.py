"""The generator of objective=replaced_token: read its model, and check that it suits the model that it trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tfm_blocks.compose.model import compose_model
from tfm_blocks.compose.overrides import override_text
from tfm_blocks.data.objectives import ObjectiveSettings, ReplacedTokenSettings
from tfm_blocks.errors import ConfigError, Problem, config_error
from tfm_blocks.language.spec import Spec, names
from tfm_blocks.launch.suitability import find_hiding_problems
from tfm_blocks.network.build import check_model, network_without_values
from tfm_blocks.network.call import losses_of
from tfm_blocks.network.graph import GENERATOR, Network
from tfm_blocks.network.weights import attach_generator, common_embeddings
from tfm_blocks.training.settings import RunSettings

ADDRESS = f"objective.{GENERATOR}"
NOT_DIVIDED = "is fsdp2, which cannot divide the embeddings that the model shares with its generator"


def read_generator(generator: Mapping[str, Any], vocab: int) -> Spec:
    """Return the model of {model: NAME, KNOB: VALUE} for a vocabulary, or of a definition. Raises ConfigError."""
    if "graph" in generator:
        return check_model(generator)
    if "vocab" in generator:
        rule = "is set, but the generator has the vocabulary of the model"
        raise config_error(f"{ADDRESS}.vocab", rule, "leave it out")
    changes = [override_text(knob, value) for knob, value in generator.items() if knob != "model"]
    try:
        composed = compose_model(generator["model"], changes).with_vocab(vocab)
        return check_model(composed.model, composed.sources)
    except ConfigError as error:
        problems = [replace(problem, address=f"{ADDRESS}: {problem.address}") for problem in error.problems]
        raise ConfigError(problems) from None


def trained_network(spec: Spec, objective: ObjectiveSettings, vocab: int) -> Network:
    """Return the network that a run trains, without values: the model, with the generator of a run that has one.

    Raises ConfigError.
    """
    network = network_without_values(spec)
    if isinstance(objective, ReplacedTokenSettings):
        attach_generator(network, network_without_values(read_generator(objective.generator, vocab)))
    return network


def find_generator_problems(network: Network, replacer: Network, run: RunSettings, vocab: int) -> Iterator[Problem]:
    """Yield a problem unless the model has one output, and the generator predicts its input with its embeddings."""
    spec, generator = network.spec, replacer.spec
    first = spec.sink.arguments.get("first_id", 0)
    if (outputs := spec.sink.shape[-1]) != first + 1:
        rule = f"has {int(str(outputs)) - first} outputs, but objective=replaced_token needs one: was it replaced?"
        help = "write model=electra_discriminator, or at the last node block: unembed, vocab: 2, first_id: 1"
        yield Problem(spec.sink.key, rule, help=help)
    if run.trainer.strategy == "fsdp2":
        yield Problem("trainer.strategy", NOT_DIVIDED, help="write trainer.strategy=ddp")
    if any(node.address.partition(".")[0] == GENERATOR for node in spec.nodes):
        rule = "is the name of a node, but objective=replaced_token uses it for the generator"
        yield Problem(f"model.graph.{GENERATOR}", rule, help="give the node another name")
    for address, one in (("model", spec), (ADDRESS, generator)):
        if one.adapted or one.base is not None:
            key = "adapt" if one.adapted else "parametrisation"
            rule = f"has no rule for a generator, which shares the embeddings of the model, but {key} is set"
            yield Problem(f"{address}.{key}", rule, help="leave it out")
    if blocks := losses_of(generator):
        rule = f"has blocks that add losses, {', '.join(blocks)}, but a generator has one loss"
        yield Problem(ADDRESS, rule, help="use other blocks")
    if names(generator.inputs) != names(spec.inputs):
        own, other = (", ".join(names(one.inputs)) for one in (spec, generator))
        yield Problem(ADDRESS, f"reads {other}, but the model reads {own}", help="give both the same input")
        return
    for problem in find_hiding_problems(generator, run.objective.name):
        yield replace(problem, address=f"{ADDRESS}: {problem.address}")
    if generator.sink.shape[-1] != vocab:
        rule = f"has {generator.sink.shape[-1]} logits for each position, but the vocabulary has {vocab}"
        yield Problem(ADDRESS, rule, help="name a model that predicts tokens, such as electra")
    pairs = list(common_embeddings(network, replacer))
    if not any("embedding" in own.roles for own, _ in pairs):
        rule = "has no embedding at an address of the model's, but the two share their embeddings"
        yield Problem(ADDRESS, rule, help="name a model whose embedding has the same address, such as src_emb")
    for weight, shared in pairs:
        if weight.shape != shared.shape:
            rule = f"has the shape {list(shared.shape)} at {shared.name}, but the model {list(weight.shape)}"
            help = "give both the same width and number of rows; electra's d_embedding is apart from its d_model"
            yield Problem(ADDRESS, rule, help=help)
