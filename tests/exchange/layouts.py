"""Folders of published models in the layouts that hubs have: rewritten from folders that transformers saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WEIGHTS = "model.safetensors"
HALF = {"num_hidden_layers", "n_layer"}  # number of layers, under which old versions stored buffers
TOOLS = {
    "_name_or_path": "someone/model", "_num_labels": 3, "_attn_implementation": "eager", "_attn_implementation_autoset": True, "_commit_hash": "0a1b",
    "_flash_attn_2_enabled": True, "_remove_final_layer_norm": False, "_from_auto": True, "_some_tool": {"a": [1]},
    "use_cache": False, "torch_dtype": "bfloat16", "transformers_version": "4.17.0", "model_max_length": 512,
    "task_specific_params": {"summarization": {"num_beams": 4, "length_penalty": 2.0}}, "id2label": {"0": "a"},
    "label2id": {"a": 0}, "output_past": True, "gradient_checkpointing": False, "unsloth_fixed": True, "unsloth_version": "2025.1",
    "max_length": 142, "min_length": 56, "num_beams": 4, "no_repeat_ngram_size": 3, "do_sample": True, "top_k": 5, "top_p": 0.9,
    "temperature": 0.7, "repetition_penalty": 1.1, "bad_words_ids": [[36]], "early_stopping": True, "suppress_tokens": [3],
    "forced_bos_token_id": 0, "predict_special_tokens": True, "attn_implementation": "sdpa", "tokenizer_class": "XTokenizer",
    "chunk_size_feed_forward": 0, "pruned_heads": {}, "torchscript": False, "xla_device": True, "use_bfloat16": False,
    "remove_invalid_values": False, "return_dict": True, "is_decoder": False, "tie_encoder_decoder": False, "tf_legacy_loss": False,
    "problem_type": None, "finetuning_task": "lm", "prefix": " ", "max_sequence_length": 2048, "bos_token": "<s>",
    "quantization_config": None, "use_flash_attn": True, "training_args": {"lr": 0.1}, "sep_token_id": 2, "unk_token_id": 3,
}  # fmt: skip


def change_config(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


def of_base(folder: Path, theirs: nn.Module) -> None:
    """The names of the base model; T5, whose weights have no prefix, gets one."""
    prefix = f"{theirs.base_model_prefix}."
    add = "" if hasattr(theirs, theirs.base_model_prefix) else prefix
    change_weights(folder, lambda weights: {add + name.removeprefix(prefix): w for name, w in weights.items()})
    change_config(folder, lambda config: config | {"architectures": [type(theirs.base_model).__name__]})


def with_buffers(folder: Path, theirs: nn.Module) -> None:
    """The buffers that versions before 4.40 stored, in the types that they had."""
    inner = "" if not hasattr(theirs, theirs.base_model_prefix) else f"{theirs.base_model_prefix}."
    ids = torch.arange(20)[None]
    mask = torch.ones(1, 1, 20, 20, dtype=torch.uint8).tril()
    buffers = {f"{inner}embed_positions.position_ids": ids, f"{inner}rotary_emb.inv_freq": torch.ones(3)}
    for layer in (0, 1):
        buffers |= {
            f"{inner}h.{layer}.attn.bias": mask.bool() if layer else mask,
            f"{inner}h.{layer}.attn.masked_bias": torch.tensor(-1e4),
            f"h.{layer}.attn.masked_bias": torch.tensor(-1e4),
            f"{inner}layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(3),
            f"{inner}layers.{layer}.self_attn.rotary_emb.cos_cached": torch.ones(1, 1, 20, 4),
        }
    if theirs.config.model_type in ("bart", "marian"):
        buffers |= {f"model.{side}.version": torch.ones(1) for side in ("encoder", "decoder")}
    if theirs.config.model_type == "t5":
        name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
        buffers |= {name: torch.randn(8, 4)}
    if theirs.config.model_type == "marian":
        buffers |= {
            f"model.{side}.embed_positions.weight": theirs.model.encoder.embed_positions.weight.detach().clone()
            for side in ("encoder", "decoder")
        }
    change_weights(folder, lambda weights: weights | buffers)


def with_copies(folder: Path, theirs: nn.Module) -> None:
    """Each tied matrix under all its names."""
    copies = theirs.all_tied_weights_keys
    change_weights(folder, lambda weights: weights | {copy: weights[name].clone() for copy, name in copies.items()})


def under_a_copy(folder: Path, theirs: nn.Module) -> None:
    """Each tied matrix under another of its names."""
    copies = {name: copy for copy, name in theirs.all_tied_weights_keys.items()}
    change_weights(folder, lambda weights: {copies.get(name, name): w for name, w in weights.items()})


def of_tools(folder: Path, theirs: nn.Module) -> None:
    """Keys of tools and of generation, in both files of settings."""
    tools = dict(TOOLS)
    if not (folder / "tokenizer_config.json").exists():
        del tools["tokenizer_class"]  # no class of transformers has this name
    change_config(folder, lambda config: tools | config)
    generation = {
        "_from_model_config": True,
        "transformers_version": "4.1",
        "max_length": 30,
        "eos_token_id": theirs.config.eos_token_id,
        "decoder_start_token_id": getattr(theirs.config, "decoder_start_token_id", None),  # `generate` needs it
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))


def of_few_keys(folder: Path, theirs: nn.Module) -> None:
    """No key whose value is the default of its class, and no architecture."""
    defaults = {field.name: field.default for field in fields(theirs.config) if field.default is not MISSING}
    change_config(folder, lambda config: {
        key: value for key, value in config.items() if key == "model_type" or value != defaults.get(key, "none")
    } | {"architectures": None})  # fmt: skip


def of_current_names(folder: Path, theirs: nn.Module) -> None:
    """The names of transformers 5 in memory."""
    theirs.save_pretrained(folder, save_original_format=False)


def without_bias(folder: Path, theirs: nn.Module) -> None:
    """No bias of the output and no table of positions that is computed, as in the base models of BART and Marian."""
    zero = getattr(theirs, "final_logits_bias", torch.zeros(1))
    zero.zero_()
    change_weights(folder, lambda weights: {name: w for name, w in weights.items() if name != "final_logits_bias"})


def in_halves(folder: Path, theirs: nn.Module) -> None:
    """Shards of float16."""
    (folder / WEIGHTS).unlink()
    theirs.to(torch.float16).save_pretrained(folder, max_shard_size="3KB")


def in_brain_floats(folder: Path, theirs: nn.Module) -> None:
    """Shards of bfloat16 without the prefix."""
    of_base(folder, theirs)
    weights = {name: w.to(torch.bfloat16) for name, w in load_file(folder / WEIGHTS).items()}
    (folder / WEIGHTS).unlink()
    shards = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(weights))}
    for file in sorted(set(shards.values())):
        save_file(
            {name: weights[name] for name, shard in shards.items() if shard == file}, folder / file, {"format": "pt"}
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def of_another_output(folder: Path, theirs: nn.Module) -> None:
    """An output matrix that differs from the embedding, although config.json ties them."""
    output = theirs.get_output_embeddings()
    (name,) = [name for name, module in theirs.named_modules() if module is output]
    noise = torch.randn(output.weight.shape, generator=torch.Generator().manual_seed(3))
    change_weights(folder, lambda weights: {f"{name}.weight": noise} | weights)


LAYOUTS = {layout.__name__: layout for layout in (
    of_base, with_buffers, with_copies, under_a_copy, of_tools, of_few_keys, of_current_names, without_bias, in_halves,
    in_brain_floats, of_another_output,
)}  # fmt: skip
