"""Where your own model, data and loss are found: beside where you called us.

One rule: every command that loads them looks in the same folder, however Python was started (the
`tdp` script, unlike `python -m`, does not have the working folder on its path).
"""

import sys
from collections.abc import Mapping
from pathlib import Path


def add_own_code(env: Mapping[str, str]) -> str:
    """Put the folder of your own modules on sys.path, if it is not there; returns it.

    It is the working folder, or the snapshot of it that a job runs (TDP_CODE).
    """
    folder = env.get("TDP_CODE") or str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return folder
