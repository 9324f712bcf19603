"""Labels: the losses, gradients and scores of other libraries, the same data through all formats, and refused pairs."""

import json
import math
import re
from collections import Counter

import numpy as np
import pytest
import scipy.stats
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer as Pieces
from tokenizers import models, normalizers, trainers
from torchmetrics.functional import confusion_matrix, matthews_corrcoef, spearman_corrcoef
from torchmetrics.functional.classification import multiclass_f1_score, multilabel_accuracy, multilabel_f1_score
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

import tfm_blocks as tfm
from tests.conftest import expect_problem
from tests.oracles.references import READING, scatter
from tfm_blocks.cli import main
from tfm_blocks.data.labels import LabelCoder, encode_words
from tfm_blocks.data.layout import Batch, batch_of
from tfm_blocks.data.objective_layouts import layout_of
from tfm_blocks.data.objectives import LabelSettings
from tfm_blocks.data.prepare import prepare
from tfm_blocks.data.published_libraries import published_tokenizer
from tfm_blocks.data.settings import read_data
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.vocabulary import Vocabulary
from tfm_blocks.exchange.family import families
from tfm_blocks.exchange.weights import Conversion, read_weight_table
from tfm_blocks.network.matching import fill, weights_of
from tfm_blocks.report.baseline_tests import statistics_of_corpora
from tfm_blocks.report.comparison import compare_runs
from tfm_blocks.report.confusion import confusion_png, count_confusions
from tfm_blocks.runs.metrics import read_metric_names
from tfm_blocks.runs.row_results import read_translations
from tfm_blocks.scoring.corpus import MEASURES
from tfm_blocks.scoring.labels import label_statistics
from tfm_blocks.training.labels import LabelObjective, class_weights, label_scores
from tfm_blocks.translation.classify import Classifier

KNOBS = {"d_model": 16, "d_ff": 28, "heads": 4, "layers": 2, "vocab": 37, "max_length": 20, "dropout": 0.0}
NAMES = ("a", "b", "c")
TAGGER = """\
# @package _global_
defaults: [bert_classifier, _self_]
model: {graph: {pooler: null, squash: null}}
"""
HEADS = {"bert.pooler.dense.{kind}": "pooler.block.{kind}", "classifier.{kind}": "logits.block.{kind}"}


def both(predict, folder):
    """Return our classifier and transformers', with the same weights, and the table between them."""
    (folder / "tagger.yaml").write_text(TAGGER)
    words, outputs = predict == "words", 1 if predict == "number" else 3
    config = {**READING, "num_labels": outputs, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if predict == "several":
        config["problem_type"] = "multi_label_classification"
    theirs = (BertForTokenClassification if words else BertForSequenceClassification)(BertConfig(**config)).train()
    scatter(theirs)
    model = str(folder / "tagger.yaml") if words else "bert_classifier"
    ours = tfm.build(model, **KNOBS, classes=outputs, **({"pooling": "none"} if words else {}))
    rows = [row for row in families()["bert"].weights if row.theirs.startswith("bert.") and row.ours]
    conversion = Conversion([*rows, *read_weight_table(HEADS)])
    fill(ours, conversion.to_ours(weights_of(theirs))[0])
    return ours.train(), theirs, conversion


@pytest.mark.parametrize("predict", ["class", "several", "number", "words"])
def test_losses_and_gradients_are_those_of_transformers(predict, tmp_path):
    ours, theirs, conversion = both(predict, tmp_path)
    generator = torch.Generator().manual_seed(2)
    ids_BS = torch.randint(3, 37, (5, 8), generator=generator)
    ids_BS[torch.arange(8) >= torch.tensor([8, 5, 3, 8, 6])[:, None]] = 0
    keep_BS, labels_BS = (ids_BS != 0), torch.zeros_like(ids_BS)
    values_NC = None
    if predict == "words":
        labels_BS[:, ::2] = torch.randint(1, 4, (5, 4), generator=generator)
        labels_BS *= keep_BS
        expected = torch.where(labels_BS > 0, labels_BS - 1, -100)
    elif predict == "class":
        labels_BS[:, 0] = torch.randint(1, 4, (5,), generator=generator)
        expected = labels_BS[:, 0] - 1
    else:
        labels_BS[:, 0] = 1
        values_NC = torch.randn(5, 1 if predict == "number" else 3, generator=generator)
        values_NC = values_NC if predict == "number" else (values_NC > 0).float()
        expected = values_NC
    batch = batch_of({"src": ids_BS}, labels_BS)
    batch = Batch(batch.inputs, batch.labels_BT, batch.kept_N, values_NC=values_NC)
    objective = LabelObjective(ours, 0.0, None, coder=LabelCoder(predict, () if predict == "number" else NAMES))
    total, sums = objective.loss(batch)
    loss = total / len(batch.kept_N)
    loss.backward()
    output = theirs(input_ids=ids_BS, attention_mask=keep_BS.long(), labels=expected)
    output.loss.backward()
    assert loss.item() == pytest.approx(output.loss.item(), rel=1e-5)
    assert sums[0].item() == pytest.approx(total.item())
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    wanted = conversion.to_ours(gradients)[0]
    largest = max(gradient.abs().max() for gradient in wanted.values())
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - wanted[name]).abs().max() < 1e-5 * largest, name


def test_weights_of_classes_multiply_their_losses(tmp_path):
    ours, _, _ = both("class", tmp_path)
    labels_BS = torch.zeros(3, 4, dtype=torch.int64)
    labels_BS[:, 0] = torch.tensor([1, 2, 2])
    batch = batch_of({"src": torch.full((3, 4), 5)}, labels_BS)
    coder, weights_C = LabelCoder("class", NAMES), torch.tensor([4.0, 0.5, 1.0])
    plain, weighted = (
        LabelObjective(ours, 0.0, None, coder=coder, weights_C=weights).label_outputs(batch)[0]
        for weights in (None, weights_C)
    )
    torch.testing.assert_close(weighted, plain * torch.tensor([4.0, 0.5, 0.5]))


def test_balanced_weights_give_the_classes_of_a_mix_equal_sums_over_an_epoch(tmp_path):
    for name, label, rows in (("a", "pos", 30), ("b", "neg", 10)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.txt").write_text("".join(f"text {row} of {name}\n" for row in range(rows)))
        (tmp_path / name / "train.labels").write_text(f"{label}\n" * rows)
    files = {"src": "train.txt", "tgt": "train.labels"}
    mix = {name: {"dir": name, "weight": weight} for name, weight in (("a", 1), ("b", 3))}
    labelled = {"predict": "class", "labels": ["neg", "pos"], "train": files, "val": files, "test": None, "mix": mix}
    corpus = prepare(read_data({**OPTIONS, "dir": str(tmp_path), **labelled}), 280, tell=lambda text: None).train
    weights_C = class_weights(LabelSettings(name="label", weights="balanced"), corpus)
    epoch = corpus.read(1, 0)
    counts_C = np.bincount([epoch.ids("tgt", row)[0] for row in range(len(epoch))], minlength=3)[1:]
    assert counts_C.min() > 0 and counts_C[0] != counts_C[1]
    assert (weights_C * torch.tensor(counts_C)).tolist() == pytest.approx([len(epoch) / 2] * 2)


def drawn(predict, seed, rows=200):
    random = np.random.default_rng(seed)
    if predict == "number":
        return [f"{value:.3g}" for value in random.normal(size=rows)]
    if predict == "several":
        return [" ".join(name for name in NAMES if random.random() < 0.4) or "-" for _ in range(rows)]
    counts = random.integers(1, 5, rows) if predict == "words" else [1] * rows
    return [" ".join(random.choice(NAMES, size=count, p=[0.6, 0.3, 0.1])) for count in counts]


@pytest.mark.parametrize("predict", ["class", "several", "number", "words"])
def test_scores_are_those_of_torchmetrics(predict):
    coder = LabelCoder(predict, () if predict == "number" else NAMES)
    right = drawn(predict, 1)
    outputs = [
        one if place % 3 else other for place, (one, other) in enumerate(zip(right, drawn(predict, 2), strict=True))
    ]
    if predict == "words":
        outputs = [" ".join(reversed(text.split())) for text in right]
    scores, theirs = label_scores(outputs, right, coder), scores_of_torchmetrics(outputs, right, predict)
    assert scores == pytest.approx({name: float(score) for name, score in theirs.items()}, abs=1e-6)


def scores_of_torchmetrics(outputs, right, predict):
    if predict == "number":
        return {"spearman": spearman_corrcoef(*torch.tensor([list(map(float, texts)) for texts in (outputs, right)]))}
    if predict == "several":
        sides = (
            torch.tensor([[name in text.split() for name in NAMES] for text in texts]) for texts in (outputs, right)
        )
        sides = [side.int() for side in sides]
        f1 = multilabel_f1_score(*sides, 3, average="macro")
        return {"accuracy": multilabel_accuracy(*sides, 3, average="micro"), "f1": f1}
    output_N, right_N = class_numbers(outputs, right)
    return {
        "accuracy": (output_N == right_N).double().mean(),
        "f1": multiclass_f1_score(output_N, right_N, 3),
        "mcc": matthews_corrcoef(output_N, right_N, task="multiclass", num_classes=3),
    }


def class_numbers(*sides):
    return [torch.tensor([NAMES.index(name) for text in texts for name in text.split()]) for texts in sides]


@pytest.mark.parametrize("output", ["a", "b"])
def test_a_classifier_that_predicts_one_class_has_no_correlation(output):
    """torchmetrics reports 0.08 and -0.08."""
    scores = label_scores([output] * 1000, ["a"] * 900 + ["b"] * 100, LabelCoder("class", ("a", "b")))
    assert scores["mcc"] == 0.0


@pytest.mark.parametrize("predict", ["number", "class", "several"])
def test_statistics_of_a_corpus_of_a_mix_give_the_scores_of_its_lines(predict):
    """Ranks among all rows would give another correlation, since the numbers of the corpora have different ranges."""
    coder = LabelCoder(predict, () if predict == "number" else NAMES)
    outputs, right = drawn(predict, 1), drawn(predict, 2)
    corpora = ["a" if place % 3 else "b" for place in range(len(right))]
    if predict == "number":
        right = [f"{float(text) + (place % 3 == 0) * 9}" for place, text in enumerate(right)]
    parts = statistics_of_corpora(label_statistics(outputs, right, coder), corpora)
    for corpus in ("a", "b"):
        lines = [
            [text for text, own in zip(texts, corpora, strict=True) if own == corpus] for texts in (outputs, right)
        ]
        for name, score in label_scores(*lines, coder).items():
            value = float(MEASURES[name](parts[f"{name}/{corpus}"].sum(0)[None])[0])
            assert value == pytest.approx(score * (100 if name == "accuracy" else 1), abs=1e-5), name


def test_a_class_that_does_not_occur_counts_for_the_accuracy_of_several_and_not_for_f1():
    coder, outputs, right = LabelCoder("several", ("a", "b", "never")), ["a", "a b", "-"], ["a", "b", "-"]
    assert label_scores(outputs, right, coder) == pytest.approx({"accuracy": 8 / 9, "f1": (2 / 3 + 1) / 2})
    assert label_scores(["-"], ["-"], coder) == {"accuracy": 1.0, "f1": 0.0}


@pytest.mark.parametrize("predict", ["class", "words"])
def test_confusions_are_those_of_torchmetrics(predict):
    coder, right = LabelCoder(predict, NAMES), drawn(predict, 1)
    outputs = [" ".join(reversed(text.split())) for text in right] if predict == "words" else drawn(predict, 2)
    output_N, right_N = class_numbers(outputs, right)
    expected = confusion_matrix(output_N, right_N, task="multiclass", num_classes=3)
    assert count_confusions(coder, outputs, right).tolist() == expected.tolist()


def test_a_picture_reads_no_formulas_in_names_of_classes():
    coder = LabelCoder("class", (r"$\wrong{$", "b"))
    assert confusion_png(coder, np.array([[1, 2], [3, 4]])).startswith(b"\x89PNG")


TEXTS = ["a good film", "bad", "a day, was good", "so bad so"]
LABELS = {
    "class": ["pos", "neg", "pos", "neg"],
    "several": ["x", "-", "x y", "y"],
    "number": ["0.5", "-1", "2", "1e3"],
    "words": ["O P O", "N", "O O O P", "O N O"],
}
CLASSES = {"class": ["neg", "pos"], "several": ["x", "y"], "number": None, "words": ["O", "P", "N"]}
OPTIONS = {"kind": "labels", "max_length": 40, "step_tokens": 64, "batch_tokens": 128, "cache": "none"}


def typed(predict, label):
    """Return a label as JSON has it: a number, a list, or text."""
    if predict == "number":
        return float(label)
    return (
        label.split()
        if predict == "words"
        else []
        if label == "-"
        else label.split()
        if predict == "several"
        else label
    )


def corpora(folder, predict, **data):
    files = {"train": data["train"], "val": data["train"], "test": None}
    fields = {"fields": data.get("fields")}
    settings = {**OPTIONS, "dir": str(folder), "predict": predict, "labels": CLASSES[predict], **files, **fields}
    read = read_data(settings)
    assert read is not None
    return prepare(read, 300, tell=lambda text: None)


@pytest.mark.parametrize("predict", LABELS)
def test_lines_tsv_json_and_parquet_give_the_same_batches(predict, tmp_path):
    pairs = list(zip(TEXTS, LABELS[predict], strict=True))
    (tmp_path / "t.txt").write_text("".join(f"{text}\n" for text, _ in pairs))
    (tmp_path / "t.labels").write_text("".join(f"{label}\n" for _, label in pairs))
    (tmp_path / "t.tsv").write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in pairs))
    rows = [{"text": text, "label": typed(predict, label)} for text, label in pairs]
    (tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    fields = {"src": "text", "tgt": "label"}
    forms = [{"train": {"src": "t.txt", "tgt": "t.labels"}}]
    names = ["t.tsv", "t.jsonl"]
    try:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
        names.append("t.parquet")
    except ImportError:
        pass
    forms += [{"train": {"src": name, "tgt": name}, "fields": fields} for name in names]
    batches = []
    for form in forms:
        train = corpora(tmp_path, predict, **form).train
        layout = layout_of(train, ["src"], LabelSettings(name="label"))
        batches.append(layout.batch(train, range(4)))
        assert train.text["tgt"][0] == LABELS[predict][0]
    first, *others = batches
    assert len(first.kept_N) == (11 if predict == "words" else 4)
    for other in others:
        assert torch.equal(first.inputs["src"], other.inputs["src"]) and torch.equal(first.labels_BT, other.labels_BT)
        assert first.values_NC is None or torch.equal(first.values_NC, other.values_NC)
    if predict == "number":
        assert first.values_NC[:, 0].tolist() == [0.5, -1.0, 2.0, 1000.0]


@pytest.mark.parametrize(
    ("predict", "label", "rule"),
    [
        ("class", "good", "row 2 has the label 'good', which is none of data.labels: neg, pos"),
        ("number", "1,5", "row 2 must be a number within float32, but the label is '1,5'"),
        ("number", "nan", "row 2 must be a number within float32, but the label is 'nan'"),
        ("number", "1e39", "row 2 must be a number within float32, but the label is '1e39'"),
        ("words", "O O", "row 2 has 1 words, but 2 labels"),
        ("several", "x z", "row 2 has the label 'z', which is none of data.labels: x, y"),
    ],
)
def test_wrong_labels_are_errors_with_their_row(predict, label, rule, tmp_path):
    labels = [LABELS[predict][0], label, *LABELS[predict][2:]]
    (tmp_path / "t.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    (tmp_path / "t.labels").write_text("".join(f"{text}\n" for text in labels))
    with pytest.raises(tfm.DataError) as error:
        corpora(tmp_path, predict, train={"src": "t.txt", "tgt": "t.labels"})
    assert rule in str(error.value) and "data." in error.value.problems[0].address


@pytest.mark.parametrize("learned", ["bytes", "with a prefix space", "prepended"])
def test_words_have_the_tokens_of_their_text_and_begin_at_their_first_token(learned):
    lines = ["a red house and a blue boat"] * 20
    tokenizer = Tokenizer.train(lines, 300, add_prefix_space=learned == "with a prefix space")
    if learned == "prepended":  # as in tokenizer.json files of Llama
        pieces = Pieces(models.BPE(byte_fallback=True))
        pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        pieces.train_from_iterator(lines[0].split() * 20, trainers.BpeTrainer(vocab_size=60, special_tokens=["<s>"]))
        files = {"tokenizer.json": pieces.to_str().encode()}
        tokenizer = published_tokenizer(Vocabulary(pieces.get_vocab_size(), 0, 0), files, learned)
    ids, places = encode_words("a red  house", tokenizer)
    assert ids == tokenizer.encode("a red house")
    assert [tokenizer.piece(ids[place]).strip("▁Ġ")[:1] for place in places] == ["a", "r", "h"]


def write_texts(folder, rows=20):
    random = np.random.default_rng(3)
    begin = "more: " * (folder.name == "more")
    for split, count in (("train", 120), ("val", rows), ("test", rows)):
        pairs = [random.choice(["good", "bad"]) for _ in range(count)]
        (folder / f"{split}.txt").write_text("".join(f"{begin}the film was {word} today\n" for word in pairs))
        (folder / f"{split}.labels").write_text("".join(f"{'pos' if word == 'good' else 'neg'}\n" for word in pairs))


SMALL = [
    "objective=label", "data=labels", "data.labels=[neg,pos]", "d_model=16", "d_ff=16", "heads=2", "layers=1", "vocab=300",
    "logger=csv", "data.step_tokens=300", "data.batch_tokens=600", "trainer.steps=12", "trainer.validate_every=6",
    "schedule=linear", "schedule.peak=1e-2", "schedule.warmup=2",
]  # fmt: skip


@pytest.mark.grid
def test_a_run_learns_labels_classifies_embeds_and_is_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    run = tfm.train("classifier", overrides=[*SMALL, f"data.dir={tmp_path}", "name=labels"])
    assert run.scores["test/accuracy"] == run.scores["test/f1"] == run.scores["test/mcc"] == 1.0
    classifier = tfm.load(run.folder)
    assert isinstance(classifier, Classifier)
    texts = ["the film was good today", "bad", "the film was bad today"]
    assert [one.label for one in classifier.classify(texts)] == ["pos", "neg", "neg"]
    together, alone = classifier.embed(texts), torch.cat([classifier.embed([text]) for text in texts])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    capsys.readouterr()
    (tmp_path / "lines").write_text("\n".join(texts))
    main(["classify", str(run.folder), "lines", "--scores"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["label"] for row in rows] == ["pos", "neg", "neg"]
    assert all(sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5) for row in rows)
    main(["embed", str(run.folder), "lines", "-o", "vectors.npy"])
    np.testing.assert_allclose(np.load("vectors.npy"), together.numpy(), rtol=1e-4, atol=1e-5)
    main(["report", str(run.folder), "-o", "page.html"])
    page = (tmp_path / "page.html").read_text()
    matrix = page[page.index("Confusion matrices") :].split("</table>")[0]
    rights = Counter((tmp_path / "test.labels").read_text().split())
    rows = [re.findall(r'data-value="(\d+)', row) for row in matrix.split("<tr>")[2:]]
    assert rows == [[str(rights["neg"]), "0"], ["0", str(rights["pos"])]]
    short = [item for item in SMALL if not item.startswith(("trainer.", "schedule.warmup"))]
    short += ["trainer.steps=1", "schedule.warmup=1"]
    other = tfm.train("classifier", overrides=[*short, f"data.dir={tmp_path}", "name=other"])
    comparison = compare_runs([run.folder, other.folder], baseline="other")
    tests = {row.score: row for row in comparison.baseline_tests}
    assert {"accuracy", "f1", "mcc", "loss"} <= tests.keys()
    assert all(row.sentences is not None and 0 <= row.sentences <= 1 for row in tests.values())


@pytest.mark.parametrize("predict", ["class", pytest.param("number", marks=pytest.mark.grid)])
def test_labels_of_a_mix_are_scored_for_each_corpus_and_together(predict, tmp_path, monkeypatch):
    """The scores of a corpus are computed from its lines, which translations.jsonl contains in their order."""
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    (tmp_path / "more").mkdir()
    write_texts(tmp_path / "more", rows=9)
    options = ["data.mix={a: {}, b: {dir: more}}", f"data.dir={tmp_path}", "name=mixed", "schedule.peak=1e-4"]
    if predict == "number":
        for path in tmp_path.rglob("*.labels"):
            values = path.read_text().replace("pos", "1").replace("neg", "0").split()
            path.write_text("".join(f"{value}.{place}\n" for place, value in enumerate(values)))
        options += ["data.predict=number", "data.labels=null", "classes=1"]
    run = tfm.train(
        "classifier",
        overrides=[
            *(one for one in SMALL if "peak" not in one and (predict == "class" or "labels=" not in one)),
            *options,
        ],
    )
    names = ("accuracy", "f1", "mcc") if predict == "class" else ("spearman",)
    assert ("train/perplexity" in read_metric_names(run.folder / "metrics.csv")) == (predict == "class")
    lines, scores = read_translations(run.folder), run.scores
    of_b = [place for place, line in enumerate(lines) if line.source.startswith("more")]
    assert len(of_b) == 9 and len(lines) == 29
    coder = LabelCoder(predict, ("neg", "pos") if predict == "class" else ())
    parts = {"": range(29), "/a": [place for place in range(29) if place not in of_b], "/b": of_b}
    for suffix, places in parts.items():
        texts = ([getattr(lines[place], side) for place in places] for side in ("output", "reference"))
        expected = label_scores(*texts, coder)
        for name in names:
            assert scores[f"test/{name}{suffix}"] == pytest.approx(expected[name]), (name, suffix)
    assert {f"val/{names[0]}/a", f"val/{names[0]}/b", "val/loss/b"} <= scores.keys()
    halves = json.loads((run.folder / "status.json").read_text())["halves"]
    without = [lines[:place] + lines[place + 1 :] for place in range(29)]
    others = [label_scores([one.output for one in rest], [one.reference for one in rest], coder) for rest in without]
    for name in names[-2:]:  # the jackknife
        error = math.sqrt(28**2 / 29 * np.var([other[name] for other in others], ddof=1))
        assert halves[name] == pytest.approx(scipy.stats.t.ppf(0.975, 28) * error, rel=1e-3), name


@pytest.mark.grid
def test_loggers_get_the_confusion_matrices(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    kept = [item for item in SMALL if item != "logger=csv"]
    run = tfm.train("classifier", overrides=[*kept, f"data.dir={tmp_path}", "name=labels", "logger=tensorboard"])
    (events,) = run.folder.rglob("events*")
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    assert accumulator.Tags()["images"] == ["confusion/val", "confusion/test"]
    assert [image.step for image in accumulator.Images("confusion/val")] == [6, 12]


WRONG = {
    "data=text needs next_token": (["data=text"], "objective", "data.kind=text has none"),
    "plain text": (["data=lm"], "objective", "data.kind=lm has none"),
    "probe": (["data=parity", "model=probe_encoder"], "objective", "data.kind=probe has none"),
    "next_token": (["objective=next_token"], "objective", "reads a text"),
    "decoder": (["model=decoder_only"], "model.inputs", "reads tgt from left to right"),
    "pairs": (["model=base"], "model.inputs", "reads tgt from left to right"),
    "too few outputs": (["data.labels=[a,b,c]"], "model.graph.logits", "has 2 outputs from the id 1 on, but needs one for each of the 3"),
    "a number": (["data.predict=number", "data.labels=null"], "model.graph.logits", "needs one for a number"),
    "tokens": (["model=encoder_only"], "model.graph.logits", "from the id 0 on"),
    "pooled words": (["data.predict=words"], "model.graph.pool", "gives all words the same vector (mean)"),
    "weights": (["objective.weights={neg: 1.0}"], "objective.weights", "must have a weight for each of data.labels and no others, but 'pos' has none"),
    "a foreign weight": (["objective.weights={neg: 1.0, pos: 1.0, odd: 2.0}"], "objective.weights", "but 'odd' is not a label"),
    "an unknown weight": (["objective.weights=balance"], "objective.weights", "must be balanced, or a number above 0 for each class, but is 'balance'"),
    "a weight below 0": (["objective.weights={neg: -1, pos: 1}"], "objective.weights", "must be balanced, or a number above 0"),
    "weights of numbers as names": (["objective.weights={0: 2.0, neg: 1.0, pos: 1.0}"], "objective.weights", "but '0' is not a label"),
    "no classes": (["data.labels=null"], "data.labels", "must name at least 2 classes"),
    "a class": (["data.labels=[a]"], "data.labels", "must name at least 2 classes"),
    "twice": (["data.labels=[a,a]"], "data.labels", "names a more than once"),
    "spaces": (["data.labels=[a,'b c']", "data.predict=words"], "data.labels", "spaces separate the labels"),
    "the label of none": (["data.labels=['-',b]", "data.predict=several"], "data.labels", "has -, which is the label of a text of no class"),
    "smoothing of several": (["data.predict=several", "label_smoothing=0.1"], "label_smoothing", "but data.predict=several has none"),
    "smoothing of a number": (["data.predict=number", "data.labels=null", "classes=1", "label_smoothing=0.1"], "label_smoothing", "data.predict=number has none"),
    "names of numbers": (["data.predict=number"], "data.labels", "must be null"),
    "a third column": (["data.train={src: a, ctx: b, tgt: c}"], "data.train", "must have src for the texts and tgt"),
    "another source": (["data.fields={text: a, tgt: b}"], "data.fields", "must have src for the texts and tgt"),
    "rules of pairs": (["data.clean.max_ratio=3.0"], "data.clean", "compare the two sides of a pair"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_unfitting_graphs_and_data_are_refused_with_place_rule_and_fix(case, tmp_path):
    overrides, address, rule = WRONG[case]
    write_texts(tmp_path)
    base = ["objective=label", "data=labels", "data.labels=[neg,pos]", f"data.dir={tmp_path}", "model=classifier"]
    keys = {item.partition("=")[0] for item in overrides}
    kept = [item for item in base if item.partition("=")[0] not in keys]
    if any(item.startswith("data=") for item in overrides):
        kept = [
            item
            for item in kept
            if not item.startswith("data.") or (item.startswith("data.dir") and "data=parity" not in overrides)
        ]
    with expect_problem(address, rule, among=True):
        tfm.train(overrides=[*kept, *overrides])
