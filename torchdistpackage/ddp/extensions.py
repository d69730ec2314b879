"""What serves the options of a core class, which imports no extension.

A core file, such as naive_ddp.py, states as protocols what it must be given. `EXTENSIONS` in the
`__init__` of this folder names who makes it, in a file that imports core and extensions. That file
loads with the first wrapper; this folder itself loads nothing, as plans are computed without torch.
"""

import sys
from functools import cache
from pkgutil import resolve_name
from typing import Any


@cache  # a look-up takes 5 us, and a step of a pipeline makes one
def extensions_of(core: str) -> Any:
    """What `EXTENSIONS` names for the class `core`."""
    return resolve_name(sys.modules[__package__].EXTENSIONS[core])
