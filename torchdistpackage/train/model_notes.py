"""Notes on the model that a run prints once, at its start."""

import math
from collections.abc import Iterator

from torchdistpackage.parallel.context.module import is_wrapped
from torchdistpackage.parallel.tensor.four_bit import kernel_notes
from torchdistpackage.plan.run_plan import attends_to_parts
from torchdistpackage.train.step import Trainer


def model_notes(trainer: Trainer) -> list[str]:
    """Return the lines, of rank 0."""
    model = trainer.plan.model
    notes = [*_copies(trainer), *_parts(trainer)] if model is None else [*model.notes()]
    return [*notes, *kernel_notes()]


def _copies(trainer: Trainer) -> Iterator[str]:
    """Yield a note if tensor ranks share nothing of a user's own model."""
    plan = trainer.plan
    tensor = plan.topology.dense.axis_size("tensor")
    layouts = trainer.layouts.values()
    if tensor == 1 or any("tensor" in (*x.split_axes, *x.unreduced) for x in layouts):
        return
    count = sum(math.prod(layout.shape) for layout in layouts)
    yield (
        f"parallel.tensor={tensor}, but none of the {len(layouts)} parameters "
        f"({count:,} numbers) of {plan.user_code['model.target'][0]} on this rank is split: "
        f"{tensor} ranks hold the same copy and do the same work; return tensor_parallel(model) "
        f"from it (docs/own_code.md), or set parallel.tensor to 1"
    )


def _parts(trainer: Trainer) -> Iterator[str]:
    """Yield a warning if context ranks share sequences and the model was not told about it."""
    plan = trainer.plan
    shared = plan.topology.dense.axis_size("context") > 1
    if shared and not is_wrapped(trainer.stage):
        yield f"{attends_to_parts(plan)}. If the model calls context_attention itself, all is well"
