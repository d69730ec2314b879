"""Which extension serves which core class, as its options ask.

A core file, such as ddp/naive_ddp.py, states as a protocol what it must be given, and imports no
extension. `SERVED_BY` names who makes it, in a file that imports core and extensions; that file
loads when the first object of the class is made.
"""

from functools import cache
from pkgutil import resolve_name
from typing import Any

SERVED_BY = {
    "NaiveDDP": "torchdistpackage.ddp.options:ResolvedOptions",
    "ZeroOptimizer": "torchdistpackage.ddp.zero.options:ResolvedZeroOptions",
    "ShardedOptimizerBase": "torchdistpackage.ddp.zero.state_dict:StateSaver",
    "Reducer": "torchdistpackage.ddp.scheduled_ready:LastBackwardPolicy",
}
"""Core class -> "module:attribute"."""


@cache  # a look-up takes 5 us, and a step of a pipeline makes one
def extensions_of(core: str) -> Any:
    """What `SERVED_BY` names for the class `core`."""
    return resolve_name(SERVED_BY[core])
