"""Moments at which a writer of checkpoints is killed.

A moment is a call that changes the disk (or hands over to another rank): the writer dies before
it, and in those that write, also with half of it done.
"""

import os
import pathlib
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchdistpackage.checkpoint import file_exchange, local_copies, writer
from torchdistpackage.comm import primitives

NEVER = -1


class Moments:
    """Counts the moments of a save, and kills this process at one of them.

    kill_at: its number, among those called `point` if that is named, else among all.
    """

    def __init__(self, kill_at: int, point: str = ""):
        self.kill_at, self.point = kill_at, point
        self.passed, self.counts = 0, Counter[str]()

    def __call__(self, name: str) -> bool:
        self.passed += 1
        self.counts[name] += 1
        if self.point:
            return name == self.point and self.counts[name] - 1 == self.kill_at
        return self.passed - 1 == self.kill_at

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("mkdir", "chmod", "fsync", "rename", "unlink", "rmdir"):
            patch.setattr(os, name, self._before(getattr(os, name), name))
        # `collect_objects` is a `reduce_objects`, so it has its moment there
        for name in ("gather_objects", "reduce_objects", "broadcast_object"):
            patch.setattr(primitives, name, self._before(getattr(primitives, name), name))
        kept = file_exchange._KeptFile
        patch.setattr(kept, "take", self._before(kept.take, "a block of the neighbour"))
        for holder, name, at in (
            (writer, "write_safetensors", 0),
            (local_copies, "copy_file", 1),
            (pathlib.Path, "write_text", 0),
        ):
            patch.setattr(holder, name, self._half(getattr(holder, name), name, at))

    def _before(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self(name):
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return watched

    def _half(self, write: Callable[..., Any], name: str, at: int) -> Callable[..., Any]:
        """`write`, of whose file (argument `at`) half is written by the one who dies."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = write(*args, **kwargs)
            if self(f"half of {name}"):
                os.truncate(args[at], Path(args[at]).stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return self._before(watched, name)
