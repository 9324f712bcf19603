"""Searches against naive loops and exhaustive search; the same sentence gives the same in any batch."""

import functools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tfm_blocks as tfm
from tfm_blocks.blocks.layers.state import CacheShape, State
from tfm_blocks.data.layout import BOS, EOS, PAD
from tfm_blocks.registry.blocks import REGISTRY, block
from tfm_blocks.translation.beam import beam_search, gnmt
from tfm_blocks.translation.search import CHUNK, Bounds, chooser, largest, likeliest, one_by_one
from tfm_blocks.translation.settings import Sampling


def network(vocab=40, model="tiny", **knobs):
    sizes = {"layers": 2, "d_model": 32, "d_ff": 32, "heads": 4, "vocab": vocab, "seed": 3}
    made = tfm.build(model, **sizes | knobs)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1.5)
    return made.eval()


def bounds(longest, shortest=0, prefixes=None):
    rows = len(longest)
    prefix_BP = torch.tensor(prefixes or [[]] * rows, dtype=torch.int64)
    return Bounds(torch.full((rows,), shortest), torch.tensor(longest), prefix_BP)


def sources(rows=5, vocab=40, width=7):
    torch.manual_seed(2)
    src_BS = torch.randint(4, vocab, (rows, width))
    src_BS[:, -1] = EOS
    src_BS[1, 4], src_BS[1, 5:] = EOS, PAD
    return {"src": src_BS}


@torch.no_grad()
def log_p_of(made, src_S, ids):
    """Return the summed log probability of a sequence, by one forward pass."""
    logits_1TV = made(src=src_S[None], tgt=torch.tensor([[BOS, *ids[:-1]]]))
    return logits_1TV.log_softmax(2)[0].gather(1, torch.tensor(ids)[:, None]).sum().item()


def expect_log_p(made, put, row, hypotheses):
    """Compare the log probabilities of the hypotheses of a row with those of one forward pass."""
    src_S = put["src"][row][put["src"][row] != PAD]
    for one in hypotheses:
        assert math.isclose(one.log_p, log_p_of(made, src_S, [*one.ids, EOS][: one.length]), abs_tol=1e-4)


def test_a_beam_of_1_is_greedy_search():
    made, put = network(), sources()
    limits = bounds([12, 9, 12, 3, 12])
    hypotheses = beam_search(made, put, limits, beam=1, penalty=gnmt(0.6))
    assert [one.ids for (one,) in hypotheses] == [one.ids for one in one_by_one(made, put, limits)]


@pytest.mark.parametrize("made", [network(), network(model="restricted", r=3)], ids=["attention", "restricted"])
@pytest.mark.parametrize("beam", [2, 5])
def test_scores_match_a_forward_pass_and_come_best_first(beam, made):
    put = sources()
    for row, hypotheses in enumerate(beam_search(made, put, bounds([8] * 5), beam=beam, penalty=gnmt(0.6), nbest=beam)):
        scores = [one.log_p / gnmt(0.6)(one.length) for one in hypotheses]
        assert scores == sorted(scores, reverse=True) and len({tuple(one.ids) for one in hypotheses}) == beam
        expect_log_p(made, put, row, hypotheses)


@pytest.fixture
def running_sum(monkeypatch):
    """Register a block whose state is one row per hypothesis, which a search must reorder."""
    monkeypatch.setattr(REGISTRY, "blocks", dict(REGISTRY.blocks))

    @block("running_sum", "x: B T D -> B T D", branch=True, sees={"x": "past"}, source="a test")
    class RunningSum(nn.Module):
        """y_t = x_t + y_(t-1) / 2."""

        def __init__(self, D: int) -> None:
            super().__init__()
            self.width = D

        def forward(self, x_BTD: Tensor) -> Tensor:
            state, steps = self.start(room=CacheShape(len(x_BTD), 0, x_BTD)), []
            for x_B1D in x_BTD.split(1, dim=1):
                y_B1D, state = self.step(x_B1D, state)
                steps.append(y_B1D)
            return torch.cat(steps, 1)

        def start(self, *, room: CacheShape) -> State:
            return State(moving={"y": room.like.new_zeros(room.rows, 1, self.width)})

        def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
            state.moving["y"] = x_R1D + state.moving["y"] / 2
            return state.moving["y"], state


@pytest.mark.parametrize("beam", [2, 5])
def test_the_state_of_a_recurrent_block_follows_its_hypothesis(running_sum, beam):
    made, put = network(**{"model.graph.decoder.layer.self": "{block: running_sum}"}), sources()
    for row, hypotheses in enumerate(beam_search(made, put, bounds([8] * 5), beam=beam, penalty=gnmt(0.6), nbest=beam)):
        expect_log_p(made, put, row, hypotheses)


class Waits(TorchFunctionMode):
    """Count the synchronisations with a device: Python numbers read from a tensor."""

    READS = ("tolist", "item", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += getattr(function, "__name__", "") in self.READS
        return function(*args, **(kwargs or {}))


@pytest.mark.grid
@pytest.mark.parametrize(
    "search",
    [one_by_one, functools.partial(beam_search, beam=3, penalty=gnmt(0.6), nbest=3)],
    ids=["greedy", "beam"],
)
def test_a_search_waits_for_a_device_once_a_step_however_many_end(search):
    made, put = network(), sources()
    waits = []
    for limits in (
        bounds([4] * 5),
        bounds([24] * 5, shortest=23),
        bounds([24, 4, 7, 11, 3], prefixes=[[5]] * 5),
    ):
        with Waits() as counted:
            search(made, put, limits)
        waits.append(counted.count)
    assert waits[1] == waits[0] + 20
    assert waits[2] <= waits[1] + 1  # for the prefixes


@pytest.mark.parametrize("beam", [1, 3])
def test_the_fewest_and_the_most_tokens_are_kept(beam):
    made, put = network(), sources()
    for hypotheses in beam_search(made, put, bounds([9] * 5, shortest=6), beam=beam, penalty=gnmt(1.0), nbest=beam):
        assert all(6 <= len(one.ids) <= 9 and one.length <= 9 for one in hypotheses)


@pytest.mark.parametrize("beam", [1, 3])
def test_a_translation_begins_with_its_prefix_and_continues_by_the_model(beam):
    made, put = network(), sources()
    prefixes = [[5, 6, 7], [7, 6, 5], [9, 8, 8], [8, 8, 8], [6, 5, 5]]
    forced = beam_search(made, put, bounds([9] * 5, prefixes=prefixes), beam=beam, penalty=gnmt(0.6))
    for row, prefix in enumerate(prefixes):
        assert forced[row][0].ids[: len(prefix)] == prefix and len(forced[row]) == 1
        expect_log_p(made, put, row, forced[row])


@torch.no_grad()
def test_a_sentence_with_non_finite_logits_of_any_hypothesis_has_no_hypotheses():
    made, put = (
        network(40, **{"model.graph.tgt_emb": "{same: null, block: embedding}", "model.graph.logits.tie": None}),
        sources(),
    )
    second_best = beam_search(made, put, bounds([3] * 5), beam=3, penalty=gnmt(0.6), nbest=2)[0][1].ids[0]
    made["tgt_emb"].block.weight[second_best] = torch.nan
    assert not beam_search(made, put, bounds([3] * 5), beam=3, penalty=gnmt(0.6))[0]


def test_a_sentence_draws_the_same_in_any_batch():
    made, put = network(), sources()
    together = one_by_one(made, put, bounds([9] * 5), chooser(Sampling(seed=4), range(5), 9))
    for row, hypothesis in enumerate(together):
        alone = {"src": put["src"][row : row + 1]}
        assert one_by_one(made, alone, bounds([9]), chooser(Sampling(seed=4), [row], 9))[0].ids == hypothesis.ids
    assert together != one_by_one(made, put, bounds([9] * 5), chooser(Sampling(seed=5), range(5), 9))


@pytest.mark.parametrize("narrow", [Sampling(top_k=1), Sampling(top_p=1e-9), Sampling(temperature=1e-6)])
def test_the_narrowest_draw_is_greedy_search(narrow):
    made, put = network(), sources()
    drawn = one_by_one(made, put, bounds([9] * 5), chooser(narrow, range(5), 9))
    assert [one.ids for one in drawn] == [one.ids for one in one_by_one(made, put, bounds([9] * 5))]


def test_draws_are_as_frequent_as_their_probabilities():
    logits_V = torch.tensor([-torch.inf, -torch.inf, 0.0, 1.0, 2.0, -1.0])
    count = 20_000
    choose = chooser(Sampling(temperature=2.0, top_k=3), range(count), 1)
    ids_B = choose(logits_V.expand(count, -1).clone(), 0, torch.arange(count))
    expected_V = torch.softmax(torch.tensor([-torch.inf, -torch.inf, 0.0, 0.5, 1.0, -torch.inf]), 0)
    torch.testing.assert_close(torch.bincount(ids_B, minlength=6) / count, expected_V, rtol=0, atol=0.012)


COLUMNS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 20 * CHUNK, 20 * CHUNK + 1, 21 * CHUNK - 1]


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("levels", [2, 10**6])  # with two levels, most rows have several maxima
def test_the_likeliest_token_is_the_first_maximum(columns, levels):
    x_BV = torch.randint(levels, (50, columns), generator=torch.Generator().manual_seed(columns)).float()
    assert likeliest(x_BV, 0, torch.arange(50)).equal(x_BV.argmax(1))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize(
    ("hypotheses", "count"), [(1, 1), (1, 2), (1, 8), (4, 8), pytest.param(2 * CHUNK, 8, marks=pytest.mark.grid)]
)
def test_the_largest_values_and_their_places_match_topk(columns, hypotheses, count):
    generator = torch.Generator().manual_seed(columns)
    x_RMV = torch.randn(50, hypotheses, columns, generator=generator)
    plus_RM = torch.randn(50, hypotheses, generator=generator)
    expected = (x_RMV + plus_RM[:, :, None]).flatten(1).topk(min(count, hypotheses * columns))
    actual = largest(x_RMV, plus_RM, count)
    assert actual[0].equal(expected.values)
    assert actual[1].equal(expected.indices)
