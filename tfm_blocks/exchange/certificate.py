"""The certificate beside exported weights: the comparisons with the run, and their results."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import Problem, RunError
from tfm_blocks.language.spec import TARGET, names
from tfm_blocks.network.graph import Network
from tfm_blocks.runs.files import JsonFile, write_json

SENTENCES, LONGEST, SEED = 32, 24, 1
MOST = 0.02  # the largest difference of log probabilities that counts as rounding of float32
FIRST_SUBWORD = Tokenizer.UNK + 1
Rows = Mapping[str, list[Tensor]]  # ids of sentences by input, without begin and end


@dataclass(frozen=True)
class LogProbabilities:
    """Differences of the log probabilities of the tokens of random sentences, as absolute values."""

    sentences: int
    tokens: int
    seed: int
    largest: float
    mean: float


@dataclass(frozen=True)
class Translations:
    """The translations of a text: how many are equal, and the BLEU of both if references were given."""

    sentences: int
    equal: int
    search: Mapping[str, Any]
    bleu: float | None = None
    bleu_of_run: float | None = None
    signature: str = ""


@dataclass(frozen=True)
class Certificate(JsonFile):
    """The content of certificate.json. quantization: the type of the weights; weights: the SHA-256 of their files."""

    FILE = "certificate.json"

    run: str
    format: str
    quantization: str
    versions: Mapping[str, str]
    log_probabilities: LogProbabilities
    translations: Translations | None = None
    weights: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the file, with the hashes of the weights. Raises RunError if the folder does not agree with the run."""
        largest = self.log_probabilities.largest
        if not math.isfinite(largest) or (self.quantization == "float32" and largest > MOST):
            rule = (
                f"the export differs from the run: log probabilities by {largest:.1e}, and rounding by at most {MOST}"
            )
            raise RunError(
                Problem(
                    self.run,
                    rule,
                    help="one cause is a tokenizer with the same id for BOS and EOS, which the run distinguishes",
                )
            )
        weights = {}
        for path in sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")):
            with path.open("rb") as file:
                weights[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        write_json(folder / self.FILE, replace(self, weights=weights).to_json())

    def __str__(self) -> str:
        log_p = self.log_probabilities
        lines = [f"log probabilities of {log_p.tokens} tokens differ by at most {log_p.largest:.1e}"]
        if texts := self.translations:
            lines.append(f"{texts.equal} of {texts.sentences} translations are equal")
            if texts.bleu is not None:
                lines.append(f"BLEU {texts.bleu:.2f}, of the run {texts.bleu_of_run:.2f}")
        return "\n".join(lines)


def compare_with_engine(
    network: Network,
    log_p_of_engine: Callable[[Rows], list[list[float]]],
    first_predicted: int = 0,
    positions: int = LONGEST + 1,
) -> LogProbabilities:
    """Compare the log probabilities of random sentences with the log probabilities of another engine.

    log_p_of_engine: returns the log probability of each token and of eos. first_predicted: the engine assigns
    probability 0 to smaller ids. positions: the maximum tokens of a sentence in the engine, with begin or end.
    """
    rows = random_rows(network, positions)
    pairs = zip(_log_p_of_network(network, rows, first_predicted), log_p_of_engine(rows), strict=True)
    differences = torch.tensor([abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True)])
    return LogProbabilities(SENTENCES, len(differences), SEED, differences.max().item(), differences.mean().item())


def random_rows(network: Network, positions: int = LONGEST + 1) -> Rows:
    """Return sentences of random ids, from the first subword on, that fit the positions of both engines."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = names(network.spec.inputs)
    ordered = [name for name in (*names(network.spec.sources), TARGET) if name in inputs]
    return {name: _random_rows(network, name, positions, generator) for name in ordered}


def _random_rows(network: Network, name: str, positions: int, generator: torch.Generator) -> list[Tensor]:
    longest = int(min(positions, network.longest(name).tokens)) - 1
    vocabulary = int(str(network.spec.sink.shape[-1]))
    lengths = torch.randint(1, longest + 1, (SENTENCES,), generator=generator).tolist()
    return [torch.randint(FIRST_SUBWORD, vocabulary, (length,), generator=generator) for length in lengths]


@torch.inference_mode()
def _log_p_of_network(network: Network, rows: Rows, first_predicted: int) -> list[list[float]]:
    inputs = network_inputs(rows)
    logits_BTV = network(**inputs)
    logits_BTV[..., :first_predicted] = -torch.inf
    return pick_log_p(logits_BTV.log_softmax(-1), rows[TARGET])


def network_inputs(rows: Rows) -> dict[str, Tensor]:
    """Return the padded inputs of the network: sources with their end, targets with their begin."""
    end, begin = torch.tensor([Tokenizer.EOS]), torch.tensor([Tokenizer.BOS])
    inputs = {name: pad_sequence([torch.cat((row, end)) for row in ids], True) for name, ids in rows.items()}
    if TARGET in rows:
        inputs[TARGET] = pad_sequence([torch.cat((begin, row)) for row in rows[TARGET]], True)
    return inputs


def pick_log_p(log_p_BTV: Tensor, rows: list[Tensor]) -> list[list[float]]:
    """Return the log probability of each token of the rows and of eos."""
    end = torch.tensor([Tokenizer.EOS])
    return [
        log_p_TV[: len(row) + 1].gather(1, torch.cat((row, end))[:, None])[:, 0].tolist()
        for log_p_TV, row in zip(log_p_BTV, rows, strict=True)
    ]
