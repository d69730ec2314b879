"""Moments at which a writer of checkpoints is killed.

A moment is a call that changes the disk (or hands over to another rank): the writer dies before
it, and in those that write, also with half of it done.
"""

import os
import pathlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchdistpackage.checkpoint import writer
from torchdistpackage.comm import primitives

NEVER = -1


class Moments:
    """Counts the moments of a save, and kills this process at one of them."""

    def __init__(self, kill_at: int):
        self.kill_at, self.passed = kill_at, 0

    def __call__(self) -> bool:
        self.passed += 1
        return self.passed - 1 == self.kill_at

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("mkdir", "chmod", "fsync", "rename", "unlink", "rmdir"):
            patch.setattr(os, name, self._before(getattr(os, name)))
        for name in ("gather_objects", "broadcast_object"):
            patch.setattr(primitives, name, self._before(getattr(primitives, name)))
        written = self._half(writer.write_safetensors, at=0)
        patch.setattr(writer, "write_safetensors", written)
        patch.setattr(pathlib.Path, "write_text", self._half(pathlib.Path.write_text, at=0))

    def _before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self():
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return watched

    def _half(self, write: Callable[..., Any], at: int) -> Callable[..., Any]:
        """`write`, of whose file (argument `at`) half is written by the one who dies."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = write(*args, **kwargs)
            if self():
                os.truncate(args[at], Path(args[at]).stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return self._before(watched)
