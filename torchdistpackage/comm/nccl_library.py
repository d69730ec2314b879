"""The version of the NCCL library that this process has loaded.

torch.cuda.nccl.version() is the version of the header with which torch was compiled
(torch/csrc/cuda/nccl.cpp), and stays so where LD_PRELOAD puts another library ahead.
"""

import ctypes
import os
from contextlib import suppress

import torch.cuda.nccl
import torch.distributed as dist

from torchdistpackage.environment.gpu_sharing import nccl_version

_NAME = "libnccl.so.2"


def loaded_nccl() -> tuple[int, ...] | None:
    """Return (major, minor, patch) of the library in use; None if torch has no NCCL.

    A torch that contains NCCL, and RCCL, report it themselves.
    """
    if not dist.is_nccl_available():
        return None
    code = ctypes.c_int()
    with suppress(OSError, AttributeError):
        # never loads one: another library of the same name would not be the one that torch calls
        library = ctypes.CDLL(_NAME, mode=os.RTLD_NOLOAD)
        if library.ncclGetVersion(ctypes.byref(code)) == 0:
            return nccl_version(code.value)
    return tuple(int(part) for part in torch.cuda.nccl.version()[:3])
