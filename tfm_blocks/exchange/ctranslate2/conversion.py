"""Write the weights of a network into a specification of CTranslate2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from ctranslate2.specs import Activation
from ctranslate2.specs import transformer_spec as ct2
from torch import Tensor

from tfm_blocks.blocks.layers.state import max_length_of
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.exchange.ctranslate2.rules import EngineSide, norms_of, placement
from tfm_blocks.language.spec import Node
from tfm_blocks.network.graph import Network

POSITIONS = 2048  # rows of the table of positions, unless the block limits the length
ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELUTanh,
    "quick_gelu": Activation.GELUSigmoid,
    "silu": Activation.SWISH,
    "sigmoid": Activation.Sigmoid,
}


def convert_network(network: Network, sides: Sequence[EngineSide], subwords: list[str], of_source: list[str]) -> Any:
    """Return the specification of a network, with the subword of each id of the target and of sources."""
    *encoders, last = sides
    decoder = ct2.TransformerDecoderSpec(**_options(last), with_encoder_attention=bool(encoders))
    _fill_side(decoder, last, network)
    # padding and bos, which search must not produce, get the bias -inf
    unembed = _module(network, network.spec.sink)
    weight = _all_rows(unembed.weight, unembed.first_id)
    bias = weight.new_zeros(len(weight))
    if unembed.bias is not None:
        bias[unembed.first_id :] = unembed.bias.detach()
    bias[: Tokenizer.EOS] = -math.inf
    _fill_linear(decoder.projection, weight, bias)
    if encoders:
        encoder = ct2.TransformerEncoderSpec(**_options(encoders[0]))
        _fill_side(encoder, encoders[0], network)
        spec = ct2.TransformerSpec(encoder, decoder)
        spec.register_source_vocabulary(of_source)
        spec.register_target_vocabulary(subwords)
        spec.config.add_source_eos = True
        spec.config.decoder_start_token = subwords[Tokenizer.BOS]
    else:
        spec = ct2.TransformerDecoderModelSpec(decoder)
        spec.register_vocabulary(subwords)
    spec.config.bos_token, spec.config.eos_token = subwords[Tokenizer.BOS], subwords[Tokenizer.EOS]
    norm = next(norm for node in last.nodes for norm in norms_of(node))
    spec.config.layer_norm_epsilon = norm.arguments["eps"]
    return spec


def _options(side: EngineSide) -> dict[str, Any]:
    """Return the arguments of the constructor of a side's specification."""
    attention, ffn = side.layers[0]["self"].arguments, side.layers[0]["ffn"]
    rotary, kv_heads = attention["position"], attention["kv_heads"]
    options = {
        "num_layers": len(side.layers),
        "num_heads": attention["heads"],
        "num_heads_kv": None if kv_heads == attention["heads"] else kv_heads,
        "head_dim": attention["d_head"],
        "activation": ACTIVATIONS[ffn.arguments["activation"].block],
        "ffn_glu": ffn.block == "gated_ffn",
        "layernorm_embedding": side.node("norm") is not None,
        "no_final_norm": side.node("last") is None,
        "rms_norm": any(norm.block == "rmsnorm" for node in side.nodes for norm in norms_of(node)),
    }
    if rotary:
        width = attention["d_head"] or side.layers[0]["self"].axes["D"] // attention["heads"]
        options["rotary_dim"] = int(width * rotary.arguments["share"])
        options["rotary_interleave"] = rotary.arguments["layout"] == "pairs"
        options["rotary_base"] = rotary.arguments["base"]
    return options


def _fill_side(spec: Any, side: EngineSide, network: Network) -> None:
    spec.pre_norm = placement("ffn", side.layers[0]["ffn"]) == "pre"
    embedding = _module(network, side.nodes[0])
    (table,) = spec.embeddings if isinstance(spec.embeddings, list) else [spec.embeddings]
    table.weight = _all_rows(embedding.weight, embedding.first_id)
    spec.scale_embeddings = float(embedding.scale)
    if not side.layers[0]["self"].arguments["position"]:
        spec.position_encodings.encodings = _positions(side, network, embedding.weight.shape[1])
    if node := side.node("norm"):
        _fill_norm(spec.layernorm_embedding, _module(network, node))
    if node := side.node("last"):
        last: Any = network.get_submodule(node.owner)
        _fill_norm(spec.layer_norm, last["norm"])
    for layer, nodes in zip(spec.layer, side.layers, strict=True):
        _fill_layer(layer, nodes, network)


def _fill_layer(spec: Any, nodes: dict[str, Node], network: Network) -> None:
    parts = {"self": "self_attention", "cross-attention": "attention", "ffn": "ffn"}
    for kind, node in nodes.items():
        part = getattr(spec, parts[kind])
        branch: Any = network.get_submodule(node.owner)
        _fill_norm(part.layer_norm, (branch.pre if len(branch.pre) else branch.post)["norm"])
        if kind == "ffn":
            # the first half of `inner` of a gated network has the activation
            linears = [part.linear_0, part.linear_0_noact] if hasattr(part, "linear_0_noact") else [part.linear_0]
            inner, count = branch.block.inner, len(linears)
            biases = [None] * count if inner.bias is None else inner.bias.chunk(count)
            for target, weight, bias in zip(linears, inner.weight.chunk(count), biases, strict=True):
                _fill_linear(target, weight, bias)
            _fill_linear(part.linear_1, branch.block.out.weight, branch.block.out.bias)
        else:
            part.queries_scale = float(branch.block.scores.beta)
            maps = (branch.block.qkv,) if hasattr(branch.block, "qkv") else (branch.block.q, branch.block.kv)
            for linear, source in zip(part.linear, (*maps, branch.block.out), strict=True):
                _fill_linear(linear, source.weight, source.bias)


def _fill_linear(spec: Any, weight: Tensor, bias: Tensor | None) -> None:
    """Copy a linear map. The weights are cloned, because CTranslate2 quantises them in place."""
    spec.weight = weight.detach().clone()
    if bias is not None:
        spec.bias = bias.detach()


def _fill_norm(spec: Any, norm: Any) -> None:
    """Copy a norm. A missing bias becomes zeros, because CTranslate2 treats a norm without bias as RMSNorm."""
    spec.gamma = norm.weight.detach()
    if hasattr(spec, "beta"):
        spec.beta = torch.zeros_like(spec.gamma) if norm.bias is None else norm.bias.detach()


def _all_rows(weight: Tensor, first_id: int) -> Tensor:
    """Return the matrix with a row for each id. Ids below `first_id` repeat the row of `first_id`."""
    return torch.cat((weight[:1].expand(first_id, -1), weight)).detach()


def _positions(side: EngineSide, network: Network, D: int) -> Tensor:
    """Return the table of positions of a side, or zeros if the side has no positions."""
    node = side.node("position")
    if node is None or node.block == "none":
        return torch.zeros(POSITIONS, D)
    block = _module(network, node)
    rows = max_length_of(block) or POSITIONS
    table_ND: Tensor = block.table(0, torch.empty(1, rows, D))
    return table_ND.detach()


def _module(network: Network, node: Node) -> Any:
    """Return the module of a node's block."""
    branch: Any = network.get_submodule(node.owner)
    return branch.block
