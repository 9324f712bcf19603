"""Load an exported folder with transformers, and compare it with the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfm_blocks import __version__
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import Problem, RunError, cut
from tfm_blocks.exchange.certificate import LONGEST, Certificate, Rows, compare_with_engine, network_inputs, pick_log_p
from tfm_blocks.exchange.custom_code import vocabulary_of
from tfm_blocks.language.spec import TARGET
from tfm_blocks.network.graph import Network


def certify(network: Network, tokenizer: Tokenizer, run: Path, folder: Path, *, own_code: bool) -> Certificate | None:
    """Compare the exported folder with the run, write the certificate into it, and return it.

    Returns None if transformers is not installed. own_code: the folder contains code, which this process wrote. Raises
    RunError if transformers cannot load the folder.
    """
    try:
        import transformers
    except ImportError:
        return None
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # warnings print the folder's name
    load = transformers.AutoModelForSeq2SeqLM if network.spec.sources else transformers.AutoModelForCausalLM
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=own_code)
        model = load.from_pretrained(folder, trust_remote_code=own_code, dtype=torch.float32).eval()
    except Exception as error:  # the library raises any class for a value that it cannot use
        rule = f"transformers cannot load the export: {cut(' '.join(str(error).split()))}"
        raise RunError(Problem(str(run), rule)) from error
    published = _published_ids(tokenizer)
    versions = {"tfm-blocks": __version__, "transformers": transformers.__version__, "torch": torch.__version__}
    positions = min(LONGEST + 1, getattr(config, "max_position_embeddings", None) or LONGEST + 1)
    first = vocabulary_of(tokenizer).first  # the export lacks smaller ids, such as padding
    log_p = compare_with_engine(network, lambda rows: _log_p(model, rows, published), first, positions)
    certificate = Certificate(run.name, "huggingface", str(config.dtype).removeprefix("torch."), versions, log_p)
    certificate.write(folder)
    return certificate


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
