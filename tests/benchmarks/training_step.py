"""Compare the speed of training steps with torch.nn.Transformer and Hugging Face's MarianMT of the same size.

    python tests/benchmarks/training_step.py --size tiny --steps 15 --precision bf16

Alternate the sides in one process. A step is forward, label-smoothed loss, backward and fused AdamW, in float32 or
under bfloat16 autocast. Tokens are source and target tokens without padding. Print the median tokens/s of each side,
and the ratio of ours to the faster of the others.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MarianConfig, MarianMTModel

import tfm_blocks as tfm
from tfm_blocks.blocks.position import Sinusoidal
from tfm_blocks.training.loss import chunk_size, smoothed_loss

VOCAB = 10_000
SMOOTHING = 0.1
SIZES = {
    "base": {"d_model": 512, "d_ff": 2048, "heads": 8, "layers": 6, "pairs": 32},
    "tiny": {"d_model": 128, "d_ff": 256, "heads": 4, "layers": 4, "pairs": 128},
}
Batch = tuple[Tensor, Tensor, Tensor]


def batch_of(pairs: int, generator: torch.Generator) -> Batch:
    """Return src_BS, tgt_BT, labels_BT of sentences of 16 to 32 tokens, padded with 0."""
    src_BS, tgt_BT = (torch.randint(4, VOCAB, (pairs, 33), generator=generator) for _ in range(2))
    for ids_BN in (src_BS, tgt_BT):
        lengths_B = torch.randint(16, 33, (pairs,), generator=generator)
        ids_BN[torch.arange(33) >= lengths_B[:, None] + (ids_BN is tgt_BT)] = 0
    return src_BS[:, :32], tgt_BT[:, :-1] * (tgt_BT[:, 1:] != 0), tgt_BT[:, 1:]


def ours(size: dict[str, int]) -> tuple[nn.Module, Callable[[Batch], Tensor]]:
    knobs = {key: size[key] for key in ("d_model", "d_ff", "heads", "layers")}
    model = tfm.build("base", vocab=VOCAB, dropout=0.1, **knobs).train()

    def loss(batch: Batch) -> Tensor:
        src_BS, tgt_BT, labels_BT = batch
        kept = labels_BT != 0
        x_ND = model.trunk(src=src_BS, tgt=tgt_BT)[kept]
        total, *_ = smoothed_loss(
            model.head, model.head_parameters(), x_ND, labels_BT[kept], smoothing=SMOOTHING, chunk=chunk_size(x_ND)
        )
        return total / kept.sum()

    return model, loss


class TorchTransformer(nn.Module):
    """Wrap nn.Transformer with scaled embeddings, sinusoidal positions and one matrix for embeddings and output."""

    def __init__(self, size: dict[str, int]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, size["d_model"])
        self.position = Sinusoidal(size["d_model"])
        self.dropout = nn.Dropout(0.1)
        layers, heads = size["layers"], size["heads"]
        self.stacks = nn.Transformer(size["d_model"], heads, layers, layers, size["d_ff"], 0.1, batch_first=True)
        self.stacks.encoder.norm = self.stacks.decoder.norm = None
        nn.init.normal_(self.embedding.weight, std=size["d_model"] ** -0.5)

    def embed(self, ids_BN: Tensor) -> Tensor:
        return self.dropout(self.position(self.embedding(ids_BN) * self.embedding.embedding_dim**0.5))

    def forward(self, src_BS: Tensor, tgt_BT: Tensor) -> Tensor:
        future_TT = nn.Transformer.generate_square_subsequent_mask(tgt_BT.shape[1])
        pad_BS = torch.zeros(src_BS.shape).masked_fill(src_BS == 0, -torch.inf)
        x_BTD = self.stacks(
            self.embed(src_BS),
            self.embed(tgt_BT),
            tgt_mask=future_TT,
            src_key_padding_mask=pad_BS,
            memory_key_padding_mask=pad_BS,
            tgt_is_causal=True,
        )
        return F.linear(x_BTD, self.embedding.weight)


def torch_transformer(size: dict[str, int]) -> tuple[nn.Module, Callable[[Batch], Tensor]]:
    model = TorchTransformer(size).train()
    return model, lambda batch: dense_loss(model(batch[0], batch[1]), batch[2])


def marian(size: dict[str, int]) -> tuple[nn.Module, Callable[[Batch], Tensor]]:
    layers, heads, inner = size["layers"], size["heads"], size["d_ff"]
    config = MarianConfig(
        vocab_size=VOCAB, d_model=size["d_model"], encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=inner, decoder_ffn_dim=inner,
        dropout=0.1, activation_function="relu", scale_embedding=True, pad_token_id=0, eos_token_id=2,
        decoder_start_token_id=1, max_position_embeddings=64, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = MarianMTModel(config).train()

    def loss(batch: Batch) -> Tensor:
        src_BS, tgt_BT, labels_BT = batch
        logits_BTV = model(input_ids=src_BS, attention_mask=(src_BS != 0).long(), decoder_input_ids=tgt_BT).logits
        return dense_loss(logits_BTV, labels_BT)

    return model, loss


def dense_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=0, label_smoothing=SMOOTHING)


def speed(loss: Callable[[Batch], Tensor], optimizer: torch.optim.Optimizer, batch: Batch, bf16: bool) -> float:
    """Return the tokens/s of one step."""
    tokens = int((batch[0] != 0).sum() + (batch[2] != 0).sum())
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        total = loss(batch)
    total.backward()
    optimizer.step()
    optimizer.zero_grad()
    return tokens / (time.perf_counter() - start)


def measure(size: dict[str, int], steps: int, bf16: bool) -> dict[str, float]:
    """Return the median tokens/s of each side."""
    generator = torch.Generator().manual_seed(1)
    sides = {"tfm-blocks": ours(size), "torch": torch_transformer(size), "marian": marian(size)}
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) for name, (model, _) in sides.items()
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(steps + 2):
        batch = batch_of(size["pairs"], generator)
        for name, (_, loss) in sides.items():
            speeds[name].append(speed(loss, optimizers[name], batch, bf16))
    return {name: statistics.median(values[2:]) for name, values in speeds.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    arguments = parser.parse_args()
    speeds = measure(SIZES[arguments.size], arguments.steps, arguments.precision == "bf16")
    for name, speed in speeds.items():
        print(f"{name:12} {speed:8,.0f} tokens/s")
    print(f"ratio to the faster other: {speeds['tfm-blocks'] / max(speeds['torch'], speeds['marian']):.3f}")
