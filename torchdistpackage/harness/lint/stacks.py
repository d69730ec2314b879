"""Where a call stands in the code of those who made it. No torch.

One rule: frames of the machinery that carries a call are left out; what is left is the caller's.
"""

import inspect
import sys
import threading
from pathlib import Path

from torchdistpackage.harness.lint.matcher import Where

_HERE = str(Path(__file__).parent)
_TORCH = str(Path("site-packages", "torch", "distributed"))
_THREADING = str(Path(threading.__file__))


def stack_here() -> tuple[Where, object]:
    """(the caller's stack from the inside out, the frame of the batch a message is part of).

    torch hands the messages of a batch over one by one; its frame tells which belong together.
    """
    frame, batch = inspect.currentframe(), None
    found: list[tuple[str, int, str]] = []
    while frame is not None:
        code = frame.f_code
        if code.co_name == "batch_isend_irecv":
            batch = frame
        elif _is_shown(code.co_filename):
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found), batch


def stack_of(thread: threading.Thread) -> Where:
    """Where a thread is now."""
    frame = sys._current_frames().get(thread.ident or 0)
    found: list[tuple[str, int, str]] = []
    while frame is not None:
        code = frame.f_code
        if _is_shown(code.co_filename):
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found)


def _is_shown(file: str) -> bool:
    return not (file.startswith(_HERE) or _TORCH in file or file == _THREADING)
