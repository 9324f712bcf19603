"""The settings of the config group `objective`: what a model predicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

from tfm_blocks.config.settings import RuleError, Settings
from tfm_blocks.data.tokenizer import MASK
from tfm_blocks.errors import ConfigError

Rate = Annotated[float, Field(gt=0, lt=1)]
Part = Annotated[float, Field(ge=0, le=1)]


class ObjectiveBase(Settings):
    """What the code asks of an objective.

    special: tokens that a learned tokenizer gets. generates: the model generates text, which is scored.
    """

    special: ClassVar[Sequence[str]] = ()
    generates: ClassVar[bool] = False


class NextTokenSettings(ObjectiveBase):
    """Predict each token of the target from the tokens before it, and from the sources."""

    generates = True

    name: Literal["next_token"]


class MaskedSettings(ObjectiveBase):
    """Hide tokens of a text, and predict them at their positions: Devlin et al. 2019, section 3.1.

    rate: fraction of the tokens of a row that are hidden in training, special tokens apart: floor(rate · n + U) of n
    tokens, for U uniform in [0, 1), and at least one. eval_rate: the same in validation and test.
    mask, random: fractions of the hidden tokens that become the mask token and a random token; the others stay.
    static: hide the same tokens in each epoch. whole_words: hide words instead of tokens.
    """

    special = (MASK,)

    name: Literal["masked"]
    rate: Rate
    eval_rate: Rate
    mask: Part
    random: Part
    static: bool
    whole_words: bool

    @field_validator("random")
    @classmethod
    def _is_part_of_the_hidden(cls, random: float, info: ValidationInfo) -> float:
        mask = info.data.get("mask", 0)
        if mask + random > 1 + 1e-9:
            rule = f"is {random:g}, but objective.mask is {mask:g}: together they are more than all hidden tokens"
            raise RuleError(rule, f"write objective.random={1 - mask:g} or less")
        return random


class LabelSettings(ObjectiveBase):
    """Predict the label of a text, several, a number, or the label of each word: `data.predict` of data=labels.

    weights: the weight of the loss of each class; balanced: n / (C · n_c) for n training labels, n_c of them of class c
    of C, so that classes have equal sums; null: 1. For several classes, they multiply the loss of each decision.
    """

    name: Literal["label"]
    weights: dict[str, Annotated[float, Field(gt=0)]] | Literal["balanced"] | None = None


ObjectiveSettings = Annotated[NextTokenSettings | MaskedSettings | LabelSettings, Field(discriminator="name")]
NEXT_TOKEN = NextTokenSettings(name="next_token")


def read_objective(objective: Any) -> ObjectiveSettings | None:
    """Return the settings of the config's key `objective`, or None if it is invalid. Without the key: next_token."""
    if objective is None:
        return NEXT_TOKEN
    try:
        return TypeAdapter(ObjectiveSettings).validate_python(objective)
    except (ValidationError, ConfigError):
        return None
