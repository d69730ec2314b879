"""What a run says once about its model, at its start."""

from torchdistpackage.parallel.tensor.four_bit import kernel_notes
from torchdistpackage.train.step import Trainer


def model_notes(trainer: Trainer) -> list[str]:
    """Return the lines, of rank 0."""
    model = trainer.plan.model
    return [*(() if model is None else model.notes()), *kernel_notes()]
