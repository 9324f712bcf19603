"""Paths in star graphs (Bachmann and Nagarajan 2024): masked diffusion against next-token prediction.

A graph consists of two arms that begin at one node. The source lists the edges in random order, the start, and the
end of one arm; the target is the path between them. Both models train under the same seeds, and the score is the
percentage of test graphs whose whole path is correct. The same command resumes.

    python tests/benchmarks/star_graphs.py star --seeds 1 2 3 [--steps 6000]
"""

import argparse
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

import tfm_blocks as tfm
from tfm_blocks.scoring.significance import seed_test

LETTERS = "abcdefghij"
SIZES = {"test": 1000, "val": 200, "train": 50_000}
SHARED = [
    "d_model=64", "d_ff=256", "heads=4", "layers=3", "vocab=300", "dropout=0", "label_smoothing=0", "optimizer=adamw",
    "schedule=linear", "schedule.peak=2e-3", "schedule.warmup=0.05", "data=text", "data.dir=.", "data.max_length=60",
    "data.step_tokens=384", "data.batch_tokens=100000", "trainer.validate_every=250",
    "trainer.validate_sentences=0", "trainer.average=1", "trainer.checkpoint_every=1000", "logger=csv",
]  # fmt: skip
MODELS = {
    "diffusion": [
        "model=encoder_only",
        "model.add_norm=pre",
        "++model.graph.encoder.layer.attn.position=rotary",
        "objective=masked_diffusion",
        "objective.min_rate=0.1",
    ],
    "next": ["model=decoder_only", "++model.graph.decoder.layer.self.position=rotary"],
}


def write_graphs(edges: int) -> None:
    """Write the sources and targets of all splits, without repetitions. Each arm has `edges` edges."""
    draw, seen = random.Random(0), set[str]()
    for split, size in SIZES.items():
        rows: list[tuple[str, str]] = []
        while len(rows) < size:
            start, *nodes = draw.sample(LETTERS, 2 * edges + 1)
            arms = [start, *nodes[:edges]], [start, *nodes[edges:]]
            listed = [f"{one} {other}" for arm in arms for one, other in itertools.pairwise(arm)]
            draw.shuffle(listed)
            question = f"{' / '.join(listed)} ? {start} {nodes[edges - 1]}"
            if question not in seen:
                seen.add(question)
                rows.append((question, " ".join(arms[0])))
        for side, texts in zip(("src", "tgt"), zip(*rows, strict=True), strict=True):
            Path(f"{split}.{side}").write_text("".join(f"{text}\n" for text in texts))


def train(name: str, words: list[str]) -> Path:
    """Train or resume a run, unless it is done. Return its folder."""
    folder = Path("runs", name)
    if not (folder / "weights.safetensors").is_file():
        settings = [f"resume={folder}"] if folder.is_dir() else [*words, *SHARED, f"name={name}"]
        subprocess.run([sys.executable, "-m", "tfm_blocks", "train", *settings], check=True)
    return folder


def outputs(folder: Path, steps: int, edges: int) -> list[str]:
    """Return the path for each test graph: filled in `steps` steps, or greedily predicted for 0 steps."""
    sources, model = Path("test.src").read_text().splitlines(), tfm.load(folder)
    if not steps:
        return model.translate(sources)
    masks = " ".join(["<mask>"] * (edges + 1))
    return [filled.text.split("\t")[1] for filled in model.fill([f"{one}\t{masks}" for one in sources], steps=steps)]


def main() -> None:
    """Write the graphs, train the runs, and print the scores of each model and a test of the difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the texts and the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--edges", type=int, default=3, help="of each arm")
    parser.add_argument("--steps", type=int, default=6_000, help="of training")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(arguments.folder)
    write_graphs(arguments.edges)
    paths = Path("test.tgt").read_text().splitlines()
    scores: dict[str, list[float]] = {}
    for seed in arguments.seeds:
        run_words = [f"seed={seed}", f"trainer.steps={arguments.steps}"]
        runs = {model: train(f"{model}-{seed}", [*words, *run_words]) for model, words in MODELS.items()}
        for label, model, steps in (
            ("diffusion, 4 steps", "diffusion", 4),
            ("1 step", "diffusion", 1),
            ("next", "next", 0),
        ):
            found = outputs(runs[model], steps, arguments.edges)
            right = sum(path == text for path, text in zip(paths, found, strict=True))
            scores.setdefault(label, []).append(100 * right / len(paths))
    for label, values in scores.items():
        deviation = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
        print(f"{label}: {fmean(values):.1f}{deviation} % of the paths, seeds {', '.join(f'{x:.1f}' for x in values)}")
    if test := seed_test(scores["next"], scores["diffusion, 4 steps"]):
        print(f"difference of 4 steps and next: {test.difference:+.1f}, p = {test.p:.2g}")


if __name__ == "__main__":
    main()
