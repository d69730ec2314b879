"""Losses of preference pairs, as functions of the pairs' scores.

`PREFERENCE_LOSSES` (config/preference_losses.py) lists the log-probabilities that each takes.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.config.schema import DpoSection


class PairScores(NamedTuple):
    """Scores (N,) of the chosen and the rejected answer of each pair.

    A score is a log-probability, minus that of the reference if the loss has one.
    """

    chosen: Tensor
    rejected: Tensor


def sigmoid(scores: PairScores, options: DpoSection) -> Tensor:
    """Return DPO's loss (N,), with label smoothing."""
    return _smoothed(options.beta * (scores.chosen - scores.rejected), options.label_smoothing)


def hinge(scores: PairScores, options: DpoSection) -> Tensor:
    """Return SLiC's hinge loss (N,)."""
    return torch.relu(1 - options.beta * (scores.chosen - scores.rejected))


def ipo(scores: PairScores, options: DpoSection) -> Tensor:
    """Return IPO's squared distance (N,) of the margin to 1 / (2 beta)."""
    return (scores.chosen - scores.rejected - 1 / (2 * options.beta)).square()


def simpo(scores: PairScores, options: DpoSection) -> Tensor:
    """Return SimPO's loss (N,): the margin must exceed gamma."""
    margin = options.beta * (scores.chosen - scores.rejected) - options.gamma
    return _smoothed(margin, options.label_smoothing)


def orpo(scores: PairScores, options: DpoSection) -> Tensor:
    """Return ORPO's loss (N,).

    It is the chosen answer's mean cross entropy plus beta times the loss of the odds of chosen over
    rejected.
    """
    log_odds = _log_odds(scores.chosen) - _log_odds(scores.rejected)
    return -scores.chosen - options.beta * F.logsigmoid(log_odds)


def kto(ratios: Tensor, is_desirable: Tensor, kl: Tensor, options: DpoSection) -> Tensor:
    """Return KTO's loss (N,) of answers (equation 8 of arXiv:2402.01306, without its constants).

    ratios (N,): log-probabilities relative to the reference. is_desirable (N,): bool. kl:
    divergence from the reference, a scalar of at least 0 without gradient.
    """
    sign = torch.where(is_desirable, 1.0, -1.0).to(ratios)
    good, bad = options.desirable_weight, options.undesirable_weight
    weight = torch.where(is_desirable, good, bad).to(ratios)
    return weight * (1 - torch.sigmoid(options.beta * sign * (ratios - kl)))


def _smoothed(margin: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def _log_odds(log_prob: Tensor) -> Tensor:
    """Return log(p / (1 - p)) from log p.

    A row without counted tokens has p = 1 and infinite odds. Its pair does not count, so it must
    only stay finite, in gradients too.
    """
    below_one = log_prob.clamp(max=-1e-12)
    return below_one - torch.log(-torch.expm1(below_one))
