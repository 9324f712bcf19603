"""docs/runs.md has the keys that a run logs, docs/tracking.md the rest."""

from pathlib import Path

from tfm_blocks.tracking.metric_schema import FACTS, MEDIA, METRIC_KEYS, columns, find_key

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "runs.md"


def test_the_page_on_runs_has_every_key_with_its_unit_and_summary() -> None:
    rows = [
        line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(("| `train/", "| `val/", "| `test/"))
    ]
    assert rows == [f"| `{key.name}` | {key.unit} | {key.summary} |" for key in METRIC_KEYS]


def test_the_page_on_tracking_has_every_medium_and_fact() -> None:
    rows = [*((one.name, one.what) for one in MEDIA), *((f"facts.{one.name}", one.what) for one in FACTS)]
    text = "\n".join(f"| `{name}` | {what} |" for name, what in rows)
    assert f"\n{text}\n\n" in (DOCS / "tracking.md").read_text("utf-8")


def test_every_column_is_of_one_key() -> None:
    names = columns(["encoder.0.ffn"], ["de", "en"])
    assert len(names) == len(set(names))
    assert {find_key(name).name for name in names} == {key.name for key in METRIC_KEYS}
