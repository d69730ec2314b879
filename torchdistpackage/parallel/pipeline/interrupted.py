"""Groups over which a step has ended in an exception: none is begun over them again.

One rule: ranks that have agreed on a step either all come to its end, or those who do not refuse
further ones by themselves. They cannot ask the others: what is still under way would be taken for
their words.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torchdistpackage.comm.per_group import PerGroup
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import CommError

_interrupted: PerGroup[str] = PerGroup()
"""With the exception."""


@contextmanager
def step_over(group: Group) -> Iterator[None]:
    """A step that the ranks of `group` have agreed on; a rank alone may fail and go on."""
    try:
        yield
    except BaseException as error:
        if group.size() > 1:
            _interrupted.setdefault(group, f"{type(error).__name__}: {error}")
        raise


def refuse_interrupted(group: Group) -> None:
    """Before anything is sent over `group`.

    Raises:
        CommError: a step over it ended here in an exception.
    """
    if group in _interrupted:
        raise CommError(
            f"an earlier step over this group was interrupted by {_interrupted[group]}; its "
            f"messages are lost: make a new group, and what steps over it"
        )


def is_interrupted(group: Group) -> bool:
    """A step over `group` ended here in an exception while messages were under way."""
    return group in _interrupted
