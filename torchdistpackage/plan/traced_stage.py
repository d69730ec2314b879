"""The bytes of a stage's micro-batch, measured on fake tensors if its layers do not state them
(train/stage_trace.py). No torch."""

from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True, slots=True)
class TracedBytes:
    """Bytes of one micro-batch of a stage. kept, loss: from the forward to the backward, without
    and only of logits and loss. forward, backward: the maximum in each, kept bytes included.
    stream: of the stage's output."""

    kept: float
    loss: float
    forward: float
    backward: float
    stream: float

    def toward(self, other: Self, share: float) -> Self:
        """Return the bytes on the line from here to `other`, at the fraction `share`, or beyond
        it.
        """
        values = ((getattr(self, x.name), getattr(other, x.name)) for x in fields(self))
        return type(self)(*(max(a + (b - a) * share, 0.0) for a, b in values))


@dataclass(frozen=True, slots=True)
class TracedStage:
    """A stage with `rows` tokens of a rank, and with twice as many; bytes are interpolated
    linearly."""

    one: TracedBytes
    two: TracedBytes
    rows: int

    def at(self, rows: int) -> TracedBytes:
        """Return the bytes of `rows` tokens."""
        return self.one.toward(self.two, rows / self.rows - 1)
