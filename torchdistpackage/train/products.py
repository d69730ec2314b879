"""Which tensor-parallel calls a piece of a model makes, from its layouts alone. No torch.

One rule, that of parallel/tensor/linear.py: a product whose output is cut joins its input's parts
before it, one whose input is cut sums its output after it, and the backward does the transpose in
reverse. An embedding with a cut vocabulary sums its output too; a head is a product whose output
is cut.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torchdistpackage.harness.lint.matcher import OpSignature
from torchdistpackage.layout.layout import Layout

Calls = tuple[OpSignature, ...]


@dataclass(frozen=True, slots=True)
class Activations:
    """What flows between pieces: (S, B, width) as a whole.

    cuts: ranks along the tensor axis. sequence_parallel: each holds S / cuts of the rows.
    """

    seq_len: int
    batch: int
    cuts: int
    sequence_parallel: bool
    dtype: str
    axis: str = "tensor"

    def elements(self, width: int) -> int:
        """Of what one rank sends to the next stage."""
        rows = self.seq_len // self.cuts if self.sequence_parallel else self.seq_len
        return rows * self.batch * width


def piece_calls(
    layouts: Iterable[Layout], flow: Activations, *, takes_ids: bool
) -> tuple[Calls, Calls]:
    """(calls of the forward, of the backward) of a piece on the tensor group.

    layouts: of its parameters, in the order in which they are used. takes_ids: it looks up rows of
    its matrix.
    """
    forward: list[OpSignature] = []
    backward: list[OpSignature] = []
    for layout in layouts:
        if len(layout.shape) != 2 or flow.axis not in layout.split_axes or flow.cuts == 1:
            continue
        dout, din = layout.shape
        if flow.axis in layout.split[0] and not takes_ids:
            before, after = _joined(din, flow), ()
            transposed = (_summed(din, flow),)
        else:
            before, after = (), (_summed(din if takes_ids else dout, flow),)
            transposed = _joined(din if takes_ids else dout, flow)
        forward += (*before, *after)
        backward[:0] = transposed
    return tuple(forward), tuple(backward)


def _joined(width: int, flow: Activations) -> Calls:
    """The parts of a sequence joined; without sequence parallelism everybody has it whole."""
    if not flow.sequence_parallel:
        return ()
    return (gather((flow.seq_len // flow.cuts, flow.batch, width), flow.dtype),)


def _summed(width: int, flow: Activations) -> OpSignature:
    """A partial sum completed, for my part of the sequence or whole."""
    if flow.sequence_parallel:
        shape = (flow.seq_len // flow.cuts, flow.batch, width)
        return reduction("reduce_scatter", shape, flow.dtype)
    return reduction("all_reduce", (flow.seq_len, flow.batch, width), flow.dtype)


def loss_calls(flow: Activations) -> Calls:
    """Of the cross entropy of logits whose vocabulary is cut: row maxima, then sums."""
    if flow.cuts == 1:
        return ()
    shape = (flow.seq_len, flow.batch)
    return (
        reduction("all_reduce", shape, flow.dtype, "max"),
        reduction("all_reduce", (2, *shape), flow.dtype),
    )


def reduction(operation: str, shape: tuple[int, ...], dtype: str, op: str = "sum") -> OpSignature:
    return OpSignature(operation, (("shape", shape), ("dtype", dtype), ("op", op)))


def gather(shape: tuple[int, ...], dtype: str) -> OpSignature:
    return OpSignature("all_gather", (("shape", shape), ("dtype", dtype)))
