"""Checkpointing of modules by name, and the choice of modules for a memory limit, from a profile.

The choice is a set of modules, none inside another, that frees enough memory and costs the least
forward time. That is a knapsack problem on the tree of modules. The candidate sets of a module are
the module itself, and unions of sets of its children; a set stays only if every cheaper one frees
less.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchdistpackage.errors import ConfigError

Profile = Mapping[str, Mapping[str, Any]]
"""A profile as `get_model_profile` returns it; one written by hand needs only `fwd_time` and
`fwd_mem`."""

_MB_PER_GB = 1e3
_MOST_SETS, _MOST_JOINED = 1500, 300_000
"""Largest number of sets, and of unions of sets, to consider. A longer list is thinned to one set
for each 1/1500 of the memory that all modules free; where a module would have more unions, to one
for each 1/200 of what it frees."""


class RecomputePlan(tuple[str, ...]):
    """The names of the modules to checkpoint, in the profile's order.

    memory_gb: activations that a forward then keeps. time_ms: forward time that is spent twice.
    """

    memory_gb: float
    time_ms: float

    @classmethod
    def of(cls, names: Iterable[str], memory_gb: float, time_ms: float) -> "RecomputePlan":
        """Return the plan that recomputes the modules of these names."""
        plan = cls(names)
        plan.memory_gb, plan.time_ms = memory_gb, time_ms
        return plan

    def __str__(self) -> str:
        names = ", ".join(self) or "nothing"
        return (
            f"recompute {names}: activations of {self.memory_gb:.3g} GB, {self.time_ms:.4g} ms more"
        )


def propose_recompute(
    profile: Profile,
    memory_gb: float,
    *,
    candidates: Callable[[str], bool] | None = None,
) -> RecomputePlan:
    """Return the modules to checkpoint so that one forward keeps at most `memory_gb` (1e9 bytes).

    It chooses the set that costs the least forward time, and among equals the one that frees most.
    It counts the activations kept until the backward; while the backward recomputes a module, it
    also needs that module's own. Modules whose forward changes buffers (BatchNorm) are not chosen.

    candidates: names of modules that may be chosen; default: all but the root.

    Raises:
        ConfigError: the limit is not a positive number, the profile is empty or not of a forward
            with gradients, or even the least memory is more than the limit.
    """
    if not isinstance(profile, Mapping):
        raise ConfigError(
            f"propose_recompute: the profile is a {type(profile).__name__}; pass what "
            f"get_model_profile returned"
        )
    if not isinstance(memory_gb, int | float) or not memory_gb > 0:
        raise ConfigError(f"propose_recompute: memory_gb is {memory_gb!r}; give gigabytes above 0")
    needed = {"fwd_time", "fwd_mem"}
    if bad := [name for name, entry in profile.items() if not needed <= entry.keys()]:
        raise ConfigError(
            f"propose_recompute: {len(bad)} of {len(profile)} entries lack fwd_time or fwd_mem "
            f"({bad[0]!r}); pass what get_model_profile returned"
        )
    tree = _ModuleTree(profile)
    total = tree.total_mb
    if not total > 0:
        raise ConfigError(
            "propose_recompute: the profile has no activations; profile a forward with gradients"
        )
    excess = total - memory_gb * _MB_PER_GB
    if excess <= 0:
        return RecomputePlan.of((), total / _MB_PER_GB, 0.0)

    def may(name: str) -> bool:
        entry = profile[name]
        allowed = name != "root" and not entry.get("has_state")
        return allowed and _freed_mb(entry) > 0 and (candidates is None or candidates(name))

    step = sum(_freed_mb(profile[name]) for name in profile if may(name)) / _MOST_SETS
    sets = _sets(tree, tree.tops, may, step)
    enough = [s for s in sets if s[0] >= excess - 1e-9 * total]
    if not enough:
        least = total - max(freed for freed, _, _ in sets)
        raise ConfigError(
            f"propose_recompute: {memory_gb:g} GB are too little: activations take "
            f"{total / _MB_PER_GB:.4g} GB, and {least / _MB_PER_GB:.4g} GB if every module that "
            f"can be is recomputed; allow that much, or use smaller batches"
        )
    freed, time_ms, names = min(enough, key=lambda s: (s[1], -s[0]))
    chosen = set(_flat(names))
    kept_gb = (total - freed) / _MB_PER_GB
    return RecomputePlan.of((name for name in profile if name in chosen), kept_gb, time_ms)


_Set = tuple[float, float, Any]
"""(MB freed, ms, names as nested pairs)."""


class _ModuleTree:
    """The modules of a profile as a tree."""

    def __init__(self, profile: Profile):
        self.profile = profile
        self.children: dict[str, list[str]] = {name: [] for name in profile}
        self.tops: list[str] = []
        for name in profile:
            above = name
            while "." in above:
                above = above.rpartition(".")[0]
                if above in profile:
                    self.children[above].append(name)
                    break
            else:
                if name != "root":
                    self.tops.append(name)
        root = profile.get("root")
        tops = sum(profile[name]["fwd_mem"] for name in self.tops)
        self.total_mb = tops if root is None else root["fwd_mem"]


def _sets(
    tree: _ModuleTree, names: Sequence[str], may: Callable[[str], bool], step: float
) -> list[_Set]:
    """Return the sets worth considering of modules among and inside `names`, cheapest first."""
    sets: list[_Set] = [(0.0, 0.0, ())]
    for name in names:
        own_sets = _sets(tree, tree.children[name], may, step)
        if may(name):
            entry = tree.profile[name]
            own_sets = _worth([*own_sets, (_freed_mb(entry), entry["fwd_time"], name)], step)
        if len(own_sets) * len(sets) > _MOST_JOINED:
            own_sets = _thinned(own_sets, own_sets[-1][0] / 200)
        if len(own_sets) > 1:
            joined = [(f + g, t + u, (a, b)) for f, t, a in sets for g, u, b in own_sets]
            sets = _worth(joined, step)
    return sets


def _worth(sets: list[_Set], step: float) -> list[_Set]:
    """Return the sets that free more than every cheaper one; if there are many, one per `step`."""
    best: list[_Set] = []
    for candidate in sorted(sets, key=lambda s: (s[1], -s[0])):
        if not best or candidate[0] > best[-1][0]:
            best.append(candidate)
    return _thinned(best, step) if len(best) > _MOST_SETS else best


def _thinned(best: list[_Set], step: float) -> list[_Set]:
    # the cheapest set that reaches the start of each interval of freed memory, and the very last
    """Return the cheapest set in each interval `step` of freed memory, and the very last."""
    return [*(a for a, b in pairwise(best) if a[0] // step != b[0] // step), best[-1]]


def _freed_mb(entry: Mapping[str, Any]) -> float:
    """Return the megabytes that checkpointing a module frees."""
    return entry.get("freed_mem", entry["fwd_mem"])


def _flat(names: Any) -> Iterable[str]:
    """Yield the names in nested pairs."""
    todo = [names]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            yield item
        else:
            todo.extend(item)


class CheckpointedForward:
    """The forward of `module`, recomputed in its backward with the same random states."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.module).forward
        if not torch.is_grad_enabled():
            return forward(self.module, *args, **kwargs)
        return checkpoint(forward, self.module, *args, use_reentrant=False, **kwargs)


def checkpoint_modules(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Recompute the modules called `names` in the backward, in place; return `model`.

    Names of parameters, `state_dict` and types do not change, and copies are checkpointed too. A
    module that is checkpointed already stays so. `uncheckpoint_modules(model)` undoes it.

    Raises:
        ConfigError: a name is not one of the model's, or one is inside another.
    """
    names = [names] if isinstance(names, str) else list(names)
    modules = dict(model.named_modules())
    if unknown := [name for name in names if name not in modules]:
        raise ConfigError(
            f"checkpoint_modules: {len(unknown)} names are not of this model: "
            f"{', '.join(map(repr, unknown[:3]))}; it has {', '.join(list(modules)[1:4])}, ..."
        )
    pairs = [(a, b) for a in names for b in names if b.startswith(f"{a}." if a else "") and b != a]
    if pairs:
        outer, inner = pairs[0]
        raise ConfigError(
            f"checkpoint_modules: {inner} is inside {outer or 'the model'}, which recomputes it "
            f"anyway; name one of them"
        )
    for name in names:
        module = modules[name]
        if not isinstance(vars(module).get("forward"), CheckpointedForward):
            module.forward = CheckpointedForward(module)
    return model


def uncheckpoint_modules(model: nn.Module) -> None:
    """Undo `checkpoint_modules` on all modules of `model`."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), CheckpointedForward):
            del module.forward
