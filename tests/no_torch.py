"""Pytest plugin (`-p tests.no_torch`): `import torch` fails in this process.

One rule: a test that passes under it needs no torch, directly or indirectly. Processes that a test
starts are not concerned.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class _Refuse(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname.partition(".")[0] == "torch":
            raise ImportError(f"{fullname} was imported where torch is not to be needed")


sys.meta_path.insert(0, _Refuse())
