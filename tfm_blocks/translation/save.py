"""Write a network that was trained outside of a run as a run folder."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import config_error
from tfm_blocks.language.spec import TARGET, Spec, names
from tfm_blocks.network.adapters import merge_adapters
from tfm_blocks.network.build import network_without_values
from tfm_blocks.network.graph import Network
from tfm_blocks.network.matching import expect_weights, weights_of
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.plugins import GROUP
from tfm_blocks.runs.folder import CONFIG, TOKENIZER, new_folder
from tfm_blocks.runs.model import write_model, write_weights
from tfm_blocks.runs.records import Status
from tfm_blocks.translation.translator import expect_rows


def save_network(
    network: Network, folder: Path, tokenizer: Tokenizer, knobs: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """Write a new run folder, as `write_run` does. Raises ConfigError or RunError."""
    with new_folder(folder) as part:
        write_run(network, part, folder.name, tokenizer, knobs)
    return folder


def write_run(network: Network, folder: Path, name: str, tokenizer: Tokenizer, knobs: Mapping[str, Any]) -> None:
    """Write model, tokenizer, config, weights and status to an empty folder. Raises ConfigError or RunError.

    `knobs` are the values of the knobs that gave the model. Adapters are added to the weights.
    """
    network = merge_adapters(deepcopy(network)) if network.spec.adapted else network
    spec, weights = network.spec, weights_of(network)
    if TARGET in names(spec.inputs) and spec.sink.shape[-1] != tokenizer.size:
        rule = f"has {tokenizer.size} subwords, but the model has a vocabulary of {spec.sink.shape[-1]}"
        raise config_error("tokenizer", rule, f"build the model with vocab={tokenizer.size}")
    expect_rows(spec, tokenizer)
    expect_weights(network_without_values(spec), weights, "network")
    plugins = _plugin_modules(spec)
    write_model(folder, spec.mapping, plugins)
    tokenizer.save(folder / TOKENIZER)
    knobs = {**knobs, "vocab": tokenizer.size}
    if tokenizer.source:
        knobs["source_vocab"] = tokenizer.source.size
    config = {"name": name, **knobs, "plugins": plugins, "model": spec.mapping}
    (folder / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), "utf-8")
    write_weights(folder, weights)
    Status("saved", parameters=network.parameter_count).write(folder)


def _plugin_modules(spec: Spec) -> list[str]:
    """Return the modules outside of this package that register the model's blocks.

    Modules that an installed package announces are left out, since they are always loaded. Raises ConfigError.
    """
    modules = {name: REGISTRY.blocks[name].cls.__module__ for name in spec.blocks}
    known = {entry.module for entry in entry_points(group=GROUP)}
    for name, module in modules.items():
        if module == "__main__":
            rule = f"the block {name} is defined in the script, which cannot be imported"
            raise config_error("model", rule, "move it to a module, and add the module to plugins=[…]")
    return sorted({module for module in modules.values() if module.split(".")[0] != "tfm_blocks"} - known)
