"""The objectives of training: the losses of a micro-batch, also of later tokens, with a teacher or with a generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.blocks.layers.state import mean_of_kept
from tfm_blocks.data.layout import EOS, Batch
from tfm_blocks.data.objectives import DistilSettings, ObjectiveSettings, ReplacedTokenSettings, SeveralTokensSettings
from tfm_blocks.devices import sum_dtype, without_autocast
from tfm_blocks.network.call import Values
from tfm_blocks.network.graph import TAP, Network
from tfm_blocks.training.loss import (
    PLAIN,
    Lesson,
    LossWeights,
    Sums,
    chunk_size,
    position_losses,
    sample_ids,
    smoothed_loss,
    weigh,
)
from tfm_blocks.training.settings import LossSettings

AHEAD = "predict_ahead"
Trunk = Callable[..., tuple[Tensor, Values]]


class Objective:
    """The smoothed loss of the predicted positions, plus z-loss and the auxiliary losses of blocks.

    `trunk` is the network's `trunk_with_losses`, or its compiled form. `losses` has the weights of losses in training,
    which may depend on the `step`.
    """

    def __init__(
        self,
        network: Network,
        smoothing: float,
        trunk: Trunk | None = None,
        losses: LossSettings = LossSettings(),  # noqa: B008  it is frozen
    ) -> None:
        self.network, self.smoothing, self.losses, self.step = network, smoothing, losses, 1
        self.trunk = trunk or network.trunk_with_losses

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return sums over the batch: the differentiable total, and [smoothed loss, -log p, other losses...].

        The other losses are those that `losses.names_with` names, weighted: the auxiliary loss of each block, which
        counts for each token of a sequence that the loss is a mean over, z-loss, and the parts of the objective.
        """
        x_ND, labels_N, losses = self._predicted(batch)
        weights = LossWeights(z_loss=self.losses.weight("z_loss", self.step))
        sums, parts = self._sums(x_ND, labels_N, batch.weights_N, weights), self._parts(batch, losses)
        others = [*self._z_loss(weights, sums), *parts]
        return self.total(batch, sum(parts, sums.total), [sums.loss, sums.nll], losses, others)

    def _parts(self, batch: Batch, losses: Values) -> list[Tensor]:
        """Return further losses with their weights; their values of tapped nodes are removed from `losses`."""
        return []

    def with_network(self, network: Network) -> Self:
        """Return the objective of another network, whose trunk is not compiled."""
        other = copy(self)
        other.network, other.trunk = network, network.trunk_with_losses
        network.tap(self.network.tapped)
        return other

    def total(
        self, batch: Batch, total: Tensor, means: Sequence[Tensor], losses: Values, others: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor]:
        """Add the auxiliary losses of blocks to `total`; also return `means`, these losses, and the `others` in it."""
        auxiliary = [(loss * batch.counts_B).sum() for loss in losses.values()]
        factors = [self.losses.factor(address, self.step) for address in losses]
        auxiliary = [loss if factor == 1 else factor * loss for loss, factor in zip(auxiliary, factors, strict=True)]
        logged = torch.stack([*means, *auxiliary, *others]).detach()
        return sum(auxiliary, total), logged.to(sum_dtype(logged.device))

    def scores(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return sums over the batch: the smoothed loss, -log p, and the number of correct tokens.

        Logits are float32, because bf16 would cause ties.
        """
        x_ND, labels_N, _ = self._predicted(batch)
        with without_autocast(x_ND.device):
            sums = self._sums(x_ND.float(), labels_N, batch.weights_N)
        return sums.loss, sums.nll, sums.correct

    def position_scores(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the smoothed loss, -log p and the most probable token of each position of `batch.kept_N`."""
        x_ND, labels_N, _ = self._predicted(batch)
        with without_autocast(x_ND.device):
            x_ND = x_ND.float()
            loss_N, nll_N, best_N = position_losses(self.network.head, x_ND, labels_N, **self._options(x_ND))
        return weigh(loss_N, batch.weights_N), weigh(nll_N, batch.weights_N), best_N

    def _predicted(self, batch: Batch) -> tuple[Tensor, Tensor, Values]:
        """Return the trunk's output and the labels of the predicted positions, and the auxiliary losses."""
        x_BTD, losses = self.trunk(batch.inputs)
        return batch.kept(x_BTD), batch.kept(batch.labels_BT), losses

    def _sums(
        self,
        x_ND: Tensor,
        labels_N: Tensor,
        weights_N: Tensor | None,
        weights: LossWeights = PLAIN,
        lesson: Lesson | None = None,
    ) -> Sums:
        trained = [parameter for parameter in self.network.head_parameters() if parameter.requires_grad]
        return smoothed_loss(
            self.network.head,
            trained,
            x_ND,
            labels_N,
            weights=weights,
            weights_N=weights_N,
            lesson=lesson,
            **self._options(x_ND),
        )

    def _z_loss(self, weights: LossWeights, sums: Sums) -> list[Tensor]:
        """Return the weighted z-loss, if it is logged."""
        return [weights.z_loss * sums.squares] if self.losses.has_z_loss else []

    def _options(self, x_ND: Tensor) -> dict[str, Any]:
        return {"smoothing": self.smoothing, "chunk": chunk_size(x_ND), "first": self.network.first_predicted}


class SeveralTokensObjective(Objective):
    """The smoothed loss, plus a weight times the mean of the losses of later tokens.

    Source: Gloeckle et al. 2024, section 2; DeepSeek-AI 2024 (DeepSeek-V3), equations 21 to 25. Value k that the node
    predict_ahead reads predicts, by the head, the token k positions after the next, if no document ends before it. As
    in equation 24, each loss is a mean over all predicted tokens of the target.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ahead = next(node.reads["ahead"] for node in self.network.spec.nodes if node.block == AHEAD)
        self.network.tap(self.ahead)

    def _parts(self, batch: Batch, losses: Values) -> list[Tensor]:
        labels_BT, totals = batch.labels_BT, list[Tensor]()
        for distance, address in enumerate(self.ahead, 1):
            later_BT = F.pad(labels_BT, (0, distance))[:, distance:]
            ended_BT = F.pad(labels_BT == EOS, (0, distance)).unfold(1, distance, 1)[:, : labels_BT.shape[1]].any(2)
            kept_BT = (later_BT != 0) & ~ended_BT
            later_BT = torch.where(kept_BT, later_BT, labels_BT)  # the loss of a label that has no logit is not finite
            later_N, weights_N = batch.kept(later_BT), batch.kept(kept_BT).float()
            x_ND = batch.kept(losses[f"{TAP}{address}"])
            totals.append(self._sums(x_ND, later_N, weights_N).total)
        for address in set(self.ahead):
            del losses[f"{TAP}{address}"]
        return [sum(totals, torch.zeros_like(totals[0])) * (self.losses.weight("ahead", self.step) / len(self.ahead))]


class DistilObjective(Objective):
    """The smoothed loss, and the divergence from a teacher at a temperature: Hinton et al. 2015, section 2.

    The teacher is frozen and in eval mode. It reads the inputs of the model, and predicts at the same positions.
    `hidden` maps nodes of the model to nodes of the teacher that their outputs follow.
    """

    def __init__(
        self, *arguments: Any, teacher: Network, temperature: float, hidden: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__(*arguments)
        self.teacher, self.temperature, self.hidden = teacher.eval().requires_grad_(False), temperature, hidden
        self.network.tap(hidden)
        teacher.tap(hidden.values())

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x_ND, labels_N, losses = self._predicted(batch)
        weights = LossWeights(**{name: self.losses.weight(name, self.step) for name in LossWeights._fields})
        lesson, theirs = self._lesson(batch)
        sums = self._sums(x_ND, labels_N, None, weights, lesson)
        others = self._z_loss(weights, sums)
        others, total = [*others, weights.kl * sums.divergence], sums.total
        states = {address: losses.pop(f"{TAP}{address}") for address in self.hidden}
        if states:
            pairs = [(states[own], theirs[f"{TAP}{other}"], own) for own, other in self.hidden.items()]
            others.append(self.losses.weight("hidden", self.step) * self._distance(batch, pairs))
            total = total + others[-1]
        return self.total(batch, total, [sums.loss, sums.nll], losses, others)

    @torch.no_grad()
    def _lesson(self, batch: Batch) -> tuple[Lesson, Values]:
        """Return the distribution of the teacher, and the values of its tapped nodes."""
        device, teacher = batch.labels_BT.device, self.teacher
        if teacher.device != device:
            teacher.to(device)
        x_BTD, values = teacher.trunk_with_losses(batch.inputs)
        x_ND = batch.kept(x_BTD)
        first = max(teacher.first_predicted, self.network.first_predicted)
        return Lesson(lambda rows: teacher.head(x_ND[rows]).detach(), self.temperature, first), values

    def _distance(self, batch: Batch, pairs: Sequence[tuple[Tensor, Tensor, str]]) -> Tensor:
        """Return the sum over pairs of the mean squared difference in each sequence, once for each counted token."""
        masks = self.network.keep_masks(batch.inputs).masks
        axes = {call.address: str(call.node.shape[1]) for call in self.network.calls}
        distance_B = torch.zeros(len(batch.labels_BT), device=batch.labels_BT.device)
        for own_BND, other_BND, address in pairs:
            square_BN = (own_BND.float() - other_BND.float()).square().mean(2)
            keep_BN = masks.get(axes[address])  # None for an axis of a fixed size
            distance_B = distance_B + (square_BN.mean(1) if keep_BN is None else mean_of_kept(square_BN, keep_BN))
        return (distance_B * batch.counts_B).sum()


class ReplacedTokenObjective(Objective):
    """The loss of deciding whether a generator has replaced a token: Clark et al. 2020 (ELECTRA), equation 2.

    The generator, a child of the network, predicts the hidden tokens. Samples of its distribution replace them, through
    which no gradient passes. The network decides for each token whether it was replaced, from a logit that is above 0
    if it was; a sample that equals the hidden token was not. The loss is the binary cross entropy of all tokens that
    are not padding, times losses.replaced, plus the cross entropy of the hidden tokens, times losses.generator.
    """

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return sums as `Objective.loss`; the loss is the binary cross-entropy, and -log p is the generator's."""
        x_ND, labels_N, _ = self._masked._predicted(batch)
        names = {"ce": "generator", "z_loss": "z_loss"}
        weights = LossWeights(**{name: self.losses.weight(key, self.step) for name, key in names.items()})
        sums = self._masked._sums(x_ND, labels_N, batch.weights_N, weights)
        _, keep_BT, loss_BT, _, losses = self._decide(batch, x_ND)
        loss = (loss_BT * keep_BT).sum()
        replaced = self.losses.weight("replaced", self.step) * loss
        parts = [*self._z_loss(weights, sums), weights.ce * sums.loss, replaced]
        return self.total(batch, sums.total + replaced, [loss, sums.nll], losses, parts)

    def decisions(self, batch: Batch) -> tuple[Batch, Tensor, Tensor]:
        """Return the batch with the label 1 at original and 2 at replaced tokens, and the loss and decision of each."""
        x_ND, _, _ = self._masked._predicted(batch)
        replaced_BT, keep_BT, loss_BT, logits_BT, _ = self._decide(batch, x_ND)
        labels_BT = (1 + replaced_BT.long()) * keep_BT
        decided = replace(batch, labels_BT=labels_BT, kept_N=labels_BT.flatten().nonzero()[:, 0])
        return decided, decided.kept(loss_BT), 1 + (decided.kept(logits_BT) > 0).long()

    @property
    def _masked(self) -> Objective:
        """Return the objective of the generator, which recomputes its layers if the network does."""
        replacer = self.network.replacer
        assert replacer is not None, "the launch attaches it"
        replacer.recomputes = self.network.recomputes
        masked = Objective(replacer, self.smoothing, None, self.losses)
        masked.step = self.step
        return masked

    def _decide(self, batch: Batch, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Values]:
        """Return replaced_BT, keep_BT, loss_BT, logits_BT and the auxiliary losses; x_ND is the generator's output."""
        ((name, read_BT),) = batch.inputs.items()
        assert self.network.replacer is not None and batch.uniforms_N is not None, "the layout draws them"
        sampled_N = sample_ids(self.network.replacer.head, x_ND, batch.uniforms_N, chunk=chunk_size(x_ND))
        original_BT = torch.where(batch.labels_BT != 0, batch.labels_BT, read_BT)
        ids_BT = original_BT.flatten().index_copy(0, batch.kept_N, sampled_N).view_as(read_BT)
        keep_BT, replaced_BT = read_BT != 0, ids_BT != original_BT
        x_BTD, losses = self.trunk({name: ids_BT}, {name: keep_BT})
        logits_BT = self.network.head(x_BTD)[..., -1].float()
        loss_BT = F.binary_cross_entropy_with_logits(logits_BT, replaced_BT.to(logits_BT), reduction="none")
        keep_BT = keep_BT & (batch.counts_B[:, None] > 0)  # an idle rank has no tokens
        return replaced_BT, keep_BT, loss_BT, logits_BT, losses


def make_objective(
    settings: ObjectiveSettings,
    network: Network,
    smoothing: float,
    trunk: Trunk | None,
    losses: LossSettings,
    teacher: Network | None,
) -> Objective:
    """Return the objective of a config, with the `teacher` of objective=distil. Labels have another objective."""
    options = network, smoothing, trunk, losses
    match settings:
        case DistilSettings(temperature=temperature, hidden=hidden):
            assert teacher is not None, "objective=distil has a teacher"
            return DistilObjective(*options, teacher=teacher, temperature=temperature, hidden=hidden or {})
        case ReplacedTokenSettings():
            return ReplacedTokenObjective(*options)
        case SeveralTokensSettings():
            return SeveralTokensObjective(*options)
    return Objective(*options)
