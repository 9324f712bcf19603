"""Every display of a metric reads the table of metrics."""

from pathlib import Path
from typing import get_args

import pytest

from tfm_blocks import metric_schema
from tfm_blocks.compose.folders import CONF
from tfm_blocks.data.objectives import HidingSettings, ObjectiveSettings
from tfm_blocks.metric_schema import (
    EQUAL_LOSS,
    FINAL_SCORES,
    HIDING,
    METRIC_KEYS,
    TRAIN_KEYS,
    Key,
    columns,
    find_key,
    find_score,
    keys_as_markdown,
)
from tfm_blocks.runs.metrics import summarise
from tfm_blocks.scoring.corpus import MEASURES
from tfm_blocks.sweep.settings import OptunaSettings
from tfm_blocks.tracking.dashboard import FACTS, LABEL_MEDIA, MEDIA, read_dashboard
from tfm_blocks.training.callbacks import score_news, train_news
from tfm_blocks.training.settings import EarlyStoppingSettings

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_of_logged_keys_is_made_from_the_table() -> None:
    assert (DOCS / "logged-keys.md").read_text("utf-8") == keys_as_markdown() + "\n"


def test_objectives_are_listed_by_what_they_predict() -> None:
    kinds = get_args(get_args(ObjectiveSettings)[0])
    names = {kind: get_args(kind.model_fields["name"].annotation)[0] for kind in kinds}
    assert {names[kind] for kind in kinds if issubclass(kind, HidingSettings)} == set(HIDING)
    assert {names[kind] for kind in kinds if kind.generates} == set(EQUAL_LOSS)


def test_progress_lines_have_the_texts_of_the_table() -> None:
    latest = {key.name: 0.5 for key in METRIC_KEYS}
    assert train_news(latest) == "loss 0.500  lr 5.00e-01  0 tokens/s  0 skipped"
    assert train_news(latest | {"train/skipped": 0.0}) == "loss 0.500  lr 5.00e-01  0 tokens/s"
    assert score_news({"val/loss": 1.0, "val/length_ratio": 1.0, "val/exact_match": 0.25}, "val") == (
        "val: loss 1.000, exact 25.0%"
    )


def test_the_best_value_follows_the_direction_of_the_table() -> None:
    rows = [{"step": step, "val/chrf": value, "val/loss": value} for step, value in ((1, 2.0), (2, 3.0), (3, 1.0))]
    assert {name: (best.value, best.step) for name, best in summarise(rows)["best"].items()} == {
        "val/chrf": (3.0, 2),
        "val/loss": (1.0, 3),
    }


def test_every_score_of_finished_models_has_a_formula() -> None:
    assert [score.name for score in FINAL_SCORES if score.kind != "scaled"] == list(MEASURES)


@pytest.mark.parametrize("key", metric_schema.VAL_KEYS, ids=lambda key: str(key.name))
def test_metrics_with_a_direction_can_be_monitored_and_searched_for(key: Key) -> None:
    how = {
        "name": None,
        "parallel": 1,
        "timeout": None,
        "retries": 0,
        "trials": 1,
        "seed": 0,
        "startup": 0,
        "halving": None,
        "together": [],
    }
    search = {"method": "optuna", **how, "metric": key.name}
    if key.summary == "last":
        with pytest.raises(ValueError, match="must be a validation metric that can improve"):
            EarlyStoppingSettings(monitor=key.name)
        with pytest.raises(ValueError, match="must be a validation metric that can improve"):
            OptunaSettings.model_validate(search)
    else:
        assert EarlyStoppingSettings(monitor=key.name).monitor == key.name
        expected = "maximize" if key.summary == "max" else "minimize"
        assert OptunaSettings.model_validate(search).direction == expected


def test_a_metric_without_a_panel_is_in_the_last_section_of_the_training_dashboard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dashboard = read_dashboard("training", [CONF])
    assert dashboard.all_sections == dashboard.sections
    monkeypatch.setattr("tfm_blocks.tracking.dashboard.TRAIN_KEYS", (*TRAIN_KEYS, Key("train/new", "as a test")))
    monkeypatch.setattr("tfm_blocks.tracking.dashboard.METRICS", {"train/new": Key("train/new", "as a test")})
    (panel,) = dashboard.all_sections["More"]
    assert panel.lines == ["train/new"]


def test_the_page_on_tracking_has_every_medium_and_fact() -> None:
    media = MEDIA | LABEL_MEDIA
    rows = [*media.items(), *((f"facts.{name}", description) for name, description in FACTS.items())]
    text = "\n".join(f"| `{name}` | {what} |" for name, what in rows)
    assert f"\n{text}\n\n" in (DOCS / "tracking.md").read_text("utf-8")


def test_every_column_is_of_one_key() -> None:
    text = columns(["encoder.0.ffn"], ["de", "en"], ["a", "b"])
    probe = columns(["encoder.0.ffn"], ["40", "64"], kinds=["answered"])
    labels = columns([], [], ["a"], kinds=["classes", "several", "number"])
    packed = columns([], [], ["a"], kinds=["documented"])
    for names in (text, probe, labels):
        assert len(names) == len(set(names))
    assert {find_key(name).name for name in (*text, *probe, *labels, *packed)} == {key.name for key in METRIC_KEYS}
    assert "test/accuracy@64" in probe and "test/accuracy" not in text and "test/bleu" not in probe


def test_each_corpus_of_a_mix_has_columns_and_scores() -> None:
    mixed = columns([], ["a", "b"], ["a", "b"])
    new = set(mixed) - set(columns([], ["a", "b"]))
    names = ("loss", "perplexity", "token_accuracy", "bleu", "chrf")
    assert new == {f"{split}/{name}/{part}" for split in ("val", "test") for name in names for part in "ab"}
    assert find_score("loss/a").key == "loss/a" and find_score("loss/a").better == "lower"
    for name in ("nothing/a", "", "/a"):
        with pytest.raises(KeyError):
            find_score(name)


def test_a_score_is_found_by_its_key_and_by_its_name_in_tables() -> None:
    for score in FINAL_SCORES:
        assert {find_score(name) for name in score.names} == {score} and score.display in score.names
    assert find_score("bits per byte/a") == find_score("bits_per_byte/a")
    assert find_score("bits per byte/a").heading == "bits per byte/a" and find_score("f1").heading == "F1"
