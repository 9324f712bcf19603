"""Measure the figures of docs/benchmarks.md: speed compared with other libraries, and agreement with them.

    python tests/benchmarks/peers.py
    python tests/benchmarks/peers.py --draw

Write docs/benchmarks.json and draw docs/images/benchmarks.svg from it; with --draw, only draw. The machine must be idle.
Each row of the speeds has its own command, which measures it alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import sys
from argparse import Namespace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib
import torch
import transformers
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.oracles.references import REFERENCES, both  # noqa: E402
from tests.oracles.test_hugging_face import far_apart, ids  # noqa: E402
from tfm_blocks.launch.run_spec import choose_precision  # noqa: E402
from tfm_blocks.report.drawing import COLOURS, PAGE, STYLE  # noqa: E402

JSON = ROOT / "docs" / "benchmarks.json"
FIGURE = ROOT / "docs" / "images" / "benchmarks.svg"
SMALLEST = 1e-8  # a difference of 0 is drawn here
S, T = 7, 6  # tokens of the sources and targets whose logits are compared


def speeds() -> list[dict[str, Any]]:
    """Return a row for each comparison: its name, command, both figures with their unit, and the other library."""
    rows: list[dict[str, Any]] = []

    def add(what: str, command: str, peer: str, unit: str, ours: float, theirs: float) -> None:
        rows.append(
            {"what": what, "command": f"python tests/benchmarks/{command}", "peer": peer, "unit": unit}
            | {"ours": ours, "theirs": theirs, "ratio": theirs / ours if unit == "ms" else ours / theirs}
        )
        print(f"{what:44} {ours:10,.0f} {theirs:10,.0f} {unit:9} {rows[-1]['ratio']:.2f}", flush=True)

    training, decoding, ctranslate2, prompts, restricted = (
        importlib.import_module(name)
        for name in ("training_step", "decoding", "decoding_ctranslate2", "prompts", "restricted_attention")
    )
    precision = choose_precision("auto", "cpu").name
    libraries = {"torch": "nn.Transformer", "marian": "MarianMT"}
    for size, steps in (("base", 9), ("tiny", 21)):
        sides = training.measure(training.SIZES[size], steps, precision == "bf16")
        peer = max(libraries, key=sides.__getitem__)
        command = f"training_step.py --size {size} --steps {steps} --precision {precision}"
        add(f"training step of {size}", command, libraries[peer], "tokens/s", sides["tfm-blocks"], sides[peer])
    for beam, rounds in ((1, 9), (4, 7)):
        sides = decoding.measure(decoding.SIZES["base"], beam, rounds)
        command = f"decoding.py --size base --beam {beam} --rounds {rounds}"
        what = "greedy search of base" if beam == 1 else f"beam search of base, beam {beam}"
        add(what, command, "MarianMT.generate", "tokens/s", sides["tfm-blocks"], sides["marian"])
    sides, _ = ctranslate2.measure(decoding.SIZES["base"], 1, decoding.SENTENCES, 7, ["float32", "int8"], "wall")
    command = "decoding_ctranslate2.py --size base --rounds 7 --int8"
    pair = sides["tfm-blocks int8"], sides["ctranslate2 int8"]
    add("greedy search of base in int8", command, "CTranslate2", "tokens/s", *pair)
    sides = {name: wall for name, (wall, _) in prompts.measure(3).items()}
    what = "prompt continuation, decoder-only model of base's size"
    add(what, "prompts.py --rounds 3", "GPT2.generate", "tokens/s", sides["tfm-blocks"], sides["gpt2"])
    options = Namespace(r=128, heads=8, width=512, rounds=3, threads=torch.get_num_threads(), bf16=False)
    steps = {kind: restricted.block_step(kind, 8192, options) for kind in ("restricted", "dense")}
    times = restricted.alternate(steps, options.rounds)
    what = "restricted attention, 8,192 positions, r = 128"
    add(what, "restricted_attention.py --rounds 3", "dense attention", "ms", times["restricted"], times["dense"])
    return rows


@torch.no_grad()
def agreement() -> dict[str, float]:
    """Return the largest difference of the logits of each model, divided by the largest logit, in float32."""
    found = {}
    for name in REFERENCES:
        ours, theirs = both(name)
        inputs = {"src": ids([7, 4, 5], S), "tgt": ids([6, 3, 5], T, seed=1)}
        inputs = {one.name: inputs[one.name] for one in ours.spec.inputs}
        last, keep = list(inputs)[-1], {key: value != 0 for key, value in inputs.items()}
        named = {"src": ("input_ids", "attention_mask"), "tgt": ("decoder_input_ids", "decoder_attention_mask")}
        arguments = {}
        for key, value in inputs.items():
            tokens, mask = named[key if len(inputs) == 2 else "src"]
            arguments |= {tokens: value, mask: keep[key].long()}
        logits = ours(**inputs)[keep[last]]
        found[name] = far_apart(logits, theirs(**arguments, use_cache=False).logits[keep[last]])
    return found


def draw(measured: dict[str, Any]) -> None:
    """Draw the ratios of the speeds as bars, and the differences of the logits as dots on a logarithmic axis."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE, 3.2), layout="constrained")
        bars, dots = figure.subplots(1, 2)
        rows = measured["speed"][::-1]
        bars.barh(
            [f"{row['what']}\ncompared with {row['peer']}" for row in rows],
            [row["ratio"] for row in rows],
            0.6,
            color=COLOURS[0],
        )
        for place, row in enumerate(rows):
            bars.text(row["ratio"], place, f" {row['ratio']:.2f}", va="center")
        bars.axvline(1, color="black", linewidth=0.5, linestyle=":")
        bars.set_title("Speed relative to the other library")
        names = sorted(measured["agreement"], key=measured["agreement"].__getitem__)
        values = [max(measured["agreement"][name], SMALLEST) for name in names]
        dots.plot(values, names, linestyle="", marker="o", color=COLOURS[1])
        dots.axvline(1e-5, color="black", linewidth=0.5, linestyle=":")
        dots.set_xscale("log")
        dots.minorticks_off()
        dots.set_xticks(ticks := [SMALLEST, 1e-7, 1e-6, 1e-5], ["0", *(f"{tick:.0e}" for tick in ticks[1:])])
        dots.tick_params(axis="y", labelsize=5)
        dots.set_title("Difference from transformers' logits")
        figure.savefig(FIGURE, metadata={"Date": None})


def machine() -> str:
    """Return the number of cores, and the processor with its family and model."""
    if sys.platform != "linux":
        return f"{os.cpu_count()} cores of {platform.processor()}"
    facts = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {facts['model name']} (family {facts['cpu family']}, model {facts['model']})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draw", action="store_true")
    if not parser.parse_args().draw:
        versions = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
        measured = {"date": datetime.now(UTC).date().isoformat(), "machine": machine(), "versions": versions}
        measured |= {"speed": speeds(), "agreement": agreement()}
        JSON.write_text(json.dumps(measured, indent=1) + "\n", "utf-8")
    draw(json.loads(JSON.read_text("utf-8")))


if __name__ == "__main__":
    main()
