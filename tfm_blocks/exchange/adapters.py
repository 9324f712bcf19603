"""Runs of adapters as other runs and folders: merged with their base, or as an adapter of the package peft."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from torch import Tensor

from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.data.tokenizer_files import load_tokenizer
from tfm_blocks.errors import config_error
from tfm_blocks.exchange.config import to_json, vocabulary_of
from tfm_blocks.exchange.exporting import find_published
from tfm_blocks.exchange.folder import PublishedFile, inherit_record
from tfm_blocks.exchange.published_tensors import conversion_of
from tfm_blocks.exchange.weights import Conversion
from tfm_blocks.language.spec import Adapter, Spec
from tfm_blocks.network.adapters import without_adapters
from tfm_blocks.network.build import network_without_values
from tfm_blocks.network.matching import expect_weights, weights_of
from tfm_blocks.runs.files import named_folder
from tfm_blocks.runs.folder import CONFIG, TOKENIZER, WEIGHTS, new_folder
from tfm_blocks.runs.model import read_network, read_spec, read_tensors, write_model, write_tensors, write_weights
from tfm_blocks.runs.records import SavedModel, Status
from tfm_blocks.runs.saved_run import SavedRun

# by model type: modules that peft 0.21 reads as experts, or whose names differ between the files and transformers 5
OTHER_MODULES = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "qwen3_moe", "qwen3_next"),
        r".*\.(gate|gate_proj|up_proj|down_proj)",
    ),
    **dict.fromkeys(("minimax", "mixtral", "qwen2_moe"), r".*\.gate"),
    "gpt_neox": "embed_out",
    "gpt_oss": r".*\.router",
    "kimi_linear": ".*",
}


def merge_run(run: Path, folder: Path, plugins: Sequence[str] = ()) -> int:
    """Write a run of adapters as a new run folder with plain weights, and return the number of parameters.

    Raises ConfigError for a run without adapters, and RunError.
    """
    _adapted_spec(run, plugins, "nothing is merged")
    network, saved = read_network(run, plugins), SavedModel.read(run)
    config = {**SavedRun(run).config, "name": folder.name, "model": network.spec.mapping}
    with new_folder(folder) as part:
        write_model(part, network.spec.mapping, saved.plugins, saved.columns)
        (part / TOKENIZER).write_bytes((run / TOKENIZER).read_bytes())
        (part / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), "utf-8")
        inherit_record(run, part)
        write_weights(part, weights_of(network))
        Status("merged", of=(named_folder(run).name,), parameters=network.parameter_count).write(part)
    return network.parameter_count


def _adapted_spec(run: Path, plugins: Sequence[str], what: str) -> Spec:
    spec = read_spec(run, plugins)
    if not spec.adapted:
        rule = f"the run has no adapters, so {what}"
        raise config_error(str(run), rule, f"its weights are plain: tfm export {run} --to huggingface")
    return spec


@dataclass(frozen=True)
class _Part:
    """The adapter of one of the maps that a linear map stacks, and the rows of this map among all adapted maps."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    rows: range


def export_to_peft(run: Path, folder: Path, plugins: Sequence[str] = ()) -> str:
    """Write the adapters of a run as a new folder that peft loads, and return the name of the base's architecture.

    Raises ConfigError for a run without adapters, for modules that peft does not find, and without a family.
    """
    spec = _adapted_spec(run, plugins, "there is no adapter to write")
    vocabulary = vocabulary_of(load_tokenizer(run / TOKENIZER))
    imported = PublishedFile.read_or_empty(run).family
    published = find_published(without_adapters(spec), SavedRun(run).config, vocabulary, imported)
    fix = f"write the merged model: tfm export {run} --to huggingface"
    if published is None:
        rule = "no family of published models has its graph, so transformers has no model to adapt"
        raise config_error(str(run), rule, fix)
    tensors = read_tensors(run / WEIGHTS)
    expect_weights(network_without_values(spec), tensors, str(run / WEIGHTS))
    parts, row_numbers, column_numbers = _number_maps(spec, tensors, fix)
    conversion = conversion_of(published)
    matrices, transposed = {}, False
    for name, rows, columns in _their_maps(conversion, row_numbers, column_numbers):
        is_transposed = bool((rows != rows[:, :1]).any())
        transposed |= is_transposed
        if is_transposed:
            rows, columns = rows.T, columns.T
        matrices[name.removesuffix(".weight")] = _their_matrices(parts, rows[:, 0].long(), columns.amax(0).long() - 1)
    _expect_modules(matrices, published.family.model_type, fix)
    dropouts = {adapter.dropout for node in spec.nodes for adapter in node.adapters.values()}
    if len(dropouts) > 1:
        rule = f"the adapters have the dropouts {', '.join(map(str, sorted(dropouts)))}, but peft's folder has one"
        help = f"it has {max(dropouts)}, which changes no output; change lora_dropout there before you train further"
        print(f"warning: {run}: {rule}\n  help: {help}", file=sys.stderr)
    task = None if published.family.encoder else "SEQ_2_SEQ_LM" if spec.sources else "CAUSAL_LM"
    with new_folder(folder) as part:
        content = _peft_config(matrices, task, max(dropouts), transposed)
        (part / "adapter_config.json").write_text(to_json(content), "utf-8")
        stored = {}
        for module, (a_RI, b_OR, _) in matrices.items():
            stored[f"base_model.model.{module}.lora_A.weight"] = a_RI
            stored[f"base_model.model.{module}.lora_B.weight"] = b_OR
        write_tensors(part / "adapter_model.safetensors", stored, {"format": "pt"})
    return published.family.architecture


def _expect_modules(modules: Iterable[str], model_type: str, fix: str) -> None:
    """Raise ConfigError for a module that peft would not find in a model of transformers, or would take for experts."""
    for module in modules:
        if re.fullmatch(OTHER_MODULES.get(model_type, ""), module):
            rule = f"peft reads an adapter of {module} in {model_type} as one of experts, or does not find the module"
            raise config_error("--to", rule, fix)


def _number_maps(
    spec: Spec, tensors: Mapping[str, Tensor], fix: str
) -> tuple[list[_Part], dict[str, Tensor], dict[str, Tensor]]:
    """Return the adapted parts, and for each weight a matrix with the numbers of its rows, and of its columns, from 1.

    The numbers of rows increase over all adapted weights; rows without adapters have the number 0.
    """
    network = network_without_values(without_adapters(spec))
    weights = weights_of(network)
    zero = torch.zeros((), dtype=torch.float64)
    rows = {name: zero.expand(weight.shape) for name, weight in weights.items()}
    columns = dict(rows)
    parts: list[_Part] = []
    first = 1
    adapters = [
        (f"{node.owner}.{path}", adapter)
        for node in spec.nodes
        if not node.shares
        for path, adapter in node.adapters.items()
    ]
    for address, adapter in adapters:
        linear = network.get_submodule(address)
        if not isinstance(linear, Linear):
            rule = f"the adapter at {address} is of experts, which peft's folder cannot express"
            raise config_error("--to", rule, fix)
        outputs, inputs = linear.weight.shape
        adapted = [*_split(linear, adapter, tensors, address, first)]
        row_O = torch.arange(first, first + outputs, dtype=zero.dtype)
        row_O[[not any(row in part.rows for part in adapted) for row in range(first, first + outputs)]] = 0
        parts += adapted
        rows[f"{address}.weight"] = row_O[:, None].expand(-1, inputs)
        columns[f"{address}.weight"] = torch.arange(1, 1 + inputs, dtype=zero.dtype).expand(outputs, -1)
        first += outputs
    return parts, rows, columns


def _split(
    linear: Linear, adapter: Adapter, tensors: Mapping[str, Tensor], address: str, first: int
) -> Iterator[_Part]:
    """Yield the parts of an adapter; the rows of its linear map are numbered from `first`."""
    chosen = [linear.parts[part] for part in adapter.parts]
    a, b = (tensors[f"{address}.adapter.{matrix}"] for matrix in "ab")
    pieces = torch.split(a, adapter.rank), torch.split(b, chosen)
    for part, a_RI, b_OR in zip(adapter.parts, *pieces, strict=True):
        start = first + sum(linear.parts[:part])
        yield _Part(a_RI, b_OR, adapter.scale, range(start, start + linear.parts[part]))


def _their_maps(
    conversion: Conversion, rows: Mapping[str, Tensor], columns: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each of their adapted weights, and the numbers of our rows and columns in it."""
    their_columns = conversion.to_theirs(columns)
    for name, numbers in conversion.to_theirs(rows).items():
        if numbers.any():
            yield name, numbers, their_columns[name]


def _their_matrices(parts: Sequence[_Part], row_O: Tensor, column_I: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return A, B and the scale of one of their linear maps, whose rows and columns have these numbers in ours.

    Several of our parts become blocks of A and of B; rows of other maps are 0 in B.
    """
    inside = [(part, (row_O >= part.rows.start) & (row_O < part.rows.stop)) for part in parts]
    used = [(part, inside_O) for part, inside_O in inside if inside_O.any()]
    scale, blocks = used[0][0].scale, []
    for part, inside_O in used:
        block_OR = part.b_OR.new_zeros(len(row_O), part.b_OR.shape[1])
        block_OR[inside_O] = part.b_OR[row_O[inside_O] - part.rows.start] * (part.scale / scale)
        blocks.append(block_OR)
    return torch.cat([part.a_RI[:, column_I] for part, _ in used]), torch.cat(blocks, 1), scale


def _peft_config(
    matrices: Mapping[str, tuple[Tensor, Tensor, float]], task: str | None, dropout: float, transposed: bool
) -> dict[str, object]:
    """Return adapter_config.json. The scale of a map is alpha / rank."""
    ranks = {module: len(a_RI) for module, (a_RI, _, _) in matrices.items()}
    alphas = {module: scale * ranks[module] for module, (_, _, scale) in matrices.items()}
    return {
        "alpha_pattern": {module: int(alpha) if alpha == int(alpha) else alpha for module, alpha in alphas.items()},
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
        "lora_alpha": next(iter(alphas.values())),
        "lora_dropout": dropout,
        "peft_type": "LORA",
        "r": next(iter(ranks.values())),
        "rank_pattern": ranks,
        "target_modules": list(matrices),
        "task_type": task,
    }
