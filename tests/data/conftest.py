"""Small real data: shipped dates, and text files in a temporary folder."""

import gzip
from pathlib import Path

import pytest
import yaml

from tfm_blocks.config.settings import Settings, read_settings
from tfm_blocks.data.prepare import prepare
from tfm_blocks.data.settings import DataSettings

SENTENCES = {
    "src": ["a man in a blue shirt .", "two dogs run .", "a girl sings a song ."],
    "tgt": ["ein mann in einem blauen hemd .", "zwei hunde laufen .", "ein mädchen singt ein lied ."],
}


class Root(Settings):
    """Root of a run's config, of which only `data` is read."""

    data: DataSettings


def read_data(mapping):
    return read_settings(Root, {"data": mapping}).data


def prepared(settings, vocab=300):
    lines = []
    return prepare(settings, vocab, lines.append), lines


def pairs(corpus):
    return [(corpus.text["src"][row], corpus.text["tgt"][row]) for row in range(len(corpus))]


@pytest.fixture(scope="session")
def conf():
    return Path(__file__).parents[2] / "conf" / "data"


@pytest.fixture(scope="session")
def sentences():
    return SENTENCES


@pytest.fixture
def dates(conf):
    """Return a function that makes settings of a smaller dates config, with changes."""
    mapping = yaml.safe_load((conf / "dates.yaml").read_text())
    return lambda **changes: read_data(mapping | {"train": 2000, "val": 50, "test": 50} | changes)


@pytest.fixture
def text(tmp_path):
    """Return a function that writes `{"train.src": lines or bytes, …}` over three good splits and returns settings that read them."""

    def write(files=None, **changes):
        contents = {f"{split}.{side}": SENTENCES[side] for split in ("train", "val", "test") for side in SENTENCES}
        for name, content in (contents | (files or {})).items():
            raw = content if isinstance(content, bytes) else "".join(f"{line}\n" for line in content).encode()
            (tmp_path / name).write_bytes(
                gzip.compress(raw) if name.endswith(".gz") and raw[:2] != b"\x1f\x8b" else raw
            )
        splits = {split: {"src": f"{split}.src", "tgt": f"{split}.tgt"} for split in ("train", "val", "test")}
        sizes = {"step_tokens": 200, "batch_tokens": 200, "max_length": 60, "cache": str(tmp_path / "cache")}
        return read_data({"kind": "text", "dir": str(tmp_path)} | splits | sizes | changes)

    return write
