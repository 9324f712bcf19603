"""Read an existing tokenizer: of a run, of the tokenizers library, of a folder of transformers, or of SentencePiece.

A tokenizer of others is tried in a separate process, because it can crash its library or never return.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfm_blocks.data.cache import expand_home
from tfm_blocks.data.published_libraries import published_tokenizer, stored_tokenizer
from tfm_blocks.data.published_tokenizer import (
    COMPANIONS,
    FAST,
    KEY,
    PAIR,
    SETTINGS,
    SINGLE,
    TARGET_IDS,
    PublishedTokenizer,
    stored_text,
    without_code,
)
from tfm_blocks.data.tokenizer import MASK, Tokenizer
from tfm_blocks.data.tokenizer_format import LARGEST_OF_RUN, expect_small, is_learned, refusing_damage
from tfm_blocks.data.vocabulary import Vocabulary
from tfm_blocks.errors import LONGEST_LINE, Problem, RunError, config_error, cut, shown

if TYPE_CHECKING:  # the module imports a library that a translator does not need
    from tfm_blocks.data.pair_settings import TokenizerPaths

ADDRESS = "data.tokenizer"
FILE_SETS = ((FAST,), (*PAIR, TARGET_IDS), PAIR, *((name,) for name in SINGLE))
BEGINS = ("<s>", "<bos>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>", "[CLS]")  # usual names, in order
ENDS = ("</s>", "<eos>", "[EOS]", "<|end_of_text|>", "<|endoftext|>", "[SEP]")
LARGEST = 2**31  # above all ids
HELP = "name a run folder, a tokenizer.json, a folder saved by transformers, or a .model of SentencePiece"
PUBLISHED_BEGIN = f'{{"{KEY}": '.encode()  # of a file with the tokenizer of a published model
SEPARATE_BEGIN = b'{"source": '  # of a file with the tokenizers of separate vocabularies

SECONDS = 5  # of CPU time for all texts; usual tokenizers take milliseconds
LOADING = 60  # seconds of CPU time
WAIT = 600  # seconds, on a busy machine
MEMORY = 16 << 30  # bytes of addresses
RUN = 48  # characters; a pattern whose time doubles with each one exceeds SECONDS
LETTERS = 8  # of the patterns, which are tried in pairs
TEXTS = (
    *("", " ", "\n", "\r\n\t ", "\0", "\ufffd\U0010ffff"),
    "The quick brown fox jumps over 13 lazy dogs, doesn't it? (x+y)*z = 0.5; foo_bar@example.org/a/b",
    "naïve Ärger ﬁ Ⅷ Ελληνικά русский עברית العربية हिन्दी ไทย 中文 日本語 한국어 🙂👩‍👩‍👧 e\u0301\u200b\u202e",
)
PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from tfm_blocks.data import tokenizer_files as t; t.try_tokenizer()"
)


def load_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer of a run. Raises RunError if it is missing, damaged or another kind of tokenizer."""
    if not path.is_file():
        raise RunError(Problem(str(path), "the tokenizer is missing"))
    expect_small(path, LARGEST_OF_RUN)
    with refusing_damage(str(path)):
        return _of_text(path.read_text("utf-8"), str(path))


def _of_text(text: str, where: str) -> Tokenizer:
    if text.startswith(SEPARATE_BEGIN.decode()):
        texts = json.loads(text)
        source, target = (_of_text(texts[side], where) for side in ("source", "target"))
        return target.with_source(source)
    is_published = text.startswith(PUBLISHED_BEGIN.decode())
    return stored_tokenizer(text, where) if is_published else Tokenizer.of_text(text, where)


def read_tokenizer(written: str | TokenizerPaths) -> Tokenizer:
    """Read the tokenizer at a path, or the tokenizers of sources and targets at two paths.

    Raises ConfigError if there is none, and RunError if it is damaged.
    """
    if isinstance(written, str):
        return _read(written, ADDRESS)
    source, target = _read(written.source, f"{ADDRESS}.source").of("src"), _read(written.target, f"{ADDRESS}.target")
    if source.conventions.around_texts != target.conventions.around_texts:
        rule = f"{written.source} and {written.target} add different special tokens around a text"
        raise config_error(ADDRESS, rule, "name two tokenizers of runs, or two files of the same kind")
    return target.with_source(source)


def expect_special(tokenizer: Tokenizer, path: str, special: Sequence[str], tags: Mapping[str, bool]) -> None:
    """Raise ConfigError if a tokenizer that was not learned for the run lacks its mask, sentinels or tags."""
    learn = "write data.tokenizer=null to learn one"
    if MASK in special and tokenizer.mask is None:
        rule = f"has no mask token, which the objective reads at hidden positions: {path}"
        raise config_error(ADDRESS, rule, f"name a tokenizer with <mask> or [MASK], or {learn}")
    for tag, is_of_text in tags.items():
        side = tokenizer.of("src") if is_of_text else tokenizer
        if (id := side.ids.get(tag)) not in (own := side.special_ids):
            rule = f"has no token {tag}, which is a tag of data.mix"
        elif is_of_text and own.isdisjoint(side.encode(tag)):
            rule = f"has {tag} as a target_tag, which no text contains, but it is a tag of data.mix"
        elif not is_of_text and id is not None and side.decode([id]):
            rule = f"has {tag} as a tag of texts, which outputs show, but it is a target_tag of data.mix"
        else:
            continue
        raise config_error(ADDRESS, f"{rule}: {path}", f"leave the tag out, or {learn}")
    needed, known = sum(name != MASK for name in special), len(tokenizer.sentinels)
    if known < needed:
        rule = f"has {known} of the {needed} sentinels <extra_id_0>, <extra_id_1>, … of the objective: {path}"
        help = f"write objective.sentinels={known}" if known else f"name a tokenizer of T5, or {learn}"
        raise config_error(ADDRESS, rule, help)


def _read(written: str, address: str) -> Tokenizer:
    path = expand_home(address, written)
    if not path.exists():
        raise config_error(address, f"there is no file or folder {path}", HELP)
    file = path / FAST if path.is_dir() else path
    if file.suffix == ".json" and file.is_file():
        with file.open("rb") as opened_file:
            begin = opened_file.read(len(PUBLISHED_BEGIN + SEPARATE_BEGIN))
        if begin.startswith((PUBLISHED_BEGIN, SEPARATE_BEGIN)):
            return load_tokenizer(file)
        expect_small(file)
        with refusing_damage(str(file)):
            is_of_run = is_learned(json.loads(file.read_bytes()))
        if is_of_run:
            return load_tokenizer(file)
    if path.is_dir():
        if not (files := read_folder(path)[0]):
            rule = f"the folder {path} has no {FAST} and no SentencePiece model"
            raise config_error(address, rule, HELP)
    else:
        name = FAST if path.suffix == ".json" else path.name if path.name in SINGLE else SINGLE[-1]
        files = {name: _read_small(path)}
    expect_usable(files, str(path))
    opened = published_tokenizer(Vocabulary(LARGEST, 0, 0), files, str(path))
    source = _vocabulary(opened.source, path) if isinstance(opened.source, PublishedTokenizer) else None
    return published_tokenizer(replace(_vocabulary(opened, path), source=source), files, str(path))


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


def _read_small(path: Path) -> bytes:
    expect_small(path)
    return path.read_bytes()


def _vocabulary(opened: PublishedTokenizer, path: Path) -> Vocabulary:
    """Return the vocabulary with BOS and EOS of the tokenizer's config, or else with usual names.

    BOS and EOS get a new id each, after the other ids, unless the tokenizer has separate tokens for them.
    """
    if not opened.names:
        raise RunError(Problem(str(path), "has no subwords", help=HELP))
    size = max(opened.names.values()) + 1
    ends = [*_from_config(opened, "eos_token"), *ENDS]
    begins = [*_from_config(opened, "bos_token"), *BEGINS]
    if (PAIR[0] in opened.files) != (PAIR[1] in opened.files):
        begins.append("<pad>")  # outputs of Marian begin with it, and MarianTokenizer cannot add a token to the target
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


def expect_usable(files: Mapping[str, bytes], where: str) -> None:
    """Raise RunError if the tokenizer of these files fails, crashes or does not return for some texts."""
    try:
        rule = _fault(stored_text(Vocabulary(1 << 31, 0, 0), files))
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8: {error}"
    if rule:
        raise RunError(
            Problem(where, rule, help="the file is damaged, or of another kind: restore it, or name another")
        )


@cache
def _fault(text: str) -> str:
    """Return the fault of a tokenizer, or an empty text. The process imports nothing from the current folder."""
    root = str(Path(__file__).parent.parent.parent)
    command = [sys.executable, "-P", "-c", PROGRAM, root]
    try:
        done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=WAIT, check=False)
    except subprocess.TimeoutExpired:
        return f"cannot be used: the library does not return within {WAIT} s"
    if done.returncode == -signal.SIGXCPU:
        return (
            f"cannot be used: short texts take more than {SECONDS} s of CPU time; a pattern may backtrack without end"
        )
    if done.returncode < 0:
        return f"cannot be used: the library crashes ({signal.Signals(-done.returncode).name})"
    if done.returncode:
        reason = (done.stdout or done.stderr).decode("utf-8", "replace").strip().splitlines() or ["it fails"]
        return cut(reason[-1], LONGEST_LINE)
    return ""


def try_tokenizer() -> None:
    """Encode and decode texts with the tokenizer of stdin, under limits, and print its fault."""
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, LOADING)):
        _limit(limit, value)
    text = sys.stdin.buffer.read().decode()
    try:
        tokenizer = stored_tokenizer(text, "")
    except RunError as error:
        sys.exit(_print(error.problems[0].rule))
    _limit(resource.RLIMIT_CPU, int(time.process_time()) + SECONDS)
    for text in _texts(tokenizer.files):
        try:
            for side in (tokenizer, tokenizer.source):
                if isinstance(side, PublishedTokenizer):
                    side.text_of(side.published_ids([text])[0])
        except BaseException as error:  # also a panic of the library
            sys.exit(_print(f"cannot encode and decode {shown(text)}: {str(error).partition(chr(10))[0]}"))


def _limit(limit: int, value: int) -> None:
    most = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def _print(rule: str) -> int:
    print(rule.encode("utf-8", "backslashreplace").decode())
    return 1


def _texts(files: Mapping[str, bytes]) -> Iterator[str]:
    """Yield TEXTS, and runs of characters before which a pattern can backtrack."""
    yield from TEXTS
    patterns = "".join(_patterns(json.loads(files[FAST]))) if FAST in files else ""
    letters = [*dict.fromkeys(filter(str.isalnum, patterns))][:LETTERS]
    runs = [*map(chr, range(32, 127)), *dict.fromkeys(patterns), *map("".join, product(letters, letters))]
    for run, end in product(runs, ("!", "\x01", "z", "!" + "".join(letters))):
        yield run * RUN + end


def _patterns(value: Any) -> Iterator[str]:
    """Yield the regular expressions in the JSON of a tokenizer."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _patterns(inner)
    if isinstance(value, dict) and isinstance(pattern := value.get("Regex"), str):
        yield pattern
