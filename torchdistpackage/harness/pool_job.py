"""What the pool and its ranks say to each other."""

from dataclasses import dataclass

from torchdistpackage.launch.entrypoint import EntryPoint
from torchdistpackage.launch.failure import Failure
from torchdistpackage.launch.rank import Result


@dataclass(frozen=True, slots=True)
class Job:
    """One run, as a rank gets it.

    store: meet there first, as the old default group is gone, or of another back end.
    transport: `gloo`, or an order of the late transport (harness/late/orders.py).
    """

    reference: EntryPoint
    args: bytes
    cleanups: tuple[str, ...]
    store: str | None
    transport: str = "gloo"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a job. `keeps_group`: the default group is still the one it found."""

    outcome: Result | Failure
    keeps_group: bool
