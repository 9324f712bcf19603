"""Export a run as graphs of ONNX."""

from __future__ import annotations

from pathlib import Path

import torch

from tfm_blocks import __version__
from tfm_blocks.data.tokenizer_files import load_tokenizer
from tfm_blocks.exchange.certificate import Certificate
from tfm_blocks.exchange.exporting import tokenizer_files
from tfm_blocks.exchange.onnx.conversion import OPSET, expect_libraries, to_onnx, write_files
from tfm_blocks.exchange.onnx.tracing import trace_network
from tfm_blocks.network.graph import Network
from tfm_blocks.runs.folder import TOKENIZER, new_folder
from tfm_blocks.runs.model import read_network


def export_to_onnx(run: Path, folder: Path) -> tuple[list[str], Certificate | None]:
    """Write a run as a new folder with the graphs, the weights and the tokenizer.

    Returns the names of the graphs, and the certificate if ONNX Runtime is installed. Raises RunError if a node cannot
    be exported, the libraries that write ONNX are not installed, or the folder exists.
    """
    expect_libraries()
    network, tokenizer = read_network(run), load_tokenizer(run / TOKENIZER)
    with new_folder(folder) as part:
        graphs = write_graphs(network, part, str(run))
        for name, content in tokenizer_files(tokenizer).items():
            (part / name).write_bytes(content)
        certificate = _certify(network, run, part)
    return graphs, certificate


def write_graphs(network: Network, folder: Path, where: str) -> list[str]:
    """Write the graphs and the weights of a network to an existing folder; return the names. Raises RunError."""
    programs = {graph.name: to_onnx(graph, where) for graph in trace_network(network, where)}
    write_files(programs, network, folder)
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

    from tfm_blocks.exchange.onnx.comparison import Engine, compare_graphs

    libraries = {name: version(name) for name in ("onnx", "onnxscript", "onnxruntime")}
    versions = {"tfm-blocks": __version__, "torch": torch.__version__, **libraries, "opset": str(OPSET)}
    log_p = compare_graphs(Engine(folder, onnxruntime), network)
    certificate = Certificate(run.name, "onnx", "float32", versions, log_p)
    certificate.write(folder)
    return certificate
