"""A rank of `tdp comm bench`: measures, and the first one says what it is at.

One rule: an error is also left in a file, for a parent that ends this rank before it is heard.
"""

import sys
from pathlib import Path

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError
from torchdistpackage.harness.bench.report import BenchReport, Measurement
from torchdistpackage.harness.bench.request import Request
from torchdistpackage.harness.measure.watched import watched
from torchdistpackage.launch.files import atomic_write


def bench(request: Request, note: str) -> BenchReport | None:
    """The report on rank 0, None on the others.

    Raises:
        CommError: as `watched`; its text is in the file `note` too.
    """
    said: list[tuple[str, str]] = []

    def say(cell: Measurement) -> None:
        at = (cell.operation, cell.axis)
        if tpc.rank == 0 and at not in said[-1:]:
            sys.stderr.write(f"measuring {cell.operation} over {cell.axis}\n")
        said[:] = [at]

    try:
        report = watched(request, on_round=say)
    except CommError as error:
        atomic_write(Path(note), str(error))
        raise
    return report if tpc.rank == 0 else None
