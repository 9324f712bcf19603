"""`tfm serve` of encoders: results equal the commands', in common batches, and unsuitable requests are refused."""

import asyncio

import pytest
import torch

import tfm_blocks as tfm
from tests.serving.clients import Client, serving
from tests.serving.test_limits import post_all
from tests.serving.test_serve import batches, post
from tfm_blocks.data.labels import LabelCoder
from tfm_blocks.data.tokenizer import MASK, Tokenizer
from tfm_blocks.serving.batcher import Job
from tfm_blocks.serving.readers import Reading, TextReader
from tfm_blocks.translation.classify import Classifier
from tfm_blocks.translation.encoder import Encoder
from tfm_blocks.translation.fill import Filler

TEXTS = ["ban den", f"fast {MASK} ban {MASK}", "", "den ban fast den den"]
SIZES = {"d_model": 16, "d_ff": 24, "heads": 2, "layers": 1, "seed": 3}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["ban den fast"] * 3, 300, special=[MASK])


@pytest.fixture(scope="module")
def filler(tokenizer):
    return Filler(tfm.build("encoder_only", vocab=tokenizer.size, **SIZES), tokenizer)


def classifier_of(tokenizer, predict):
    names = {"class": ("a", "b", "c"), "words": ("a", "b"), "several": ("a", "b"), "number": ()}[predict]
    knobs = {"classes": len(names) or 1, "pooling": "none" if predict == "words" else "mean"}
    network = tfm.build("classifier", vocab=tokenizer.size, **knobs, **SIZES)
    return Classifier(network, tokenizer, LabelCoder(predict, names))


def close(one, other):
    """Return True if two JSON values are equal, and their floats approximately."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return one == pytest.approx(other, abs=2e-6) if isinstance(one, float) else one == other


@pytest.mark.parametrize("predict", ["class", "several", "number", "words"])
def test_labels_are_those_of_classify_in_common_batches(tokenizer, predict):
    classifier = classifier_of(tokenizer, predict)
    texts = [text for text in TEXTS if text] if predict == "words" else TEXTS
    expected = [one.to_json(classifier.coder) for one in classifier.classify(texts)]
    with serving(TextReader(classifier), wait=0.3) as (port, batcher):
        before = batches(batcher)
        replies = post_all(port, "/classify", [{"texts": [text]} for text in texts] + [{"texts": texts}])
        count, total = (after - first for after, first in zip(batches(batcher), before, strict=True))
        embedded = post(port, "/embed", {"texts": texts, "pooling": "first"}).json()
    outputs = [output for reply in replies[:-1] for output in reply.json()["outputs"]]
    assert close(outputs, expected) and close(replies[-1].json()["outputs"], expected)
    assert total == 2 * len(texts) and count < total
    assert close(embedded["outputs"], classifier.embed(texts, pooling="first").tolist())


def test_vectors_and_filled_texts_are_those_of_the_commands(filler):
    with serving(TextReader(filler)) as (port, _):
        health = post(port, "/health", {})
        embedded, filled = (
            post(port, "/embed", {"texts": TEXTS}),
            post(port, "/fill", {"texts": TEXTS, "top": 3, "steps": 2}),
        )
    assert health.status_code == 405
    assert close(embedded.json()["outputs"], filler.embed(TEXTS).tolist())
    expected = [one.to_json() for one in filler.fill(TEXTS, top=3, steps=2)]
    assert close(
        filled.json()["outputs"], [{**one, "masks": [list(best) for best in one["masks"]]} for one in expected]
    )


def test_a_request_to_fill_masks_in_steps_can_stop_after_each_step(filler):
    reader, reading, seen = TextReader(filler), Reading("fill", steps=20), []
    tasks = reader.tasks([" ".join([MASK] * 20), MASK], "fill")

    def results(watch):
        return [task.place for task, _ in reader.run(tasks, reading, batch_tokens=4096, watch=watch)]

    assert results(lambda task, ids: seen.append(task.place) or len(seen) < 5) == []
    assert seen == [1, 0] * 3
    seen.clear()
    assert results(lambda task, ids: seen.append(task.place) or task.place == 0 or len(seen) < 3) == [1, 0]
    costs = [Job(tasks[:1], 1, Reading("fill", steps=steps)).cost for steps in (1, 2, 20, 1000)]
    assert costs == [21, 42, 20 * 21, 21 * 21]  # 20 masks and eos


def test_filled_targets_after_a_source_are_those_of_the_command(filler):
    """A run of masked diffusion on pairs reads a source, a tab and a target."""
    prompted = Filler(filler.network, filler.tokenizer, ("src",))
    texts = [f"ban den\t{MASK} fast {MASK}", f"fast\t{MASK}", f"\tden {MASK} {MASK}"]
    alone = filler.fill([text.partition("\t")[2] for text in texts], top=2, steps=2)
    with serving(TextReader(prompted), wait=0.3) as (port, _):
        filled = post(port, "/fill", {"texts": texts, "top": 2, "steps": 2}).json()["outputs"]
        wrong = post(port, "/fill", {"texts": [texts[0], f"ban {MASK}"]})
    expected = [one.to_json() for one in prompted.fill(texts, top=2, steps=2)]
    assert close(filled, [{**one, "masks": [list(best) for best in one["masks"]]} for one in expected])
    assert [one["text"].partition("\t")[0] for one in filled] == ["ban den", "fast", ""]
    assert not close([one["masks"] for one in filled], [one.to_json()["masks"] for one in alone])
    assert wrong.status_code == 422 and "1 tab-separated texts, but the run reads src, tgt" in wrong.text


def test_a_text_without_words_has_no_labels_of_words(tokenizer):
    classifier = classifier_of(tokenizer, "words")
    (alone,) = classifier.classify([""])
    with serving(TextReader(classifier)) as (port, _):
        served = post(port, "/classify", {"texts": ["", "ban den"]}).json()["outputs"]
    assert alone.label == "" and served[0] == {"label": "", "probabilities": []}
    assert len(served[1]["probabilities"]) == 2


@pytest.mark.parametrize(
    ("path", "body", "status", "rule"),
    [
        ("/classify", {"texts": ["ban"]}, 422, "was not trained to predict labels"),
        ("/translate", {"texts": ["ban"]}, 422, "is an encoder, which writes no text"),
        ("/generate", {"prompts": ["ban"]}, 422, "is an encoder, which writes no text"),
        ("/embed", {"texts": ["ban"] * 65}, 413, "number of texts must be at most 64"),
        ("/embed", {"texts": ["ban " * 30]}, 413, "tokens of text 1 must be at most 20"),
        ("/embed", {"texts": ["ban"], "pooling": "last"}, 422, "pooling Input should be 'mean' or 'first'"),
        ("/fill", {"texts": [MASK], "top": 17}, 413, "top must be at most 16"),
        ("/fill", {"texts": [MASK], "beam": 2}, 422, "beam Extra inputs"),
        ("/embed", {"texts": ["\ud800"]}, 422, ""),
    ],
)
def test_an_unsuitable_request_is_refused(filler, path, body, status, rule):
    with serving(TextReader(filler), tokens=20) as (port, _):
        code, reply = asyncio.run(Client(port).post(path, body))
    assert code == status and reply["error"]["help"]
    assert rule in f"{reply['error']['address']} {reply['error']['rule']}"


def test_a_translator_reads_no_text_for_labels(translator):
    with serving(translator) as (port, _):
        reply = post(port, "/embed", {"texts": ["Haus"]})
    assert reply.status_code == 422 and "not an encoder" in reply.json()["error"]["rule"]


def test_a_text_whose_outputs_are_not_finite_fails_alone(tokenizer):
    encoder = Encoder(tfm.build("encoder_only", vocab=tokenizer.size, **SIZES), tokenizer)
    (*_, id) = tokenizer.encode("fast")
    with torch.no_grad():
        encoder.network["src_emb"].block.weight[id] = torch.nan
    with serving(TextReader(encoder), wait=0.3) as (port, _):
        first, second = post_all(port, "/embed", [{"texts": ["ban", "fast", "den"]}, {"texts": ["fast"]}])
    outputs = first.json()["outputs"]
    assert outputs[1] is None and close([outputs[0], outputs[2]], encoder.embed(["ban", "den"]).tolist())
    assert first.json()["errors"][0]["address"] == "sentence 2"
    assert second.status_code == 500 and "not finite" in second.json()["error"]["rule"]
