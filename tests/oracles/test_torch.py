"""torch's own nn.Transformer and ours, post-norm and pre-norm, with the same weights: logits, gradients, greedy output."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfm_blocks as tfm
from tests.oracles.references import SIZES, put, rows_of, scatter
from tests.oracles.test_hugging_face import far_apart, ids
from tfm_blocks.data.layout import BOS, EOS, PAD
from tfm_blocks.exchange.weights import Conversion
from tfm_blocks.network.matching import weights_of
from tfm_blocks.translation.search import Bounds, one_by_one

B, S, T, LONGEST = 8, 7, 6, 12
TABLES = {"tiny": "torch_post", "prenorm": "torch_pre"}

models = pytest.mark.parametrize("model", TABLES)


class Torchs(nn.Module):
    """nn.Transformer between a shared embedding and the output, with final norms for pre-norm."""

    def __init__(self, position, norm_first):
        super().__init__()
        self.position = [position]  # no part of the weights
        self.embedding = nn.Embedding(SIZES["vocab"], 16)
        self.stacks = nn.Transformer(16, 4, 2, 2, 28, 0.0, batch_first=True, norm_first=norm_first)
        if not norm_first:
            self.stacks.encoder.norm = self.stacks.decoder.norm = None

    def forward(self, src, tgt, keep_src, keep_tgt):
        src_BSD, tgt_BTD = (self.position[0](self.embedding(ids) * 4) for ids in (src, tgt))
        future_TT = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        pads = {"src_key_padding_mask": ~keep_src, "memory_key_padding_mask": ~keep_src}
        hidden_BTD = self.stacks(src_BSD, tgt_BTD, tgt_mask=future_TT, tgt_key_padding_mask=~keep_tgt, **pads)
        return hidden_BTD @ self.embedding.weight.T


def both(model, dtype=torch.float32):
    ours = tfm.build(model, **SIZES, dropout=0).to(dtype).eval()
    torch.manual_seed(1)
    theirs = Torchs(ours["src_pos"].block, model == "prenorm").to(dtype).eval()
    scatter(theirs)
    put(ours, translated(model, weights_of(theirs)))
    return ours, theirs


def translated(model, tensors):
    return Conversion(rows_of(TABLES[model]), SIZES).to_ours(tensors)[0]


@models
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_logits_are_equal_with_padding_in_both_sequences(model, side):
    ours, theirs = both(model)
    src_BS, tgt_BT = ids([7, 4, 5], S, side), ids([6, 3, 5], T, seed=1)  # before a target, torch's softmax has NaN
    keep = {"src": src_BS != PAD, "tgt": tgt_BT != PAD}
    logits_BTV = ours(src=src_BS, tgt=tgt_BT, keep={"src": keep["src"]} if side == "left" else None)
    expected = theirs(src_BS, tgt_BT, keep["src"], keep["tgt"])
    assert far_apart(logits_BTV[keep["tgt"]], expected[keep["tgt"]]) < 1e-5


def smoothed(logits_BTV, labels_BT):
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=PAD, label_smoothing=0.1)


@models
def test_the_gradient_of_every_parameter_is_equal(model):
    ours, theirs = both(model, torch.float64)
    src_BS, tgt_BT, labels_BT = ids([7, 4, 5], S), ids([6, 3, 5], T, seed=1), ids([6, 3, 5], T, seed=2)
    smoothed(ours.train()(src=src_BS, tgt=tgt_BT), labels_BT).backward()
    smoothed(theirs.train()(src_BS, tgt_BT, src_BS != PAD, tgt_BT != PAD), labels_BT).backward()
    slopes = translated(model, {name: one.grad for name, one in theirs.named_parameters()})
    assert slopes.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, slopes[name], rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@models
@torch.no_grad()
def test_greedy_output_is_the_same_token_by_token(model):
    ours, theirs = both(model)
    src_BS = ids([7, 4, 5, 6, 7, 3, 2, 5], S)
    out_BT = torch.full((B, 1), BOS)
    for _ in range(LONGEST):
        logits_BV = theirs(src_BS, out_BT, src_BS != PAD, out_BT >= 0)[:, -1]
        logits_BV[:, [PAD, BOS]] = -torch.inf
        out_BT = torch.cat([out_BT, logits_BV.argmax(1, keepdim=True)], 1)
    expected = [row[1 : row.index(EOS) if EOS in row else None] for row in out_BT.tolist()]
    bounds = Bounds(torch.zeros(B).long(), torch.full((B,), LONGEST), torch.empty(B, 0).long())
    assert [one.ids for one in one_by_one(ours, {"src": src_BS}, bounds)] == expected
    assert len({token for row in expected for token in row}) > 3
