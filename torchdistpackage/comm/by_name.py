"""The primitives for users: the same operations, whose group may also be the name of an axis.

One rule: what is given as `group` goes through `as_group`, except None where it means everybody.
"""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torchdistpackage.comm import p2p, primitives
from torchdistpackage.comm.arguments import as_group

Given, Result = ParamSpec("Given"), TypeVar("Result")


def by_name(operation: Callable[Given, Result]) -> Callable[Given, Result]:
    """`operation`, whose `group` may be a name."""
    signature = inspect.signature(operation)
    place = list(signature.parameters).index("group")
    may_be_none = signature.parameters["group"].default is None

    def resolved(group):
        return None if group is None and may_be_none else as_group(group)

    @functools.wraps(operation)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if "group" in kwargs:
            kwargs["group"] = resolved(kwargs["group"])
        elif len(args) > place:
            args = (*args[:place], resolved(args[place]), *args[place + 1 :])
        return operation(*args, **kwargs)

    return call


all_reduce = by_name(primitives.all_reduce)
start_all_reduce = by_name(primitives.start_all_reduce)
start_all_gather = by_name(primitives.start_all_gather)
start_reduce_scatter = by_name(primitives.start_reduce_scatter)
start_all_to_all = by_name(primitives.start_all_to_all)
start_broadcast = by_name(primitives.start_broadcast)

send = by_name(p2p.send)
receive = by_name(p2p.receive)
start_send = by_name(p2p.start_send)
start_receive = by_name(p2p.start_receive)

ranks_of = by_name(primitives.ranks_of)
barrier = by_name(primitives.barrier)
gather_objects = by_name(primitives.gather_objects)
broadcast_object = by_name(primitives.broadcast_object)
