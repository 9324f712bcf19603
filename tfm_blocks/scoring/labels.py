"""Scores of labels, computed by torchmetrics from the texts of predicted and correct labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics.functional import matthews_corrcoef, spearman_corrcoef
from torchmetrics.functional.classification import multiclass_f1_score, multilabel_accuracy, multilabel_f1_score

from tfm_blocks.data.labels import NONE, LabelCoder


def label_scores(outputs: Sequence[str], references: Sequence[str], coder: LabelCoder) -> dict[str, float]:
    """Return the scores of labels, from 0 to 1 or from -1 to 1.

    For classes: accuracy, F1 as the mean over classes, and Matthews' correlation. For several classes: the fraction of
    right decisions, and F1. For numbers: Spearman's rank correlation.
    """
    if coder.predict == "number":
        values_2N = torch.tensor([list(map(float, texts)) for texts in (outputs, references)], dtype=torch.float64)
        if (values_2N == values_2N[:, :1]).all(1).any():
            return {"spearman": 0.0}  # numbers that are all equal have no order
        return {"spearman": float(spearman_corrcoef(*values_2N))}
    classes = len(coder.names)
    if coder.predict == "several":
        output_NC, right_NC = (_indicators(texts, coder) for texts in (outputs, references))
        return {
            "accuracy": float(multilabel_accuracy(output_NC, right_NC, classes, average="micro")),
            "f1": float(multilabel_f1_score(output_NC, right_NC, classes)),
        }
    output_N, right_N = (_classes(texts, coder) for texts in (outputs, references))
    return {
        "accuracy": float((output_N == right_N).double().mean()),
        "f1": float(multiclass_f1_score(output_N, right_N, classes)),
        "mcc": float(matthews_corrcoef(output_N, right_N, task="multiclass", num_classes=classes)),
    }


def _classes(texts: Sequence[str], coder: LabelCoder) -> Tensor:
    place = {name: number for number, name in enumerate(coder.names)}
    split = ([text] for text in texts) if coder.predict == "class" else (text.split() for text in texts)
    return torch.tensor([place[name] for names in split for name in names])


def _indicators(texts: Sequence[str], coder: LabelCoder) -> Tensor:
    rows = [{name for name in text.split() if name != NONE} for text in texts]
    return torch.tensor([[int(name in names) for name in coder.names] for names in rows])


def confusion_matrix(outputs: Sequence[str], references: Sequence[str], coder: LabelCoder) -> list[list[int]]:
    """Return the number of labels of each correct class, by row, and of each predicted class, by column."""
    classes = len(coder.names)
    output_N, right_N = (_classes(texts, coder) for texts in (outputs, references))
    counts: list[list[int]] = (
        torch.bincount(right_N * classes + output_N, minlength=classes**2).view(classes, -1).tolist()
    )
    return counts
