"""Metrics of predictions on all samples of a validation, as scikit-learn defines them."""

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


def of_classes(predicted: npt.NDArray, labels: npt.NDArray, num_classes: int) -> dict[str, float]:
    """Return accuracy and F1. predicted, labels (N,): class numbers.

    `f1_macro` is the mean over the classes that occur in either; `f1`, with two classes, is that of
    the second.
    """
    predicted, labels = predicted.astype(np.int64), labels.astype(np.int64)
    counts = np.bincount(labels * num_classes + predicted, minlength=num_classes**2)
    table = counts.reshape(num_classes, num_classes).astype(np.float64)
    right, num_expected, num_predicted = np.diagonal(table), table.sum(1), table.sum(0)
    occurs = num_expected + num_predicted > 0
    scores = _f1(right, num_expected, num_predicted)
    values = {"accuracy": float(right.sum() / max(table.sum(), 1))}
    if num_classes == 2:
        values["f1"] = float(scores[1])
    return values | {"f1_macro": float(scores[occurs].mean()) if occurs.any() else 0.0}


def of_label_sets(scores: npt.NDArray, labels: npt.NDArray) -> dict[str, float]:
    """Return metrics of samples with several classes. scores (N, K): logits; labels (N, K): 0 or 1.

    `accuracy` is that of whole sets, and `auc` the mean over classes that some samples have and
    some have not.
    """
    predicted = scores > 0
    expected = labels > 0
    right = (predicted & expected).sum(0).astype(np.float64)
    sums = expected.sum(0).astype(np.float64), predicted.sum(0).astype(np.float64)
    every = _f1(right.sum(keepdims=True), *(x.sum(keepdims=True) for x in sums))
    values = {
        "accuracy": float((predicted == expected).all(1).mean()),
        "f1": float(every[0]),
        "f1_macro": float(_f1(right, *sums).mean()),
    }
    areas = [area_under_curve(scores[:, k], expected[:, k]) for k in range(scores.shape[1])]
    defined = [x for x in areas if x is not None]
    return values | ({"auc": float(np.mean(defined))} if defined else {})


def areas(logits: npt.NDArray, labels: npt.NDArray) -> dict[str, float]:
    """Return the area under the ROC curve of logits (N, K).

    With two classes it is that of the second, else the mean of each class against all others. {} if
    a class has all samples or none.
    """
    odds = logits - logits.max(1, keepdims=True)
    shares = np.exp(odds) / np.exp(odds).sum(1, keepdims=True)
    classes = (1,) if logits.shape[1] == 2 else range(logits.shape[1])
    values = [area_under_curve(shares[:, k], labels == k) for k in classes]
    defined = [x for x in values if x is not None]
    return {"auc": float(np.mean(defined))} if len(defined) == len(values) else {}


def area_under_curve(scores: npt.NDArray, positive: npt.NDArray) -> float | None:
    """Return the area under the ROC curve (Mann and Whitney, 1947).

    It is the fraction of pairs of a positive and a negative sample in which the positive scores
    higher; ties count half.
    """
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if not num_positive or not num_negative:
        return None
    above = ranks(scores)[positive].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * num_negative))


def correlations(predicted: npt.NDArray, expected: npt.NDArray) -> dict[str, float]:
    """Return the correlations of two rows of numbers (N,); {} if one is constant."""
    values = {
        "pearson": _pearson(predicted, expected),
        "spearman": _pearson(ranks(predicted), ranks(expected)),
    }
    return {name: value for name, value in values.items() if math.isfinite(value)}


def ranks(values: npt.NDArray) -> npt.NDArray[np.float64]:
    """Return the rank of each value from 1; equal values get their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[inverse]


def _pearson(x: npt.NDArray, y: npt.NDArray) -> float:
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / size if size else math.nan


def _f1(
    right: npt.NDArray, num_expected: npt.NDArray, num_predicted: npt.NDArray
) -> npt.NDArray[np.float64]:
    """Return 2 right / (expected + predicted), or 0 if both are 0."""
    both = num_expected + num_predicted
    return 2 * right / np.where(both == 0, 1, both)
