"""Predict the labels of texts with a run of objective=label, and load any run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfm_blocks.data.labels import LabelCoder, encode_words
from tfm_blocks.data.layout import padded_rows
from tfm_blocks.data.settings import LabelsSettings, read_data
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.language.spec import TARGET, names
from tfm_blocks.network.graph import Network
from tfm_blocks.runs.model import read_spec
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.translation.encoder import Encoder
from tfm_blocks.translation.fill import Filler, predicts_tokens, visible_sources
from tfm_blocks.translation.translator import Translator


@dataclass(frozen=True)
class Classified:
    """The label of a text, as data=labels writes it, and the outputs behind it.

    outputs: for each labelled position the probability of each class, or the number.
    """

    label: str
    outputs: Sequence[Sequence[float]]

    def to_json(self, coder: LabelCoder) -> dict[str, Any]:
        """Return the label, with the probability of each class of a text or of each word."""
        if coder.predict == "number":
            return {"value": self.outputs[0][0]}
        named = [dict(zip(coder.names, (round(p, 6) for p in values), strict=True)) for values in self.outputs]
        return {"label": self.label, "probabilities": named if coder.predict == "words" else named[0]}


class Classifier(Encoder):
    """Predicts the labels of texts. Raises RunError if the run was not trained to do so."""

    unfit = ("was not trained to predict labels", "name a run of objective=label")

    def __init__(self, network: Network, tokenizer: Tokenizer, coder: LabelCoder) -> None:
        super().__init__(network, tokenizer)
        self.coder = coder

    @classmethod
    def further_arguments(cls, run: Path) -> tuple[Any, ...]:
        data = read_data(SavedRun(run).config.get("data"))
        return (data.coder,) if isinstance(data, LabelsSettings) else cls.refuse()

    def classify(
        self, texts: Sequence[str], *, batch_tokens: int = 4096, first: int = 1, name: str = "stdin"
    ) -> list[Classified]:
        """Return the label of each text. Raises DataError, with a line of `name`, for a text that is too long.

        Lines count from `first`.
        """
        rows, places = self.encode_labelled(texts, first=first, name=name)
        return self.in_batches(rows, batch_tokens, lambda part: self.labels(rows[part], places[part]))

    def encode_labelled(
        self, texts: Sequence[str], *, first: int = 1, name: str = "stdin"
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return the ids of each text, and the positions that have a label; arguments and errors as in `encode`."""
        if self.coder.predict != "words":
            return self.encode(texts, first=first, name=name), [[0] for _ in texts]
        places: list[list[int]] = []

        def read(text: str) -> list[int]:
            ids, begins = encode_words(text, self.tokenizer)
            places.append(begins)
            return ids

        return self.encode(texts, first=first, name=name, read=read), places

    def labels(self, rows: Sequence[list[int]], places: Sequence[Sequence[int]]) -> Iterator[Classified]:
        """Yield the label of each row of a batch, at its `places`."""
        x_BSD = self.network.trunk_with_losses({self.input: padded_rows(rows).to(self.network.device)})[0]
        logits_BSC = self.network.head(x_BSD)[:, :, self.network.first_predicted :].float()
        for logits_SC, positions in zip(logits_BSC, places, strict=True):
            logits_NC = logits_SC[list(positions)]
            label = self.coder.text_of(logits_NC.tolist())
            if self.coder.predict == "number":
                yield Classified(label, logits_NC.tolist())
            else:
                p_NC = logits_NC.sigmoid() if self.coder.predict == "several" else logits_NC.softmax(1)
                yield Classified(label, p_NC.tolist())


def load_any(
    run: Path, *, device: str = "cpu", plugins: Sequence[str] = (), checkpoint: str | int | None = None
) -> Translator | Encoder:
    """Load a run as a Translator, or without a target as a Classifier, Filler or Encoder. Raises RunError."""
    if TARGET in names(read_spec(run, plugins).inputs):
        return Translator.load(run, device=device, plugins=plugins, checkpoint=checkpoint)
    data = SavedRun(run).config.get("data")
    if isinstance(read_data(data), LabelsSettings):
        return Classifier.load(run, device=device, plugins=plugins, checkpoint=checkpoint)
    encoder = Encoder.load(run, device=device, plugins=plugins, checkpoint=checkpoint)
    network, tokenizer = encoder.network, encoder.tokenizer
    fills = tokenizer.mask is not None and predicts_tokens(network, tokenizer)
    return Filler(network, tokenizer, visible_sources(SavedRun(run).config)) if fills else encoder
