"""Read an existing tokenizer: of a run, of the tokenizers library, of a folder of transformers, or of SentencePiece."""

from __future__ import annotations

import json
from pathlib import Path

from tfm_blocks.data.cache import expand_home
from tfm_blocks.data.published_tokenizer import (
    COMPANIONS,
    FAST,
    PAIR,
    SETTINGS,
    SINGLE,
    PublishedTokenizer,
    is_published,
    published_tokenizer,
    without_code,
)
from tfm_blocks.data.tokenizer import Tokenizer, expect_small, is_learned, refusing_damage
from tfm_blocks.data.tokenizer_trial import expect_usable
from tfm_blocks.data.vocabulary import Vocabulary
from tfm_blocks.errors import ConfigError, Problem, RunError

ADDRESS = "data.tokenizer"
FILE_SETS = ((FAST,), PAIR, *((name,) for name in SINGLE))
BEGINS = ("<s>", "<bos>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>", "[CLS]")  # usual names, in order
ENDS = ("</s>", "<eos>", "[EOS]", "<|end_of_text|>", "<|endoftext|>", "[SEP]")
LARGEST = 2**31  # above all ids
HELP = "name a run folder, a tokenizer.json, a folder saved by transformers, or a .model of SentencePiece"


def read_tokenizer(written: str) -> Tokenizer:
    """Read the tokenizer at a path. Raises ConfigError if there is none, and RunError if it is damaged."""
    path = expand_home(ADDRESS, written)
    if not path.exists():
        raise ConfigError(Problem(ADDRESS, f"there is no file or folder {path}", help=HELP))
    file = path / FAST if path.is_dir() else path
    if file.suffix == ".json" and file.is_file() and _is_of_run(file):
        return Tokenizer.load(file)
    files = _read_files(path)
    expect_usable(files, str(path))
    opened = published_tokenizer(Vocabulary(LARGEST, 0, 0), files, str(path))
    return published_tokenizer(_vocabulary(opened, path), files, str(path))


def read_folder(folder: Path) -> tuple[dict[str, bytes], list[str]]:
    """Return the first of FILE_SETS that a folder has, with its COMPANIONS; nothing if it has none of them.

    Also returns the removed keys that name code, each with its file. Raises RunError for a large or damaged file.
    """
    files, removed = {}, []
    names = next((names for names in FILE_SETS if all((folder / name).is_file() for name in names)), ())
    for name in [*names, *(name for name in COMPANIONS if names and (folder / name).is_file())]:
        files[name] = _read_small(folder / name)
        if name in SETTINGS:
            with refusing_damage(str(folder / name)):
                files[name], keys = without_code(files[name])
                removed += [f"{name}: {key}" for key in keys]
                if not isinstance(json.loads(files[name]), dict):
                    raise ValueError("it must be a mapping")
    return files, removed


def _is_of_run(file: Path) -> bool:
    expect_small(file)
    if is_published(file):
        return True
    with refusing_damage(str(file)):
        return is_learned(json.loads(file.read_bytes()))


def _read_files(path: Path) -> dict[str, bytes]:
    if path.is_dir():
        if files := read_folder(path)[0]:
            return files
        raise ConfigError(Problem(ADDRESS, f"the folder {path} has no {FAST} and no SentencePiece model", help=HELP))
    name = FAST if path.suffix == ".json" else path.name if path.name in SINGLE else SINGLE[-1]
    return {name: _read_small(path)}


def _read_small(path: Path) -> bytes:
    expect_small(path)
    return path.read_bytes()


def _vocabulary(opened: PublishedTokenizer, path: Path) -> Vocabulary:
    """Return the vocabulary with the begin and the end of the tokenizer's config, or else with usual names.

    The begin and the end get a new id each, after the other ids, unless the tokenizer has separate tokens for them.
    """
    if not opened.names:
        raise RunError(Problem(str(path), "has no subwords", help=HELP))
    size = max(opened.names.values()) + 1
    ends = [*_from_config(opened, "eos_token"), *ENDS]
    begins = [*_from_config(opened, "bos_token"), *BEGINS]
    eos = next((opened.special[name] for name in ends if name in opened.special), size)
    start = next((opened.special[name] for name in begins if name in opened.special), eos)
    if start == eos:
        start = max(size, eos + 1)
    return Vocabulary(max(size, start + 1, eos + 1), start, eos)


def _from_config(opened: PublishedTokenizer, key: str) -> list[str]:
    """Return the token of a key in tokenizer_config.json, which is a text or has it as `content`."""
    token = opened.config.get(key)
    token = token.get("content") if isinstance(token, dict) else token
    return [token] if isinstance(token, str) else []
