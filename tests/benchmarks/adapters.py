"""Compare fine-tuning of all weights with adapters, with half of the layers frozen, and with Muon: memory and time.

The variants take a step in turn. Then each takes three steps in a process of its own, whose largest resident memory
counts, less that of a process that only builds the model.

    python tests/benchmarks/adapters.py --rounds 7
"""

import argparse
import os
import statistics
import time
from multiprocessing import get_context
from pathlib import Path

import torch

from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.training.groups import build_optimizer, freeze
from tfm_blocks.training.optimizer_settings import read_optimizer

KNOBS = ["d_model=256", "d_ff=1024", "heads=4", "layers=6", "max_length=256", "first_id=0", "vocab=8000", "dropout=0"]
ADAPT = "model.adapt.a={where: {role: matrix, block: attention}, rank: 8, alpha: 16}"
BELOW = ["emb", "pos", "decoder.0", "decoder.1", "decoder.2"]
VARIANTS = {  # the optimizer, and the overrides of the model
    "full": ({"name": "adamw"}, []),
    "adapters": ({"name": "adamw"}, [ADAPT]),
    "half frozen": ({"name": "adamw", "groups": {"below": {"where": {"node": BELOW}, "train": False}}}, []),
    "muon": ({"name": "muon"}, []),
}


def make(optimizer, overrides):
    """Return a network like GPT-2, and its optimizer."""
    composed = compose_model("gpt2", list({text.partition("=")[0]: text for text in (*KNOBS, *overrides)}.values()))
    network = build_network(check_model(composed.model, composed.sources), seed=1).train()
    settings = read_optimizer(optimizer)
    freeze(settings, network)
    return network, build_optimizer(settings, network)


def step(network, optimizer, ids_BT):
    """Take a training step, and return the seconds of the optimizer alone."""
    logits_BTV = network(tgt=ids_BT)
    torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()).backward()
    for group in optimizer.param_groups:
        group["lr"] = 1e-4 * group["rate"]
    start = time.perf_counter()
    optimizer.step()
    seconds = time.perf_counter() - start
    optimizer.zero_grad()
    return seconds


def held(network, optimizer):
    """Return the bytes of the weights, their gradients, and the state of the optimizer."""
    trained = sum(parameter.nbytes for parameter in network.parameters() if parameter.requires_grad)
    state = sum(one.nbytes for states in optimizer.state.values() for one in states.values() if torch.is_tensor(one))
    return sum(parameter.nbytes for parameter in network.parameters()) + trained + state


def peak(name, overrides, steps):
    """Return the largest resident memory in MB of this process after some steps of a variant."""
    optimizer, own = VARIANTS[name]
    network, optimizer = make(optimizer, [*own, *overrides])
    ids_BT = torch.randint(3, network.spec.sink.shape[-1], (8, 128))
    for _ in range(steps):
        step(network, optimizer, ids_BT)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("overrides", nargs="*", default=[], help="such as d_model=32 vocab=100")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    made = {name: make(own, [*more, *arguments.overrides]) for name, (own, more) in VARIANTS.items()}
    vocab = made["full"][0].spec.sink.shape[-1]
    ids_BT = torch.randint(3, vocab, (8, 128))
    times, updates = ({name: [] for name in made} for _ in range(2))
    for number in range(arguments.rounds + 1):
        for name, (network, optimizer) in made.items():
            start = time.perf_counter()
            update = step(network, optimizer, ids_BT)
            if number:
                times[name].append(time.perf_counter() - start)
                updates[name].append(update)
    for name, pair in made.items():
        count = sum(parameter.numel() for parameter in pair[0].parameters() if parameter.requires_grad)
        ratio = statistics.median(a / b for a, b in zip(times[name], times["full"], strict=True))
        share = statistics.median(a / b for a, b in zip(updates[name], times[name], strict=True))
        held_MB, seconds = held(*pair) / 1e6, statistics.median(times[name])
        print(f"{name}: {count:,} trained, {held_MB:.1f} MB held, {seconds:.3f} s per step,")
        print(f"  {ratio:.2f} of full, {share:.1%} of the step in the optimizer")
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in VARIANTS:
            idle, training = (pool.apply(peak, (name, arguments.overrides, steps)) for steps in (0, 3))
            print(f"{name}: {training - idle:.0f} MB more in training than after building, {training:.0f} MB in all")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
