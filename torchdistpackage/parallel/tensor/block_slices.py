"""Blocks that see the whole sequence, and hand on this rank's slice of it.

It is sequence parallelism for blocks whose layers are not known to work on slices: what stands
between blocks, so what `recompute: blocks` keeps and pipeline stages send, is (B, S/n, D). Within a
block nothing changes, so neither do the gradients of its parameters.
"""

from collections.abc import Iterable
from functools import cache
from inspect import signature
from typing import Any

from torch import nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group


def let_see_all(blocks: Iterable[nn.Module], group: Group, dim: int = 1) -> None:
    """Let each block gather the slices (B, S/n, D) that it is given, and return its slice. dim: of
    the sequence."""
    for block in blocks:
        block.__class__ = _seeing_all(type(block))
        block.__dict__["_tdp_slices"] = group, dim


class _SeesAll:
    """A block that gathers its first argument and scatters its first result."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        group, dim = self.__dict__["_tdp_slices"]
        if args:
            args = (collectives.gather(args[0], dim, group), *args[1:])
        else:
            name = "hidden_states"
            if name not in kwargs:
                name = next(iter(signature(self.forward).parameters))  # type: ignore[attr-defined]
            kwargs[name] = collectives.gather(kwargs[name], dim, group)
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if isinstance(output, tuple | list):
            first = collectives.scatter(output[0], dim, group)
            return type(output)((first, *output[1:]))
        return collectives.scatter(output, dim, group)

    def __reduce_ex__(self, protocol: object) -> tuple:
        return _new, (type(self).__bases__[1],), vars(self)


@cache
def _seeing_all(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_SeesAll, kind), {"__module__": kind.__module__})


def _new(kind: type[nn.Module]) -> nn.Module:
    """Create an empty block, when unpickling."""
    return nn.Module.__new__(_seeing_all(kind))
