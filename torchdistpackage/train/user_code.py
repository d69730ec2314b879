"""Where your own model, data and loss are found: beside where you called us.

One rule: every command that loads them looks in the same folder, however Python was started (the
`tdp` script, unlike `python -m`, does not have the working folder on its path), and no file in it
takes the place of a module of Python's own.
"""

import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path


def add_user_code(env: Mapping[str, str]) -> str:
    """Put the folder of your own modules on sys.path, if it is not there; returns it.

    It is the working folder, or the snapshot of it that a job runs (TDP_CODE), and comes behind
    the standard library and before what is installed.
    """
    folder = env.get("TDP_CODE") or str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(_after_library(), folder)
    return folder


def _after_library() -> int:
    library = Path(sysconfig.get_path("stdlib"))
    ours = [
        i
        for i, entry in enumerate(sys.path)
        if Path(entry) == library or Path(entry).name == "lib-dynload"
    ]
    return max(ours, default=len(sys.path) - 1) + 1
