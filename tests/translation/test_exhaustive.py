"""Beam search against all possible sequences, and against a search without early stopping."""

import itertools
import math

import pytest
import torch

from tests.translation.test_search import bounds, network, sources
from tfm_blocks.data.layout import BOS, EOS, PAD
from tfm_blocks.translation.beam import beam_search, gnmt, plain

FIRST = EOS + 1  # of the ids that may stand before eos


def allowed(vocab, longest, shortest, prefix):
    """Yield all sequences within the bounds, ended by eos or cut at the maximum length."""
    for length in range(1, longest + 1):
        for ids in itertools.product(range(FIRST, vocab), repeat=length - 1):
            for last in (EOS, *(range(FIRST, vocab) if length == longest else ())):
                one = [*ids, last]
                begins = one[: len(prefix)] == prefix
                if begins and (last != EOS or length - 1 >= shortest):
                    yield one


@torch.no_grad()
def log_ps(made, src_S, sequences):
    """Return the summed log probabilities of each sequence, by one forward pass over all of them."""
    width = max(map(len, sequences))
    out_RT = torch.tensor([[*one] + [PAD] * (width - len(one)) for one in sequences])
    tgt_RT = torch.cat((torch.full((len(out_RT), 1), BOS), out_RT[:, :-1]), 1)
    tgt_RT[tgt_RT == EOS] = PAD  # what follows eos is padding too
    log_p_RTV = made(src=src_S.expand(len(out_RT), -1), tgt=tgt_RT).log_softmax(2)
    return log_p_RTV.gather(2, out_RT[:, :, None])[:, :, 0].masked_fill(out_RT == PAD, 0.0).sum(1).tolist()


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize(
    "penalty",
    [
        pytest.param(gnmt(0.6), id="gnmt0.6"),
        pytest.param(gnmt(1.5), id="gnmt1.5", marks=pytest.mark.grid),
        pytest.param(plain(1.0), id="plain"),
        pytest.param(plain(0.0), id="plain0", marks=pytest.mark.grid),
    ],
)
@pytest.mark.parametrize(
    "prefix",
    [pytest.param([], id="free"), pytest.param([4], id="one", marks=pytest.mark.grid), pytest.param([3, 5], id="two")],
)
@pytest.mark.parametrize("shortest", [0, pytest.param(2, marks=pytest.mark.grid)])
@pytest.mark.parametrize(("vocab", "longest"), [(6, 5), pytest.param(7, 4, marks=pytest.mark.grid)])
def test_a_wide_beam_finds_the_best_of_all_sequences_within_the_bounds(
    vocab, longest, shortest, prefix, penalty, patient
):
    made, put = network(vocab, layers=1), sources(2, vocab)
    limits = bounds([longest, longest - 1], shortest, [prefix, prefix])
    widest = (vocab - FIRST) ** longest
    hypotheses = beam_search(made, put, limits, beam=widest, penalty=penalty, nbest=4, patient=patient)
    for row, most in enumerate([longest, longest - 1]):
        sequences = list(allowed(vocab, most, shortest, prefix))
        totals = log_ps(made, put["src"][row], sequences)
        scored = [(total / penalty(len(one)), one) for total, one in zip(totals, sequences, strict=True)]
        best = sorted(scored, reverse=True)[:4]
        assert [one.ids for one in hypotheses[row]] == [[id for id in one if id != EOS] for _, one in best]
        for one, (score, sequence) in zip(hypotheses[row], best, strict=True):
            assert one.length == len(sequence)
            assert math.isclose(one.log_p / penalty(one.length), score, abs_tol=1e-4)


@torch.no_grad()
def unstopped(made, src_S, longest, beam, penalty, ends):
    """Return scores and ids, best first, of a beam search up to the maximum length that runs the whole model in every step."""
    live, finished = [((), 0.0)], []
    for position in range(longest):
        tgt_RT = torch.tensor([[BOS, *ids] for ids, _ in live])
        log_p_RV = made(src=src_S.expand(len(live), -1), tgt=tgt_RT)[:, -1].log_softmax(1)
        log_p_RV[:, :EOS] = -torch.inf
        total_RV = log_p_RV + torch.tensor([total for _, total in live])[:, None]
        values, places = total_RV.flatten().topk((1 + len(ends)) * beam)
        extended = [
            ((*live[place // total_RV.shape[1]][0], place % total_RV.shape[1]), value)
            for value, place in zip(values.tolist(), places.tolist(), strict=True)
        ]
        finished += [one for one in extended[:beam] if one[0][-1] in ends]
        live = [one for one in extended if one[0][-1] not in ends][:beam]
        if position == longest - 1:
            finished += live
    scored = [(total / penalty(len(ids)), [id for id in ids if id not in ends]) for ids, total in finished]
    return sorted(scored, reverse=True)


PENALTIES = {
    "gnmt0.6": gnmt(0.6),
    "gnmt1.5": gnmt(1.5),
    "gnmt3": gnmt(3.0),
    "plain0": plain(0.0),
    "plain1": plain(1.0),
    "plain1.5": plain(1.5),
}


@pytest.mark.parametrize(
    ("beam", "nbest"), [(4, 4), *(pytest.param(beam, 1, marks=pytest.mark.grid) for beam in (2, 4))]
)
@pytest.mark.parametrize(
    "penalty",
    [
        pytest.param(PENALTIES[name], id=name, marks=[] if name in ("gnmt0.6", "plain1") else pytest.mark.grid)
        for name in PENALTIES
    ],
)
@pytest.mark.parametrize("ends", [(EOS,), (EOS, 7, 11)], ids=["one", "three"])
def test_a_patient_search_equals_a_search_without_early_stopping(ends, beam, nbest, penalty):
    made, put, most = network(20), sources(vocab=20), [14, 14, 5, 9, 14]
    limits = bounds(most)._replace(ends=ends)
    hypotheses = beam_search(made, put, limits, beam=beam, penalty=penalty, nbest=nbest, patient=True)
    for row, longest in enumerate(most):
        src_S = put["src"][row][put["src"][row] != PAD]
        best = unstopped(made, src_S, longest, beam, penalty, ends)[:nbest]
        assert [one.ids for one in hypotheses[row]] == [ids for _, ids in best]


def test_a_search_that_is_not_patient_misses_better_ones_under_a_large_power():
    made, put = network(20), sources(vocab=20)
    scores = {
        patient: [
            one.log_p / gnmt(3.0)(one.length)
            for (one,) in beam_search(made, put, bounds([14] * 5), beam=2, penalty=gnmt(3.0), patient=patient)
        ]
        for patient in (False, True)
    }
    gained = [patient - hasty for hasty, patient in zip(scores[False], scores[True], strict=True)]
    assert min(gained) > -1e-5  # the same hypothesis, whose rounding depends on the size of the batch
    assert max(gained) > 1e-2
