"""The objective of ELECTRA, against transformers on the same weights, batch and samples."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, ElectraForPreTraining

import tfm_blocks as tfm
from tests.conftest import OBJECTIVES
from tests.exchange.published import VOCAB, publish, write_tokenizer
from tests.exchange.test_losses import their_loss
from tests.launch.test_resume import Losses
from tests.oracles.references import scatter
from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.encoding import write_packed
from tfm_blocks.data.layout import Batch
from tfm_blocks.data.noise import Masking
from tfm_blocks.data.objective_layouts import ReplacedTokens
from tfm_blocks.exchange.exporting import export_run
from tfm_blocks.exchange.importing import import_folder
from tfm_blocks.launch.check import check_run
from tfm_blocks.launch.job import train
from tfm_blocks.network.matching import fill, weights_of
from tfm_blocks.network.weights import attach_generator
from tfm_blocks.runs.checkpoints import average as average_weights
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.runs.model import read_network, read_tensors
from tfm_blocks.training.loss import sample_ids
from tfm_blocks.training.objective import ReplacedTokenObjective
from tfm_blocks.training.settings import LossSettings

TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")
HEAD = {"transform": "dense", "logits": "dense_prediction"}  # the discriminator's, here and in transformers


class Pair:
    """A generator and a discriminator of transformers with common embeddings, and the same weights here."""

    def __init__(self, folder):
        self.folder = folder
        self.their_generator = publish("electra", folder / "generator")
        self.body = publish("electra", folder / "body", hidden_size=32)  # the discriminator with a generator's head
        with torch.no_grad():
            self.their_generator.generator_lm_head.bias[
                0
            ] = -1e4  # no sample is padding, whose embedding is not trained
        for table in TABLES:
            shared = getattr(self.their_generator.electra.embeddings, table).weight
            getattr(self.body.electra.embeddings, table).weight = shared
        self.body.generator_lm_head.weight = self.body.electra.embeddings.word_embeddings.weight
        self.theirs = ElectraForPreTraining(self.body.config).eval()
        scatter(self.theirs)
        self.theirs.electra = self.body.electra
        generator, body, self.tokenizer = self.imported("weights")
        config, sizes = self.body.config, {"vocab": self.tokenizer.size, "first_id": generator.first_predicted}
        sizes |= {"d_model": 32, "d_ff": config.intermediate_size, "heads": config.num_attention_heads}
        sizes |= {"layers": config.num_hidden_layers, "max_length": config.max_position_embeddings}
        sizes |= {"d_embedding": config.embedding_size, "segments": config.type_vocab_size, "dropout": 0.0}
        self.network = tfm.build("electra_discriminator", **sizes)
        fill(self.network, self.ours(body))
        attach_generator(self.network, generator)

    def imported(self, name):
        """Return the two models as they are now, without the discriminator's head, and their tokenizer."""
        for part, model in (("generator", self.their_generator), ("body", self.body)):
            model.save_pretrained(self.folder / name / part)
            write_tokenizer(self.folder / name / part)
            import_folder(self.folder / name / part, self.folder / name / f"{part}-run")
        runs = [tfm.load(self.folder / name / f"{part}-run") for part in ("generator", "body")]
        return runs[0].network, runs[1].network, runs[0].tokenizer

    def ours(self, body, read=lambda parameter: parameter):
        """Return the weights of the discriminator by our addresses; `read` is applied to those of its head."""
        head = self.theirs.discriminator_predictions
        layers = {own: getattr(head, other) for own, other in HEAD.items()}
        heads = {
            f"{own}.block.{kind}": read(getattr(layer, kind))
            for own, layer in layers.items()
            for kind in ("weight", "bias")
        }
        return {name: heads.get(name, weights_of(body).get(name)) for name in weights_of(self.network)}


def batch_of(tokenizer, folder):
    """Return rows of hidden tokens with the words w4 to w29, and with w30 as mask."""
    ids = np.array(tokenizer.vocabulary.to_here(list(range(VOCAB))))
    hiding = Masking(
        rate=0.3, eval_rate=0.3, mask=0.85, random=0.0, static=False, mask_id=int(ids[30]), words_V2=None, draw=(1, 2),
        plain_V=np.isin(np.arange(tokenizer.size), ids[4:30]),
    )  # fmt: skip
    random = np.random.default_rng(0)
    documents = [" ".join(f"w{word}" for word in random.integers(4, 30, length)) for length in (150, 9)]
    folder.mkdir()
    write_packed(folder, "tgt", documents, tokenizer, context=14)
    corpus = Corpus(folder, tokenizer)
    rows = range(len(corpus) - 6, len(corpus))  # the last row is shorter
    return ReplacedTokens("src", "tgt", hiding).for_step(corpus, rows).batch(corpus, rows)


def naive_samples(pair, batch):
    """Return the ids with the samples of transformers' generator: the first id whose cumulated probability exceeds u."""
    published = torch.tensor([0, *pair.tokenizer.vocabulary.to_published([*range(1, pair.tokenizer.size)])])
    keep_BS = batch.inputs["src"] != 0
    with torch.no_grad():
        logits_BSV = pair.their_generator(published[batch.inputs["src"]], attention_mask=keep_BS.long()).logits
    ids_BS = torch.where(batch.labels_BT != 0, batch.labels_BT, batch.inputs["src"])
    first = pair.network.replacer.first_predicted
    for place, uniform in zip(batch.kept_N.tolist(), batch.uniforms_N.tolist(), strict=True):
        row, position = divmod(place, ids_BS.shape[1])
        p_V = torch.softmax(logits_BSV[row, position].double(), 0)[published[first:]]
        total, id = 0.0, first - 1
        while total <= uniform * float(p_V.sum()):
            id += 1
            total += float(p_V[id - first])
        ids_BS[row, position] = id
    return ids_BS, published


@pytest.mark.grid
def test_losses_and_gradients_equal_those_of_transformers(tmp_path):
    pair = Pair(tmp_path)
    batch = batch_of(pair.tokenizer, tmp_path / "corpus")
    objective = ReplacedTokenObjective(pair.network, 0.0)
    loss, sums = objective.loss(batch)
    (loss / batch.tokens).backward()
    ids_BS, published = naive_samples(pair, batch)
    original_BS = torch.where(batch.labels_BT != 0, batch.labels_BT, batch.inputs["src"])
    keep_BS, replaced_BS = batch.inputs["src"] != 0, ids_BS != original_BS
    assert batch.tokens == keep_BS.sum() and 0 < replaced_BS.sum() < len(batch.kept_N)
    decided, _, _ = objective.decisions(batch)
    assert torch.equal(decided.labels_BT, (1 + replaced_BS.long()) * keep_BS)
    generated = their_loss(pair.their_generator, batch, pair.tokenizer)
    options = {"attention_mask": keep_BS.long(), "labels": replaced_BS.long()}
    judged = pair.theirs(published[ids_BS], **options).loss
    (generated + 50 * judged).backward()
    expected = [judged, generated, generated, 50 * judged]  # the loss, -log p, and the weighted parts
    assert (sums / batch.tokens).tolist() == pytest.approx([one.item() for one in expected], rel=1e-5)
    assert loss.item() / batch.tokens == pytest.approx((generated + 50 * judged).item(), rel=1e-5)

    for model in (pair.their_generator, pair.body):  # an import is linear, so the import of their gradients has ours
        for parameter in model.parameters():
            if not getattr(parameter, "is_gradient", False):
                parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.is_gradient = True
    generator, body, _ = pair.imported("gradients")
    expected = pair.ours(body, lambda parameter: parameter.grad)
    expected |= {f"generator.{name}": gradient for name, gradient in weights_of(generator).items()}
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, parameter in pair.network.named_parameters():
        gradient = expected[name].view_as(parameter)
        assert (parameter.grad - gradient).abs().max() < 1e-5 * largest, name


@pytest.mark.grid
def test_no_gradient_of_the_decisions_reaches_the_generator(tmp_path):
    pair = Pair(tmp_path)
    batch = batch_of(pair.tokenizer, tmp_path / "corpus")
    losses = LossSettings(generator=0.0)
    ReplacedTokenObjective(pair.network, 0.0, None, losses).loss(batch)[0].backward()
    gradients = {name: one.grad for name, one in pair.network.named_parameters()}
    assert all(not gradient.any() for name, gradient in gradients.items() if name.startswith("generator."))
    assert gradients["src_emb.block.weight"].any()


def test_samples_have_the_distribution_of_the_generator():
    logits_V = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 2
    logits_V[0] = -torch.inf
    uniforms_N = (torch.arange(100_000) + 0.5) / 100_000
    ids_N = sample_ids(lambda x_ND: logits_V.expand(len(x_ND), -1), torch.zeros(100_000, 1), uniforms_N, chunk=4096)
    share_V = torch.bincount(ids_N, minlength=50) / 100_000
    assert (share_V - torch.softmax(logits_V, 0)).abs().max() < 2e-5
    edges = sample_ids(
        lambda x_ND: logits_V.expand(len(x_ND), -1), torch.zeros(2, 1), torch.tensor([0, 1 - 2**-24]), chunk=8
    )
    assert edges.tolist() == [1, 49]


def test_draws_are_uniform_and_depend_on_seed_epoch_and_row(tmp_path):
    tokenizer = Pair(tmp_path).tokenizer
    batch = batch_of(tokenizer, tmp_path / "corpus")
    again = batch_of(tokenizer, tmp_path / "again")
    assert torch.equal(batch.uniforms_N, again.uniforms_N) and len(batch.uniforms_N.unique()) == len(batch.kept_N)
    hiding = Masking(
        rate=0.15, eval_rate=0.15, mask=0.85, random=0.0, static=False, mask_id=1, words_V2=None,
        plain_V=np.ones(9, bool),
    )  # fmt: skip
    draws = [
        hiding.drawn(seed, epoch).uniforms(np.arange(250_000), 16, np.zeros(1, int))
        for seed in (1, 2)
        for epoch in (0, 1)
    ]
    shares = [np.histogram(draw, 10, (0, 1))[0] / 250_000 for draw in draws]
    assert np.abs(np.array(shares) - 0.1).max() < 3e-3
    assert np.abs(np.corrcoef(draws) - np.eye(4)).max() < 0.01


@pytest.mark.grid
@pytest.mark.parametrize("average", [[], ["trainer.ema=0.5"]])
def test_the_final_scores_are_those_of_the_best_validation_with_its_generator(small, tmp_path, average):
    """The validation after step 4 counts as the best one, and the final scores repeat it."""
    overrides = [*OBJECTIVES["replaced_token"], "data.test=null", "schedule.peak=0.1", "trainer.keep_last=2", *average]
    run = train(check_run(small(*overrides)), tmp_path, callbacks=[Losses({4: 1.0})])
    (best,) = (row for row in read_rows(run / "metrics.csv") if row["step"] == 4 and "val/loss" in row)
    scores = json.loads((run / "status.json").read_text())["scores"]
    assert scores["val/loss"] == pytest.approx(best["val/loss"], rel=1e-6)
    final = read_tensors(run / "weights.safetensors")
    assert not any(name.startswith("generator.") for name in final)
    assert any(name.startswith("generator.") for name in read_tensors(run / "checkpoints" / "best.safetensors"))
    assert all(
        torch.equal(final[name], tensor) for name, tensor in weights_of(read_network(run, checkpoint="best")).items()
    )
    assert read_tensors(average_weights(run, 2) / "weights.safetensors").keys() == final.keys()


@pytest.mark.grid
def test_a_trained_discriminator_leaves_as_a_model_of_transformers(small, tmp_path):
    run = train(check_run(small(*OBJECTIVES["replaced_token"])), tmp_path)
    architecture, certificate = export_run(run, tmp_path / "theirs")
    assert architecture == "ElectraForPreTraining"
    assert certificate.translations.equal == certificate.translations.sentences == 4
    theirs, ours = ElectraForPreTraining.from_pretrained(tmp_path / "theirs").eval(), tfm.load(run)
    read = AutoTokenizer.from_pretrained(tmp_path / "theirs")(
        ["3 May 2019", "Sonntag"], return_tensors="pt", padding=True
    )
    expected_BS, keep_BS = theirs(**read).logits.detach(), read["attention_mask"] == 1
    with torch.no_grad():
        logits_BS = ours.network(src=read["input_ids"].where(keep_BS, 0))[..., -1]
    torch.testing.assert_close(logits_BS[keep_BS], expected_BS[keep_BS], rtol=1e-5, atol=1e-5)
    import_folder(tmp_path / "theirs", tmp_path / "back")
    weights, again = weights_of(ours.network), weights_of(tfm.load(tmp_path / "back").network)
    assert all(torch.equal(weights[name], again[name]) for name in weights if "emb" not in name)


def test_layers_of_the_generator_are_recomputed_with_those_of_the_model():
    sizes = {"d_model": 8, "d_embedding": 8, "d_ff": 12, "heads": 2, "layers": 1, "vocab": 30}
    network = tfm.build("electra_discriminator", **sizes).train()
    attach_generator(network, tfm.build("electra", **sizes))
    network.recomputes = True
    runs = Counter()
    for name, module in network.named_modules():
        if name.endswith("ffn.block"):
            module.register_forward_hook(lambda *_, name=name: runs.update([name]))
    ids_BS = torch.full((2, 5), 7)
    batch = Batch({"src": ids_BS}, ids_BS, torch.arange(10), uniforms_N=torch.full((10,), 0.5))
    ReplacedTokenObjective(network, 0.0).loss(batch)[0].backward()
    assert runs == {"encoder.0.ffn.block": 2, "generator.encoder.0.ffn.block": 2}
