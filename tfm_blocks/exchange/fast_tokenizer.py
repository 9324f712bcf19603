"""Write a SentencePiece model as a tokenizer.json, which AutoTokenizer loads for models of any type."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from tfm_blocks.data.published_libraries import SentencePieceTokenizer
from tfm_blocks.data.published_tokenizer import SINGLE

UNIGRAM, BPE, CHAR = 1, 2, 4  # numbers of the types of models
USER_DEFINED, BYTE = 4, 6  # numbers of the types of subwords
SPACE = "▁"
SAMPLES, LONGEST, SEED = 200, 12, 1
LONGEST_PIECE = 500  # characters; the merges of a subword take its square
TEXTS = ("", " ", "  a\tb \n c  ", "naïve Ärger ﬁ Ⅷ русский 中文 日本語 🙂 e\u0301\u200b", "x" * 40, "(x+y)*z = 0.5")
DECODER = decoders.Sequence(
    [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Replace(Regex(r"\A\s+|\s+\z"), ""),
    ]
)


def to_fast(tokenizer: SentencePieceTokenizer) -> Tokenizer | None:
    """Return a tokenizer with the ids of a single SentencePiece model, or None if there is no equal one.

    The two are compared on TEXTS and on texts of random subwords.
    """
    content = next((tokenizer.files[name] for name in SINGLE if name in tokenizer.files), None)
    if content is None:
        return None
    try:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
    except ImportError:  # the module needs protobuf
        return None
    proto = ModelProto.FromString(content)
    if any(piece.type == USER_DEFINED or len(piece.piece) > LONGEST_PIECE for piece in proto.pieces):
        return None  # SentencePiece matches user-defined symbols within words, after the normalisation
    names = {id: name for name, id in tokenizer.matched.items()}
    names |= {id: names.get(id, f"<id {id}>") for id in range(len(proto.pieces), max(names, default=0))}
    try:
        pieces = Tokenizer(_model(proto))
        steps: list[normalizers.Normalizer] = []
        if proto.normalizer_spec.precompiled_charsmap:
            steps.append(normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
        if proto.normalizer_spec.remove_extra_whitespaces:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        if proto.normalizer_spec.add_dummy_prefix:
            steps.append(normalizers.Prepend(SPACE))
        pieces.normalizer, pieces.decoder = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)]), DECODER
        pieces.add_special_tokens([AddedToken(names[id], normalized=False, special=True) for id in sorted(names)])
        texts = [*TEXTS, *_random_texts([piece.piece for piece in proto.pieces if piece.type != BYTE])]
        ids = [encoding.ids for encoding in pieces.encode_batch(texts, add_special_tokens=False)]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # also a panic of the library
        return None
    return pieces if ids == tokenizer.published_ids(texts) else None


def _model(proto: Any) -> models.Model:
    trainer, fallback = proto.trainer_spec, bool(proto.trainer_spec.byte_fallback)
    if trainer.model_type == UNIGRAM:
        scores = [(piece.piece, piece.score) for piece in proto.pieces]
        return models.Unigram(scores, unk_id=trainer.unk_id, byte_fallback=fallback)
    vocab = {piece.piece: id for id, piece in enumerate(proto.pieces)}
    if trainer.model_type not in (BPE, CHAR):
        raise ValueError("tokenizers does not have this model")
    merges = list(_merges(vocab)) if trainer.model_type == BPE else []
    return models.BPE(vocab, merges, unk_token=trainer.unk_piece, fuse_unk=True, byte_fallback=fallback)


def _merges(vocab: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of subwords that are a subword, in its order: the first subwords have the highest scores."""
    for piece in vocab:
        pairs = [(piece[:place], piece[place:]) for place in range(1, len(piece))]
        known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        yield from sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))


def _random_texts(names: Sequence[str]) -> Iterator[str]:
    draws = random.Random(SEED)
    for _ in range(SAMPLES):
        yield "".join(draws.choices(names, k=draws.randint(1, LONGEST))).replace(SPACE, " ")
