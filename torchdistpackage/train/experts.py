"""Experts in a run: their counts are summed with a step's numbers and applied on all ranks.

One all-reduce per step carries loss, tokens, norm and how often each expert was chosen. Every stage
updates its biases from it, and rank 0 logs the load of all layers.
"""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from torchdistpackage.layout.layout import Layout
from torchdistpackage.parallel.expert.balance import (
    ExpertLoad,
    apply_counts,
    load_of,
    routers_in,
)

_EXPERTS = ".experts."
_PART = re.compile(r"\.(?:router|experts)(?=\.|$)")


class ExpertCounts:
    """The mixtures of a run, including those of other stages, in the order of the model.

    layouts: of the entire model by global name. stage, local: the modules of this rank, and the
    layouts of their parameters by local name. counts: whether this rank counts, among those that
    route the same tokens.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        stage: nn.Module,
        local: Mapping[str, Layout],
        *,
        counts: bool,
    ):
        num_experts_of = {
            mixture_of(name): layout.shape[0]
            for name, layout in layouts.items()
            if "expert" in layout.split_axes and _EXPERTS in name
        }
        self.names = tuple(num_experts_of)
        self._sizes = [num_experts + 1 for num_experts in num_experts_of.values()]
        index_of = {name: index for index, name in enumerate(num_experts_of)}
        routers = routers_in(stage)
        mixtures = {path: mixture_of(path) for path in routers}
        names = {mixture_of(name): mixture_of(x.name) for name, x in local.items()}
        indexed = ((index_of.get(names.get(mixtures[p], "")), r) for p, r in routers.items())
        self._mine = {index: router for index, router in indexed if index is not None}
        self._counts = counts
        self.reset()

    def reset(self) -> None:
        """Forget counts from outside of steps, such as a trial's."""
        for router in self._mine.values():
            router.counter.take(router.weight.device)

    def join(self, stats: Tensor) -> Tensor:
        """Return `stats` with the counts of this rank appended."""
        if not self._sizes:
            return stats
        parts = [stats.new_zeros(size) for size in self._sizes]
        for index, router in self._mine.items():
            counts = router.counter.take(stats.device)
            if self._counts:
                parts[index] += counts
        return torch.cat([stats, *parts])

    def split(self, joined: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Split a joined tensor (see `join`) after its sum over ranks."""
        if not self._sizes:
            return joined, ()
        number = len(joined) - sum(self._sizes)
        return joined[:number], joined[number:].split(self._sizes)

    def follow(self, counts: Sequence[Tensor], numbers: Tensor) -> None:
        """Update biases and last loads from a step's counts, unless the step's numbers are not
        finite.
        """
        if self._mine:
            own_counts = [counts[index] for index in self._mine]
            apply_counts(self._mine.values(), own_counts, numbers.isfinite().all())

    def loads(self, numbers: Sequence[float]) -> dict[str, ExpertLoad]:
        """Return the load of each mixture by global name, from the summed counts on the host."""
        loads_by_name: dict[str, ExpertLoad] = {}
        for name, size in zip(self.names, self._sizes, strict=True):
            loads_by_name[name], numbers = load_of(numbers[:size]), numbers[size:]
        return loads_by_name


def mixture_of(name: str) -> str:
    """Return the path of a mixture, from the path of its router or experts, or of one of their
    parameters.
    """
    return _PART.split(name, maxsplit=1)[0]
