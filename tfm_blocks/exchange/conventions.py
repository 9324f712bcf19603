"""Read how a published model frames its texts and limits its outputs: the rules of AutoTokenizer and `generate`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Encoding, Tokenizer, models

from tfm_blocks.data.published_tokenizer import FAST, PublishedTokenizer
from tfm_blocks.data.tokenizer_format import refusing_damage
from tfm_blocks.data.vocabulary import EOS, Conventions
from tfm_blocks.errors import Problem, RunError, shown
from tfm_blocks.exchange.config import Published

LARGEST_LIMIT = 1_000_000
BOS_KEY = "bos_token"
FRAMES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "RobertaTokenizer": (("cls_token",), ("sep_token",)),
    "BartTokenizer": (("cls_token",), ("sep_token",)),
    "BertTokenizer": (("cls_token",), ("sep_token",)),
    "T5Tokenizer": ((), ("eos_token",)),
    "MarianTokenizer": ((), ("eos_token",)),
    "PegasusTokenizer": ((), ("eos_token",)),
    "BlenderbotTokenizer": ((), ("eos_token",)),
    "XLMRobertaTokenizer": (("cls_token",), ("sep_token",)),
    "CamembertTokenizer": (("cls_token",), ("sep_token",)),
    "DebertaV2Tokenizer": (("cls_token",), ("sep_token",)),
}
"""The tokens that a class of transformers adds around a text, whatever its files say."""
TOKENS = {"cls_token": "<s>", "sep_token": "</s>", "bos_token": "<s>", "eos_token": "</s>"}  # the names by default


def read_conventions(
    published: Published, opened: PublishedTokenizer, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> Conventions:
    """Return the conventions for the files of a tokenizer, config.json, and generation_config.json or else config.json.

    Raises RunError for a value of another type.
    """
    to_here, vocabulary = published.vocabulary.to_here, published.vocabulary
    with refusing_damage("tokenizer_config.json"):
        before, after = map(to_here, frame := _frame(opened, published, config))
        other = isinstance(opened.source, PublishedTokenizer) and _frame(opened.source, published, config)
        if other and other != frame:
            rule = f"has the ids {other} for the tokens around a text, but the vocabulary of the target has {frame}"
            raise RunError(Problem("vocab.json", rule, help="give these tokens the same ids in both vocabularies"))
    ends, pairs = after[-1:] == [EOS], published.family.pairs
    longest, shortest = (_output_length(generation, kind, pairs) for kind in ("max", "min"))
    first = _number(generation, "forced_bos_token_id", vocabulary.size) if pairs else None
    phrases = (phrase for phrase in _list(generation, "bad_words_ids") if isinstance(phrase, list))
    never = [*_list(generation, "suppress_tokens"), *(phrase[0] for phrase in phrases if len(phrase) == 1)]
    known = {id for id in never if type(id) is int and 0 <= id < vocabulary.size}  # longer phrases have no counterpart
    refused = {0, *range(1, vocabulary.first), *to_here(sorted(known))}
    return Conventions(
        before=tuple(before),
        after=tuple(after[:-1] if ends else after),
        of_targets=pairs,
        adds_eos=ends,
        adds_bos=False,
        refused=tuple(sorted(refused)),
        first=0 if first is None else to_here([first])[0],
        last=generation.get("forced_eos_token_id") is not None,
        shortest=shortest,
        longest=longest,
    )


def ids_of_encoder(files: Mapping[str, bytes]) -> dict[str, int]:
    """Return the keys of config.json for the tokens that begin and end a text of BERT, if tokenizer.json has them."""
    if FAST not in files:
        return {}
    pieces, named = Tokenizer.from_str(files[FAST].decode()), _named_tokens(files)
    keys = {"bos_token_id": ("cls_token", "[CLS]"), "eos_token_id": ("sep_token", "[SEP]")}
    ids = {key: pieces.token_to_id(_content(named.get(token) or usual)) for key, (token, usual) in keys.items()}
    return {key: id for key, id in ids.items() if id is not None}


def _named_tokens(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the settings of a tokenizer, which name its special tokens."""
    return {
        key: value
        for name in ("special_tokens_map.json", "tokenizer_config.json")
        for key, value in json.loads(files.get(name, b"{}")).items()
    }


def _content(token: Any) -> str:
    """Return the text of a token, which may be a mapping."""
    return str(token["content"] if isinstance(token, dict) else token)


def _frame(opened: PublishedTokenizer, published: Published, config: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return the published ids that AutoTokenizer adds before and after a text."""
    settings = dict(json.loads(opened.files.get("tokenizer_config.json", b"{}")))
    classes = settings.get("tokenizer_class"), config.get("tokenizer_class"), published.family.tokenizer
    name = str(next(filter(None, classes), "")).removesuffix("Fast")
    flags = [key for key in (BOS_KEY, "eos_token") if f"add_{key}" in settings]
    if name not in FRAMES and not flags:
        processor = Tokenizer.from_str(opened.files[FAST].decode()).post_processor if FAST in opened.files else None
        if processor is None:
            return [], []
        text: Encoding = Tokenizer(models.WordLevel({"x": 0}, unk_token="x")).encode("x")
        whole = processor.process(text)
        place = whole.sequence_ids.index(0)
        return whole.ids[:place], whole.ids[place + 1 :]
    added = [key for key in flags if settings[f"add_{key}"]]
    before, after = FRAMES.get(
        name, ([key for key in added if key == BOS_KEY], [key for key in added if key != BOS_KEY])
    )
    named = _named_tokens(opened.files)
    start = published.vocabulary.start if published.family.encoder else config.get("bos_token_id")
    begin = _token_ids(opened, named, before, start)
    return begin, _token_ids(opened, named, after, published.vocabulary.eos)


def _token_ids(opened: PublishedTokenizer, named: Mapping[str, Any], keys: Sequence[str], default: Any) -> list[int]:
    """Return the ids of the named tokens. A token that the tokenizer lacks has the id `default`, or none."""
    ids = [opened.names.get(_content(named.get(key) or TOKENS[key]), default) for key in keys]
    return [id for id in ids if type(id) is int]


def _output_length(generation: Mapping[str, Any], kind: str, pairs: bool) -> int:
    """Return a limit of new tokens, or 0. In an encoder-decoder model, `max_length` includes the start token."""
    limit = _number(generation, f"{kind}_new_tokens", LARGEST_LIMIT)
    if limit is None and pairs:
        limit = (_number(generation, f"{kind}_length", LARGEST_LIMIT) or 1) - 1
    return limit or 0


def _list(generation: Mapping[str, Any], key: str) -> list[Any]:
    value = generation.get(key)
    if value is None or isinstance(value, list):
        return value or []
    rule = f"must be a list, but is {shown(value)}"
    raise RunError(Problem(f"generation_config.json: {key}", rule, help="correct it, or remove the key"))


def _number(generation: Mapping[str, Any], key: str, bound: int) -> int | None:
    value = generation.get(key)
    if value is None or (type(value) is int and 0 <= value < bound):
        return value
    rule = f"must be a whole number from 0 to {bound - 1}, but is {shown(value)}"
    raise RunError(Problem(f"generation_config.json: {key}", rule, help="correct it, or remove the key"))
