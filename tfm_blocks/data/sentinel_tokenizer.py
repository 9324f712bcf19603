"""The tokenizer of a run that fills spans: sentinels in a text are read and written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tokenizers import Tokenizer as Pieces

from tfm_blocks.data.published_tokenizer import PublishedTokenizer
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.vocabulary import sentinel


class SentinelTokenizer(Tokenizer):
    """A learned tokenizer for which <extra_id_0>, <extra_id_1>, … in a text are sentinels.

    A sentinel stands for a span with the space before it, as in the training of objective=span_corruption.
    """

    @cached_property
    def _marks(self) -> dict[str, int]:
        return {sentinel(number): id for number, id in enumerate(self.sentinels)}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode_marked(text, self._marks) for text in texts]

    def _decode(self, ids: Sequence[int]) -> str:
        names = {id: name for name, id in self._marks.items()}
        places = [place for place, id in enumerate(ids) if id in names]
        text = super()._decode(ids[: places[0]] if places else ids)
        for place, end in zip(places, [*places, len(ids)][1:], strict=True):
            text += f"{' ' if text else ''}{names[ids[place]]}"
            text += self._continued.decode(list(ids[place + 1 : end]), skip_special_tokens=True)
        return text


def with_sentinels(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer that reads sentinels in a text. A published tokenizer does so by itself."""
    if isinstance(tokenizer, PublishedTokenizer):
        return tokenizer
    return SentinelTokenizer(Pieces.from_str(tokenizer.text))
