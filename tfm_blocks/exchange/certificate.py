"""The certificate beside exported weights: the comparisons with the run, and their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfm_blocks.data.cache import file_digest
from tfm_blocks.data.layout import padded_rows
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import cut, run_error
from tfm_blocks.exchange.config import vocabulary_of
from tfm_blocks.exchange.random_sentences import (
    SEED,
    Rows,
    network_inputs,
    pick_judgements,
    pick_log_p,
    predicted_rows,
    random_sentences,
)
from tfm_blocks.language.spec import TARGET
from tfm_blocks.network.graph import Network
from tfm_blocks.runs.files import JsonFile, named_folder, write_json
from tfm_blocks.translation.encoder import Encoder
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.translator import Translator
from tfm_blocks.version import __version__

TARGET_FOLDER = "target"  # of the files of the target's tokenizer, if sources have a separate one
MOST = 0.02  # the largest difference of log probabilities that counts as rounding of float32
TEXTS, NEW_TOKENS = 4, 8  # of the comparison of outputs, with GREEDY
GREEDY = {"do_sample": False, "num_beams": 1, "no_repeat_ngram_size": 0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class LogProbabilities:
    """Differences of the log probabilities of the tokens of random sentences, as absolute values.

    ids: the number of different ids in the sentences; positions: the length of the longest.
    """

    sentences: int
    tokens: int
    ids: int
    positions: int
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
    """The content of certificate.json. quantization: the type of the weights; weights: the SHA-256 of their files.

    not_compared: the reason why there are no `translations`.
    """

    FILE = "certificate.json"

    run: str
    format: str
    quantization: str
    versions: Mapping[str, str]
    log_probabilities: LogProbabilities
    translations: Translations | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    not_compared: str = ""

    def write(self, folder: Path) -> None:
        """Write the file, with the hashes of the weights. Raises RunError if the folder does not agree with the run."""
        largest = self.log_probabilities.largest
        is_float32 = self.quantization == "float32" or self.format == "huggingface"  # transformers computes in float32
        if not math.isfinite(largest) or (is_float32 and largest > MOST):
            rule = f"the export differs from the run: log probabilities by {largest:.1e}, rounding by at most {MOST}"
            raise run_error(self.run, rule, "tfm eject writes the graph as one PyTorch file")
        files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
        weights = {path.name: file_digest(path) for path in files}
        write_json(folder / self.FILE, replace(self, weights=weights).to_json())

    def __str__(self) -> str:
        log_p = self.log_probabilities
        lines = [f"log probabilities of {log_p.tokens} tokens differ by at most {log_p.largest:.1e}"]
        if texts := self.translations:
            kind = "outputs of AutoTokenizer and generate" if self.format == "huggingface" else "translations"
            kind = kind if texts.search else "outputs of AutoTokenizer and the model"
            lines.append(f"{texts.equal} of {texts.sentences} {kind} are equal")
            if texts.bleu is not None:
                lines.append(f"BLEU {texts.bleu:.2f}, of the run {texts.bleu_of_run:.2f}")
        if self.not_compared:
            lines.append(f"outputs of AutoTokenizer and generate were not compared: {self.not_compared}")
        return "\n".join(lines)


@torch.inference_mode()
def compare_with_engine(
    network: Network,
    log_p_of_engine: Callable[[Rows], list[list[float]]],
    first_predicted: int = 0,
    positions: float = math.inf,
    excluded: Collection[int] = (),
) -> LogProbabilities:
    """Compare the log probabilities of sentences with the log probabilities of another engine.

    A discriminator gives the log probability that a token was replaced.

    log_p_of_engine: returns the log probability of each token and of eos. first_predicted: the engine assigns
    probability 0 to smaller ids. positions: the maximum tokens of a sentence in the engine, with begin or end.
    excluded: ids that no sentence has, because the engine reads them as padding.
    """
    differences: list[float] = []
    sentences, longest, ids = 0, 0, set[int]()
    for rows in random_sentences(network, positions, excluded):
        logits_BTV = network(**network_inputs(rows))
        predicted = predicted_rows(rows)
        if is_discriminator(network):
            log_p = pick_judgements(logits_BTV[..., -1], predicted)
        else:
            logits_BTV[..., :first_predicted] = -torch.inf
            log_p = pick_log_p(logits_BTV.log_softmax(-1), predicted)
        pairs = zip(log_p, log_p_of_engine(rows), strict=True)
        differences += [abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True)]
        sentences += len(predicted)
        longest = max(longest, *(len(row) + 1 for row in predicted))
        ids.update(*(row.tolist() for row in predicted))
    differences_R = torch.tensor(differences)
    largest, mean = differences_R.max().item(), differences_R.mean().item()
    return LogProbabilities(sentences, len(differences), len(ids), longest, SEED, largest, mean)


def is_discriminator(network: Network) -> bool:
    """Return True if a network has one output for each token: whether the token was replaced."""
    return int(str(network.spec.sink.shape[-1])) == network.first_predicted + 1


def certify(
    ours: Translator | Encoder, translates: bool, run: Path, folder: Path, *, own_code: bool
) -> Certificate | None:
    """Compare the exported folder with the run, write the certificate into it, and return it.

    Returns None if transformers is not installed. own_code: the folder contains code, which this process wrote. Raises
    RunError if transformers cannot load the folder, or if it differs from the run.
    """
    try:
        import transformers
    except ImportError:
        return None
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # warnings print the folder's name
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=own_code)
        if isinstance(ours, Encoder):
            task = "PreTraining" if is_discriminator(ours.network) else "MaskedLM"
        else:
            task = "Seq2SeqLM" if ours.inputs else "CausalLM"
        load = getattr(transformers, f"AutoModelFor{task}")
        model = load.from_pretrained(folder, trust_remote_code=own_code, dtype=torch.float32).eval()
    except Exception as error:  # the library raises any class for a value that it cannot use
        rule = f"transformers cannot load the export: {cut(' '.join(str(error).split()))}"
        help = "another version of transformers may load it; tfm eject writes the graph as one PyTorch file"
        raise run_error(str(run), rule, help) from error
    versions = {"tfm-blocks": __version__, "transformers": transformers.__version__, "torch": torch.__version__}
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    log_p, reason = _compare_log_p(model, ours, positions), ""
    try:
        outputs = _compare_texts(model, folder, ours, translates, positions)
    except Exception as error:  # such as a missing library
        outputs, reason = None, cut(" ".join(str(error).split()))
    name, kind = named_folder(run).name, str(config.dtype).removeprefix("torch.")
    certificate = Certificate(name, "huggingface", kind, versions, log_p, outputs, not_compared=reason)
    certificate.write(folder)
    return certificate


def _published_ids(tokenizer: Tokenizer) -> Tensor:
    """Return the published id of each id. Padding, which is masked, gets the vocabulary's id for it."""
    vocabulary = vocabulary_of(tokenizer)
    return torch.tensor([vocabulary.pad, *vocabulary.to_published(range(1, tokenizer.size))])


def _compare_log_p(model: Any, ours: Translator | Encoder, positions: float) -> LogProbabilities:
    """Compare log probabilities. The export lacks the ids before the first of the vocabulary, such as padding.

    The positions of some models, such as RoBERTa and M2M100, depend on the id of padding, so they read it only as
    padding.
    """
    published, pad, excluded = _published_ids(ours.tokenizer), model.config.pad_token_id, []
    positions_of_ids = (part for name, part in model.named_modules() if name.endswith("embed_positions"))
    counts = any(getattr(part, "padding_idx", None) is not None for part in positions_of_ids)
    if pad is not None and (counts or isinstance(ours, Encoder)):
        excluded, published[0] = (published[1:] == pad).nonzero()[:, 0].add(1).tolist(), pad
    of_source = _published_ids(ours.tokenizer.source) if ours.tokenizer.source else published

    def log_p_of_model(rows: Rows) -> list[list[float]]:
        *sources, last_BT = network_inputs(rows).values()
        ids, keep = {"input_ids": published[last_BT]}, last_BT != 0
        for source_BS in sources:
            ids, keep = {"input_ids": of_source[source_BS], "decoder_input_ids": published[last_BT]}, source_BS != 0
        logits_BTV = model(**ids, attention_mask=keep.long()).logits
        if logits_BTV.ndim == 2:  # of a discriminator
            return pick_judgements(logits_BTV, predicted_rows(rows))
        return pick_log_p(logits_BTV.log_softmax(-1)[..., published], predicted_rows(rows))

    first = vocabulary_of(ours.tokenizer).first
    return compare_with_engine(ours.network, log_p_of_model, first, positions, excluded)


def _compare_texts(
    model: Any, folder: Path, ours: Translator | Encoder, translates: bool, positions: float
) -> Translations | None:
    """Compare the predictions or outputs for texts that AutoTokenizer encodes with the files of the folder."""
    from transformers import AutoTokenizer

    side = "right" if ours.inputs else "left"
    theirs = AutoTokenizer.from_pretrained(folder, config=model.config, padding_side=side, trust_remote_code=False)
    if isinstance(ours, Encoder):
        return _compare_predictions(model, theirs, ours, positions)
    own = folder / TARGET_FOLDER
    decoder = AutoTokenizer.from_pretrained(own) if own.is_dir() else theirs
    return _compare_outputs(model, theirs, decoder, ours, translates, positions)


@torch.inference_mode()
def _compare_predictions(model: Any, theirs: Any, encoder: Encoder, positions: float) -> Translations | None:
    """Compare the most probable token at each position of texts that AutoTokenizer encodes.

    The prediction of a discriminator is whether the token was replaced.
    """
    texts, published = _texts(encoder, positions), _published_ids(encoder.tokenizer)
    equal = 0
    for batch in _batches(texts, theirs, model):
        rows = encoder.encode(batch)
        read = theirs(batch, return_tensors="pt", padding=len(batch) > 1)
        logits = model(input_ids=read["input_ids"], attention_mask=read["attention_mask"]).logits
        own_BSV = encoder.network(**{encoder.input: padded_rows(rows)})
        if logits.ndim == 2:
            best_BS, expected_BS = logits > 0, own_BSV[..., -1] > 0
        else:
            best_BS, expected_BS = logits.argmax(-1), published[own_BSV.argmax(-1)]
        equal += sum(
            best_S[: int(keep_S.sum())].tolist() == expected_S[: len(ids)].tolist()
            for best_S, keep_S, expected_S, ids in zip(best_BS, read["attention_mask"], expected_BS, rows, strict=True)
        )
    return Translations(len(texts), equal, {}) if texts else None


def _batches(texts: list[str], theirs: Any, model: Any) -> list[list[str]]:
    """Return the texts as one batch, or each alone if AutoTokenizer has no padding token with an embedding."""
    pad = theirs.pad_token_id
    is_padded = bool(texts) and pad is not None and pad < getattr(model.config, "vocab_size", math.inf)
    return [texts] if is_padded else [[text] for text in texts]


def _compare_outputs(
    model: Any, theirs: Any, decoder: Any, translator: Translator, translates: bool, positions: float
) -> Translations | None:
    """Compare the outputs of `generate` with the run's, for texts that AutoTokenizer encodes.

    `decoder` is the tokenizer of the outputs.

    Returns None if no text fits, or if the model reads several texts at once.
    """
    texts = _texts(translator, positions)
    if not texts or len(translator.sources if translates else ("",)) > 1:
        return None
    if translates:
        expected = [best.text for (best,) in translator.search(texts, Search(longest=(0.0, NEW_TOKENS)))]
    else:
        done = zip(translator.encode(texts), translator.generate(texts, NEW_TOKENS, Search()), strict=True)
        expected = [translator.tokenizer.decode([*ids, *best.ids]) for ids, (best,) in done]
    outputs = []
    for batch in _batches(texts, theirs, model):
        read = theirs(batch, return_tensors="pt", padding=len(batch) > 1)
        ids, keep = read["input_ids"], read["attention_mask"]
        if not ids.numel():  # AutoTokenizer finds no token in a text that the run encodes
            outputs += ["" for _ in batch]
            continue
        rows = model.generate(input_ids=ids, attention_mask=keep, max_new_tokens=NEW_TOKENS, **GREEDY)
        new = rows[:, ids.shape[1] if translates and not translator.inputs else 0 :]
        outputs += decoder.batch_decode(new, skip_special_tokens=True)
    equal = sum(a == b for a, b in zip(outputs, expected, strict=True))
    return Translations(len(texts), equal, {"beam": 1, "tokens": NEW_TOKENS, "padding_side": theirs.padding_side})


def _texts(ours: Translator | Encoder, positions: float) -> list[str]:
    """Return texts of random ids that fit the positions of both models, with room for the output."""
    generator = torch.Generator().manual_seed(SEED)
    names_of_inputs = ours.inputs or (TARGET,)
    room = min(positions, *(ours.network.longest(name).tokens for name in names_of_inputs)) - NEW_TOKENS - 2
    tokenizer, texts = ours.tokenizer.source or ours.tokenizer, []
    for length in range(4, 16):
        ids = torch.randint(Tokenizer.EOS + 1, tokenizer.size, (length,), generator=generator).tolist()
        text = tokenizer.decode(ids).strip()
        if text and len(tokenizer.encode(text)) <= room:
            texts.append(text)
    return texts[:TEXTS]
