"""Groups on which messages were lost: an exception ended a step while some were under way.

What is still under way would be taken for a message of the next step, so a rank refuses further
steps over such a group by itself, without asking the others.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torchdistpackage.comm.creation import PerGroup
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import CommError

_interrupted: PerGroup[str] = PerGroup()
"""Group -> the exception that ended a step over it."""


@contextmanager
def step_over(group: Group) -> Iterator[None]:
    """Around a step that the ranks of `group` have agreed on; a group of one may fail and go on."""
    try:
        yield
    except BaseException as error:
        if group.size() > 1:
            _interrupted.setdefault(group, exception_text(error))
        raise


def refuse_interrupted(group: Group) -> None:
    """Raises CommError if a step over `group` ended here in an exception."""
    if group in _interrupted:
        raise CommError(lost_messages("step over this group", _interrupted[group]))


def is_interrupted(group: Group) -> bool:
    """Whether a step over `group` ended here in an exception."""
    return group in _interrupted


def exception_text(error: BaseException) -> str:
    """Its class and its message."""
    return f"{type(error).__name__}: {error}"


def lost_messages(what: str, error: str) -> str:
    """Text of the error that refuses to go on after `error` has ended an earlier one."""
    return (
        f"an earlier {what} was interrupted by {error}; its messages are lost: make a new group "
        f"and a new executor or Pipeline over it"
    )
