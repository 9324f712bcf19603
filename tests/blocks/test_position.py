"""Positions against the paper's formula."""

import math

import pytest
import torch

from tests.blocks.test_attention import started
from tfm_blocks.blocks.attention import Attention
from tfm_blocks.blocks.layers.state import State
from tfm_blocks.blocks.position import LearnedPosition, RandomPosition, Sinusoidal
from tfm_blocks.registry.values import Part


def test_sinusoids_match_the_paper():
    D, N = 6, 11
    table_ND = Sinusoidal(D)(torch.zeros(1, N, D))[0]
    for pos in range(N):
        for i in range(D // 2):
            angle = pos / 10000 ** (2 * i / D)
            assert table_ND[pos, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table_ND[pos, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_a_shift_of_position_is_the_same_rotation_everywhere():
    table_ND = Sinusoidal(8)(torch.zeros(1, 40, 8))[0].double()
    before_NI, after_NI = (
        torch.view_as_complex(part.reshape(-1, 4, 2).contiguous()) for part in (table_ND[:-3], table_ND[3:])
    )
    turn_NI = after_NI / before_NI
    torch.testing.assert_close(turn_NI, turn_NI[:1].expand_as(turn_NI), rtol=0, atol=1e-5)


@pytest.mark.parametrize("block", [Sinusoidal(4), LearnedPosition(4, max_length=9)])
def test_a_step_adds_the_encoding_of_its_position(block):
    for name, _ in block.named_parameters():
        block.initialise(name, torch.Generator().manual_seed(1))
    x_BND = torch.randn(2, 9, 4)
    stepped, _ = block.step(x_BND[:, 5:6], State(position=5))
    torch.testing.assert_close(stepped, block(x_BND)[:, 5:6])


def test_a_sequence_longer_than_the_learned_table_is_an_error():
    with pytest.raises(ValueError, match="has 9 positions, but the sequence has 10"):
        LearnedPosition(4, max_length=9)(torch.zeros(1, 10, 4))


def test_sines_in_halves_are_a_permutation_of_sines_in_pairs():
    x_BND = torch.zeros(1, 11, 6)
    pairs_ND, halves_ND = Sinusoidal(6)(x_BND)[0], Sinusoidal(6, layout="halves")(x_BND)[0]
    assert torch.equal(halves_ND, torch.cat((pairs_ND[:, 0::2], pairs_ND[:, 1::2]), 1))


@torch.no_grad()
def test_sines_on_queries_and_keys_do_not_change_values():
    """Compare with a loop over heads that adds the table, as wide as all heads together, to the outputs of the maps."""
    own = started(Attention(8, None, heads=2, position=Part("sinusoidal", {"dropout": 0.5})))
    x_BTD, table_TD = torch.randn(2, 5, 8), Sinusoidal(8)(torch.zeros(1, 5, 8))[0]
    q_BTD, k_BTD, v_BTD = own.qkv(x_BTD).chunk(3, 2)
    q_BTD, k_BTD = q_BTD + table_TD, k_BTD + table_TD
    heads = [
        (q_BTD[..., one] @ k_BTD[..., one].mT / 2).softmax(2) @ v_BTD[..., one] for one in (slice(0, 4), slice(4, 8))
    ]
    expected = own.out(torch.cat(heads, 2))
    torch.testing.assert_close(own(x_BTD, keep_BT=torch.ones(2, 5, dtype=torch.bool)), expected)


def test_random_positions_are_ascending_sines_of_another_draw_in_each_training_batch():
    block, x_BND = RandomPosition(8, range=100, max_length=20).train(), torch.zeros(1, 12, 8)
    table_ND = Sinusoidal(8)(torch.zeros(1, 100, 8))[0]
    drawn = []
    for _ in range(20):
        distance_NM = torch.cdist(block(x_BND)[0], table_ND, compute_mode="donot_use_mm_for_euclid_dist")
        positions_N = distance_NM.argmin(1)
        assert distance_NM.amin(1).max() < 1e-6
        assert (positions_N.diff() > 0).all()
        drawn.append(tuple(positions_N.tolist()))
    assert len(set(drawn)) == 20 and max(map(max, drawn)) > 90


def test_random_positions_of_an_evaluation_do_not_depend_on_the_length_of_the_sequence():
    block = RandomPosition(8, range=100, max_length=20).eval()
    long_BND = block(torch.zeros(1, 20, 8))
    assert torch.equal(block(torch.zeros(1, 7, 8)), long_BND[:, :7])
    stepped, _ = block.step(torch.zeros(1, 1, 8), State(position=5))
    assert torch.equal(stepped, long_BND[:, 5:6])
    with pytest.raises(ValueError, match="has 20 positions, but the sequence has 21"):
        block(torch.zeros(1, 21, 8))
