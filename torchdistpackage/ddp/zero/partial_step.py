"""An optimizer's step, a few of its parameters at a time.

One rule: what the optimizer sees while it steps are its own groups with a part of their parameters,
so options that a scheduler changed, and per-parameter state, are where they always are.

How many at a time. A call costs the host 0.1 to 0.4 ms, so where the host only issues what a device
does, a thousand buckets must not be a thousand calls; yet the first call must not wait for the last
sum, nor the first gather for the last call. So calls halve what is left while sums come in, and
double what is done while parameters go out: both are a few calls, and the device hardly waits.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor
from torch.optim import Optimizer

AT_ONCE_BYTES = 128 * 2**20
"""Of parameters that wait for a call: it is made then at the latest, since optimizers that step by
`foreach` make a copy or two of all that they are given."""


class PartialStep:
    """Steps `inner` by parts; each part is some of its parameters.

    one_by_one: each in a call of its own, where the host itself waits for sums, or steps. around:
    of each call, given its parts.
    """

    def __init__(
        self,
        inner: Optimizer,
        parts: Sequence[Sequence[Tensor]],
        *,
        one_by_one: bool,
        around: Callable[[Sequence[int]], AbstractContextManager[object]] = nullcontext,
    ):
        self._inner, self._around = inner, around
        self._at_once_bytes = 0 if one_by_one else AT_ONCE_BYTES
        self._num_bytes = [sum(p.nbytes for p in members) for members in parts]
        self._landed: list[int] = []
        self._num_left = len(parts)
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
        self._landed, self._num_left = [], len(self._parts)
        try:
            yield
        finally:
            inner._optimizer_step_pre_hooks = before
            inner._optimizer_step_post_hooks = after
        for hook in after.values():
            hook(inner, (), {})

    def landed(self, part: int) -> None:
        """The gradients of `part` are there: step it, or let it wait for more."""
        self._landed.append(part)
        if self._is_enough(self._landed, -(-self._num_left // 2)):
            some, self._landed = self._landed, []
            self._num_left -= len(some)
            self.step(some)

    def in_turn(self, parts: Iterable[int]) -> Iterator[int]:
        """Step `parts`, all of which are there, in this order; each comes back once it is."""
        some: list[int] = []
        num_done = 0
        parts = list(parts)
        for part in parts:
            some.append(part)
            if part == parts[-1] or self._is_enough(some, num_done):
                self.step(some)
                yield from some
                num_done += len(some)
                some = []

    def all_at_once(self) -> None:
        """Of what a class does across parameters no part may be left out."""
        with self._around(range(len(self._parts))):
            self._inner.step()

    def step(self, parts: Sequence[int]) -> None:
        """Step the parameters of `parts` that have gradients, in one call."""
        some: dict[int, list[Tensor]] = {}
        for part in parts:
            for number, params in self._parts[part].items():
                some[number] = some[number] + params if number in some else params
        with self._around(parts):
            if some:
                self._step_only(some)

    def _step_only(self, some: dict[int, list[Tensor]]) -> None:
        """Step these of the groups of these numbers."""
        inner, groups = self._inner, self._inner.param_groups
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

    def _is_enough(self, parts: Sequence[int], num_parts: int) -> bool:
        if len(parts) >= num_parts:
            return True
        return sum(self._num_bytes[part] for part in parts) >= self._at_once_bytes
