"""The ejected file: docstring, imports, the classes, and its format."""

from __future__ import annotations

import ast
import subprocess

import yaml

from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.exchange.eject.context import EjectContext
from tfm_blocks.exchange.eject.model_class import ModelWriter
from tfm_blocks.exchange.eject.values import CannotEjectError
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Spec
from tfm_blocks.network.build import network_without_values

WIDTH = 120
NODE = '''class Node(nn.Module):
    """Modules and parameters by name."""

    def __init__(self, /, **children: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)
'''
LEGEND = """\
Names of tensors end in their axes: B batch, T target positions, S source positions, N positions, D width, H heads,
K width of a head, F inner width, V vocabulary. Parameters start as torch leaves them: load weights with
`Model().load_state_dict(torch.load(FILE))`."""


def eject(spec: Spec, sources: Sources, title: str) -> str:
    """Return the PyTorch file of a model. Raises ConfigError for a block whose source is not covered."""
    context = EjectContext(network_without_values(spec), sources)
    try:
        body = ModelWriter(context).text()
    except CannotEjectError as error:
        raise ConfigError(Problem("model", f"cannot be ejected: {error}", help="see docs/ejecting.md")) from error
    classes = context.classes.text
    return _formatted(_file(_docstring(spec, title), f"{classes}\n\n{body}" if classes else body))


def _docstring(spec: Spec, title: str) -> str:
    model = yaml.safe_dump({"model": spec.mapping}, sort_keys=False, default_flow_style=None, width=WIDTH - 10)
    text = f"{title}: written by `tfm eject`.\n\n{LEGEND}\n\n{model}"
    return text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')


def _file(docstring: str, body: str) -> str:
    names = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    imports = "import torch\n" * ("torch" in names) + "from torch import Tensor, nn\n"
    imports += "from torch.nn import functional as F\n" * ("F" in names)
    state = ("from typing import Any\n\n", "State = dict[str, Any]\n\n\n") if "State" in names else ("", "\n")
    node = f"{NODE}\n\n" if "Node" in names else ""
    return f'"""{docstring}"""\n\nfrom __future__ import annotations\n\n{state[0]}{imports}\n{state[1]}{node}{body}'


def _formatted(text: str) -> str:
    """Return the text as `ruff format` writes it. Raises ConfigError if ruff is not installed."""
    command = ["ruff", "format", "--isolated", "--line-length", str(WIDTH), "-"]
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        help = "pip install -c constraints.txt -e '.[eject]'"
        raise ConfigError(Problem("tfm eject", "ruff formats the file, but is not installed", help=help)) from None
