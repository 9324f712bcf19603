"""The subwords that begin a word or end a sentence, for objectives that hide words or permute sentences."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from tokenizers import models

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import config_error

BREAKS = ("⏎", "Ċ")  # a line break in subwords
SENTENCE_ENDS = (".", "!", "?", "…", "。", "！", "？", *BREAKS)  # of subwords


def words(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Return words_V2: whether an id begins a word, and whether the next id begins another.

    A word begins after a space or a line break. WordPiece instead has a prefix inside a word, ##, some BPE has a suffix
    at its end, </w>, and each id of a word-level model is a word. Raises ConfigError for other subwords.
    """
    pieces, model = _pieces(tokenizer), tokenizer.subword_model
    if isinstance(model, models.WordLevel):
        return np.ones((len(pieces), 2), np.bool_)
    if suffix := _suffix(tokenizer):
        return np.array([(False, piece.endswith(suffix)) for piece in pieces])
    if prefix := getattr(model, "continuing_subword_prefix", None):
        return np.array([(not piece.startswith(prefix), False) for piece in pieces])
    words_V2 = np.array([(piece.startswith(("▁", "Ġ", *BREAKS)), piece.endswith(BREAKS)) for piece in pieces])
    if not words_V2.any():
        rule = "needs subwords that mark the beginnings of words, but the subwords of data.tokenizer do not"
        raise config_error("objective.whole_words", rule, "write objective.whole_words=false")
    return words_V2


def sentence_ends(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Return True for the ids that end a sentence: eos, and subwords that end in a full stop or the like."""
    pieces = [piece.removesuffix(_suffix(tokenizer)) for piece in _pieces(tokenizer)]
    return np.array([id == tokenizer.EOS or piece.endswith(SENTENCE_ENDS) for id, piece in enumerate(pieces)])


def _pieces(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.shown_piece(id) for id in range(tokenizer.size)]


def _suffix(tokenizer: Tokenizer) -> str:
    return getattr(tokenizer.subword_model, "end_of_word_suffix", None) or ""
