"""Make matmuls slow in a rank that checks its node; Python imports this file at its start where it
stands in PYTHONPATH.
"""

import sys
import time
from importlib.abc import MetaPathFinder

CHECK = "torchdistpackage.harness.node_check"


class SlowMatmuls(MetaPathFinder):
    """Waits for the import of the check, since a watcher of ranks imports no torch."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name != CHECK:
            return
        sys.meta_path.remove(self)
        import torch

        multiply = torch.mm

        def slow(*args, **kwargs):
            time.sleep(0.01)
            return multiply(*args, **kwargs)

        torch.mm = slow


sys.meta_path.insert(0, SlowMatmuls())
