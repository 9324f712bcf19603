"""The table of metrics: name, unit, direction and digits of all that is logged or scored, and where it is shown.

Every other module reads it, so a new metric is a row here and the code that computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

SummaryKind = Literal["min", "max", "last"]

TOKENS = "train/tokens"
SECONDS = "train/seconds"
SPEED = "train/tokens_per_second"
SKIPPED = "train/skipped"
OBJECTIVE = "val/loss"  # decides which weights are the best, and what a search minimises by default


@dataclass(frozen=True)
class Key:
    """One metric that runs log.

    summary: the value of a run that Weights & Biases shows in its tables. min: lower values are better; max: higher
    values are better, or the metric only grows; last: neither.
    form: its format in tables with fixed digits. progress: its text on progress lines, or "".
    best: `tfm compare` and `tfm show` have a column for its best validation. chart: `tfm report` draws it.
    headline: `tfm runs` shows the measured metric with the lowest number. translated: it needs translations.

    A name that ends in {node} or {group} is several keys: one for each block that adds a loss, or each group of the
    text.
    """

    name: str
    unit: str
    summary: SummaryKind = "last"
    form: str = "{:.4f}"
    progress: str = ""
    best: bool = False
    chart: bool = False
    headline: int | None = None
    translated: bool = False

    @property
    def summarised(self) -> str:
        """The name of that value in W&B."""
        return self.name if self.summary == "last" else f"{self.name}.{self.summary}"


@dataclass(frozen=True)
class FinalScore:
    """A score of the finished model, by which `tfm compare`, `tfm show` and `tfm report` compare runs.

    kind: corpus: sacreBLEU computes it, with an interval and a signature; fraction: a logged fraction, in percent, with
    an interval; token: a logged value without an interval. key: the name under which the split logs it.
    mean, difference: formats of the tables over seeds, which leave out a score without `mean`, and against a baseline.
    """

    name: str
    kind: Literal["corpus", "fraction", "token"]
    better: Literal["lower", "higher"]
    key: str = ""
    mean: str = "{:.2f}"
    difference: str = "{:+.2f}"


@dataclass(frozen=True)
class Medium:
    """What is no number, logged at each validation."""

    name: str
    what: str


@dataclass(frozen=True)
class Fact:
    """What is known of a run from its start, beside its config: `facts.NAME`."""

    name: str
    what: str


IN_EVERY_ROW = frozenset({TOKENS, SECONDS})
TRAIN_KEYS = (
    Key(
        "train/loss",
        "nats a target token, label-smoothed, without auxiliary losses; mean since the row before",
        "min",
        progress="loss {:.3f}",
        chart=True,
    ),
    Key("train/perplexity", "e^(nats a target token), not smoothed; mean since the row before", "min"),
    Key(TOKENS, "target tokens that the run has read, those of skipped steps too; in every row", "max"),
    Key(SECONDS, "seconds of training, with validations and those before a resume; in every row", "max"),
    Key("train/lr", "learning rate of the last step", progress="lr {:.2e}", chart=True),
    Key("train/gradient_norm", "L2 norm before clipping, of the last step that was taken"),
    Key("train/gradient_norm_clipped", "the same after clipping"),
    Key(SPEED, "target tokens a second, of all ranks", form="{:,.0f}", progress="{:,.0f} tokens/s"),
    Key("train/padding", "share of the token ids that are read, 0 to 1"),
    Key("train/waiting", "share of the time that a rank waits for its next batches, 0 to 1"),
    Key(SKIPPED, "steps of the run whose loss or gradient was not finite", progress="{:.0f} skipped"),
    Key("train/aux_loss/{node}", "auxiliary loss of the block a target token; added to the minimised sum"),
)
SPLIT_KEYS = (  # of val/ and test/
    Key(
        "loss",
        "nats a target token, label-smoothed",
        "min",
        progress="loss {:.3f}",
        best=True,
        chart=True,
        headline=4,
    ),
    Key("perplexity", "e^(nats a target token), not smoothed", "min", progress="perplexity {:.2f}", headline=3),
    Key("token_accuracy", "share of target tokens, 0 to 1", "max", progress="tokens {:.1%}"),
    Key(
        "bleu",
        "sacreBLEU's BLEU of TEXTS, 0 to 100",
        "max",
        progress="BLEU {:.2f}",
        best=True,
        chart=True,
        headline=1,
        translated=True,
    ),
    Key("chrf", "sacreBLEU's chrF of TEXTS, 0 to 100", "max", progress="chrF {:.2f}", chart=True, translated=True),
    Key(
        "exact_match",
        "share of TEXTS, 0 to 1",
        "max",
        progress="exact {:.1%}",
        best=True,
        chart=True,
        headline=2,
        translated=True,
    ),
    Key("length_ratio", "pieces of TEXTS a piece of their references", translated=True),
    Key("exact_match/{group}", "share of TEXTS of the group, 0 to 1", "max", translated=True),
)


def _of_split(split: str, texts: str) -> list[Key]:
    return [replace(key, name=f"{split}/{key.name}", unit=key.unit.replace("TEXTS", texts)) for key in SPLIT_KEYS]


VAL_KEYS = _of_split("val", "the first translations")
TEST_KEYS = [replace(key, summary="last", best=False, chart=False) for key in _of_split("test", "all translations")]
METRIC_KEYS = (*TRAIN_KEYS, *VAL_KEYS, *TEST_KEYS)
IMPROVABLE = {key.name: key for key in VAL_KEYS if key.summary != "last"}  # a search or early stopping can follow these
FINAL_SCORES = (
    FinalScore("exact match", "fraction", "higher", key="exact_match"),
    FinalScore("BLEU", "corpus", "higher"),
    FinalScore("chrF", "corpus", "higher"),
    FinalScore("TER", "corpus", "lower"),
    FinalScore("loss", "token", "lower", key="loss", mean="", difference="{:+.4f}"),
    FinalScore("perplexity", "token", "lower", key="perplexity", difference="{:+.4f}"),
)
MEDIA = (
    Medium(
        "samples/val", "table of source, output and reference of the first validation sentences, each time the same"
    ),
    Medium("samples/test", "the same of the test set, once"),
    Medium("attention/1", "picture of what each head looks at in a short validation sentence, each time the same"),
    Medium("attention/2", "the same of another sentence"),
)
FACTS = (
    Fact("model", "the name of the model"),
    Fact("parameters", "how many, tied and shared ones counted once"),
    Fact("parameters_asked", "the same with the vocabulary that was asked for, as `tfm show` counts"),
    Fact("parameters_by_node", "of each node's address"),
    Fact("config_hash", "equal for runs that differ in their seed alone, or in what a resumed run may change"),
    Fact("git_commit", "of the folder in which the run was started, with -dirty where files differ from it"),
    Fact("seed", "of weights, order and dropout"),
    Fact("resumed", "how often"),
    Fact("command", "the newest command line"),
    Fact("hardware", "device, its name, devices, nodes, processor cores"),
    Fact("precision", "its name, the reason, and for `auto` on a CPU the measured milliseconds of both"),
    Fact("versions", "of Python and the libraries"),
)


def columns(nodes: Sequence[str], groups: Sequence[str]) -> list[str]:
    """The keys of a run whose blocks at `nodes` add a loss, and whose text has these groups."""
    return [name for key in METRIC_KEYS for name in _expand(key.name, nodes, groups)]


def _expand(name: str, nodes: Sequence[str], groups: Sequence[str]) -> Iterator[str]:
    head, brace, kind = name.partition("{")
    if not brace:
        yield name
        return
    for one in nodes if kind == "node}" else groups:
        yield head + one


def find_key(name: str) -> Key:
    """The key that a logged name is of. Raises KeyError where the contract has none."""
    for key in METRIC_KEYS:
        head, brace, _ = key.name.partition("{")
        if name == key.name or (brace and name.startswith(head)):
            return key
    raise KeyError(name)


def markdown() -> str:
    """Return docs/logged-keys.md."""
    keys = [f"| `{key.name}` | {key.unit} | {key.summary} |" for key in METRIC_KEYS]
    scores = [f"| {score.name} | {score.better} |" for score in FINAL_SCORES]
    return "\n".join(
        [
            "# Logged keys\n",
            "Made by `python -m tfm_blocks.metric_schema > docs/logged-keys.md` from the table that all commands read.",
            "W&B shows the summary of a run in its tables. Samples, pictures and facts: [tracking.md](tracking.md).\n",
            *("| key | unit | summary |", "|---|---|---|", *keys),
            "\n[comparing.md](comparing.md) compares these scores of finished models:\n",
            *("| score | better |", "|---|---|", *scores),
        ]
    )


if __name__ == "__main__":
    print(markdown())
