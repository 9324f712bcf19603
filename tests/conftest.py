"""A translator that has learned for a moment."""

from random import Random

import pytest
import torch

import tfm_blocks as tfm
from tfm_blocks.compose.model import compose_model
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.runs.folder import TOKENIZER
from tfm_blocks.runs.model import weights_of, write_model, write_weights
from tfm_blocks.translation.search import BOS, EOS
from tfm_blocks.translation.translator import Translator

WORDS = ["ein", "kleines", "Haus", "steht", "am", "Fluss", "und", "zwei", "Kinder", "spielen", "davor"]


def sentences(count, seed):
    random = Random(seed)
    return [" ".join(random.choices(WORDS, k=random.randint(1, 9))) for _ in range(count)]


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


@pytest.fixture(scope="session")
def translator():
    """It has learned for a moment to say the words backwards, so that it says something and is not sure of it."""
    torch.manual_seed(1)
    known = sentences(400, 0)
    tokenizer = Tokenizer.train(known, 300)
    network = tfm.build("tiny", layers=2, d_model=32, d_ff=64, vocab=tokenizer.size, seed=3)
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for step in range(120):
        batch = known[step % 10 * 40 :][:40]
        src_BS = padded([[*tokenizer.encode(text), EOS] for text in batch])
        ids = [tokenizer.encode(" ".join(text.split()[::-1])) for text in batch]
        logits_BTV = network(src=src_BS, tgt=padded([[BOS, *one] for one in ids]))
        loss = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), padded([[*one, EOS] for one in ids]).flatten(), ignore_index=0
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Translator(network.eval(), tokenizer)


def save(translator, folder):
    """A run folder of it."""
    knobs = {"layers": 2, "d_model": 32, "d_ff": 64, "vocab": translator.tokenizer.size}
    folder.mkdir()
    write_model(folder, compose_model("tiny", [f"{name}={value}" for name, value in knobs.items()]).model, [])
    write_weights(folder, weights_of(translator.network))
    translator.tokenizer.save(folder / TOKENIZER)
