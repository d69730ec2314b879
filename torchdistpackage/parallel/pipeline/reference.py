"""Reference of a pipeline step: GPipe in its plainest form. Tests compare Pipeline with it.

Every message blocks, all micro-batches are kept, and nothing is measured or checked.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torchdistpackage.comm.p2p import receive, send
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import resolve_group


def gpipe_step(
    stage: nn.Module,
    microbatches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    activation: Tensor,
    group: Group | None = None,
) -> Tensor | None:
    """Run all forwards, and then all backwards (Huang et al. 2019, arXiv:1811.06965).

    It adds gradients of the mean loss over the micro-batches to the parameters of `stage`.

    microbatches: (inputs, targets), equal on all ranks.
    activation: a tensor of the shape and dtype that one stage passes to the next.

    Returns:
    The mean loss on the last rank, None elsewhere.
    """
    group = resolve_group(group, "pipe")
    ranks, stage_index = ranks_of(group), group.rank()
    previous_rank = ranks[stage_index - 1] if stage_index > 0 else None
    next_rank = ranks[stage_index + 1] if stage_index + 1 < len(ranks) else None

    saved: list[tuple[Tensor, Tensor]] = []
    for inputs, targets in microbatches:
        if previous_rank is not None:
            inputs = receive(torch.empty_like(activation), group, previous_rank).requires_grad_()
        output = stage(inputs)
        if next_rank is not None:
            send(output.detach(), group, next_rank)
        else:
            output = loss_fn(output, targets) / len(microbatches)
        saved.append((inputs, output))

    for inputs, output in saved:
        if next_rank is not None:
            output.backward(receive(torch.empty_like(output), group, next_rank))
        else:
            output.backward()
        if previous_rank is not None:
            assert inputs.grad is not None
            send(inputs.grad, group, previous_rank)

    return None if next_rank is not None else sum(loss.detach() for _, loss in saved)
