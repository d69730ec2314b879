"""What a stage holds of a micro-batch, where its layers do not state it but ran without numbers
(train/stage_trace.py). No torch."""

from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True, slots=True)
class TracedBytes:
    """Bytes of one micro-batch of a stage. kept, loss: from the forward to the backward, those of
    logits and loss apart. forward, backward: most in each, kept bytes included. stream: of what the
    stage hands on."""

    kept: float
    loss: float
    forward: float
    backward: float
    stream: float

    def toward(self, other: Self, share: float) -> Self:
        """Return the bytes on the line from here to `other`, where `share` is 1, and beyond."""
        values = ((getattr(self, x.name), getattr(other, x.name)) for x in fields(self))
        return type(self)(*(max(a + (b - a) * share, 0.0) for a, b in values))


@dataclass(frozen=True, slots=True)
class TracedStage:
    """A stage with `rows` tokens of a rank, and with twice as many, between which and beyond which
    bytes follow a line."""

    one: TracedBytes
    two: TracedBytes
    rows: int

    def at(self, rows: int) -> TracedBytes:
        """Return the bytes of so many tokens."""
        return self.one.toward(self.two, rows / self.rows - 1)
