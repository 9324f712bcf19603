"""Labels of texts as ids of a corpus: a class, several classes, a number, or a class of each word."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import listed, shown

Predicted = Literal["class", "several", "number", "words"]
NONE = "-"  # the label of a text without any of several classes
HALF = 1 << 16  # a float32 is stored in two ids of 16 bits


@dataclass(frozen=True)
class LabelCoder:
    """Labels as ids: the class with the number c in `names` is c + 1, because 0 is ignored; a number is its float32."""

    predict: Predicted
    names: tuple[str, ...]

    @property
    def outputs(self) -> int:
        """Return the number of outputs of a model: one for each class, or for a number."""
        return len(self.names) or 1

    def encode(self, text: str) -> list[int]:
        """Return the ids of a label. Raises ValueError with the rule that the label breaks."""
        if self.predict == "number":
            try:
                with np.errstate(over="ignore"):
                    value = np.float32(float(text))
            except ValueError:
                value = np.float32(math.nan)
            if not np.isfinite(value):
                raise ValueError(f"must be a number within float32, but the label is {shown(text)}")
            return list(divmod(int(value.view(np.uint32)), HALF))
        names, several = [text.strip()] if self.predict == "class" else text.split(), self.predict == "several"
        if names == [NONE] and several:
            return []
        if unknown := [name for name in names if name not in self.names]:
            raise ValueError(
                f"has the label {shown(unknown[0])}, which is none of data.labels: {listed(self.names, 8)}"
            )
        ids = [self.names.index(name) + 1 for name in names]
        if not ids:
            raise ValueError(f"has no label{f'; write {NONE} for a text of no class' if several else ''}")
        return sorted(set(ids)) if several else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a label."""
        if self.predict == "number":
            return f"{self.numbers(ids)[0]:.7g}"
        return " ".join(self.names[id - 1] for id in ids) or (NONE if self.predict == "several" else "")

    def text_of(self, outputs_NC: Sequence[Sequence[float]]) -> str:
        """Return the label with the largest output; of several classes, those above 0; of a number, the number."""
        if self.predict == "number":
            return f"{outputs_NC[0][0]:.7g}"
        if self.predict == "several":
            return self.decode([place + 1 for place, output in enumerate(outputs_NC[0]) if output > 0])
        return self.decode([int(np.argmax(outputs)) + 1 for outputs in outputs_NC])

    def numbers(self, ids: Sequence[int]) -> list[float]:
        """Return the value that each output should have: 1 for each of several classes, or the number."""
        if self.predict == "number":
            high, low = ids
            return [float(np.uint32(int(high) * HALF + int(low)).view(np.float32))]
        return [float(place + 1 in ids) for place in range(len(self.names))]


def encode_words(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids of a text, whose words are separated by spaces, and the place of the first token of each word.

    Raises ValueError for a word without tokens.
    """
    before, after = tokenizer.conventions.before, tokenizer.conventions.after
    one, two = (tokens[len(before) : len(tokens) - len(after)] for tokens in tokenizer.encode_batch(["a", "a a"]))
    space = "" if [*one, *one] == two else " "  # "": the tokenizer itself reads a space before each text, or ignores it
    words = [f"{space}{word}" if place else word for place, word in enumerate(text.split())]
    ids, places = list(before), []
    for word, tokens in zip(words, tokenizer.encode_batch(words) if words else [], strict=True):
        inner = tokens[len(before) : len(tokens) - len(after)]
        if not inner:
            raise ValueError(f"has the word {shown(word.strip())}, for which the tokenizer returns no token")
        places.append(len(ids))
        ids += inner
    return [*ids, *after], places
