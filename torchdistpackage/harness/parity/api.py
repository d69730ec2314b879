"""`prove`: a model and loop of your own program on several layouts, against one process."""

import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torchdistpackage.equivalence.compare import (
    alone_difference,
    failure_of,
    first_difference,
)
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.parity.layout_ranks import ParityModel, run_layouts
from torchdistpackage.harness.parity.layouts import Axes, ParityReport, checked
from torchdistpackage.harness.pool import RankPool

MOST_RANKS = 8


def prove(
    build: Callable[[], ParityModel],
    batch: Callable[[int, int, int], Any],
    layouts: Iterable[Axes],
    *,
    pool: RankPool | None = None,
) -> ParityReport:
    """Compare the steps of a model under each layout with those of one process, in float64.

    build: makes the model on each rank, after `tpc` is set up; importable, as all that ranks call.
    batch: called with the step (from 0), this rank's index along data and the number of such
    ranks; returns what the step is fed, float tensors in float64. layouts: such as
    `[{"data": 2}, {"tensor": 2}, {"data": 2, "tensor": 2}]`. pool: ranks that are there already.

    If `build` gives `save` and `load`, each layout is also stopped and resumed, twice. The report
    is the line or table that `print` shows; `is_right` and `findings` are for tests.

    Raises:
        ConfigError: a layout cannot be, or one process alone fails.
    """
    try:
        chosen = checked(layouts, MOST_RANKS)
    except ValueError as error:
        raise ConfigError(f"prove: {error}") from error
    if not chosen:
        raise ConfigError("prove: no layout has several ranks; pass one, as {'data': 2}")
    with ExitStack() as stack:
        ranks = pool or stack.enter_context(RankPool(MOST_RANKS, timeout_s=600.0))
        saves = stack.enter_context(tempfile.TemporaryDirectory(prefix="tdp-prove-"))
        (one_process,), *records = run_layouts(build, batch, chosen, ranks, saves)
    if failure := failure_of(one_process):
        raise ConfigError(f"prove: one process alone fails: {failure}")
    if (alone := alone_difference(one_process)) is not None:
        return ParityReport([({}, alone)])
    return ParityReport(
        [
            (axes, first_difference(one_process, record, axes))
            for axes, record in zip(chosen, records, strict=True)
        ]
    )


compare_layouts = prove
"""The earlier name of `prove`."""
