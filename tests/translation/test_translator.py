"""Translating: order, blanks, batches; against a loop that runs the whole forward for every token."""

import pytest
import torch

import tfm_blocks as tfm
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import RunError
from tfm_blocks.translation.search import BOS, EOS, greedy, longest_output
from tfm_blocks.translation.translator import Translator

WORDS = ["ein", "kleines", "Haus", "steht", "am", "Fluss", "und", "zwei", "Kinder", "spielen", "davor"]


@pytest.fixture(scope="module")
def translator():
    torch.manual_seed(1)
    sentences = [" ".join(WORDS[: 1 + index % 11]) for index in range(50)]
    tokenizer = Tokenizer.train(sentences, 300)
    network = tfm.build("tiny", layers=2, d_model=32, d_ff=32, vocab=tokenizer.size, seed=3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.5)
    return Translator(network.eval(), tokenizer)


@torch.no_grad()
def naive_greedy(network, ids):
    """The whole model again for every token."""
    out = [BOS]
    while len(out) <= longest_output(len(ids) + 1):
        logits_V = network(src=torch.tensor([[*ids, EOS]]), tgt=torch.tensor([out]))[0, -1]
        logits_V[[0, BOS]] = -torch.inf
        out.append(int(logits_V.argmax()))
        if out[-1] == EOS:
            return out[1:-1]
    return out[1:]


def test_greedy_equals_running_the_whole_model_for_every_token(translator):
    ids = [translator.tokenizer.encode(" ".join(WORDS[start : start + 4])) for start in range(6)]
    width = max(map(len, ids)) + 1
    src_BS = torch.tensor([[*one, EOS] + [0] * (width - len(one) - 1) for one in ids])
    longest_B = torch.tensor([longest_output(len(one) + 1) for one in ids])
    found = greedy(translator.network, {"src": src_BS}, longest_B)
    assert found == [naive_greedy(translator.network, one) for one in ids]
    assert any(found)


def test_the_order_is_kept_and_blank_lines_stay_blank(translator):
    sentences = ["Haus und Kinder", "", "am Fluss", "  ", "ein kleines Haus steht am Fluss"]
    together = translator.translate(sentences, batch_tokens=20)
    assert together == [translator.translate([sentence])[0] for sentence in sentences]
    assert together[1] == together[3] == ""


def test_translating_leaves_the_mode_of_the_network_as_it_was(translator):
    translator.network.train()
    translator.translate(["Haus"])
    assert translator.network.training
    translator.network.eval()


def test_a_model_with_other_inputs_is_refused_with_the_reason(translator):
    network = tfm.build(
        "tiny",
        **{
            "layers": 1,
            "vocab": 40,
            "model.graph.src_emb.in": "img",
            "model.inputs.img": "B P",
            "model.inputs.src": None,
        },
    )
    with pytest.raises(RunError, match="the model reads img, tgt"):
        Translator(network, translator.tokenizer)
