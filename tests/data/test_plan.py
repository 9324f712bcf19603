"""The plan against naive loops over its definition."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfm_blocks.data.plan import Ranks, epoch_plan

CORPORA = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=200).map(
    lambda rows: tuple(np.array(rows, dtype=np.int32).T.copy())
)


def plan_of(lengths, *, seed=1, epoch=0, step_tokens=64, batch_tokens=64):
    widths_NC = np.stack(lengths, 1) + 1
    return epoch_plan(
        widths_NC, widths_NC[:, -1], seed=seed, epoch=epoch, step_tokens=step_tokens, batch_tokens=batch_tokens
    )


def steps_of(plan):
    return [step.rows_N.tolist() for step in plan]


@pytest.fixture(scope="module")
def corpus():
    random = np.random.default_rng(7)
    src_N = random.integers(1, 60, 5000).astype(np.int32)
    return src_N, np.clip(src_N + random.integers(-5, 6, 5000), 0, 60).astype(np.int32)


@given(CORPORA, st.integers(31, 200), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_pair_is_in_one_step_and_steps_count_their_target_tokens(lengths, step_tokens, epoch):
    plan = plan_of(lengths, step_tokens=step_tokens, epoch=epoch)
    assert sorted(pair for step in steps_of(plan) for pair in step) == list(range(len(lengths[0])))
    for step in plan:
        assert step.tokens == sum(int(lengths[1][pair]) + 1 for pair in step.rows_N)
        assert 0 < step.tokens <= step_tokens + 31


@given(CORPORA, st.integers(62, 300), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_shares_are_disjoint_cover_the_step_and_keep_under_the_cap(lengths, cap, world):
    for step in plan_of(lengths, batch_tokens=cap):
        seen = []
        for rank in range(world):
            share = step.share(Ranks(rank, world))
            assert share and all(len(batch) for batch in share)
            for batch in share:
                widest = max(int(lengths[0][pair]) for pair in batch) + max(int(lengths[1][pair]) for pair in batch) + 2
                assert len(batch) * widest <= cap
            seen += [] if step.idle(Ranks(rank, world)) else [int(pair) for batch in share for pair in batch]
        assert sorted(seen) == sorted(step.rows_N.tolist())


@given(CORPORA, st.integers(31, 200), st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_every_rank_has_as_many_steps_of_as_many_tokens_whatever_the_cap(lengths, step_tokens, one, other):
    """A step is at least one micro-batch of every rank, and the same rows whatever the world and the cap."""
    plans = [plan_of(lengths, step_tokens=step_tokens, batch_tokens=cap) for cap in (62, 400)]
    for few, many in zip(*plans, strict=True):
        assert few.tokens == many.tokens and few.rows_N.tolist() == many.rows_N.tolist()
        for world in (one, other):
            rows = [
                int(row)
                for rank in range(world)
                for batch in few.share(Ranks(rank, world))
                for row in batch
                if not few.idle(Ranks(rank, world))
            ]
            assert sorted(rows) == sorted(many.rows_N.tolist())
            assert all(few.share(Ranks(rank, world)) for rank in range(world))


def test_a_rank_without_pairs_is_idle_and_gets_one_pair():
    (step,) = plan_of((np.array([3, 4], np.int32), np.array([5, 6], np.int32)))
    assert [step.idle(Ranks(rank, 3)) for rank in range(3)] == [False, False, True]
    assert [batch.tolist() for batch in step.share(Ranks(2, 3))] == [[step.rows_N[0]]]


def test_a_pair_above_the_cap_is_a_micro_batch_of_its_own():
    (step,) = plan_of((np.array([3, 90, 3], np.int32), np.array([4, 4, 4], np.int32)), batch_tokens=20)
    assert [1] in [batch.tolist() for batch in step.share(Ranks(0, 1))]


def test_the_cap_changes_no_step(corpus):
    assert steps_of(plan_of(corpus, batch_tokens=130)) == steps_of(plan_of(corpus, batch_tokens=4000))


def test_the_same_seed_and_epoch_give_the_same_plan_and_others_another(corpus):
    first = steps_of(plan_of(corpus))
    assert first == steps_of(plan_of(corpus))
    assert first != steps_of(plan_of(corpus, epoch=1))
    assert first != steps_of(plan_of(corpus, seed=2))


def test_which_pairs_meet_in_a_step_differs_between_epochs(corpus):
    one, two = ({frozenset(step) for step in steps_of(plan_of(corpus, step_tokens=500, epoch=e))} for e in (0, 1))
    assert not one & two


def test_steps_are_even_and_none_is_left_over(corpus):
    tokens = [step.tokens for step in plan_of(corpus, step_tokens=1000)]
    assert len(tokens) == -(-sum(tokens) // 1000)
    assert all(abs(count - sum(tokens) / len(tokens)) <= 61 for count in tokens)


def test_sorting_in_pools_leaves_little_padding(corpus):
    src_N, tgt_N = corpus
    plan = plan_of(corpus, step_tokens=1000, batch_tokens=2000)
    batches = [batch for step in plan for batch in step.share(Ranks(0, 1))]
    padded = sum(len(batch) * int(src_N[batch].max() + tgt_N[batch].max() + 2) for batch in batches)
    assert (src_N + tgt_N + 2).sum() / padded > 0.85


def test_steps_come_in_random_order_of_length(corpus):
    means = [float(corpus[1][step.rows_N].mean()) for step in plan_of(corpus, step_tokens=1000)]
    rising = sum(left < right for left, right in pairwise(means)) / (len(means) - 1)
    assert 0.35 < rising < 0.65
