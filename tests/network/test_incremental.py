"""Decoding token by token equals the whole forward."""

import pytest
import torch

from tests.network.test_graph import small
from tfm_blocks.network import incremental


@pytest.mark.parametrize("model", ["tiny", "prenorm", "restricted"])
@torch.no_grad()
def test_a_cached_step_equals_the_uncached_forward(model):
    network = small(model, **({"r": 3} if model == "restricted" else {}))
    src_BS, tgt_BT = torch.randint(4, 30, (3, 7)), torch.randint(4, 30, (3, 9))
    src_BS[1, 5:] = 0
    whole_BTV = network(src=src_BS, tgt=tgt_BT)
    decoding = incremental.start(network, {"src": src_BS}, length=9)
    for position in range(9):
        x_BD, decoding = incremental.step(network, tgt_BT[:, position], decoding)
        torch.testing.assert_close(network.head(x_BD), whole_BTV[:, position], rtol=0, atol=1e-5)


@torch.no_grad()
def test_selected_rows_continue_as_a_batch_of_their_own():
    network, src_BS, tgt_BT = small(), torch.randint(4, 30, (3, 7)), torch.randint(4, 30, (3, 4))
    whole_BTV = network(src=src_BS, tgt=tgt_BT)
    decoding = incremental.start(network, {"src": src_BS}, length=4)
    for position in range(2):
        _, decoding = incremental.step(network, tgt_BT[:, position], decoding)
    rows = torch.tensor([2, 0])
    decoding = incremental.select(decoding, rows)
    x_BD, _ = incremental.step(network, tgt_BT[rows, 2], decoding)
    torch.testing.assert_close(network.head(x_BD), whole_BTV[rows, 2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", ["tiny", "restricted"])
@torch.no_grad()
def test_a_hypothesis_continues_its_parent(model):
    network = small(model, **({"r": 3} if model == "restricted" else {}))
    src_BS, tgt_BMT = torch.randint(4, 30, (2, 7)), torch.randint(4, 30, (2, 3, 6))
    tgt_BMT[:, :, 0] = tgt_BMT[:, :1, 0]
    decoding = incremental.start(network, {"src": src_BS}, length=6)
    _, decoding = incremental.step(network, tgt_BMT[:, 0, 0], decoding)
    decoding = incremental.spread(decoding, 3)
    for position in range(1, 6):
        x_RD, decoding = incremental.step(network, tgt_BMT[:, :, position].flatten(), decoding)
        whole_RTV = network(src=src_BS.repeat_interleave(3, 0), tgt=tgt_BMT[:, :, : position + 1].flatten(0, 1))
        torch.testing.assert_close(network.head(x_RD), whole_RTV[:, -1], rtol=0, atol=1e-5)
        origin_BM = torch.randint(3, (2, 3))
        incremental.reorder(decoding, origin_BM)
        tgt_BMT[:, :, : position + 1] = tgt_BMT[:, :, : position + 1].take_along_dim(origin_BM[:, :, None], 1)


@torch.no_grad()
def test_nodes_that_do_not_depend_on_the_target_run_once():
    network, src_BS = small(), torch.randint(4, 30, (2, 7))
    decoding = incremental.start(network, {"src": src_BS}, length=5)
    for parameter in network["encoder"].parameters():
        parameter.fill_(torch.nan)
    for _ in range(5):
        x_RD, decoding = incremental.step(network, torch.tensor([4, 5]), decoding)
        assert x_RD.isfinite().all()
