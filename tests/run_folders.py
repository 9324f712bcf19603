"""Folders of finished runs with chosen outputs."""

import json
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from random import Random

import yaml

from tests.conftest import WORDS
from tfm_blocks.runs.row_results import TranslatedLine, hash_rows, write_translations
from tfm_blocks.scoring.corpus import metrics, score

HEADER = "step,train/loss,train/tokens_per_second,train/tokens,train/seconds,val/loss,val/bleu,val/exact_match\n"
CONFIG = {
    "heads": 2, "model": {"args": {"heads": 2}, "add_norm": "post", "graph": {"src_emb": {"block": "embedding"}}},
    "data": {"kind": "dates", "patterns": {"en": ["d MMM y"]}}, "optimizer": {"name": "adam", "eps": 1e-9}, "trainer": {"steps": 60},
}  # fmt: skip


def printed(*arguments):
    """Run `tfm` in a process and return its output."""
    command = [sys.executable, "-m", "tfm_blocks", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def change_json(path, values):
    """Replace values of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def garbled(references, share, seed):
    random = Random(seed)
    return [
        " ".join(random.choice(WORDS) if random.random() < share else word for word in one.split())
        for one in references
    ]


def leave_run(folder, references, outputs, *, model="base", seed=1, changed=(), loss=1.0, tokenizer="one", old=False):
    """Write a run; `changed` are config values by key, and an `old` run has only the files of versions before `tfm compare`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(json.dumps(CONFIG)) | {"name": folder.name, "seed": seed}
    config["model"]["add_norm"] = "pre" if model == "prenorm" else "post"
    for key, value in dict(changed).items():
        *way, last = key.split(".")
        inner = config
        for part in way:
            inner = inner[part]
        inner[last] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    record = {
        "choices": {"model": model, "data": "dates"},
        "text": {"vocabulary": tokenizer},
        "commands": ["python train.py"],
    }
    (folder / "run.json").write_text(json.dumps(record))
    rows = [f"{step},{loss + 20 / step},{1000 + step},{10 * step},{step / 4},,,\n" for step in range(20, 61, 20)]
    rows += [f"{step},,,,,{loss + 20 / step},{step / 2},{step / 100}\n" for step in (30, 60)]
    (folder / "metrics.csv").write_text(HEADER + "".join(rows))
    sources = [f"the {number}th" for number in range(len(references))]
    lines = [TranslatedLine(*one) for one in zip(sources, outputs, references, strict=True)]
    (folder / "status.json").write_text(json.dumps(_status(lines, old)))
    if not old:
        write_translations(folder, lines)
    return folder


@cache
def _scores(outputs, references):
    return score(list(outputs), list(references), metrics("13a", tokenised=False))


def _status(lines, old):
    scores = _scores(tuple(one.output for one in lines), tuple(one.reference for one in lines))
    share = sum(one.output == one.reference for one in lines) / len(lines)
    status = {
        "state": "done", "steps": 60, "seconds": 15.0, "scored_on": "test",
        "scores": {"test/exact_match": share, "test/loss": 1.5, "test/perplexity": 4.0}, "translation": [asdict(one) for one in scores],
    }  # fmt: skip
    rows = [{"src": one.source, "tgt": one.reference} for one in lines]
    known = {
        "parameters": 12_345, "multiply_adds": 67_890, "lengths": {"S": 32, "T": 32}, "tokens_seen": 600.0, "tokens_per_second": 1040.0,
        "best": {"val/loss": {"value": 1.25, "step": 60}}, "test_set": {"rows": len(lines), "sha256": hash_rows(rows, ["src", "tgt"])},
    }  # fmt: skip
    return status if old else status | known


def leave_thousand(folder):
    """Write a thousand runs below `folder`, in ten sweeps, of 334 models and three seeds; return their root."""
    references = ["a red house"] * 4
    run = leave_run(folder / "made", references, references)
    config = (run / "config.yaml").read_text()
    files = {name: (run / name).read_bytes() for name in ("run.json", "status.json", "metrics.csv")}
    for number in range(1000):
        one = folder / "runs" / f"sweep-{number // 100}" / f"run-{number}"
        one.mkdir(parents=True)
        for name, content in files.items():
            (one / name).write_bytes(content)
        own = config.replace("heads: 2", f"heads: {number // 3}").replace("seed: 1", f"seed: {number % 3}")
        (one / "config.yaml").write_text(own)
    return folder / "runs"


def leave_answers(
    folder, task, mixer, seed, fraction, *, rate=0.003, loss=1.0, state="done", d_ff=64, lengths=(), **settings
):
    """Write a run of a probe task with this scaled accuracy and these accuracies by test length."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"mixer": mixer, "d_ff": d_ff, "vocab": 7 + len(task), "data": {"task": task, "size": "lite", **settings}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"schedule": {"peak": rate}, "seed": seed}))
    record = {"choices": {"model": "probe_decoder", "data": task}, "text": {"vocabulary": task}}
    (folder / "run.json").write_text(json.dumps(record))
    rows = "".join(f"{step},{loss + 5 / step},{loss + 10 / step}\n" for step in range(10, 61, 10))
    (folder / "metrics.csv").write_text("step,train/loss,val/loss\n" + rows)
    scores = {"test/scaled_accuracy": fraction, "test/accuracy": (1 + fraction) / 2, "test/exact": fraction}
    scores |= {f"test/accuracy@{length}": value for length, value in dict(lengths).items()}
    status = {"state": state, "steps": 60, "best": {"val/loss": {"value": loss, "step": 60}}}
    if state == "done":
        test_set = {"rows": 100, "sha256": f"{task} {settings}"}
        status |= {"scored_on": "test", "scores": scores, "test_set": test_set, "parameters": 100, "tokens_seen": 10.0}
    (folder / "status.json").write_text(json.dumps(status))
    return folder
