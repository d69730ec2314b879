"""Find inputs of a stage that the previous stage did not send, and losses on the side.

A module's inputs are compared by rows, because every row of one process must arrive on some rank. A
row in the place of another equals a right one, and therefore shows no difference by itself.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from torchdistpackage.equivalence.match import rows_found
from torchdistpackage.equivalence.record import ModuleCalls, ParityRecord


def lost_row(reference: ParityRecord, ranks: Sequence[ParityRecord]) -> tuple[str, int, int] | None:
    """Return the first module to which a row of one process never came, a rank that has the module,
    and the row; None: all came, or some came changed.
    """
    for name, calls in reference.modules.items():
        modules = [(i, r.modules[name]) for i, r in enumerate(ranks) if name in r.modules]
        full = _rows(calls)
        parts = [(rank, rows) for rank, x in modules if (rows := _rows(x)) is not None]
        if full is None or len(parts) < len(modules) or not parts:
            continue
        if any(rows.shape[1] != full.shape[1] for _, rows in parts):
            continue
        if sum(len(rows) for _, rows in parts) < len(full):
            continue
        rows_of_parts = [rows_found(rows, full) for _, rows in parts]
        if any(_has_strangers(rows, full) for _, rows in parts):
            continue
        if missing := sorted(set(range(len(full))).difference(*rows_of_parts)):
            return name, parts[-1][0], missing[0]
    return None


def _rows(calls: ModuleCalls) -> Tensor | None:
    """Return the rows of a module's first input, or None if it is not a floating-point tensor of
    rows.
    """
    x = calls.inputs[0] if calls.inputs else None
    if x is None or x.dim() < 2 or not x.is_floating_point():
        return None
    return x.flatten(0, -2)


def _has_strangers(rows: Tensor, full: Tensor) -> bool:
    return len(rows_found(full, rows)) < len(rows)


def uneven_scalar(
    reference: ParityRecord, ranks: Sequence[ParityRecord], inside: str
) -> tuple[str, float] | None:
    """Return a module in, or around, `inside` whose scalar output gets another gradient for each of
    its rows than in one process, as an auxiliary loss does, and the ratio.
    """
    for name, calls in reference.modules.items():
        if not (name.startswith(inside) or inside.startswith(f"{name}.")):
            continue
        right = _gradients_of_scalars(calls)
        for record in ranks:
            if name not in record.modules:
                continue
            gradients = _gradients_of_scalars(record.modules[name])
            for rank_index, expected in right.items():
                ratio = gradients[rank_index] / expected if rank_index in gradients else 1.0
                if abs(ratio - 1) > 1e-9:
                    return name, ratio
    return None


def _gradients_of_scalars(calls: ModuleCalls) -> Mapping[int, float]:
    """Return the gradient of each scalar output over the rows of a call, by place."""
    rows = _rows(calls)
    if rows is None or len(calls.output_grads) < 2:
        return {}
    # a scalar of each call is joined to a vector
    scalars = {i: x for i, x in enumerate(calls.output_grads) if x.dim() == 1 and x.numel()}
    return {i: float(x.mean()) * x.numel() / len(rows) for i, x in scalars.items() if bool(x.all())}
