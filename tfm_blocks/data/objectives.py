"""The settings of the config group `objective`: what a model predicts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

from tfm_blocks.config.settings import Above0, Count, CountOrZero, Filled, RuleError, Settings
from tfm_blocks.data.noise import Bools, Diffusion, Masking, Noise
from tfm_blocks.data.pair_noise import DenoiserMixture, Denoising, Prefix, SpanCorruption
from tfm_blocks.data.subwords import sentence_ends, words
from tfm_blocks.data.tokenizer import MASK, Tokenizer
from tfm_blocks.data.vocabulary import sentinel
from tfm_blocks.errors import ConfigError, shown

Rate = Annotated[float, Field(gt=0, lt=1)]
Part = Annotated[float, Field(ge=0, le=1)]


class ObjectiveBase(Settings):
    """What the code asks of an objective.

    generates: the model generates text, which is scored. example: a command that uses the trained model.
    """

    generates: ClassVar[bool] = False
    example: ClassVar[str] = "echo 'your text' | tfm translate"

    name: str

    @property
    def special(self) -> tuple[str, ...]:
        """Return the tokens that a learned tokenizer gets."""
        return ()

    @property
    def losses(self) -> tuple[str, ...]:
        """Return the names of its losses, whose weights the config's key `losses` sets."""
        return ()

    def noise(self, tokenizer: Tokenizer) -> Noise | None:
        """Return what is done to rows, or None."""
        return None


class NextTokenSettings(ObjectiveBase):
    """Predict each token of the target from the tokens before it, and from the sources."""

    generates = True

    name: Literal["next_token"]


class DistilSettings(ObjectiveBase):
    """Predict each token of the target, and learn the distribution of a trained run: Hinton et al. 2015, section 2.

    teacher: the folder of a run with the same tokenizer and inputs. temperature: T of both distributions. The loss is
    losses.ce times the cross entropy plus losses.kl times T² KL(teacher ‖ model).
    hidden: nodes of the model and the nodes of the teacher that their outputs follow. losses.hidden times the mean
    squared difference of the outputs is part of the loss.
    """

    generates = True

    name: Literal["distil"]
    teacher: Filled
    temperature: Above0
    hidden: dict[str, str] | None = None

    @property
    def losses(self) -> tuple[str, ...]:
        return ("ce", "kl", "hidden") if self.hidden else ("ce", "kl")


class SeveralTokensSettings(ObjectiveBase):
    """Predict the next token of the target and, with the block predict_ahead, later ones: Gloeckle et al. 2024.

    The loss is the cross entropy of the next token plus losses.ahead times the mean over the later ones.
    """

    generates = True

    name: Literal["several_tokens"]

    @property
    def losses(self) -> tuple[str, ...]:
        return ("ahead",)


class HidingSettings(ObjectiveBase):
    """Settings of objectives that hide tokens of a text, and predict them at their positions."""

    example = "echo 'your <mask> text' | tfm fill"

    @property
    def special(self) -> tuple[str, ...]:
        return (MASK,)


class MaskingSettings(HidingSettings):
    """Settings of objectives that hide a fraction of the tokens of a text.

    rate: fraction of the tokens of a row that are hidden in training, special tokens apart: floor(rate · n + U) of n
    tokens, for U uniform in [0, 1), and at least one. eval_rate: the same in validation and test.
    mask, random: fractions of the hidden tokens that become the mask token and a random token; the others stay.
    static: hide the same tokens in each epoch. whole_words: hide words instead of tokens.
    """

    rate: Rate
    eval_rate: Rate
    mask: Part
    random: Part
    static: bool
    whole_words: bool

    def noise(self, tokenizer: Tokenizer) -> Masking:
        words_V2 = words(tokenizer) if self.whole_words else None
        options = self.model_dump(include={"rate", "eval_rate", "mask", "random", "static"})
        return Masking(mask_id=mask_of(tokenizer), plain_V=_plain(tokenizer), words_V2=words_V2, **options)

    @field_validator("random")
    @classmethod
    def _is_part_of_the_hidden(cls, random: float, info: ValidationInfo) -> float:
        mask = info.data.get("mask", 0)
        if mask + random > 1 + 1e-9:
            rule = f"is {random:g}, but objective.mask is {mask:g}: together they are more than all hidden tokens"
            raise RuleError(rule, f"write objective.random={1 - mask:g} or less")
        return random


class MaskedSettings(MaskingSettings):
    """Hide tokens of a text, and predict them at their positions: Devlin et al. 2019, section 3.1.

    pseudo_documents: the first documents, or rows, of the test set whose pseudo-perplexity is computed after training.
    """

    name: Literal["masked"]
    pseudo_documents: CountOrZero = 0


class ReplacedTokenSettings(MaskingSettings):
    """Decide for each token whether a generator has replaced it: Clark et al. 2020 (ELECTRA), section 2.

    generator: a model and its knobs, {model: NAME, KNOB: VALUE}, or a whole definition, as recorded in a run. The
    generator fills hidden tokens with samples, is trained with the model, and has its embeddings.
    """

    example = "echo 'your text' | tfm embed"

    name: Literal["replaced_token"]
    generator: dict[str, Any]

    @property
    def losses(self) -> tuple[str, ...]:
        return ("generator", "replaced")

    @field_validator("generator")
    @classmethod
    def _names_a_model(cls, generator: dict[str, Any]) -> dict[str, Any]:
        if "graph" not in generator and not isinstance(generator.get("model"), str):
            rule = f"must name a model, but has the keys {', '.join(map(str, generator)) or 'none'}"
            raise RuleError(
                rule, "write objective.generator={model: electra, d_model: 64}, with the knobs of the model"
            )
        return generator


class MaskedDiffusionSettings(HidingSettings):
    """Hide each token of a row with a probability p that is drawn for the row: Nie et al. 2025 (LLaDA), equation 3.

    Of pairs, only tokens of the target are hidden (section 2.3), and the model reads the sources before them.
    min_rate: p is uniform in [min_rate, 1). The loss is the cross entropy of the hidden tokens divided by p, per token.
    """

    name: Literal["masked_diffusion"]
    min_rate: Rate

    def noise(self, tokenizer: Tokenizer) -> Diffusion:
        return Diffusion(mask_id=mask_of(tokenizer), plain_V=_plain(tokenizer), min_rate=self.min_rate)


class NoisyPairSettings(ObjectiveBase):
    """Settings of objectives that make a source and a target of each row of a text."""

    @property
    def special(self) -> tuple[str, ...]:
        return tuple(map(sentinel, range(getattr(self, "sentinels", 0))))


class SpanCorruptionSettings(NoisyPairSettings):
    """Replace spans of a text by sentinels, and predict each sentinel with its span: Raffel et al. 2020, section 3.1.4.

    density: fraction of the tokens that are replaced. span: mean tokens of a span. sentinels: their number, which
    limits the spans of a row.
    """

    example = "echo 'your <extra_id_0> text' | tfm translate"

    name: Literal["span_corruption"]
    density: Rate
    span: Annotated[float, Field(ge=1)]
    sentinels: Count

    def noise(self, tokenizer: Tokenizer) -> SpanCorruption:
        sentinels = np.array(tokenizer.sentinels[: self.sentinels])
        return SpanCorruption(density=self.density, span=self.span, sentinels=sentinels)


class PrefixLmSettings(NoisyPairSettings):
    """Predict the rest of a text from its beginning, which the model reads from both sides: Raffel et al. 2020."""

    name: Literal["prefix_lm"]

    def noise(self, tokenizer: Tokenizer) -> Prefix:
        return Prefix()


class DenoiserSettings(Settings):
    """A denoiser of a mixture.

    mode: a text in front of the source. density: fraction of the tokens that are predicted. span: mean tokens of a
    span; null: the tokens at the end. weight: the denoiser is drawn for a row in proportion to it.
    """

    mode: str
    density: Rate
    span: Annotated[float, Field(ge=1)] | None
    weight: Above0 = 1.0


class Ul2Settings(NoisyPairSettings):
    """Draw one of several denoisers for each row: Tay et al. 2022 (UL2), section 3.1.

    denoisers: by name. sentinels: their number, which limits the spans of a row.
    """

    name: Literal["ul2"]
    denoisers: Annotated[dict[str, DenoiserSettings], Field(min_length=1)]
    sentinels: Count

    def noise(self, tokenizer: Tokenizer) -> DenoiserMixture:
        sentinels = np.array(tokenizer.sentinels[: self.sentinels])
        denoisers = self.denoisers.values()
        return DenoiserMixture(
            kinds=tuple(
                Prefix(density=one.density)
                if one.span is None
                else SpanCorruption(density=one.density, span=one.span, sentinels=sentinels)
                for one in denoisers
            ),
            modes=tuple(np.array(tokenizer.encode(one.mode), np.int64) for one in denoisers),
            weights=tuple(one.weight for one in denoisers),
        )


class DenoisingSettings(NoisyPairSettings):
    """Predict a text from a noisy one: Lewis et al. 2020 (BART), section 2.2.

    mask: fraction of the words that spans replace. span: mean words of a span, whose length has a Poisson distribution.
    random: fraction of the masks that become a random token. permute: fraction of the sentences that change places.
    rotate: fraction of the rows that begin at a random token. insert: masks that are inserted, for each token.
    whole_words: spans consist of words instead of tokens.
    """

    name: Literal["denoising"]
    mask: Part
    span: Annotated[float, Field(gt=0, le=32)]
    random: Part
    permute: Part
    rotate: Part
    insert: Part
    whole_words: bool

    @property
    def special(self) -> tuple[str, ...]:
        return (MASK,)

    def noise(self, tokenizer: Tokenizer) -> Denoising:
        return Denoising(
            mask_id=mask_of(tokenizer),
            plain_V=_plain(tokenizer),
            words_V2=words(tokenizer) if self.whole_words else None,
            ends_V=sentence_ends(tokenizer),
            **self.model_dump(exclude={"name", "whole_words"}),
        )


class LabelSettings(ObjectiveBase):
    """Predict the label of a text, several, a number, or the label of each word: `data.predict` of data=labels.

    weights: the weight of the loss of each class; balanced: n / (C · n_c) for n training labels, n_c of them of class c
    of C, so that classes have equal sums; null: 1. For several classes, they multiply the loss of each decision.
    """

    example = "echo 'your text' | tfm classify"

    name: Literal["label"]
    weights: dict[str, Above0] | Literal["balanced"] | None = None

    @field_validator("weights", mode="plain", json_schema_input_type=dict[str, Above0] | Literal["balanced"] | None)
    @classmethod
    def _are_of_classes(cls, weights: object) -> object:
        named = {} if weights in (None, "balanced") else weights if isinstance(weights, Mapping) else {None: 0}
        if all(type(weight) in (int, float) and 0 < weight < math.inf for weight in named.values()):
            return {str(name): float(weight) for name, weight in named.items()} or weights
        rule = f"must be balanced, or a number above 0 for each class, but is {shown(weights)}"
        raise RuleError(rule, "write objective.weights=balanced, or objective.weights={CLASS: 2.0, …}")


def mask_of(tokenizer: Tokenizer) -> int:
    """Return the mask of a tokenizer, which the preparation of the data expects."""
    assert tokenizer.mask is not None, "the preparation of the data expects it"
    return tokenizer.mask


def _plain(tokenizer: Tokenizer) -> Bools:
    """Return True for the ids that stand for text."""
    plain_V = np.ones(tokenizer.size, bool)
    plain_V[list(tokenizer.special_ids)] = False
    return plain_V


ObjectiveSettings = Annotated[
    NextTokenSettings
    | DistilSettings
    | SeveralTokensSettings
    | MaskedSettings
    | ReplacedTokenSettings
    | MaskedDiffusionSettings
    | SpanCorruptionSettings
    | DenoisingSettings
    | PrefixLmSettings
    | Ul2Settings
    | LabelSettings,
    Field(discriminator="name"),
]
NEXT_TOKEN = NextTokenSettings(name="next_token")


def read_objective(objective: Any) -> ObjectiveSettings | None:
    """Return the settings of the config's key `objective`, or None if it is invalid. Without the key: next_token."""
    if objective is None:
        return NEXT_TOKEN
    try:
        return TypeAdapter(ObjectiveSettings).validate_python(objective)
    except (ValidationError, ConfigError):
        return None
