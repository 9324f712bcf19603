"""Run exported graphs in ONNX Runtime, and compare them with the network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.exchange.certificate import (
    SEED,
    SENTENCES,
    LogProbabilities,
    Rows,
    compare_with_engine,
    network_inputs,
    pick_log_p,
    random_rows,
)
from tfm_blocks.exchange.onnx.conversion import NEXT
from tfm_blocks.exchange.onnx.graphs import LOGITS
from tfm_blocks.language.spec import TARGET, names
from tfm_blocks.network.graph import Network


class Engine:
    """The graphs of an exported folder in ONNX Runtime."""

    def __init__(self, folder: Path, library: Any) -> None:
        options = {"providers": ["CPUExecutionProvider"]}
        self.graphs = {path.stem: library.InferenceSession(path, **options) for path in sorted(folder.glob("*.onnx"))}

    def run(self, name: str, values: dict[str, Any]) -> Any:
        """Run a graph on the values that it reads, add its outputs to `values`, and return the logits."""
        graph = self.graphs[name]
        outputs = graph.run(None, {port.name: values[port.name] for port in graph.get_inputs()})
        names = [port.name.removeprefix(NEXT) for port in graph.get_outputs()]
        values |= dict(zip(names, outputs, strict=True))
        return values.get(LOGITS)


@torch.inference_mode()
def compare_graphs(engine: Engine, network: Network) -> LogProbabilities:
    """Compare the log probabilities of random sentences: half of the tokens in the first pass, the others in steps.

    Without a target, the log probabilities of the whole vocabulary at each position are compared.
    """
    if TARGET in names(network.spec.inputs):
        return compare_with_engine(network, lambda rows: _log_p_of_tokens(engine, rows))
    inputs = network_inputs(random_rows(network))
    theirs_BNV = torch.from_numpy(engine.run("model", _arrays(inputs))).log_softmax(-1)
    ours_BNV = network(**inputs).log_softmax(-1)
    keep_BN = next(iter(inputs.values())) != Tokenizer.PAD
    difference_RV = (ours_BNV - theirs_BNV).abs()[keep_BN]
    return LogProbabilities(
        SENTENCES, len(difference_RV), SEED, difference_RV.max().item(), difference_RV.mean().item()
    )


def _log_p_of_tokens(engine: Engine, rows: Rows) -> list[list[float]]:
    values = _arrays(network_inputs(rows))
    if "encoder" in engine.graphs:
        engine.run("encoder", values)
    tgt_BT = values[TARGET]
    half = tgt_BT.shape[1] // 2
    values[TARGET] = tgt_BT[:, :half]
    logits = [engine.run("first", values)]
    for length in range(half + 1, tgt_BT.shape[1] + 1):
        values[TARGET] = tgt_BT[:, :length]
        logits.append(engine.run("step", values))
    return pick_log_p(torch.from_numpy(np.concatenate(logits, 1)).log_softmax(-1), rows[TARGET])


def _arrays(inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in inputs.items()}
