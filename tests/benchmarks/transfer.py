"""Training loss over learning rates at several widths, standard and mup: does the best rate of the smallest width hold?

The text is the project's own pages, as characters; the model is `gpt2` with two layers, and the base is the smallest
width. The loss is the mean of the last fifth of the steps. The best rate of a width is the minimum over the grid, whose
points are factors of 2 apart.

    python tests/benchmarks/transfer.py --widths 64,128,256 --steps 100 --seeds 1 -o curves.svg
"""

import argparse
import math
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch.nn import functional as F

from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.report.drawing import PAGE, drawing_style, line_style
from tfm_blocks.training.coordinates import optimizer_of

PAGES = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
HEAD_WIDTH = 32


def corpus() -> torch.Tensor:
    """Return the pages as ids from 1 on, of characters that occur often enough."""
    text = "".join(page.read_text("utf-8") for page in PAGES)
    letters = [letter for letter in sorted(set(text)) if text.count(letter) >= 50]
    return torch.tensor([letters.index(letter) + 1 for letter in text if letter in letters])


def model(width, base, vocab, length, parametrisation):
    sizes = [f"d_model={width}", f"d_ff={4 * width}", f"heads={width // HEAD_WIDTH}", "layers=2"]
    sizes += [f"vocab={vocab}", f"max_length={length}", f"model.parametrisation={parametrisation}"]
    knobs = {"d_model": base, "d_ff": 4 * base, "heads": base // HEAD_WIDTH}
    composed = compose_model("gpt2", [*sizes, *(f"model.base.{knob}={size}" for knob, size in knobs.items())])
    return check_model(composed.model, composed.sources)


def train(spec, ids, rate, seed, arguments):
    """Return the mean loss of the last fifth of the steps."""
    network = build_network(spec, seed=seed)
    optimizer = optimizer_of(network)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(ids) - arguments.length - 1, (arguments.batch,), generator=generator)
        rows = torch.stack([ids[start : start + arguments.length + 1] for start in starts.tolist()])
        logits = network(tgt=rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        warm = min(1.0, step / (arguments.steps / 10)) * min(1.0, 2 * (1 - (step - 1) / arguments.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * group["rate"]
        optimizer.step()
        losses.append(float(loss.detach()))
    last = losses[-max(1, arguments.steps // 5) :]
    return sum(last) / len(last)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--widths", default="64,128,256", type=lambda text: [int(part) for part in text.split(",")])
    add("--exponents", default="-12,-5", type=lambda text: [int(part) for part in text.split(",")])
    add("--steps", default=100, type=int)
    add("--seeds", default=1, type=int)
    add("--batch", default=8, type=int)
    add("--length", default=64, type=int)
    add("-o", dest="path", type=Path)
    arguments = parser.parse_args()
    ids = corpus()
    vocab, rates = (
        int(ids.max()) + 1,
        [2.0**power for power in range(arguments.exponents[0], arguments.exponents[1] + 1)],
    )
    curves = {}
    for parametrisation in ("standard", "mup"):
        for width in arguments.widths:
            spec = model(width, arguments.widths[0], vocab, arguments.length, parametrisation)
            curve = []
            for rate in rates:
                losses = [train(spec, ids, rate, seed, arguments) for seed in range(1, arguments.seeds + 1)]
                curve.append(sum(losses) / len(losses))
            curves[parametrisation, width] = curve
            best = min(range(len(rates)), key=lambda place: curve[place] if math.isfinite(curve[place]) else math.inf)
            shown = "  ".join(f"2^{math.log2(rate):.0f} {loss:.3f}" for rate, loss in zip(rates, curve, strict=True))
            print(f"{parametrisation:9} width {width:4}: best 2^{math.log2(rates[best]):.0f}   {shown}", flush=True)
    if arguments.path:
        draw(curves, rates, arguments)


def draw(curves, rates, arguments):
    with drawing_style():
        drawn = Figure(figsize=(PAGE, 2.4), layout="constrained")
        for panel, parametrisation in zip(drawn.subplots(1, 2, sharey=True), ("standard", "mup"), strict=True):
            for number, width in enumerate(arguments.widths):
                panel.plot(rates, curves[parametrisation, width], label=f"width {width}", **line_style(number))
            panel.set_xscale("log", base=2)
            panel.set_xticks(rates, [f"2^{math.log2(rate):.0f}" for rate in rates])
            panel.minorticks_off()
            panel.set_title(parametrisation)
            panel.set_xlabel("learning rate")
        drawn.axes[0].set_ylabel("training loss")
        drawn.axes[0].legend()
        drawn.savefig(arguments.path, metadata={"Date": None} if arguments.path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
