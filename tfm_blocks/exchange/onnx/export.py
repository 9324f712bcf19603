"""Export a run as graphs of ONNX, which share the weights of one safetensors file."""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.tokenizer_files import load_tokenizer
from tfm_blocks.errors import RunError, run_error
from tfm_blocks.exchange.certificate import Certificate, LogProbabilities, compare_with_engine
from tfm_blocks.exchange.exporting import tokenizer_files, write_files
from tfm_blocks.exchange.onnx.tracing import LOGITS, Graph, refused, trace_network
from tfm_blocks.exchange.random_sentences import SEED, SENTENCES, Rows, network_inputs, pick_log_p, random_sentences
from tfm_blocks.language.spec import TARGET, names
from tfm_blocks.network.graph import Network
from tfm_blocks.network.matching import weights_of
from tfm_blocks.runs.files import named_folder
from tfm_blocks.runs.folder import TOKENIZER, WEIGHTS, new_folder
from tfm_blocks.runs.model import read_network, write_weights
from tfm_blocks.version import __version__

OPSET = 20
NEXT = "next."
"""Begins the names of outputs that are inputs of the next step."""
MISSING = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.:]+)'")


def export_to_onnx(run: Path, folder: Path) -> tuple[list[str], Certificate | None]:
    """Write a run as a new folder with the graphs, the weights and the tokenizer.

    Returns the names of the graphs, and the certificate if ONNX Runtime is installed. Raises RunError if a node cannot
    be exported, the libraries that write ONNX are not installed, or the folder exists.
    """
    try:
        import onnx_ir  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        help = "pip install -c constraints.txt 'tfm-blocks[onnx]'"
        raise run_error(str(error.name), "the library is not installed", help) from None
    network, tokenizer = read_network(run), load_tokenizer(run / TOKENIZER)
    with new_folder(folder) as part:
        graphs = write_graphs(network, part, str(run))
        write_files(part, tokenizer_files(tokenizer))
        certificate = _certify(network, run, part)
    return graphs, certificate


def write_graphs(network: Network, folder: Path, where: str) -> list[str]:
    """Write the weights of a network, and the graphs that refer to them; return their names. Raises RunError."""
    import onnx_ir

    programs = {graph.name: to_onnx(graph, where) for graph in trace_network(network, where)}
    write_weights(folder, weights_of(network))
    with (folder / WEIGHTS).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin = file.tell()
    first: dict[int, str] = {}
    tied = {name: first.setdefault(id(tensor), name) for name, tensor in network.state_dict(keep_vars=True).items()}
    for name, program in programs.items():
        for value in program.model.graph.initializers.values():
            weight = tied.get(value.name.partition("network.")[2])
            if weight in header:
                start, end = header[weight]["data_offsets"]
                shape = value.const_value.shape
                value.const_value = onnx_ir.ExternalTensor(
                    WEIGHTS, begin + start, end - start, value.dtype, shape=shape, name=value.name, base_dir=folder
                )
        onnx_ir.save(program.model, folder / f"{name}.onnx")
    return list(programs)


def _certify(network: Network, run: Path, folder: Path) -> Certificate | None:
    """Compare the exported folder with the run, write the certificate into it, and return it.

    Returns None if ONNX Runtime is not installed.
    """
    try:
        import onnxruntime
    except ImportError:
        return None
    from importlib.metadata import version

    libraries = {name: version(name) for name in ("onnx", "onnxscript", "onnxruntime")}
    versions = {"tfm-blocks": __version__, "torch": torch.__version__, **libraries, "opset": str(OPSET)}
    log_p = compare_graphs(Engine(folder, onnxruntime), network)
    certificate = Certificate(named_folder(run).name, "onnx", "float32", versions, log_p)
    certificate.write(folder)
    return certificate


@torch.no_grad()
def to_onnx(graph: Graph, where: str) -> Any:
    """Return the program of ONNX. Raises RunError for an operation without a counterpart in ONNX."""
    from tfm_blocks.exchange.onnx.translations import TRANSLATIONS

    outputs = [NEXT + name if name in graph.inputs else name for name in graph.outputs]
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the libraries warn about their internal packages, classes and passes
    try:
        with warnings.catch_warnings(action="ignore"):
            program = torch.onnx.export(
                graph.program,
                dynamo=True,
                verbose=False,
                optimize=False,
                opset_version=OPSET,
                input_names=graph.inputs,
                output_names=outputs,
                custom_translation_table=TRANSLATIONS,
            )
            assert program is not None
            _simplify(program.model)
            return program
    except Exception as error:  # the classes are private
        match = MISSING.search(str(error))
        rule = f"has no counterpart of the operation {match[1]}" if match else "cannot convert the graph"
        address = match and graph.node_of(match[1])
        raise RunError(refused(where, address or graph.name, rule)) from error
    finally:
        logging.disable(level)


def _simplify(model: Any) -> None:
    """Fold constants and remove duplicates, in place.

    `optimize=True` of torch would also apply a rule for pairs of nodes. Its time is quadratic in the number of nodes,
    of which a Gemma 3n of ten layers has 7,000.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer

    optimizer.inline(model)
    optimizer.fold_constants(model)
    for simplify in (
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    ):
        simplify(model)


class Engine:
    """The graphs of an exported folder in ONNX Runtime."""

    def __init__(self, folder: Path, library: Any) -> None:
        options = {"providers": ["CPUExecutionProvider"]}
        self.graphs = {path.stem: library.InferenceSession(path, **options) for path in sorted(folder.glob("*.onnx"))}

    def run(self, name: str, values: dict[str, Any]) -> Any:
        """Run a graph on the values that it reads, add its outputs to `values`, and return the logits."""
        graph = self.graphs[name]
        read = [port.name for port in graph.get_inputs()]
        outputs = graph.run(None, {name: values[name] for name in read})
        written = [(port.name, port.name.removeprefix(NEXT)) for port in graph.get_outputs()]
        names = [state if state in read else name for name, state in written]  # a node may be called next
        values |= dict(zip(names, outputs, strict=True))
        return values.get(LOGITS)


@torch.inference_mode()
def compare_graphs(engine: Engine, network: Network) -> LogProbabilities:
    """Compare the log probabilities of random sentences: half of the tokens in the first pass, the others in steps.

    Without a target, the log probabilities of the whole vocabulary at each position are compared.
    """
    if TARGET in names(network.spec.inputs):
        return compare_with_engine(network, lambda rows: _log_p_of_tokens(engine, rows))
    rows = next(random_sentences(network))
    inputs = network_inputs(rows)
    theirs_BNV, ours_BNV = torch.from_numpy(engine.run("model", _arrays(inputs))), network(**inputs)
    if ours_BNV.isfinite().sum(-1).max() > 1:  # else the only output is a predicted number, whose log p is always 0
        theirs_BNV, ours_BNV = theirs_BNV.log_softmax(-1), ours_BNV.log_softmax(-1)
    keep_BN = next(iter(inputs.values())) != Tokenizer.PAD
    difference_BNV = (ours_BNV - theirs_BNV).abs()
    difference_RV = difference_BNV.masked_fill(ours_BNV == theirs_BNV, 0.0)[keep_BN]  # padding has -inf in both
    first = next(iter(rows.values()))
    ids, longest = len(set(torch.cat(first).tolist())), max(map(len, first)) + 1
    largest, mean = difference_RV.max().item(), difference_RV.mean().item()
    return LogProbabilities(SENTENCES, len(difference_RV), ids, longest, SEED, largest, mean)


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
