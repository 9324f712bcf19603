"""Read how a published model frames its texts and limits its outputs: the rules of AutoTokenizer and `generate`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from tokenizers import Encoding, Tokenizer, models

from tfm_blocks.data.layout import SOURCE
from tfm_blocks.data.published_tokenizer import FAST, PublishedTokenizer
from tfm_blocks.data.tokenizer_format import refusing_damage
from tfm_blocks.data.vocabulary import EOS, Conventions
from tfm_blocks.errors import run_error, shown
from tfm_blocks.exchange.config import Published
from tfm_blocks.exchange.family import Config
from tfm_blocks.language.spec import TARGET

LARGEST_LIMIT = 1_000_000
BOS_KEY = "bos_token"
FRAMES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    **dict.fromkeys(
        (
            "RobertaTokenizer",
            "BartTokenizer",
            "BertTokenizer",
            "XLMRobertaTokenizer",
            "CamembertTokenizer",
            "DebertaV2Tokenizer",
            "DistilBertTokenizer",
            "ElectraTokenizer",
        ),
        (("cls_token",), ("sep_token",)),
    ),
    **dict.fromkeys(
        ("T5Tokenizer", "MarianTokenizer", "PegasusTokenizer", "BlenderbotTokenizer"),
        ((), ("eos_token",)),
    ),
    "GPTNeoXTokenizer": ((), ()),
    "MBartTokenizer": ((), ("eos_token", "src_lang")),
    **dict.fromkeys(("MBart50Tokenizer", "NllbTokenizer"), (("src_lang",), ("eos_token",))),
}
"""The tokens that a class of transformers adds around a text, whatever its files say."""
TOKENS = {  # the names by default
    "cls_token": "<s>", "sep_token": "</s>", "bos_token": "<s>", "eos_token": "</s>", "src_lang": "en_XX",
}  # fmt: skip


def read_conventions(
    published: Published, opened: PublishedTokenizer, config: Config, generation: Config
) -> Conventions:
    """Return the conventions for the files of a tokenizer, config.json, and generation_config.json or else config.json.

    Raises RunError for a value of another type.
    """
    to_here, vocabulary = published.vocabulary.to_here, published.vocabulary
    with refusing_damage("tokenizer_config.json"):
        before, after = map(to_here, frame := _frame(opened, published, config))
        sides = [list(chain(*_frame(opened, published, config, column))) for column in (SOURCE, TARGET)]
        alike = len(sides[0]) == len(sides[1])  # unless the vocabulary lacks a language and an unknown token
        languages = next((pair for pair in zip(*sides, strict=False) if alike and pair[0] != pair[1]), ())
        other = isinstance(opened.source, PublishedTokenizer) and _frame(opened.source, published, config)
        if other and other != frame:
            rule = f"has the ids {other} for the tokens around a text, but the vocabulary of the target has {frame}"
            raise run_error("vocab.json", rule, "give these tokens the same ids in both vocabularies")
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
        languages=tuple(to_here(languages)),
        adds_eos=ends,
        adds_bos=False,
        refused=tuple(sorted(refused)),
        first=0 if first is None else to_here([first])[0],
        last=generation.get("forced_eos_token_id") is not None,
        shortest=shortest,
        longest=longest,
    )


IGNORED = {  # keys of generation_config.json that change greedy search, each with its value without an effect
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("begin_suppress_tokens", "sequence_bias", "exponential_decay_length_penalty"), None),
}


def ignored_settings(generation: Config) -> list[str]:
    """Return the settings of greedy search, as KEY: VALUE, that our search ignores."""
    given = {key: generation.get(key) for key, usual in IGNORED.items() if generation.get(key) != usual}
    phrases = generation.get("bad_words_ids") or ()
    given["bad_words_ids"] = [phrase for phrase in phrases if isinstance(phrase, list) and len(phrase) > 1]
    return [f"{key}: {shown(value)}" for key, value in given.items() if value not in (None, [], {})]


def special_ids_of(files: Mapping[str, bytes], *, encoder: bool) -> dict[str, int]:
    """Return the keys of config.json for special tokens that tokenizer.json has.

    They begin and end a text of BERT, or end the text of a decoder, whose `eos_token` has no usual name.
    """
    if FAST not in files:
        return {}
    pieces, named = Tokenizer.from_str(files[FAST].decode()), _named_tokens(files)
    keys = {"bos_token_id": ("cls_token", "[CLS]"), "eos_token_id": ("sep_token", "[SEP]")}
    names = {key: named.get(token) or usual for key, (token, usual) in keys.items()}
    names = names if encoder else {"eos_token_id": named.get("eos_token")}
    ids = {key: pieces.token_to_id(_content(name)) for key, name in names.items() if name}
    return {key: id for key, id in ids.items() if id is not None}


def _named_tokens(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the settings of a tokenizer, which name its special tokens."""
    return {
        key: value
        for name in ("special_tokens_map.json", "tokenizer_config.json")
        for key, value in json.loads(files.get(name, b"{}")).items()
        if value is not None
    }


def _content(token: Any) -> str:
    """Return the text of a token, which may be a mapping."""
    return str(token["content"] if isinstance(token, dict) else token)


def _frame(
    opened: PublishedTokenizer, published: Published, config: Config, column: str = SOURCE
) -> tuple[list[int], list[int]]:
    """Return the published ids that AutoTokenizer adds before and after a text of a column."""
    settings = dict(json.loads(opened.files.get("tokenizer_config.json", b"{}")))
    classes = settings.get("tokenizer_class"), config.get("tokenizer_class"), published.family.tokenizer
    name = str(next(filter(None, classes), "")).removesuffix("Fast")
    keys = () if FAST in opened.files else (BOS_KEY, "eos_token")  # transformers ignores them beside a tokenizer.json
    flags = [key for key in keys if f"add_{key}" in settings]
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
    if name == "NllbTokenizer":
        named["src_lang"] = named.get("src_lang") or "eng_Latn"
        before, after = FRAMES["MBartTokenizer"] if settings.get("legacy_behaviour") else (before, after)
    if column == TARGET:
        named["src_lang"] = named.get("tgt_lang") or named.get("src_lang")
    start = published.vocabulary.start if published.family.encoder else config.get("bos_token_id")
    begin = _token_ids(opened, named, before, start)
    return begin, _token_ids(opened, named, after, published.vocabulary.eos)


def _token_ids(opened: PublishedTokenizer, named: Mapping[str, Any], keys: Sequence[str], default: Any) -> list[int]:
    """Return the ids of the named tokens. A missing language is the unknown token; others are `default`."""
    names = {key: _content(named.get(key) or TOKENS[key]) for key in keys}
    unknown = opened.published_unknown
    ids = [opened.names.get(name, unknown if key == "src_lang" else default) for key, name in names.items()]
    return [id for id in ids if type(id) is int]


def _output_length(generation: Config, kind: str, pairs: bool) -> int:
    """Return a limit of new tokens, or 0. In an encoder-decoder model, `max_length` includes the start token."""
    limit = _number(generation, f"{kind}_new_tokens", LARGEST_LIMIT)
    if limit is None and pairs:
        limit = (_number(generation, f"{kind}_length", LARGEST_LIMIT) or 1) - 1
    return limit or 0


def _list(generation: Config, key: str) -> list[Any]:
    value = generation.get(key)
    if value is None or isinstance(value, list):
        return value or []
    rule = f"must be a list, but is {shown(value)}"
    raise run_error(f"generation_config.json: {key}", rule, "correct it, or remove the key")


def _number(generation: Config, key: str, bound: int) -> int | None:
    value = generation.get(key)
    if value is None or (type(value) is int and 0 <= value < bound):
        return value
    rule = f"must be a whole number from 0 to {bound - 1}, but is {shown(value)}"
    raise run_error(f"generation_config.json: {key}", rule, "correct it, or remove the key")
