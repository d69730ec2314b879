"""What the stacks of a rank tell of its loop: where it is, and whether it waits there. No torch.

One rule: on a device a backward and its hooks run in threads of autograd, which Python did not
start. A loop that stands in autograd's engine is where such a thread is. A host that only issues
kernels stands in torch for long when the queue of launches is full: then it waits as well.
"""

import re
from collections.abc import Sequence

FOREIGN = "a thread that Python did not start, as autograd's of a device"
"""Heads the stack of one."""


def loop_of(stacks: Sequence[str]) -> str:
    """The stack in which the loop goes on: the first one, or that of autograd's thread."""
    if not stacks:
        return ""
    if _ENGINE.search(_frames(stacks[0])[-1]):
        foreign = [text for text in stacks[1:] if text.startswith(FOREIGN)]
        return next(
            (text for text in foreign if not _waits(text, True)), *foreign[:1] or stacks[:1]
        )
    return stacks[0]


def innermost(stacks: Sequence[str]) -> str:
    """Where the loop is: `"loader.py", line 31, in batch`; in libraries only if nowhere else."""
    lines = [x.strip() for x in loop_of(stacks).splitlines()]
    places = [x.removeprefix("File ") for x in lines if x.startswith("File ")]
    own = [place for place in places if not _LIBRARY.search(place)]
    return next(iter([*own[-1:], *places[-1:]]), "")


def is_waiting(stacks: Sequence[str], *, on_device: bool = False) -> bool:
    """Whether the loop stands in a call that waits for other ranks, or for its device.

    on_device: it issues its work to one.
    """
    return _waits(loop_of(stacks), on_device)


def _waits(text: str, on_device: bool) -> bool:
    frames = _frames(text)
    if _COLLECTIVE.search("".join(frames[-3:])) or _DEVICE.search(frames[-1]):
        return True
    return on_device and bool(_READS.search(frames[-1]) or _LAUNCHES.search(frames[-1]))


def _frames(text: str) -> list[str]:
    return re.split(r"^  (?=File )", text, flags=re.MULTILINE)


_ENGINE = re.compile(r"\bin _engine_run_backward$", re.MULTILINE)
_COLLECTIVE = re.compile(r"/torch/distributed/")
_DEVICE = re.compile(
    r"\.(item|tolist|cpu|synchronize|wait_stream)\(|\bin synchronize$", re.MULTILINE
)
_READS = re.compile(r"\b(float|int|bool)\(|\.(to|cuda|numpy|nonzero|copy_|unique|equal)\(")
"""They read a number of the device, or copy from memory that is not pinned."""
_LAUNCHES = re.compile(r"/torch/(nn|optim|autograd|_tensor|functional|_ops|utils/_foreach)")
_LIBRARY = re.compile(r'/lib/python3[.\d]*/|^"<')
