"""Masks of a text are filled by the most probable tokens, at once or step by step."""

import pytest
import torch

from tests.data.test_objectives import WORDS
from tfm_blocks.compose.run import compose_job
from tfm_blocks.data.tokenizer import MASK, Tokenizer
from tfm_blocks.errors import RunError
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.translation.fill import Filler

TEXTS = [f"ban {MASK} den {MASK} {MASK} fast", "ban den", f"{MASK} ban", " ".join([MASK] * 7)]


@pytest.fixture(scope="module")
def filler():
    tokenizer = Tokenizer.train([" ".join(WORDS)] * 3, 400, special=[MASK])
    sizes = ["d_model=16", "d_ff=24", "heads=2", "layers=1", f"vocab={tokenizer.size}"]
    composed = compose_job(["model=encoder_only", "objective=masked", *sizes], None)
    return Filler(build_network(check_model(composed.model), seed=3).double(), tokenizer)


def slow(filler, text, steps):
    """Fill one text: in each step, the masks with the most probable tokens."""
    ids = [*filler.tokenizer.encode_masked(text), 2]
    masks = ids.count(filler.tokenizer.mask)
    counts = [masks // steps + (step < masks % steps) for step in range(steps)]
    for count in filter(None, counts):
        places = [place for place, id in enumerate(ids) if id == filler.tokenizer.mask]
        logits_NV = filler.network.eval()(src=torch.tensor([ids]))[0].float()
        logits_NV[:, sorted(filler.tokenizer.special_ids)] = -torch.inf
        p, token = torch.softmax(logits_NV, 1).max(1)
        for place in sorted(places, key=lambda place: -p[place])[:count]:
            ids[place] = int(token[place])
    return filler.tokenizer.decode(ids) if masks else text


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 50])
def test_each_step_fills_the_masks_with_the_most_probable_tokens(filler, steps):
    filled = filler.fill(TEXTS, steps=steps, top=2)
    assert [one.text for one in filled] == [slow(filler, text, steps) for text in TEXTS]
    assert [len(one.masks) for one in filled] == [text.count(MASK) for text in TEXTS]
    assert all(len(best) == 2 and best[0][1] >= best[1][1] for one in filled for best in one.masks)


def test_steps_change_the_text(filler):
    assert filler.fill(TEXTS[3:], steps=7)[0].text != filler.fill(TEXTS[3:])[0].text


def test_a_classifier_with_a_mask_fills_nothing() -> None:
    tokenizer = Tokenizer.train([" ".join(WORDS)] * 3, 400, special=[MASK])
    sizes = ["d_model=16", "d_ff=24", "heads=2", "layers=1", f"vocab={tokenizer.size}"]
    composed = compose_job(["model=classifier", "objective=label", "data=labels", "data.dir=x", *sizes])
    with pytest.raises(RunError, match="was not trained to predict hidden tokens"):
        Filler(build_network(check_model(composed.model), seed=3), tokenizer)
