"""Allowed imports between packages."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tfm_blocks"
LEVELS = [
    {"errors", "metric_schema", "version"},
    {"config", "devices", "probes"},
    {"registry"},
    {"language"},
    {"compose", "blocks.layers"},
    {"blocks"},
    {"network"},
    {"data", "runs"},
    {"translation"},
    {"scoring"},
    {"figures"},
    {"report"},
    {"tracking"},
    {"training"},
    {"distributed"},
    {"exchange", "serving", "scaling"},
    {"launch"},
    {"sweep"},
    {"cli", "__init__"},
    {"__main__"},
]
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
ONLY_IN = {
    "hydra": {"compose"},
    "omegaconf": {"compose"},
    "lightning": {"tracking", "training", "distributed", "launch"},
    "wandb": {"tracking"},
    "wandb_workspaces": {"tracking"},
    "mlflow": {"tracking"},
    "torchmetrics": {"training", "launch"},
    "submitit": {"sweep"},
    "ray": {"sweep"},
    "ctranslate2": {"exchange"},
    "onnx_ir": {"exchange"},
    "onnxruntime": {"exchange"},
    "onnxscript": {"exchange"},
    "pydantic": {"config", "data", "tracking", "training", "launch", "serving", "sweep"},
    "fastapi": {"serving"},
    "starlette": {"serving"},
    "uvicorn": {"serving"},
    "prometheus_client": {"serving"},
}
WITHOUT_TORCH = {"errors", "metric_schema", "config", "probes", "registry", "language", "compose", "figures"}


def imported(source: str) -> list[str]:
    """Yield the full names of all imports anywhere in a file, including type-checking imports."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names.append(node.module or "")
    return names


def room(name: str) -> str:
    """Return the room of a module, such as `blocks` of `blocks.attention`; the layers are a room within `blocks`."""
    return "blocks.layers" if f"{name}.".startswith("blocks.layers.") else name.partition(".")[0]


def room_of(path: Path) -> str:
    return room(".".join(path.relative_to(PACKAGE).with_suffix("").parts))


def violations(importer: str, source: str) -> list[str]:
    sentences = []
    for name in imported(source):
        top, _, rest = name.partition(".")
        inner = room(rest) or "__init__"
        if top == "tfm_blocks" and inner != importer and LEVEL[inner] >= LEVEL[importer]:
            sentences.append(f"{importer} imports {inner}")
        if importer not in ONLY_IN.get(top, {importer}):
            sentences.append(f"{importer} imports {top}")
        if top == "torch" and importer in WITHOUT_TORCH:
            sentences.append(f"{importer} imports torch")
    return sentences


def test_every_room_has_a_level():
    rooms = {room_of(path) for path in PACKAGE.rglob("*.py")}
    assert rooms == set(LEVEL)


def test_imports_point_one_way():
    by_file = {str(path): violations(room_of(path), path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {path: sentences for path, sentences in by_file.items() if sentences} == {}


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("language", "from tfm_blocks.network.graph import Network"),
        ("blocks", "import lightning.pytorch"),
        ("blocks.layers", "from tfm_blocks.blocks.attention import Attention"),
        ("language", "def f():\n    import torch"),
        ("network", "from omegaconf import OmegaConf"),
        ("runs", "from tfm_blocks.data.tokenizer import Tokenizer"),
        ("launch", "from tfm_blocks import __version__"),
    ],
)
def test_a_wrong_import_is_found(importer, source):
    assert violations(importer, source)


def test_no_file_is_a_drawer_for_everything():
    names = {path.stem for path in PACKAGE.rglob("*")}
    assert names.isdisjoint({"utils", "common", "helpers", "misc"})
