"""Tokens of a language model, one after another, on any layout.

Each token is one forward of the whole sequence through the pipeline: nothing of an earlier one is
kept. It is chosen where the logits are, from random numbers that no layout changes, and sent to all
ranks, so every layout writes what one process writes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.random import seed_from
from torchdistpackage.comm.tensor_meta import Message
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import NonFiniteError
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.schedule.generators import evaluation
from torchdistpackage.train.inference_request import Sampling
from torchdistpackage.train.staged_model import StagedModel

_NO_NUMBER = -1
"""Told instead of a token, so that all ranks end together."""


def generate(
    model: StagedModel,
    prompt: Sequence[int],
    how: Sampling,
    window: int,
    timeout_s: float | None,
) -> Iterator[int]:
    """What follows `prompt`, without end. All ranks of one model call it alike and get the same.

    The model is left in evaluation mode. window: tokens that it sees; of a longer sequence the
    last ones. timeout_s: of a message between stages.

    Raises:
        NonFiniteError: on all ranks, where logits are no numbers.
    """
    plan, mesh = model.plan, model.plan.topology.dense
    executor = Executor(
        evaluation(plan.schedule, 1),
        tpc.get_group("pipe"),
        device=model.device,
        timeout_s=timeout_s,
        dynamic_shapes=True,
    )
    # of the last stage those that hold the last token know the next; the first of them sends it
    coord, last = mesh.coord(model.rank), plan.schedule.placement[-1]
    # a sequence that is split over ranks needs a multiple of them; no token sees what comes later
    is_split = plan.shape is not None and plan.shape.sequence_parallel
    multiple = (mesh.axis_size("tensor") if is_split else 1) * model.sequence.multiple
    draw = torch.Generator().manual_seed(seed_from(how.seed, "generate"))
    tokens = list(prompt)
    model.stage.eval()
    while True:
        context = tokens[-window:]
        ids = torch.tensor([context + [0] * (-len(context) % multiple)], device=model.device)
        owner, position = model.sequence.place(len(context) - 1, ids.shape[1])
        logits = _logits(model, executor, model.sequence.part(ids), position)
        source = mesh.rank({**coord, "pipe": last, "tensor": 0, "context": owner})
        choice = torch.zeros(1, dtype=torch.int64, device=model.device)
        if logits is not None:
            choice.fill_(next_token(logits, how, draw))
        primitives.broadcast(choice, tpc.get_group("model"), source)
        token = int(choice)
        if token == _NO_NUMBER:
            raise NonFiniteError(
                f"the logits of token {len(tokens)} are no numbers; the weights, or sums of this "
                f"precision, are not finite: use an earlier checkpoint, or a wider precision.dtype"
            )
        tokens.append(token)
        yield token


def _logits(model: StagedModel, executor: Executor, ids: Tensor, position: int) -> Tensor | None:
    """Logits (V,) at one position of the ids (1, S) here, on the ranks of the last stage."""
    found: list[Tensor] = []

    def forward(stage: int, m: int, received: Message) -> Message:
        output = model.forward(stage, ids if executor.is_first_stage(stage) else received)
        if executor.is_last_stage(stage):
            module: Any = model.stage[str(stage)]
            found.append(module.logits_at(output, position))
        return output

    executor.run(forward)
    return found[0] if found else None


def next_token(logits: Tensor, how: Sampling, draw: torch.Generator) -> int:
    """A token id from logits (V,); -1 where one is no number.

    top_k keeps that many of the likeliest, then top_p the fewest whose chances add up to it
    (nucleus sampling, arXiv:1904.09751). One number is drawn for each token, whatever is kept.
    """
    logits = logits.detach().to("cpu", torch.float64)
    if logits.isnan().any() or logits.isposinf().any():
        return _NO_NUMBER
    if how.temperature == 0:
        return int(logits.argmax())
    kept, ids = (logits / how.temperature).sort(descending=True, stable=True)
    chances = kept[: how.top_k].softmax(0)
    if how.top_p is not None:
        before = chances.cumsum(0) - chances
        chances = chances[before < how.top_p]
    sums = chances.cumsum(0)
    at = torch.rand((), dtype=torch.float64, generator=draw) * sums[-1]
    index = int(torch.searchsorted(sums, at, right=True).clamp(max=len(sums) - 1))
    return int(ids[index])
