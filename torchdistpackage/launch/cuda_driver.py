"""Whether this process has initialised the CUDA driver, which its forked children could not use.

Asked of the driver itself: torch knows only of what torch did, while a call of the runtime, of
triton or of another binding initialises it too. Nothing is loaded and nothing initialised to ask.
An open /dev/nvidiactl is no sign: NVML, which is safe before a fork, holds it as well.
"""

import ctypes
import os
from pathlib import Path

_NOT_INITIALIZED, _NO_DEVICE = 3, 100
_OPEN = Path("/proc/self/fd")


def why_initialised(open_files: Path = _OPEN) -> str:
    """What shows that the driver was initialised here, or "".

    open_files: a folder of links to what this process has open.
    """
    count, answer = ctypes.c_int(), _NOT_INITIALIZED
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        answer = int(driver.cuDeviceGetCount(ctypes.byref(count)))
    except (OSError, AttributeError):
        pass  # nobody loaded it
    if answer not in (_NOT_INITIALIZED, _NO_DEVICE):
        return f"the CUDA driver is initialised (cuDeviceGetCount returns {answer})"
    for link in open_files.iterdir():
        try:
            name = str(link.readlink())
        except OSError:  # closed meanwhile, as the one that lists them
            continue
        if name.startswith("/dev/nvidia-uvm"):
            return f"{name} is open, as after the CUDA driver was initialised"
    return ""
