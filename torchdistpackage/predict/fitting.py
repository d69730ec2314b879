"""The constants of a device from its published steps that are marked "fit": a search over a grid.

The grid is coarse, since a handful of steps say no more, and a row that has several steps counts
once. The shares of the links and of float8 are not searched: steps that hide their communication
say nothing of the first, and those of a fit are in bfloat16.
The result is what devices.py holds; `scripts/prediction_table.py --fit NAME` prints it.
"""

import itertools
from dataclasses import replace

from torchdistpackage.errors import ConfigError
from torchdistpackage.predict.devices import Accelerator, Fit
from torchdistpackage.predict.published import ROWS, PublishedStep
from torchdistpackage.predict.step import step_time

_MATMUL = [x / 100 for x in range(40, 92, 2)]
_MEMORY = [x / 100 for x in range(70, 95, 5)]
"""Element-wise kernels are seen to reach 70 to 90 % of the bandwidth that is printed."""


def fit(device: Accelerator) -> tuple[Fit, float]:
    """Return the constants of the grid with the least error of the rows to fit, and that error.

    Raises:
        ConfigError: no row of this device is marked "fit".
    """
    rows: dict[str, list[PublishedStep]] = {}
    for row in ROWS:
        if row.device == device.name and row.use == "fit":
            rows.setdefault(row.number.rstrip("abc"), []).append(row)
    if not rows:
        raise ConfigError(f"no published step of {device.name} is marked fit; add one to ROWS")
    grid = (replace(device.fit, matmul=x, memory=y) for x, y in itertools.product(_MATMUL, _MEMORY))
    return min(((each, _error(device, each, rows)) for each in grid), key=lambda result: result[1])


def _error(device: Accelerator, constants: Fit, rows: dict[str, list[PublishedStep]]) -> float:
    """Return the mean over the rows of the mean of (predicted / published - 1)^2."""
    changed, errors = replace(device, fit=constants), list[float]()
    for steps in rows.values():
        relative_errors = [
            step_time(x.sizes, x.layout, changed).total / x.seconds - 1 for x in steps
        ]
        errors.append(sum(x * x for x in relative_errors) / len(relative_errors))
    return sum(errors) / len(errors)
