"""An optimizer's step, a few of its parameters at a time.

One rule: what the optimizer sees while it steps are its own groups with a part of their parameters,
so options that a scheduler changed, and per-parameter state, are where they always are.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer


class Stepping:
    """Steps `inner` by parts; each part is some of its parameters."""

    def __init__(self, inner: Optimizer, parts: Sequence[Sequence[Tensor]]):
        self._inner = inner
        part_of = {id(p): part for part, members in enumerate(parts) for p in members}
        self._parts: list[dict[int, list[Tensor]]] = [{} for _ in parts]
        for number, group in enumerate(inner.param_groups):
            for p in group["params"]:
                self._parts[part_of[id(p)]].setdefault(number, []).append(p)

    @contextmanager
    def once(self) -> Iterator[None]:
        """All parts are stepped inside: hooks that users put on the step run once, around them."""
        inner = self._inner
        before, after = inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks
        for hook in before.values():
            hook(inner, (), {})
        inner._optimizer_step_pre_hooks = OrderedDict()
        inner._optimizer_step_post_hooks = OrderedDict()
        try:
            yield
        finally:
            inner._optimizer_step_pre_hooks = before
            inner._optimizer_step_post_hooks = after
        for hook in after.values():
            hook(inner, (), {})

    def step(self, part: int) -> None:
        """Step the parameters of `part` that have gradients."""
        inner, groups = self._inner, self._inner.param_groups
        some = self._parts[part]
        if not some:
            return
        whole = {number: groups[number]["params"] for number in some}
        inner.param_groups = [groups[number] for number in some]
        try:
            for number, params in some.items():
                groups[number]["params"] = params
            inner.step()
        finally:
            inner.param_groups = groups
            for number, params in whole.items():
                groups[number]["params"] = params
