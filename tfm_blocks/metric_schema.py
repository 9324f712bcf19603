"""The table of metrics: the name, unit, direction and format of each metric, and where it is shown.

All other modules read it. To add a metric, add a row here and the code that computes it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

SummaryKind = Literal["min", "max", "last"]

TOKENS = "train/tokens"
SECONDS = "train/seconds"
SPEED = "train/tokens_per_second"
SKIPPED = "train/skipped"
BITS_PER_BYTE = "bits_per_byte"  # compares language models of different tokenizers
PSEUDO = "pseudo-perplexity"  # of an encoder
OBJECTIVE = "val/loss"  # selects the best weights, and is the default objective of a search


@dataclass(frozen=True)
class Key:
    """One logged metric.

    summary: the value that Weights & Biases shows for a run in its tables. min: lower values are better; max: higher
    values are better, or the metric only grows; last: neither.
    form: format in tables with fixed digits. progress: format on progress lines, or "".
    best: `tfm compare` and `tfm show` have a column for the best validation. chart: `tfm report` plots it.
    headline: `tfm runs` shows the measured metric with the lowest number. kinds: the kinds of runs, one of which it
    requires. translated: the texts are translated; answered: of a probe task; documented: of a language model of packed
    text; tokens: neither of a probe task nor of labels; replaced: of objective=replaced_token; probabilities: the loss
    is -log p of tokens or classes; classes (class and words), several, number: of objective=label, by data.predict.

    A name that ends in {node}, {group}, {corpus} or {length} stands for several keys: one for each block with an
    auxiliary loss, each group of the text, each corpus of a mix, or each test length of a probe task.
    """

    name: str
    unit: str
    summary: SummaryKind = "last"
    form: str = "{:.4f}"
    progress: str = ""
    best: bool = False
    chart: bool = False
    headline: int | None = None
    kinds: Sequence[str] = ()

    def is_of(self, kinds: Collection[str]) -> bool:
        """Return True if a run of these kinds measures it."""
        return not self.kinds or any(kind in kinds for kind in self.kinds)

    @property
    def summarised(self) -> str:
        """Return the name of the summary value in W&B."""
        return self.name if self.summary == "last" else f"{self.name}.{self.summary}"


@dataclass(frozen=True)
class FinalScore:
    """A score of the finished model that `tfm compare`, `tfm show` and `tfm report` show.

    kind: corpus: computed by sacreBLEU, with an interval and a signature; documents: the same, but not by sacreBLEU;
    fraction: a logged fraction, in percent, with an interval; scaled: a fraction scaled by chance, in percent, which is
    tested as the fraction; token: a logged value without an interval; solved: 100 for a seed that solved its task, else
    0. key: its name in the log of the split.
    mean: format in tables over seeds, or "" to omit it there. difference: format in tables against a baseline.
    cell: format in the matrix of models and tasks. low, high: the possible scores. title: the name in tables, if it is
    another one.
    """

    name: str
    kind: Literal["corpus", "documents", "fraction", "scaled", "token", "solved"]
    better: Literal["lower", "higher"]
    key: str = ""
    mean: str = "{:.2f}"
    difference: str = "{:+.2f}"
    cell: str = "{:z.1f}"
    low: float = 0.0
    high: float = 100.0
    title: str = ""

    @property
    def display(self) -> str:
        """Return the name in tables, such as `bits per byte`, or `bits per byte/NAME` for a corpus of a mix."""
        base, slash, corpus = self.name.partition("/")
        return f"{self.title or base}{slash}{corpus}"

    @property
    def names(self) -> set[str]:
        """Return the names by which `find_score` finds it."""
        return {self.name, self.key, self.title} - {""}

    @property
    def in_percent(self) -> bool:
        """Return True if the score is 100 times the logged fraction."""
        return self.kind in ("fraction", "scaled", "solved")

    @property
    def heading(self) -> str:
        """Return the name with the unit."""
        return f"{self.display}, %" if self.in_percent else self.display


TRANSLATION = ("translated", "tokens", "probabilities")  # the kinds of a run that translates
DECIDED = ("classes", "several")  # the kinds of a run whose outputs are decisions on classes
LOSS = "nats per target token, label-smoothed"
PERPLEXITY = "e^(nats per target token), not smoothed"
IN_EVERY_ROW = frozenset({TOKENS, SECONDS})
TRAIN_KEYS = (
    Key(
        "train/loss",
        f"{LOSS}, without auxiliary losses; mean since the previous row",
        "min",
        progress="loss {:.3f}",
        chart=True,
    ),
    Key("train/perplexity", f"{PERPLEXITY}; mean since the previous row", "min", kinds=("probabilities", "replaced")),
    Key(TOKENS, "target tokens read so far, skipped steps included; in every row", "max"),
    Key(SECONDS, "seconds of training so far, with validations and the time before a resume; in every row", "max"),
    Key("train/lr", "learning rate of the last step", progress="lr {:.2e}", chart=True),
    Key("train/gradient_norm", "L2 norm before clipping, of the last step that was not skipped"),
    Key("train/gradient_norm_clipped", "L2 norm after clipping, of the same step"),
    Key(SPEED, "target tokens per second, of all ranks", form="{:,.0f}", progress="{:,.0f} tokens/s"),
    Key("train/padding", "fraction of the input ids that are padding, 0 to 1"),
    Key("train/waiting", "fraction of the time that ranks wait for batches, 0 to 1"),
    Key(SKIPPED, "steps of the run whose loss or gradient was not finite", progress="{:.0f} skipped"),
    Key(
        "train/aux_loss/{node}",
        "auxiliary loss of the block, or a part of the objective such as `z_loss` or `generator`, per target token; "
        "part of the minimised sum",
    ),
)
SPLIT_KEYS = (  # of val/ and test/
    Key("loss", LOSS, "min", progress="loss {:.3f}", best=True, chart=True, headline=6),
    Key("perplexity", PERPLEXITY, "min", progress="perplexity {:.2f}", headline=5, kinds=("probabilities",)),
    Key(
        BITS_PER_BYTE,
        "bits per byte of the text of `data=lm`, in which the end of each document counts as a byte",
        "min",
        progress="{:.3f} bits per byte",
        kinds=("documented",),
    ),
    Key(
        "token_accuracy",
        "fraction of target tokens that are ranked first, or of right decisions of `objective=replaced_token`, 0 to 1",
        "max",
        progress="tokens {:.1%}",
        kinds=("tokens",),
    ),
    Key(
        "bleu",
        "sacreBLEU's BLEU of TEXTS, 0 to 100",
        "max",
        progress="BLEU {:.2f}",
        best=True,
        chart=True,
        headline=1,
        kinds=("translated",),
    ),
    Key(
        "chrf", "sacreBLEU's chrF of TEXTS, 0 to 100", "max", progress="chrF {:.2f}", chart=True, kinds=("translated",)
    ),
    Key(
        "exact_match",
        "fraction of TEXTS that equal their references, 0 to 1",
        "max",
        progress="exact {:.1%}",
        best=True,
        chart=True,
        headline=2,
        kinds=("translated",),
    ),
    Key("length_ratio", "tokens of TEXTS per token of their references", kinds=("translated",)),
    Key("exact_match/{group}", "exact match of TEXTS of the group, 0 to 1", "max", kinds=("translated",)),
    Key("loss/{corpus}", "the loss of a corpus of `data.mix`", "min"),
    Key("perplexity/{corpus}", "the perplexity of a corpus of `data.mix`", "min", kinds=("probabilities",)),
    Key(f"{BITS_PER_BYTE}/{{corpus}}", "bits per byte of a corpus of `data.mix`", "min", kinds=("documented",)),
    Key("token_accuracy/{corpus}", "the token accuracy of a corpus of `data.mix`, 0 to 1", "max", kinds=("tokens",)),
    Key("bleu/{corpus}", "BLEU of TEXTS of a corpus of `data.mix`, 0 to 100", "max", kinds=("translated",)),
    Key("chrf/{corpus}", "chrF of TEXTS of a corpus of `data.mix`, 0 to 100", "max", kinds=("translated",)),
    *(
        Key(f"{name}/{{corpus}}", f"`{name}` of a corpus of `data.mix`", "max", kinds=kinds)
        for name, kinds in (("accuracy", DECIDED), ("f1", DECIDED), ("mcc", ("classes",)), ("spearman", ("number",)))
    ),
)
ANSWER_KEYS = (  # of val/ and test/, and in test/ also for each length
    Key(
        "accuracy",
        "fraction of the tokens of an answer, or of the labels, that are correct, mean over answers or labels, 0 to 1; "
        "if a text has several labels, of the decisions on each class of each text",
        "max",
        progress="accuracy {:.1%}",
        best=True,
        chart=True,
        headline=3,
        kinds=("answered", *DECIDED),
    ),
    Key("exact", "fraction of entirely correct answers, 0 to 1", "max", progress="exact {:.1%}", kinds=("answered",)),
    Key("scaled_accuracy", "(accuracy - c) / (1 - c), for the accuracy c of guesses", "max", kinds=("answered",)),
    Key(
        "teacher_forced_accuracy",
        "accuracy of the tokens of generated answers if all earlier tokens are the correct ones, 0 to 1",
        "max",
        progress="teacher-forced {:.1%}",
        kinds=("answered",),
    ),
)
LABEL_KEYS = (  # of val/ and test/
    Key(
        "f1",
        "F1 of a class, mean over occurring classes, 0 to 1",
        "max",
        progress="F1 {:.3f}",
        best=True,
        kinds=DECIDED,
    ),
    Key("mcc", "Matthews' correlation of classes, -1 to 1", "max", progress="MCC {:.3f}", kinds=("classes",)),
    Key(
        "spearman",
        "Spearman's rank correlation of numbers, -1 to 1",
        "max",
        progress="Spearman {:.3f}",
        best=True,
        chart=True,
        headline=4,
        kinds=("number",),
    ),
)


def _of_split(split: str, texts: str) -> list[Key]:
    keys = (*SPLIT_KEYS, *ANSWER_KEYS, *LABEL_KEYS)
    return [replace(key, name=f"{split}/{key.name}", unit=key.unit.replace("TEXTS", texts)) for key in keys]


def _small_score(
    name: str, title: str, better: Literal["lower", "higher"], low: float = 0.0, high: float = 1.0
) -> FinalScore:
    """Return a logged value without an interval that is shown with four decimals."""
    return FinalScore(name, "token", better, name, "{:.4f}", "{:+.4f}", "{:.4f}", low, high, title)


VAL_KEYS = _of_split("val", "the first translations")
TEST_KEYS = [replace(key, summary="last", best=False, chart=False) for key in _of_split("test", "all translations")]
TEST_KEYS += [
    replace(
        key,
        name=f"{key.name}@{{length}}",
        unit=f"`{key.name}` on test examples of this length",
        progress="",
        headline=None,
    )
    for key in TEST_KEYS
    if "answered" in key.kinds
]
METRIC_KEYS = (*TRAIN_KEYS, *VAL_KEYS, *TEST_KEYS)
IMPROVABLE = {key.name: key for key in VAL_KEYS if key.summary != "last"}  # a search or early stopping can follow these
TOKEN_ACCURACY = FinalScore("token accuracy", "fraction", "higher", key="token_accuracy")
HIDING = ("masked", "masked_diffusion", "replaced_token")  # objectives with the token accuracy as a final score
EQUAL_LOSS = ("next_token", "distil", "several_tokens")  # objectives with an equal loss, of all tokens, in val and test
FINAL_SCORES = (
    FinalScore("accuracy", "fraction", "higher", key="accuracy"),
    FinalScore("scaled accuracy", "scaled", "higher", key="scaled_accuracy", low=-100.0),
    FinalScore("exact", "fraction", "higher", key="exact"),
    FinalScore("exact match", "fraction", "higher", key="exact_match"),
    TOKEN_ACCURACY,
    FinalScore("BLEU", "corpus", "higher"),
    FinalScore("chrF", "corpus", "higher"),
    FinalScore("TER", "corpus", "lower", high=math.inf),
    FinalScore(PSEUDO, "documents", "lower", low=1.0, high=math.inf),
    FinalScore("loss", "token", "lower", key="loss", mean="", difference="{:+.4f}", cell="{:.4f}", high=math.inf),
    FinalScore(
        "perplexity", "token", "lower", "perplexity", difference="{:+.4f}", cell="{:.2f}", low=1.0, high=math.inf
    ),
    _small_score(BITS_PER_BYTE, "bits per byte", "lower", high=math.inf),
    _small_score("f1", "F1", "higher"),
    _small_score("mcc", "MCC", "higher", low=-1.0),
    _small_score("spearman", "Spearman", "higher", low=-1.0),
)
SOLVED_FROM = 90.0  # percent of scaled accuracy at which a seed solved its task; the share of seeds is a score
SOLVED = FinalScore("solved", "solved", "higher", key="solved", cell="{:.0f}")
LABEL_SCORES = frozenset(key.name for key in LABEL_KEYS)


def columns(
    nodes: Sequence[str], groups: Sequence[str], corpora: Sequence[str] = (), kinds: Collection[str] = TRANSLATION
) -> list[str]:
    """Return the keys of a run with auxiliary losses at `nodes`, and with these groups or mixed corpora in its text.

    `kinds` are the kinds of the run, as in Key. In a run of a probe task the groups are test lengths.
    """
    suffixes = {"": [""], "node}": nodes, "corpus}": corpora}
    names: list[str] = []
    for key in METRIC_KEYS:
        if key.is_of(kinds):
            head, _, kind = key.name.partition("{")
            names += [head + suffix for suffix in suffixes.get(kind, groups)]
    return names


def find_key(name: str) -> Key:
    """Return the key of a logged name. Raises KeyError if the table lacks it."""
    for key in METRIC_KEYS:
        head, brace, _ = key.name.partition("{")
        if name == key.name or (brace and name.startswith(head)):
            return key
    raise KeyError(name)


def find_score(name: str) -> FinalScore:
    """Return the score with this name, key or title. Raises KeyError.

    `accuracy@64` is the score of answers of length 64, and `loss/NAME` is the loss of a corpus of a mix.
    """
    base, slash, corpus = name.partition("/")
    for score in FINAL_SCORES:
        if slash and corpus and base in score.names:
            key = score.key or score.name.lower()
            return replace(score, name=f"{score.name}/{corpus}", key=f"{key}/{corpus}")
    base, at, length = name.partition("@")
    if name == SOLVED.name:
        return SOLVED
    for score in FINAL_SCORES:
        if base in score.names and (not at or (score.in_percent and length.isdecimal())):
            return replace(score, name=f"{score.name}{at}{length}", key=f"{score.key}{at}{length}")
    raise KeyError(name)


def keys_as_markdown() -> str:
    """Return docs/logged-keys.md."""
    keys = [f"| `{key.name}` | {key.unit} | {key.summary} |" for key in METRIC_KEYS]
    scores = [f"| {score.display} | `{score.name}` | {score.better} |" for score in (*FINAL_SCORES, SOLVED)]
    return "\n".join(
        [
            "# Logged keys\n",
            "Generated by `python -m tfm_blocks.metric_schema > docs/logged-keys.md`, from the table of all metrics.",
            "W&B shows the summary of a run in its tables. [Tracking](tracking.md) lists samples, images and facts.\n",
            *("| key | unit | summary |", "|---|---|---|", *keys),
            "\nThese are the scores of finished models, by their names in [`tfm compare`](comparing.md). Three of them",
            "are not logged. TER, sacreBLEU's translation edit rate, is computed from the test outputs;",
            "[the pseudo-perplexity](encoders.md#scores) is computed on request; `solved`, the percentage of seeds",
            f"whose scaled accuracy is at least {SOLVED_FROM:g} %, is computed from the scaled accuracy.\n",
            *("| score | in JSON and CSV | better |", "|---|---|---|", *scores),
        ]
    )


if __name__ == "__main__":
    print(keys_as_markdown())
