"""Load an exported folder with transformers, and compare it with the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfm_blocks import __version__
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import Problem, RunError, cut
from tfm_blocks.exchange.certificate import (
    SEED,
    Certificate,
    Rows,
    Translations,
    compare_with_engine,
    network_inputs,
    pick_log_p,
)
from tfm_blocks.exchange.custom_code import vocabulary_of
from tfm_blocks.language.spec import TARGET
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.translator import Translator

TEXTS, NEW_TOKENS = 4, 8
GREEDY = {"do_sample": False, "num_beams": 1, "no_repeat_ngram_size": 0, "repetition_penalty": 1.0}


def certify(translator: Translator, translates: bool, run: Path, folder: Path, *, own_code: bool) -> Certificate | None:
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
    tokenizer, trust = translator.tokenizer, {"trust_remote_code": own_code}
    load = transformers.AutoModelForSeq2SeqLM if translator.inputs else transformers.AutoModelForCausalLM
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **trust)
        model = load.from_pretrained(folder, dtype=torch.float32, **trust).eval()
    except Exception as error:  # the library raises any class for a value that it cannot use
        rule = f"transformers cannot load the export: {cut(' '.join(str(error).split()))}"
        raise RunError(Problem(str(run), rule)) from error
    published = _published_ids(tokenizer)
    versions = {"tfm-blocks": __version__, "transformers": transformers.__version__, "torch": torch.__version__}
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    first = vocabulary_of(tokenizer).first  # the export lacks smaller ids, such as padding
    log_p = compare_with_engine(translator.network, lambda rows: _log_p(model, rows, published), first, positions)
    try:
        side = "right" if translator.inputs else "left"
        theirs = transformers.AutoTokenizer.from_pretrained(folder, padding_side=side, **trust)
        outputs, reason = _compare_outputs(model, theirs, translator, translates, positions), ""
    except Exception as error:  # such as a missing library
        outputs, reason = None, cut(" ".join(str(error).split()))
    kind = str(config.dtype).removeprefix("torch.")
    certificate = Certificate(run.name, "huggingface", kind, versions, log_p, outputs, not_compared=reason)
    certificate.write(folder)
    return certificate


def _compare_outputs(
    model: Any, theirs: Any, translator: Translator, translates: bool, positions: float
) -> Translations | None:
    """Compare the outputs of `generate` with the run's, in a padded batch of texts that AutoTokenizer encodes.

    Returns None if no text fits, or if the model reads several texts at once.
    """
    texts = _texts(translator, positions)
    if not texts or len(translator.sources if translates else ("",)) > 1:
        return None
    search = Search(longest=(0.0, NEW_TOKENS))
    if translates:
        expected = [best.text for (best,) in translator.search(texts, search)]
    else:
        done = zip(translator.encode(texts), translator.generate(texts, NEW_TOKENS, search), strict=True)
        expected = [translator.tokenizer.decode([*ids, *best.ids]) for ids, (best,) in done]
    outputs = []
    for batch in [texts] if theirs.pad_token else [[text] for text in texts]:
        read = theirs(batch, return_tensors="pt", padding=len(batch) > 1)
        ids, keep = read["input_ids"], read["attention_mask"]
        rows = model.generate(input_ids=ids, attention_mask=keep, max_new_tokens=NEW_TOKENS, **GREEDY)
        new = rows[:, ids.shape[1] if translates and not translator.inputs else 0 :]
        outputs += theirs.batch_decode(new, skip_special_tokens=True)
    equal = sum(a == b for a, b in zip(outputs, expected, strict=True))
    return Translations(len(texts), equal, {"beam": 1, "tokens": NEW_TOKENS, "padding_side": theirs.padding_side})


def _texts(translator: Translator, positions: float) -> list[str]:
    """Return texts of random ids that fit the positions of both models, with room for the output."""
    generator = torch.Generator().manual_seed(SEED)
    names_of_inputs = translator.inputs or (TARGET,)
    room = min(positions, *(translator.network.longest(name).tokens for name in names_of_inputs)) - NEW_TOKENS - 2
    tokenizer, texts = translator.tokenizer, []
    for length in range(4, 16):
        ids = torch.randint(Tokenizer.EOS + 1, tokenizer.size, (length,), generator=generator).tolist()
        text = tokenizer.decode(ids).strip()
        if text and len(tokenizer.encode(text)) <= room:
            texts.append(text)
    return texts[:TEXTS]


def _published_ids(tokenizer: Tokenizer) -> Tensor:
    """Return the published id of each id of this project. Padding, which is masked, gets the id of eos."""
    vocabulary = vocabulary_of(tokenizer)
    if not vocabulary.front:
        return torch.arange(tokenizer.size)
    return torch.tensor([vocabulary.eos, *vocabulary.to_published(range(1, tokenizer.size))])


@torch.inference_mode()
def _log_p(model: Any, rows: Rows, published: Tensor) -> list[list[float]]:
    inputs = network_inputs(rows)
    target_BT = inputs.pop(TARGET)
    if inputs:
        (source_BS,) = inputs.values()
        read = {"input_ids": published[source_BS], "attention_mask": (source_BS != 0).long()}
        logits_BTV = model(**read, decoder_input_ids=published[target_BT]).logits
    else:
        logits_BTV = model(input_ids=published[target_BT], attention_mask=(target_BT != 0).long()).logits
    return pick_log_p(logits_BTV.log_softmax(-1)[..., published], rows[TARGET])
