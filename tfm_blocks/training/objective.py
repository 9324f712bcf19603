"""The training objective of one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tfm_blocks.data.layout import Batch
from tfm_blocks.network.call import Values
from tfm_blocks.network.graph import Network
from tfm_blocks.training.loss import Sums, chunk_size, position_losses, smoothed_loss

Trunk = Callable[[Mapping[str, Tensor]], tuple[Tensor, Values]]


class Objective:
    """The smoothed loss of the predicted positions, plus the auxiliary losses of blocks.

    `trunk` is the network's `trunk_with_losses`, or its compiled form.
    """

    def __init__(self, network: Network, smoothing: float, trunk: Trunk | None = None) -> None:
        self.network, self.smoothing = network, smoothing
        self.trunk = trunk or network.trunk_with_losses

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return sums over the batch: the differentiable total, and [smoothed loss, -log p, auxiliary losses...].

        The total is the smoothed loss plus the auxiliary loss of each block. An auxiliary loss is weighted by the
        number of predicted tokens: of each sequence, or of the micro-batch.
        """
        x_ND, labels_N, losses = self._predicted(batch)
        smoothed, nll, _ = self._sums(x_ND, labels_N)
        auxiliary = [(loss * (batch.labels_BT != 0).sum(1)).sum() for loss in losses.values()]
        return sum(auxiliary, smoothed), torch.stack([smoothed, nll, *auxiliary]).detach().double()

    def scores(self, batch: Batch) -> Sums:
        """Return sums over the batch: the smoothed loss, -log p, and the number of correct tokens.

        Logits are float32, because bf16 would cause ties.
        """
        x_ND, labels_N, _ = self._predicted(batch)
        with torch.autocast(x_ND.device.type, enabled=False):
            return self._sums(x_ND.float(), labels_N)

    def position_scores(self, batch: Batch) -> Sums:
        """Return the smoothed loss, -log p and the most probable token of each position of `batch.kept_N`."""
        x_ND, labels_N, _ = self._predicted(batch)
        with torch.autocast(x_ND.device.type, enabled=False):
            x_ND = x_ND.float()
            return position_losses(self.network.head, x_ND, labels_N, smoothing=self.smoothing, chunk=chunk_size(x_ND))

    def _predicted(self, batch: Batch) -> tuple[Tensor, Tensor, Values]:
        """Return the trunk's output and the labels of the predicted positions, and the auxiliary losses."""
        x_BTD, losses = self.trunk(batch.inputs)
        labels_N = batch.labels_BT.flatten().index_select(0, batch.kept_N)
        return x_BTD.flatten(0, 1).index_select(0, batch.kept_N), labels_N, losses

    def _sums(self, x_ND: Tensor, labels_N: Tensor) -> Sums:
        head, parameters = self.network.head, self.network.head_parameters()
        return smoothed_loss(head, parameters, x_ND, labels_N, smoothing=self.smoothing, chunk=chunk_size(x_ND))


def backward_scale(loss: Tensor, scale: float) -> Tensor:
    """Return `scale`, or NaN if the loss is not finite, so that the gradient becomes NaN on all ranks."""
    return 0 * loss.detach() + scale
