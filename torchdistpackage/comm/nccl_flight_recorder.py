"""The flight recorder of NCCL: which calls a device has not ended.

One rule: only this file knows torch's name for it. It is there in builds with NCCL, and asked in a
thread of its own: a driver that is stuck must not take whoever asks along.
"""

import json
import threading
from typing import Any

import torch

_NAME = "_dump_nccl_trace_json"


def is_there() -> bool:
    """Whether this build of torch keeps one."""
    return _dump() is not None


def take(limit_s: float) -> dict[str, Any] | None:
    """Calls that have not ended, as torch has them; None without a recorder, or after `limit_s`."""
    dump = _dump()
    if dump is None:
        return None
    found: list[dict[str, Any]] = []

    def ask() -> None:
        if text := dump(includeCollectives=True, onlyActive=True):
            found.append(json.loads(text))

    asking = threading.Thread(target=ask, name="flight recorder", daemon=True)
    asking.start()
    asking.join(limit_s)
    return found[0] if found else None


def _dump() -> Any:
    return getattr(getattr(torch._C, "_distributed_c10d", None), _NAME, None)
