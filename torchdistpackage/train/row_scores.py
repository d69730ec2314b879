"""Log-probabilities of given tokens, summed over the end of each row, on any layout.

Every rank receives all rows. Data ranks divide them, and one all-reduce of small tensors at the end
gives all scores to all ranks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.tensor_meta import Message
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.data.source import IGNORE
from torchdistpackage.errors import NonFiniteError
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.schedule.generators import evaluation
from torchdistpackage.train.staged_model import StagedModel


class ScoredRow(NamedTuple):
    """A row of token ids whose last `num_scored` are scored; at least one precedes them."""

    ids: tuple[int, ...]
    num_scored: int


class RowScore(NamedTuple):
    """Sum of the log-probabilities of the scored tokens, and whether each is the likeliest."""

    log_prob: float
    is_greedy: bool


def score_rows(
    model: StagedModel, rows: Sequence[ScoredRow], batch: int, timeout_s: float | None
) -> list[RowScore]:
    """Return the score of each row, equal on all ranks, which call it alike.

    batch: rows of one forward; the ranks of a pipeline have as many such batches in flight as there
    are stages. timeout_s: of a message between stages. The model is left in evaluation mode.

    Raises:
        NonFiniteError: on all ranks, where logits are NaN or infinite.
    """
    mesh = model.plan.topology.dense
    num_batches = mesh.axis_size("pipe")
    executor = Executor(
        evaluation(model.plan.schedule, num_batches),
        tpc.get_group("pipe"),
        device=model.device,
        timeout_s=timeout_s,
        dynamic_shapes=True,
    )
    index, num_data = tpc.get_dp_rank(), mesh.axis_size("data")
    # a column each: the sum, the number of likeliest tokens
    scores = torch.zeros(len(rows), 2, dtype=torch.float64, device=model.device)
    model.stage.eval()
    # rows of like length together, as padding is computed too
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row].ids))
    at_once = num_data * num_batches * batch
    for first in range(0, len(order), at_once):
        numbers = order[first : first + at_once][index::num_data]
        batches = [numbers[m * batch : (m + 1) * batch] for m in range(num_batches)]
        _score(model, executor, rows, batches, scores)
    if not model.tells_loss:
        scores.zero_()
    primitives.all_reduce(scores, tpc.get_group("global"))
    if scores.isnan().any():
        raise NonFiniteError(
            "the logits are NaN or infinite; the weights, or sums of this precision, are not "
            "finite: use an earlier checkpoint, or a wider precision.dtype"
        )
    return [
        RowScore(log_prob, num_likeliest == row.num_scored)
        for (log_prob, num_likeliest), row in zip(scores.tolist(), rows, strict=True)
    ]


def _score(
    model: StagedModel,
    executor: Executor,
    rows: Sequence[ScoredRow],
    batches: Sequence[Sequence[int]],
    scores: Tensor,
) -> None:
    """Add the scores of the rows of each batch to `scores`; an empty batch runs on a row of 0."""
    parts = [_padded(model, [rows[number] for number in numbers]) for numbers in batches]

    def forward(stage: int, m: int, received: Message) -> Message:
        ids, targets = parts[m]
        output = model.forward(stage, ids if executor.is_first_stage(stage) else received)
        if executor.is_last_stage(stage) and batches[m]:
            module: Any = model.stage[str(stage)]
            counts = targets != IGNORE
            # the logits of the scored tokens alone, at least in float32, as a loss takes them
            logits = module.whole_logits(output)[counts]
            logits = logits if logits.dtype == torch.float64 else logits.float()
            tokens = targets[counts]
            log_probs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
            likeliest = logits.argmax(-1) == tokens
            row_of_token = torch.tensor(batches[m], device=scores.device)[counts.nonzero()[:, 0]]
            scores.index_add_(0, row_of_token, torch.stack([log_probs, likeliest], 1).to(scores))
        return output

    executor.run(forward)


def _padded(model: StagedModel, rows: Sequence[ScoredRow]) -> tuple[Tensor, Tensor]:
    """Return this rank's slices of inputs and targets (B, S).

    Padding follows a row, so that no token of the row sees it.
    """
    plan = model.plan
    is_split = plan.shape is not None and plan.shape.sequence_parallel
    multiple = plan.topology.dense.axis_size("tensor") if is_split else 1
    multiple *= model.sequence.multiple
    length = max((len(row.ids) - 1 for row in rows), default=1)
    length += -length % multiple
    ids = torch.zeros(max(len(rows), 1), length, dtype=torch.int64)
    targets = torch.full_like(ids, IGNORE)
    for row, (tokens, num_scored) in enumerate(rows):
        end = len(tokens) - 1
        ids[row, :end] = torch.tensor(tokens[:-1])
        targets[row, end - num_scored : end] = torch.tensor(tokens[-num_scored:])
    return model.own_part(ids), model.own_part(targets)
