"""Fixtures: a run that takes seconds, and a briefly trained translator."""

import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Pieces
from tokenizers import models
from tokenizers.pre_tokenizers import WhitespaceSplit

import tfm_blocks as tfm
from tfm_blocks.cli import main
from tfm_blocks.compose.composition import Composer
from tfm_blocks.compose.folders import config_folders
from tfm_blocks.compose.model import compose_model
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.compose.run import compose_job
from tfm_blocks.data.published_libraries import published_tokenizer
from tfm_blocks.data.published_tokenizer import PublishedTokenizer
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.vocabulary import BOS, EOS, Conventions, Vocabulary
from tfm_blocks.errors import ConfigError
from tfm_blocks.launch.check import available_cores
from tfm_blocks.launch.process_settings import collect_garbage_rarely
from tfm_blocks.network.matching import weights_of
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.runs.folder import TOKENIZER
from tfm_blocks.runs.model import write_model, write_weights
from tfm_blocks.translation.translator import Translator

COMPOSER = Composer(config_folders(None))  # shared by all tests of a process
GROUPS = (
    "{embeddings: {where: {role: [embedding, head]}, rate: 2, name: sgd}, deep: {where: {node: decoder}, rate: 'i+1'}}"
)
LEARNING = {  # overrides of runs that use each optimizer besides Adam's fused kernels
    **{name: [f"optimizer={name}"] for name in ("sgd", "adafactor", "lion", "muon")},
    "groups": ["optimizer=muon", "optimizer.cautious=true", f"optimizer.groups={GROUPS}", "schedule.weight_decay=0"],
    "followers": ["optimizer=adamw", "schedule.momentum=0.8", "schedule.weight_decay=0"],
}
ENCODER = ["model=encoder_only", "vocab=300"]
LABELLED = [
    *(f"data.{split}={{src: labels.tsv, tgt: labels.tsv}}" for split in ("train", "val", "test")),
    f"data.dir={Path(__file__).parent / 'data'}", "data.fields={src: text, tgt: label}", "data.labels=[even,odd]",
]  # fmt: skip
JOINED = "++model.graph.out={block: predict_ahead, in: decoder, ahead: [ahead], before: logits}"
OBJECTIVES = {  # overrides of runs with each objective besides next_token
    "masked": [*ENCODER, "objective=masked"],
    "replaced_token": [
        "model=electra_discriminator",
        "d_embedding=12",
        "objective=replaced_token",
        "vocab=300",
        "objective.generator={model: electra, d_model: 8, d_ff: 16, heads: 1, layers: 1, d_embedding: 12, dropout: 0}",
    ],
    "masked_diffusion": [*ENCODER, "objective=masked_diffusion"],
    "span_corruption": ["objective=span_corruption", "objective.sentinels=10", "vocab=300"],
    "denoising": ["objective=denoising", "vocab=300"],
    "prefix_lm": ["objective=prefix_lm", "vocab=300"],
    "ul2": ["objective=ul2", "objective.sentinels=10", "vocab=300"],
    "distil": ["objective=distil", "objective.teacher=TEACHER", "objective.hidden={encoder.0.ffn: encoder.1.ffn}"],
    "several_tokens": [
        "objective=several_tokens",
        "++model.graph.ahead={block: ffn, in: decoder, before: logits}",
        JOINED,
    ],
    "label": ["model=classifier", "objective=label", "data=labels", *LABELLED, "vocab=300"],
}
PUBLISHED = ["<pad>", "<unk>", "<s>", "</s>", "a", "the", "red", "blue", "house", "boat"]
WORDS = ["ein", "kleines", "Haus", "steht", "am", "Fluss", "und", "zwei", "Kinder", "spielen", "davor"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Return one worker more than cores, because some tests only wait for a process or a time limit."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else available_cores() + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle the files if the tests may not all run, so that other ones are skipped each time."""
    if until := os.environ.get("PYTEST_UNTIL"):
        items.sort(key=lambda item: Random(f"{until} {item.path.name}").random())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip the tests that begin after PYTEST_UNTIL, in seconds since 1970."""
    if time.time() > float(os.environ.get("PYTEST_UNTIL", "inf")):
        pytest.skip("the time for tests is over")


def pytest_configure(config: pytest.Config) -> None:
    """Divide the cores among the workers and their subprocesses, and hide CUDA devices except for `pytest -m gpu`."""
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, available_cores() // workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    collect_garbage_rarely()
    os.environ.pop("COLUMNS", None)  # readline sets it to 80 in a worker, and tables would fit that
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def seeded():
    """Seed torch, so that a test draws the same numbers whichever tests its worker ran before."""
    torch.manual_seed(1)


@pytest.fixture(autouse=True)
def own_service():
    """Remove the W&B service of this process from the environment, so that later subprocesses start their own."""
    yield
    os.environ.pop("WANDB_SERVICE", None)


@pytest.fixture
def registry(monkeypatch):
    """Return the registry, whose blocks are restored after the test."""
    monkeypatch.setattr(REGISTRY, "blocks", dict(REGISTRY.blocks))
    return REGISTRY


@pytest.fixture
def plugged(registry):
    """Register the blocks of tests/plugged.py for one test."""
    from tests.plugged import PLUGGED

    registry.blocks.update(PLUGGED)


@pytest.fixture
def wrong_blocks(registry, monkeypatch):
    """Register the blocks of tests/wrong_blocks.py for one test; return them by name."""
    before = dict(registry.blocks)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    sys.modules.pop("wrong_blocks", None)
    load_plugins(["wrong_blocks"])
    return {name: info for name, info in REGISTRY.blocks.items() if name not in before}


@contextmanager
def expect_problem(
    address: str, rule: str, help: str = "", *, among: bool = False
) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """Expect a ConfigError of one problem with this address, whose rule and fix contain these texts.

    With `among`, other problems are allowed, and the address may be that of a key above.
    """
    with pytest.raises(ConfigError) as caught:
        yield caught
    problems = caught.value.problems
    assert any(
        (one.address == address or (among and one.address.startswith(address)))
        and rule in one.rule
        and one.help
        and help in one.help
        for one in problems
    ), problems
    assert among or len(problems) == 1


def refused(*words: object, status: int = 2) -> str:
    """Run `tfm`, which ends with this status, and return its error."""
    with pytest.raises(SystemExit) as ending, redirect_stderr(io.StringIO()) as error:
        main([*map(str, words)])
    assert ending.value.code == status
    return error.getvalue()


def sentences(count, seed):
    random = Random(seed)
    return [" ".join(random.choices(WORDS, k=random.randint(1, 9))) for _ in range(count)]


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


@pytest.fixture(scope="session")
def translator():
    """Train briefly to reverse the words, so that outputs are neither empty nor certain."""
    torch.manual_seed(1)
    known = sentences(400, 0)
    tokenizer = Tokenizer.train(known, 300)
    network = tfm.build("tiny", layers=2, d_model=32, d_ff=64, vocab=tokenizer.size, seed=3)
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for step in range(120):
        batch = known[step % 10 * 40 :][:40]
        src_BS = padded([[*tokenizer.encode(text), EOS] for text in batch])
        ids = [tokenizer.encode(" ".join(text.split()[::-1])) for text in batch]
        logits_BTV = network(src=src_BS, tgt=padded([[BOS, *one] for one in ids]))
        loss = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), padded([[*one, EOS] for one in ids]).flatten(), ignore_index=0
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Translator(network.eval(), tokenizer)


def save(translator, folder):
    """Write a run folder of the translator."""
    knobs = {"layers": 2, "d_model": 32, "d_ff": 64, "vocab": translator.tokenizer.size}
    folder.mkdir()
    write_model(folder, compose_model("tiny", [f"{name}={value}" for name, value in knobs.items()]).model, [])
    write_weights(folder, weights_of(translator.network))
    translator.tokenizer.save(folder / TOKENIZER)


def taught(small: Callable[..., Composed], folder: Path, overrides: list[str]) -> list[str]:
    """Return the overrides with a briefly trained run in place of TEACHER."""
    if not any(text.endswith("TEACHER") for text in overrides):
        return overrides
    from tfm_blocks.launch.check import check_run
    from tfm_blocks.launch.job import train

    short = ["trainer.steps=2", "trainer.validate_every=2", "trainer.validate_sentences=0", "data.max_length=50"]
    teacher = train(check_run(small(*short, "layers=2", "d_ff=32")), folder / "teacher")
    return ["data.max_length=50", *(text.replace("TEACHER", str(teacher)) for text in overrides)]


SMALL = [
    "d_model=16", "d_ff=24", "heads=2", "layers=1", "vocab=300", "dropout=0",
    "data.train=200", "data.val=20", "data.test=10", "data.step_tokens=240", "data.max_length=60",
    "trainer.steps=6", "trainer.validate_every=4", "trainer.log_every=2", "trainer.validate_sentences=4",
    "trainer.clip=null", "trainer.accelerator=cpu", "trainer.precision=fp32", "logger=csv", "schedule=inverse_sqrt", "schedule.warmup=2",
]  # fmt: skip


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Composed]:
    """Return a function that composes a run of seconds with overrides; each test has its own cache."""
    return composed_small(tmp_path, monkeypatch)


def composed_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Composed]:
    """Return the value of `small`; for processes that cannot use the fixture."""
    monkeypatch.setenv("TFM_BLOCKS_CACHE", str(tmp_path / "cache"))

    def composed(*overrides: str) -> Composed:
        by_key = {text.partition("=")[0]: text for text in (*SMALL, *overrides)}
        run = compose_job(list(by_key.values()), COMPOSER)
        run.mapping["name"] = "run"
        return run

    return composed


def published_words(**conventions: Any) -> PublishedTokenizer:
    """Return a published tokenizer of the words PUBLISHED, with these conventions."""
    pieces = Pieces(models.WordLevel({word: id for id, word in enumerate(PUBLISHED)}, unk_token="<unk>"))
    pieces.pre_tokenizer = WhitespaceSplit()
    files = {"tokenizer.json": pieces.to_str().encode()}
    return published_tokenizer(Vocabulary(len(PUBLISHED), 2, 3), files, "here", Conventions(**conventions))
