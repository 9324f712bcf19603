"""Compare fine-tuning of all weights with adapters: memory, and time of a step, in alternating rounds.

python tests/benchmarks/adapters.py --rounds 7
"""

import argparse
import os
import statistics
import time

import torch

from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import build_network, check_model

KNOBS = ["d_model=256", "d_ff=1024", "heads=4", "layers=6", "max_length=256", "first_id=0", "vocab=8000", "dropout=0"]
ADAPT = "model.adapt.a={where: {role: matrix, block: attention}, rank: 8, alpha: 16}"


def make(*overrides):
    """Return a network like GPT-2, and its optimizer."""
    composed = compose_model("gpt2", [*KNOBS, *overrides])
    network = build_network(check_model(composed.model, composed.sources), seed=1).train()
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return network, torch.optim.AdamW(trained, 1e-4, fused=True)


def step(network, optimizer, ids_BT):
    logits_BTV = network(tgt=ids_BT)
    torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def held(network, optimizer):
    """Return the bytes of the weights, their gradients, and the state of the optimizer."""
    trained = sum(parameter.nbytes for parameter in network.parameters() if parameter.requires_grad)
    state = sum(one.nbytes for states in optimizer.state.values() for one in states.values())
    return sum(parameter.nbytes for parameter in network.parameters()) + trained + state


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.manual_seed(1)
    ids_BT = torch.randint(3, 8000, (8, 128))
    both = {"full": make(), "adapters": make(ADAPT)}
    times = {name: [] for name in both}
    for number in range(rounds + 1):
        for name, (network, optimizer) in both.items():
            start = time.perf_counter()
            step(network, optimizer, ids_BT)
            if number:
                times[name].append(time.perf_counter() - start)
    for name, pair in both.items():
        count = sum(parameter.numel() for parameter in pair[0].parameters() if parameter.requires_grad)
        print(
            f"{name}: {count:,} trained, {held(*pair) / 1e6:.1f} MB held, {statistics.median(times[name]):.3f} s per step"
        )
    ratios = [a / b for a, b in zip(times["adapters"], times["full"], strict=True)]
    print(f"adapters / full: median {statistics.median(ratios):.2f}, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
