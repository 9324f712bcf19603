"""Decoding token by token equals the whole forward."""

import torch

from tests.network.test_graph import small
from tfm_blocks.network import incremental


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


@torch.no_grad()
def test_nodes_that_do_not_depend_on_the_target_run_once():
    network, src_BS = small(), torch.randint(4, 30, (2, 7))
    decoding = incremental.start(network, {"src": src_BS}, length=5)
    for parameter in network["encoder"].parameters():
        parameter.fill_(torch.nan)
    for _ in range(5):
        x_RD, decoding = incremental.step(network, torch.tensor([4, 5]), decoding)
        assert x_RD.isfinite().all()


@torch.no_grad()
def test_steps_over_a_source_of_padding_alone_are_finite():
    network, src_BS = small(), torch.tensor([[4, 5, 6], [0, 0, 0]])
    decoding = incremental.start(network, {"src": src_BS}, length=2)
    for _ in range(2):
        x_RD, decoding = incremental.step(network, torch.tensor([4, 5]), decoding)
        assert x_RD.isfinite().all()
