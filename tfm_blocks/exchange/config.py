"""Convert the config.json of a published model to a family, knobs and special ids, and back."""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tfm_blocks.compose.model import compose_model
from tfm_blocks.compose.resolve import SOURCE_VOCAB, Composed
from tfm_blocks.data.published_tokenizer import PublishedTokenizer
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.vocabulary import OwnVocabulary, Vocabulary
from tfm_blocks.errors import Problem, RunError, config_error, run_error, shown
from tfm_blocks.exchange.family import (
    MISSING,
    Config,
    ConfigRow,
    Family,
    Knobs,
    families,
    leaves,
    unused_keys,
)
from tfm_blocks.exchange.rope import rope_rows, rope_rows_of, unused_rope_keys
from tfm_blocks.registry.expression import evaluate

BOS, EOS = "bos_token_id", "eos_token_id"
LARGEST = 2**31
MOST_LAYERS = 1000
KINDS = "attention_types"  # of the layers of GPT-Neo: its class computes missing attention_layers from them
KDA_LAYERS = "linear_attn_config.kda_layers"
PERIOD = "sliding_window_pattern"  # its last layer is global; of configs without layer_types
NOTHING: tuple[Any, ...] = (None, False, "", [], {})  # values of an unknown key that cannot enable a feature
ACTIVATIONS = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new"}  # two names of one function
DERIVED = {"head_dim", "qk_head_dim", "mamba_d_head", "num_key_value_heads"}  # transformers computes a missing one
WINDOW = "use_sliding_window"  # which classes of transformers read only without layer_types
SCALING = "rope_scaling"  # of transformers before version 5; its nested keys replace rope_parameters
QUANTIZATION = "quantization_config"
DEQUANTIZE = "import the weights before their quantisation, or load them with transformers, dequantize() and save them"
DELETE = "delete the key from config.json if the model does not use it; otherwise write a family: --family FILE.yaml"
OTHER = "correct config.json, or describe this model by a family of your own: --family FILE.yaml"


@dataclass(frozen=True)
class Published:
    """A model of a published family: the values of its knobs, and its vocabulary."""

    family: Family
    knobs: Knobs
    vocabulary: Vocabulary

    @property
    def rows(self) -> tuple[ConfigRow, ...]:
        """Return the rows of config.json. Raises ConfigError if no `rope_type` has the block of the positions."""
        return (*self.family.config, *(rope_rows_of(self.family.rope, self.knobs) if self.family.rope else ()))

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the values of all knobs."""
        return {**knob_defaults(self.family.model, self.family.config_dir), **self.knobs}

    @property
    def implied(self) -> dict[str, Any]:
        """Return the keys of config.json whose values follow from other keys."""
        sizes = {**self.knobs, "vocab_size": self.vocabulary.size}
        return {key: evaluate(text, sizes.__getitem__) for key, text in self.family.implied.items()}

    def compose(self) -> Composed:
        """Return the model of this project with these knobs. Raises ConfigError."""
        vocabulary = {"vocab": self.vocabulary.size_here, "first_id": self.vocabulary.first}
        if self.vocabulary.source:
            vocabulary[SOURCE_VOCAB] = self.vocabulary.source.size_here
        return compose_model(self.family.model, conf=self.family.config_dir).with_values({**self.knobs, **vocabulary})


def read_published(family: Family, config: Config, generation: Config, tensors: int, where: str) -> Published:
    """Read config.json, and the special ids of generation_config.json. `tensors` is the number of stored tensors.

    Raises RunError that names every key at fault.
    """
    starts = {key: generation[key] for key in family.start[:1] if family.pairs and generation.get(key) is not None}
    reader = _Reader(family, dict(leaves(config)) | starts)
    published = Published(family, reader.knobs(tensors), reader.vocabulary(generation.get(EOS)))
    reader.expect_known()
    for key, value in published.implied.items() if not reader.problems else ():
        if (stated := reader.flat.get(key, value)) != value:
            reader.problems.append((key, f"must be {value} for the other keys, but is {shown(stated)}", OTHER))
    if reader.problems:
        raise RunError([Problem(f"{where}: {key}", rule, help=help) for key, rule, help in reader.problems])
    return published


def family_of(config: Config, where: str) -> Family:
    """Return the family of the architecture with the fewest differing fixed keys. Raises RunError if there is none.

    `architectures` may be missing or name the base model, because transformers decides by `model_type`.
    """
    flat, names = dict(leaves(config)), config.get("architectures")
    fitting = [family for family in families().values() if family.fits(config)]
    if not fitting:
        if any(family.fits({"architectures": names}) for family in families().values()):
            rule = f"is {shown(config.get('model_type'))}, but architectures is {shown(names)}"
            raise run_error(f"{where}: model_type", rule, "correct the key that is wrong in config.json")
        key = "architectures" if names else "model_type"
        known = {family.architecture if key == "architectures" else family.model_type for family in families().values()}
        help = f"known: {', '.join(sorted(known))}; your own: --family FILE.yaml"
        raise run_error(f"{where}: {key}", f"cannot be imported: {shown(config.get(key))}", help)
    return min(fitting, key=lambda family: (_differences(family, flat), -len(family.implied)))


def unstated_ids(family: Family, config: Config, generation: Config) -> tuple[str, ...]:
    """Return the keys that the tokenizer replaces: BOS and EOS of an encoder, or EOS, if no file states their ids."""
    if family.encoder:
        return tuple(key for key in (BOS, EOS) if config.get(key) is None)
    flat = dict(leaves(family.missing)) | dict(leaves(config))
    stated = (flat.get(EOS, flat.get(f"decoder.{EOS}")), generation.get(EOS))
    return (EOS,) if stated == (None, None) else ()


def _differences(family: Family, flat: Config) -> int:
    """Return the number of fixed and implied keys with another value."""
    count = sum(_differs(flat, key, family) for key in family.fixed)
    if not family.implied:
        return count
    reader = _Reader(family, flat)
    implied = Published(family, reader.knobs(LARGEST), reader.vocabulary(None)).implied
    return count + sum(bool(reader.flat.get(key, value) != value) for key, value in implied.items())


def _differs(flat: Config, key: str, family: Family) -> bool:
    value, fixed = flat.get(key, family.missing.get(key)), family.fixed[key]
    if isinstance(value, list) and isinstance(fixed, list):
        return value != list(islice(cycle(fixed), len(value) or len(fixed)))
    if isinstance(value, list) and isinstance(fixed, str):  # of DeBERTa, which writes either
        return "|".join(map(str, value)) != fixed
    if value is None or (value == {} and fixed is None):  # null disables a feature, or leaves the value to the class
        return isinstance(fixed, int | float) and bool(fixed) and key in flat
    return bool(_same_activation(value) != _same_activation(fixed))


def _same_activation(value: Any) -> Any:
    return ACTIVATIONS.get(value, value) if isinstance(value, str) else value


class _Reader:
    """Read the values of a flat config, and collect the problems by key."""

    def __init__(self, family: Family, flat: Config) -> None:
        given = {key: value for key, value in flat.items() if value is not None or not family.encoder}
        missing = dict(leaves(family.missing))
        stated = any(key.startswith(("rope_parameters.", f"{SCALING}.")) for key in given)
        if stated or given.get("rope_parameters") == {}:  # the default positions are complete
            missing = {key: value for key, value in missing.items() if not key.startswith("rope_")}
        self.family, self.flat = family, {**missing, **given}  # encoders write null for ids that they have
        if KDA_LAYERS not in given:  # the class of Kimi Linear reads both lists or none
            self.flat.pop("linear_attn_config.full_attn_layers", None)
        if KINDS in given and given.get("attention_layers") is None:
            self.flat["attention_layers"] = _expanded(given[KINDS])
        if WINDOW in family.fixed and not self._has_window():
            self.flat.pop(WINDOW, None)
        knobs = knob_defaults(family.model, family.config_dir)
        self.rows = (*family.config, *(rope_rows(family.rope, self.flat, knobs) if family.rope else ()))
        self.problems: list[tuple[str, str, str]] = []

    def _has_window(self) -> bool:
        """Return True if `use_sliding_window` would give a layer a window.

        A class with the key `layer_types` reads it first. Qwen2 has no window before `max_window_layers`.
        """
        is_decided = "layer_types" in self.family.fixed and self.flat.get("layer_types") is not None
        first, count = (self.flat.get(key) for key in ("max_window_layers", "num_hidden_layers"))
        is_above = "max_window_layers" in self.family.missing and type(first) is type(count) is int and first >= count
        return not is_decided and not is_above and self.flat.get("sliding_window") is not None

    def knobs(self, tensors: int) -> dict[str, Any]:
        defaults = knob_defaults(self.family.model, self.family.config_dir)
        knobs: dict[str, Any] = {}
        keys = {key: value for key, value in self.flat.items() if key not in defaults}  # a knob's name is no key
        for row in self.rows:
            key = next((key for key in row.keys if self.flat.get(key) is not None), None)
            try:
                stated = None if any(name in self.flat for name in row.keys) else MISSING
                value = row.to_knob(self.flat[key] if key else stated, ChainMap(knobs, keys))
                default = None if row.each and isinstance(value, str) else defaults[row.knob]
                numeric = type(default) in (int, float) and not (value is None and row.missing is None)
                if numeric and type(value) not in (int, float):
                    raise ValueError(f"must be a number, but is {shown(value)}")
                if numeric and type(default) is int and (type(value) is not int or not 0 < value < LARGEST):
                    raise ValueError(f"must be a whole number from 1 to {LARGEST - 1}, but is {shown(value)}")
                if row.knob in ("layers", "experts") and value > tensors:
                    raise ValueError(f"is {value}, but there are only {tensors} tensors")
                if knobs.setdefault(row.knob, value) != value:
                    raise ValueError(f"must be {shown(knobs[row.knob])} for our blocks, but is {shown(value)}")
            except ValueError as error:
                self.problems.append((key or row.keys[0], str(error), OTHER))
                knobs.setdefault(row.knob, defaults[row.knob])
        return knobs

    def vocabulary(self, generated: Any) -> Vocabulary:
        """Return the vocabulary. `generated` is the eos of generation_config.json: an id, several or none.

        Separate vocabularies have the same ids of BOS and EOS, because config.json states each once.
        """
        of_target = self.family.target_vocab
        keys = dict.fromkeys(("vocab_size", of_target if self.flat.get(of_target) is not None else "vocab_size"))
        sizes = [self._id(key, LARGEST) for key in keys]
        bound = min(sizes) if sizes == [self.flat.get(key) for key in keys] else LARGEST
        values = (self.flat.get(EOS, self.flat.get(f"decoder.{EOS}")), generated)
        stated = [id for value in values for id in (value if isinstance(value, list) else [value])]
        ends = [id for id in stated if type(id) is int and 0 <= id < bound]  # a model cannot generate the others
        eos = ends[0] if ends else self._id(EOS, bound)
        starts = [key for key in self.family.start if self.flat.get(key) is not None]
        start = self._id(starts[0], bound) if starts else eos
        source = Vocabulary(sizes[0], start, eos) if of_target else None
        return Vocabulary(sizes[-1], start, eos, tuple(dict.fromkeys(id for id in ends if id != eos)), source)

    def _id(self, key: str, bound: int) -> int:
        value = self.flat.get(key)
        if type(value) is int and 0 <= value < bound:
            return value
        rule = f"must be a whole number from 0 to {bound - 1}, but is {shown(value)}"
        self.problems.append((key, rule, f"write the right {key} into config.json"))
        return 1

    def expect_known(self) -> None:
        """Add a problem for each key with an unsupported value, and for each unknown key that may enable a feature."""
        layers = next((self.flat.get(key) for row in self.rows if row.knob == "layers" for key in row.keys), None)
        for key, fixed in self.family.fixed.items():
            value = self.flat.get(key)
            if fixed and isinstance(fixed, list) and isinstance(value, list) and len(value) != layers:
                rule = f"must have a value for each of {layers} layers, but has {len(value)}"
                self.problems.append((key, rule, OTHER))
            elif _differs(self.flat, key, self.family):
                rule = f"must be {shown(fixed)} for our blocks, but is {shown(self.flat[key])}"
                self.problems.append((key, rule, OTHER))
        kinds, period = self.family.fixed.get("layer_types", ()), self.flat.get(PERIOD)
        is_read = PERIOD in self.family.unused and period is not None and self.flat.get("layer_types") is None
        if is_read and period != len(kinds):
            self.problems.append((PERIOD, f"must be {len(kinds)} for our blocks, but is {shown(period)}", OTHER))
        for key, value in self.flat.items():
            if key in ("is_causal", "decoder.is_causal") and not value and not self.family.encoder:
                self.problems.append((key, f"must be true for our blocks, but is {shown(value)}", OTHER))
        given = {key.split(".")[0] for key, value in self.flat.items() if value not in NOTHING}
        if {SCALING, "rope_parameters"} <= given and SCALING not in self.family.unused:
            rule = "replaces rope_parameters in transformers, but config.json has both"
            self.problems.append((SCALING, rule, "delete from config.json the key that the model does not use"))
        known = {*self.family.fixed, *self.family.implied, *self.family.unused, *self.family.start}
        known |= {self.family.target_vocab, *(key for row in self.rows for key in row.keys)}
        known |= unused_rope_keys(self.flat) if self.family.rope else set()
        for key, value in self.flat.items():
            first = key.split(".")[0]
            is_known = key in known or first in self.family.unused
            is_known = is_known or any(unused_keys().match(part) for part in key.split("."))
            is_harmless = value in NOTHING and not (value is False and first in (SCALING, "rope_parameters"))
            if not is_known and not is_harmless:  # the default of rope_parameters.truncate is true
                help = DEQUANTIZE if first == QUANTIZATION else DELETE
                self.problems.append((key, f"has no counterpart in our blocks: {shown(value)}", help))


def _expanded(kinds: Any) -> Any:
    """Return the attention of each layer for the `attention_types` of GPT-Neo, or other content unchanged."""
    try:
        names = (name for some, count in kinds for name in [*some][:MOST_LAYERS] * min(count, MOST_LAYERS))
        return list(islice(names, MOST_LAYERS))
    except (TypeError, ValueError):
        return kinds


@cache
def knob_defaults(model: str, config_dir: Path | None) -> Knobs:
    """Return the knobs of a model with their values."""
    return compose_model(model, conf=config_dir).knobs


def write_published(published: Published) -> dict[str, Any]:
    """Return a config.json, the inverse of `read_published`. Raises ConfigError for a knob without counterpart."""
    family, vocabulary = published.family, published.vocabulary
    flat = {"pad_token_id": vocabulary.pad, **family.fixed}  # transformers' default may be beyond the vocabulary
    for row in published.rows:
        try:
            flat[row.keys[0]] = row.to_published(published.knobs)
        except ValueError as error:
            raise config_error(row.knob, str(error)) from None
    layers = next(row.keys[0] for row in family.config if row.knob == "layers")
    for key, value in family.fixed.items():
        if isinstance(value, list):  # one value for each layer
            flat[key] = list(islice(cycle(value), flat[layers]))
    if KINDS in family.unused:
        flat[KINDS] = [[[kind], 1] for kind in flat["attention_layers"]]
    flat |= {"architectures": [family.architecture], "model_type": family.model_type, "dtype": "float32"}
    flat |= {"vocab_size": (vocabulary.source or vocabulary).size, EOS: vocabulary.written_eos}
    flat |= {family.target_vocab or "vocab_size": vocabulary.size, family.start[0]: vocabulary.start}
    flat |= published.implied
    config: dict[str, Any] = {}
    for key, value in flat.items():
        _put(config, key, value)
    if (other := family_of(config, family.name)).name != family.name:
        raise config_error(family.name, f"config.json with these values is of the family {other.name}")
    return config


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key."""
    *outer, inner = key.split(".")
    for name in outer:
        config[name] = config = config.get(name) or {}
    config[inner] = value


def _drop(config: dict[str, Any], key: str) -> None:
    """Remove a dotted key if it exists."""
    *outer, inner = key.split(".")
    for name in outer:
        config = config.get(name) or {}
    config.pop(inner, None)


def with_knobs(config: Config, stated: Published, published: Published) -> dict[str, Any]:
    """Return a config.json of `stated` with the knobs of another model of its family and all its other keys."""
    changed, family = deepcopy(dict(config)), published.family
    flat = dict(leaves(write_published(published)))
    changed.pop("torch_dtype", None)
    changed["dtype"] = "float32"
    is_scaled = family.rope or config.get(SCALING)
    before, after = stated.sizes, published.sizes
    types = [rope_rows_of(family.rope, sizes) if family.rope else () for sizes in (after, before)]
    rope = [row for row in published.rows if row in types[0] or (is_scaled and row.keys[0].startswith("rope_"))]
    given = dict(leaves(config))
    if any(before[row.knob] != after[row.knob] for row in (*rope, *types[1])):
        for key in (SCALING, "rope_parameters", "rope_theta"):  # of any type
            changed.pop(key, None)
        for row in rope:
            _put(changed, row.keys[0], flat[row.keys[0]])
    for row in (row for row in published.rows if row not in rope):
        depends = (row.each or row.layers is not None) and stated.knobs["layers"] != published.knobs["layers"]
        if all(given.get(key) is None for key in row.keys):
            depends |= row.to_knob(MISSING, published.knobs) != published.knobs[row.knob]
        if depends or stated.knobs[row.knob] != published.knobs[row.knob]:
            for key in row.keys:
                _drop(changed, key)
            _put(changed, row.keys[0], flat[row.keys[0]])
            for key in (*family.fixed, KINDS) if row.knob == "layers" else ():
                if isinstance(flat.get(key), list):  # one value for each layer
                    _put(changed, key, flat[key])
    for key, value in published.implied.items():
        if value != stated.implied[key]:
            _put(changed, key, value)
    sizes = [row.knob for row in published.rows if type(before[row.knob]) is not float]  # without dropout
    is_resized = any(before[name] != after[name] for name in sizes)
    for key in DERIVED.intersection(family.unused) if is_resized else ():
        changed.pop(key, None)
    return changed


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return the vocabulary of a tokenizer. The ids of a tokenizer of this project are published unchanged."""
    source = vocabulary_of(tokenizer.source) if tokenizer.source else None
    if isinstance(tokenizer, PublishedTokenizer):
        return replace(tokenizer.vocabulary, source=source)
    return OwnVocabulary(tokenizer.size, tokenizer.BOS, tokenizer.EOS, source=source)


def to_json(value: Mapping[str, Any]) -> str:
    """Return the text of a JSON file in the format of transformers."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
