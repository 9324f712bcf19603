"""What a file of a tokenizer may contain, so that the Rust library can read it without a panic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tfm_blocks.data.vocabulary import MASK, SENTINEL, SPECIAL, TAG
from tfm_blocks.errors import Problem, RunError

LARGEST_FILE = 64 << 20  # bytes; the largest tokenizer.json of the imported families has about 35 MB
LARGEST_OF_RUN = 4 * LARGEST_FILE  # a run stores all files of a tokenizer in one

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
KNOWN_PARTS = {
    "BPE": ([None, "ByteLevel", None, "ByteLevel"], ["Prepend", "ByteLevel", None, ["ByteLevel", "Strip"]]),
    "WordLevel": ([None, "WhitespaceSplit", None, None],),
}
PREPEND_SPACE = {"type": "Prepend", "prepend": " "}
UNSET = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback")


def is_learned(record: object) -> bool:
    """Return True if the JSON of a tokenizer has the settings and the first ids of `Tokenizer.train` or `of_words`."""
    if not isinstance(record, dict) or not has_known_settings(record):
        return False
    if any(not _is_own_token(token) for token in record.get("added_tokens", ())):
        return False  # these tokens are matched in a text
    if record["pre_tokenizer"].get("add_prefix_space") or record["normalizer"] not in (None, PREPEND_SPACE):
        return False  # decode(encode(text)) could begin with a different character from `text`
    vocabulary = record["model"].get("vocab")
    return isinstance(vocabulary, dict) and [vocabulary.get(name) for name in SPECIAL] == [0, 1, 2, 3]


def _is_own_token(token: Mapping[str, object]) -> bool:
    """Return True for the added tokens of `Tokenizer.train`: special ones, and tags."""
    name = str(token["content"])
    if name in (*SPECIAL, MASK) or SENTINEL.fullmatch(name):
        return bool(token["special"])
    is_marked = token["special"] == token["single_word"] and not token["normalized"] and not token["lstrip"]
    return is_marked and bool(TAG.fullmatch(name))


def expect_small(path: Path, most: int = LARGEST_FILE) -> None:
    """Raise RunError if a file has more than `most` bytes or does not exist."""
    if not path.is_file():
        raise RunError(Problem(str(path), "the file is missing"))
    if path.stat().st_size > most:
        raise RunError(Problem(str(path), f"has {path.stat().st_size:,} bytes, but at most {most:,} are read"))


@contextmanager
def refusing_damage(where: str, rule: str = "cannot be read as a tokenizer") -> Iterator[None]:
    """Raise RunError for any error inside, a panic of the Rust library included."""
    try:
        yield
    except RunError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).splitlines() or [""])[0]
        help = "the file is damaged, or of another kind: restore it, or name another"
        raise RunError(Problem(where, f"{rule}: {reason}", help=help)) from None


def has_known_settings(record: object) -> bool:
    """Return True for the settings that `save` writes; others can make the Rust library panic or hang."""
    if not isinstance(record, dict) or not isinstance(model := record.get("model"), dict):
        return False
    kinds = [_kind(record.get(name)) for name in PARTS]
    kinds = [None if kind == "TemplateProcessing" else kind for kind in kinds]  # of an export, which is not used
    unknown = SPECIAL[3] if model.get("type") == "WordLevel" else None
    unset = all(model.get(name) in (None, False) for name in UNSET)
    return kinds in KNOWN_PARTS.get(str(model.get("type")), ()) and unset and model.get("unk_token") == unknown


def _kind(part: object) -> object:
    """Return the type of a part of a tokenizer; for a sequence, the types of its decoders."""
    if not isinstance(part, dict):
        return part
    members = part.get("decoders")
    return [_kind(member) for member in members] if isinstance(members, list) else part.get("type")
