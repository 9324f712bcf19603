"""Losses and gradients of imported models equal those of transformers, for the batches of each objective."""

import numpy as np
import pytest
import torch

import tfm_blocks as tfm
from tests.exchange.published import VOCAB, publish, write_tokenizer
from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.encoding import write_packed
from tfm_blocks.data.layout import OneSequence, PlainText, Sides
from tfm_blocks.data.noise import Masking
from tfm_blocks.data.objective_layouts import HiddenTokens, NoisyPairs
from tfm_blocks.data.pair_noise import Denoising, Prefix, SpanCorruption
from tfm_blocks.exchange.importing import import_folder
from tfm_blocks.training.objective import Objective

IGNORED = -100


def layout_for(objective, tokenizer):
    """Return the layout with ids of the published vocabulary as mask and sentinels."""
    ids = np.array(tokenizer.vocabulary.to_here(list(range(VOCAB))))
    words_V = np.isin(np.arange(tokenizer.size), ids[4:30])
    if objective == "next_token":
        return PlainText()
    if objective == "prefix_lm":
        return NoisyPairs(OneSequence(), "tgt", Prefix(draw=(1, 2)))
    if objective == "span_corruption":
        noise = SpanCorruption(density=0.15, span=3.0, sentinels=ids[:29:-1], draw=(1, 2))
        return NoisyPairs(Sides(["src"]), "tgt", noise)
    if objective == "masked":
        hiding = Masking(
            rate=0.3, eval_rate=0.3, mask=0.8, random=0.1, static=False, mask_id=int(ids[30]), plain_V=words_V, words_V2=None,
            draw=(1, 2),
        )  # fmt: skip
        return HiddenTokens("src", "tgt", hiding)
    options = {"mask": 0.3, "span": 3.5, "random": 0.1, "permute": 1.0, "rotate": 0.0, "insert": 0.0}
    noise = Denoising(mask_id=int(ids[30]), plain_V=words_V, words_V2=None, ends_V=~words_V, draw=(1, 2), **options)
    return NoisyPairs(Sides(["src"]), "tgt", noise)


def their_loss(theirs, batch, tokenizer):
    """Return the loss of transformers for the same tokens; ids that pad a row become ids that it ignores."""

    def published(ids_BT, padding):
        rows = [torch.tensor(tokenizer.vocabulary.to_published(row)) for row in ids_BT.tolist()]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)

    if "src" in batch.inputs:
        src_BS = published(batch.inputs["src"], 0)
        mask_BS = (torch.arange(src_BS.shape[1]) < (batch.inputs["src"] != 0).sum(1, keepdim=True)).long()
        if not theirs.config.is_encoder_decoder:
            labels = torch.tensor([*tokenizer.vocabulary.to_published([*range(1, tokenizer.size)])])
            labels_BS = torch.where(batch.labels_BT > 0, labels[batch.labels_BT - 1], IGNORED)
            return theirs(input_ids=src_BS, attention_mask=mask_BS, labels=labels_BS).loss
        labels_BT = published(batch.labels_BT, IGNORED)
        return theirs(input_ids=src_BS, attention_mask=mask_BS, labels=labels_BT).loss
    read, lengths_B = batch.inputs["tgt"], (batch.inputs["tgt"] != 0).sum(1)
    whole = [
        [*row[:n], label[n - 1]]
        for row, label, n in zip(read.tolist(), batch.labels_BT.tolist(), lengths_B, strict=True)
    ]
    ids_BT = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(tokenizer.vocabulary.to_published(row)) for row in whole], batch_first=True
    )
    labels_BT = ids_BT.clone()
    labels_BT[:, 1:][batch.labels_BT == 0] = IGNORED
    mask_BT = (torch.arange(ids_BT.shape[1]) <= lengths_B[:, None]).long()
    return theirs(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT).loss


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("t5", "span_corruption"),
        ("gpt2", "prefix_lm"),
        ("bert", "masked"),
        pytest.param("roberta", "masked", marks=pytest.mark.grid),
        pytest.param("electra", "masked", marks=pytest.mark.grid),
        pytest.param("modernbert", "masked", marks=pytest.mark.grid),
        pytest.param("t5_v1_1", "span_corruption", marks=pytest.mark.grid),
        pytest.param("bart", "denoising", marks=pytest.mark.grid),
        pytest.param("gpt2", "next_token", marks=pytest.mark.grid),
    ],
)
def test_the_loss_and_its_gradients_equal_those_of_transformers(name, objective, tmp_path):
    theirs = publish(name, tmp_path / "theirs")
    for key, parameter in theirs.named_parameters():
        if name.startswith("t5") and key.endswith(".q.weight"):  # T5 initialises queries for scores without 1/√d
            parameter.data *= 0.25
    theirs.save_pretrained(tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    translator = tfm.load(tmp_path / "run")
    network, tokenizer, random = translator.network, translator.tokenizer, np.random.default_rng(0)
    documents = [" ".join(f"w{word}" for word in random.integers(4, 30, 200))]
    (tmp_path / "corpus").mkdir()
    write_packed(tmp_path / "corpus", "tgt", documents, tokenizer, context=14)
    corpus = Corpus(tmp_path / "corpus", tokenizer)
    batch = layout_for(objective, tokenizer).batch(corpus, range(6))
    loss, _ = Objective(network, 0.0).loss(batch)
    (loss / batch.tokens).backward()
    expected = their_loss(theirs, batch, tokenizer)
    expected.backward()
    assert loss.item() / batch.tokens == pytest.approx(expected.item(), rel=1e-5)

    for parameter in theirs.parameters():  # an import is linear, so the import of their gradients has ours
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    theirs.save_pretrained(tmp_path / "gradients")
    write_tokenizer(tmp_path / "gradients")
    import_folder(tmp_path / "gradients", tmp_path / "imported")
    gradients = dict(tfm.load(tmp_path / "imported").network.named_parameters())
    largest = max(gradient.abs().max() for gradient in gradients.values())
    assert largest > 1e-3
    for address, parameter in network.named_parameters():
        if address != "logits.block.bias":  # a buffer in BART
            assert (parameter.grad - gradients[address]).abs().max() < 1e-5 * largest, address
