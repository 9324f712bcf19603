"""Greedy and beam search against CTranslate2 with the same weights, alternating in one process.

    pip install ctranslate2
    python tests/benchmarks/decoding_ctranslate2.py --size tiny --beam 4

The sentences of tests/benchmarks/decoding.py, float32. Prints the median of output tokens/s of each side, the ratio, and
how many sentences both translate the same.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import ctranslate2
import numpy as np
import torch
from ctranslate2.specs import Activation, TransformerSpec
from decoding import LENGTH, SENTENCES, SIZES, VOCAB, sources
from torch import Tensor, nn

import tfm_blocks as tfm
from tfm_blocks.network.packed import packed
from tfm_blocks.translation.beam import beam_search, gnmt
from tfm_blocks.translation.search import PAD, Bounds, one_by_one

PIECES = ["<pad>", "<s>", "</s>", "<unk>", *(f"t{number}" for number in range(4, VOCAB))]
IDS = {piece: number for number, piece in enumerate(PIECES)}


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def copy_linear(spec, linear: nn.Linear) -> None:
    spec.weight, spec.bias = array(linear.weight), array(linear.bias)


def copy_norm(spec, branch: nn.Module) -> None:
    spec.gamma, spec.beta = array(branch.post["norm"].weight), array(branch.post["norm"].bias)


def copy_attention(spec, branch: nn.Module) -> None:
    maps = [branch.block.qkv] if hasattr(branch.block, "qkv") else [branch.block.q, branch.block.kv]
    for one, linear in zip(spec.linear, [*maps, branch.block.out], strict=True):
        copy_linear(one, linear)
    copy_norm(spec.layer_norm, branch)


def copy_ffn(spec, branch: nn.Module) -> None:
    first, second = (module for module in branch.block.modules() if isinstance(module, nn.Linear))
    copy_linear(spec.linear_0, first)
    copy_linear(spec.linear_1, second)
    copy_norm(spec.layer_norm, branch)


def translator_of(model: nn.Module, size: dict[str, int], folder: str) -> ctranslate2.Translator:
    """CTranslate2's translator of our base model."""
    layers, heads = size["layers"], size["heads"]
    spec = TransformerSpec.from_config((layers, layers), heads, pre_norm=False, activation=Activation.RELU)
    weight_VD = array(model["src_emb"].block.weight)
    positions_ND = array(model["src_pos"].block.table(0, torch.empty(1, 64, size["d_model"])))
    for embeddings in (spec.encoder.embeddings[0], spec.decoder.embeddings, spec.decoder.projection):
        embeddings.weight = weight_VD
    for side in (spec.encoder, spec.decoder):
        side.position_encodings.encodings = positions_ND
    for number, layer in enumerate(spec.encoder.layer):
        copy_attention(layer.self_attention, model["encoder"][str(number)]["attn"])
        copy_ffn(layer.ffn, model["encoder"][str(number)]["ffn"])
    for number, layer in enumerate(spec.decoder.layer):
        copy_attention(layer.self_attention, model["decoder"][str(number)]["self"])
        copy_attention(layer.attention, model["decoder"][str(number)]["cross"])
        copy_ffn(layer.ffn, model["decoder"][str(number)]["ffn"])
    spec.register_source_vocabulary(PIECES)
    spec.register_target_vocabulary(PIECES)
    spec.validate()
    spec.save(folder)
    return ctranslate2.Translator(folder, compute_type="float32", intra_threads=torch.get_num_threads())


def measure(size: dict[str, int], beam: int, rounds: int) -> tuple[dict[str, float], int]:
    """Median output tokens/s of each side, and the sentences of the last round that both translate the same."""
    model = tfm.build("base", vocab=VOCAB, **size).eval()
    whole_B = torch.full((SENTENCES,), LENGTH)
    bounds = Bounds(whole_B, whole_B, torch.empty(SENTENCES, 0, dtype=torch.int64))
    with tempfile.TemporaryDirectory() as folder:
        translator = translator_of(model, size, folder)

    def ours(src_BS: Tensor) -> list[list[int]]:
        if beam == 1:
            return [one.ids for one in one_by_one(model, {"src": src_BS}, bounds)]
        return [one.ids for one, *_ in beam_search(model, {"src": src_BS}, bounds, beam=beam, penalty=gnmt(0.6))]

    def theirs(src_BS: Tensor) -> list[list[int]]:
        texts = [[PIECES[piece] for piece in row if piece != PAD] for row in src_BS.tolist()]
        found = translator.translate_batch(
            texts, beam_size=beam, min_decoding_length=LENGTH, max_decoding_length=LENGTH, return_scores=False
        )
        return [[IDS[piece] for piece in one.hypotheses[0]] for one in found]

    sides = {"tfm-blocks": ours, "ctranslate2": theirs}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    generator = torch.Generator().manual_seed(1)
    with packed(model):  # as `tfm translate` does for all its input
        for _ in range(rounds + 1):
            src_BS, outputs = sources(generator), []
            for name, side in sides.items():
                time.sleep(0.5)  # the other side's threads spin for a while after their work
                begin = time.perf_counter()
                outputs.append(side(src_BS))
                speeds[name].append(sum(map(len, outputs[-1])) / (time.perf_counter() - begin))
    same = sum(one == other for one, other in zip(*outputs, strict=True))
    return {name: statistics.median(values[1:]) for name, values in speeds.items()}, same


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    found, same = measure(SIZES[arguments.size], arguments.beam, arguments.rounds)
    for name, speed in found.items():
        print(f"{name:12} {speed:10,.0f} output tokens/s")
    print(f"ratio {found['tfm-blocks'] / found['ctranslate2']:.2f}; {same} of {SENTENCES} sentences the same")
