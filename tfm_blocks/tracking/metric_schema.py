"""Everything that a run logs: its metrics, with units and the value that stands for the run, its media, its facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tfm_blocks.runs.metrics import SECONDS, TOKENS

SummaryKind = Literal["min", "max", "last"]


@dataclass(frozen=True)
class Key:
    """One metric. `summary` is the value of a run that Weights & Biases shows in its tables.

    A name that ends in {node} or {group} is several keys: one for each block that adds a loss, or each group of the
    text.
    """

    name: str
    unit: str
    summary: SummaryKind

    @property
    def summarised(self) -> str:
        """The name of that value in W&B."""
        return self.name if self.summary == "last" else f"{self.name}.{self.summary}"


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


def _scores(split: str, sentences: str, best: bool) -> tuple[Key, ...]:
    low: SummaryKind = "min" if best else "last"
    high: SummaryKind = "max" if best else "last"
    return (
        Key(f"{split}/loss", "nats a target token, label-smoothed", low),
        Key(f"{split}/perplexity", "e^(nats a target token), not smoothed", low),
        Key(f"{split}/token_accuracy", "share of target tokens, 0 to 1", high),
        Key(f"{split}/bleu", f"sacreBLEU's BLEU of {sentences}, 0 to 100", high),
        Key(f"{split}/chrf", f"sacreBLEU's chrF of {sentences}, 0 to 100", high),
        Key(f"{split}/exact_match", f"share of {sentences}, 0 to 1", high),
        Key(f"{split}/length_ratio", f"pieces of {sentences} a piece of their references", "last"),
        Key(f"{split}/exact_match/{{group}}", f"share of {sentences} of the group, 0 to 1", high),
    )


IN_EVERY_ROW = frozenset({TOKENS, SECONDS})
METRIC_KEYS = (
    Key(
        "train/loss", "nats a target token, label-smoothed, without auxiliary losses; mean since the row before", "min"
    ),
    Key("train/perplexity", "e^(nats a target token), not smoothed; mean since the row before", "min"),
    Key(TOKENS, "target tokens that the run has read, those of skipped steps too; in every row", "max"),
    Key(SECONDS, "seconds of training, with validations and those before a resume; in every row", "max"),
    Key("train/lr", "learning rate of the last step", "last"),
    Key("train/gradient_norm", "L2 norm before clipping, of the last step that was taken", "last"),
    Key("train/gradient_norm_clipped", "the same after clipping", "last"),
    Key("train/tokens_per_second", "target tokens a second, of all ranks", "last"),
    Key("train/padding", "share of the token ids that are read, 0 to 1", "last"),
    Key("train/waiting", "share of the time that a rank waits for its next batches, 0 to 1", "last"),
    Key("train/skipped", "steps of the run whose loss or gradient was not finite", "last"),
    Key("train/aux_loss/{node}", "auxiliary loss of the block a target token; added to the minimised sum", "last"),
    *_scores("val", "the first translations", best=True),
    *_scores("test", "all translations", best=False),
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
