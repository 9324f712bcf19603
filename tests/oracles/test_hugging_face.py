"""Models of Hugging Face and ours, written as YAML, with the same weights: equal logits, equal greedy output."""

import pytest
import torch

from tests.oracles.references import REFERENCES, SIZES, both
from tfm_blocks.data.layout import BOS, EOS, PAD
from tfm_blocks.translation.search import Bounds, one_by_one

B, S, T, LONGEST = 8, 7, 6, 12

COUNT_NO_PADDING = ("m2m_100",)  # theirs number the positions after padding from the start

# One family each: decoders, encoder-decoders, experts, latent attention; the others differ in a block or a number.
DEFAULT = ("gpt2", "llama", "gemma2", "mixtral", "deepseek_v3", "marian", "t5")
oracles = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.grid]) for name in REFERENCES]
)


def ids(lengths, longest, side="right", seed=0):
    """Return random ids of sequences of these lengths, padded on this side."""
    ids_BN = torch.randint(3, SIZES["vocab"], (len(lengths), longest), generator=torch.Generator().manual_seed(seed))
    place_N = torch.arange(longest) if side == "right" else torch.arange(longest).flip(0)
    return ids_BN.masked_fill(place_N >= torch.tensor(lengths)[:, None], PAD)


def far_apart(actual, expected):
    """Return the largest difference relative to the largest value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@oracles
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_logits_are_equal_with_padding_in_all_sequences(name, side):
    if side == "left" and name in COUNT_NO_PADDING:
        pytest.skip("its positions depend on the padding")
    ours, theirs = both(name)
    inputs = {"src": ids([7, 4, 5], S, side), "tgt": ids([6, 3, 5], T, side, 1)}
    inputs = {one.name: inputs[one.name] for one in ours.spec.inputs}
    keep = {key: value != PAD for key, value in inputs.items()}
    logits_BTV = ours(**inputs, keep=keep if side == "left" else None)
    if "src" in inputs:
        arguments = {"input_ids": inputs["src"], "attention_mask": keep["src"].long()}
        arguments |= {"decoder_input_ids": inputs["tgt"], "decoder_attention_mask": keep["tgt"].long()}
    else:
        arguments = {"input_ids": inputs["tgt"], "attention_mask": keep["tgt"].long()}
    expected = theirs(**arguments, use_cache=False).logits
    assert far_apart(logits_BTV[keep["tgt"]], expected[keep["tgt"]]) < 1e-5


@oracles
@torch.no_grad()
def test_greedy_output_is_the_same_token_by_token(name):
    ours, theirs = both(name)
    pairs = len(ours.spec.inputs) == 2
    read_BN = ids([7, 4, 5, 6, 7, 3, 2, 5], S) if pairs else ids([S] * B, S)
    options = {"max_new_tokens": LONGEST, "do_sample": False, "suppress_tokens": [PAD, BOS]}
    out_BN = theirs.generate(read_BN, attention_mask=(read_BN != PAD).long(), **options)
    new_BN = out_BN[:, 1 if pairs else S :]
    expected = [[one for one in row if one not in (EOS, PAD)] for row in new_BN.tolist()]
    bounds = Bounds(torch.zeros(B).long(), torch.full((B,), LONGEST), torch.empty(B, 0).long())
    hypotheses = one_by_one(ours, {"src": read_BN} if pairs else {}, bounds, before_BN=None if pairs else read_BN)
    assert [one.ids for one in hypotheses] == expected
    assert len({token for row in expected for token in row}) > 3
