"""What training minimises, for one micro-batch: forward, loss and backward."""

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
    """The smoothed loss where something is predicted, and the losses that blocks add to it.

    `trunk` is the network's `trunk_with_losses`, or what was compiled of it.
    """

    def __init__(self, network: Network, smoothing: float, trunk: Trunk | None = None) -> None:
        self.network, self.smoothing = network, smoothing
        self.trunk = trunk or network.trunk_with_losses

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return sums over the batch: the differentiable total, and [smoothed loss, -log p, auxiliary losses...].

        The total is the smoothed loss plus the auxiliary loss of each block. An auxiliary loss is weighted by the
        number of predicted tokens: of each sequence, or of the micro-batch.
        """
        x_ND, labels_N, added = self._kept(batch)
        smoothed, nll, _ = self._sums(x_ND, labels_N)
        extra = [(one * (batch.labels_BT != 0).sum(1)).sum() for one in added.values()]
        return sum(extra, smoothed), torch.stack([smoothed, nll, *extra]).detach().double()

    def scores(self, batch: Batch) -> Sums:
        """Sums over the batch of the smoothed loss, of -log p, and of right tokens. Logits in float32, where bf16 would
        make ties.
        """
        x_ND, labels_N, _ = self._kept(batch)
        with torch.autocast(x_ND.device.type, enabled=False):
            return self._sums(x_ND.float(), labels_N)

    def position_scores(self, batch: Batch) -> Sums:
        """Return the same for each predicted position, in the order of `batch.kept_N`."""
        x_ND, labels_N, _ = self._kept(batch)
        with torch.autocast(x_ND.device.type, enabled=False):
            x_ND = x_ND.float()
            return position_losses(self.network.head, x_ND, labels_N, smoothing=self.smoothing, chunk=chunk_size(x_ND))

    def _kept(self, batch: Batch) -> tuple[Tensor, Tensor, Values]:
        """The trunk's output and the labels where something is predicted, and the losses that blocks add."""
        x_BTD, added = self.trunk(batch.inputs)
        labels_N = batch.labels_BT.flatten().index_select(0, batch.kept_N)
        return x_BTD.flatten(0, 1).index_select(0, batch.kept_N), labels_N, added

    def _sums(self, x_ND: Tensor, labels_N: Tensor) -> Sums:
        head, parameters = self.network.head, self.network.head_parameters()
        return smoothed_loss(head, parameters, x_ND, labels_N, smoothing=self.smoothing, chunk=chunk_size(x_ND))


def backward_scale(loss: Tensor, scale: float) -> Tensor:
    """`scale`, and not a number for a loss that is not finite: so is its gradient then, on all ranks that add it up."""
    return 0 * loss.detach() + scale
