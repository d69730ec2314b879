"""Whether a module has gained parameters, found by comparing what it holds with what it held,
and whether it has buffers.

One rule: each is one pass over its tables, in C, so that every forward can afford it.
"""

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_

from torch import nn

_requires_grad = attrgetter("requires_grad")


class ModuleWatch:
    """Of `module`, as it is now."""

    def __init__(self, module: nn.Module):
        modules = list(module.modules())
        self._tables = [table for m in modules for table in (m._modules, m._parameters)]
        self._buffers = [m._buffers for m in modules]
        self._held = self._all()
        frozen = (p for p in module.parameters() if not p.requires_grad)
        self._frozen = list(frozen)

    def has_changed(self) -> bool:
        """Whether modules or parameters came, went or were replaced, or frozen ones are no more."""
        now = self._all()
        return (
            len(now) != len(self._held)
            or not all(map(is_, now, self._held))
            or any(map(_requires_grad, self._frozen))
        )

    def has_buffers(self) -> bool:
        """Whether there are any; those of modules that came later do not count."""
        return any(self._buffers)

    def _all(self) -> list[object]:
        values: Iterable[Iterable[object]] = (table.values() for table in self._tables)
        return list(chain.from_iterable(values))
