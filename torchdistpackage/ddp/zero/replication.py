"""Which ranks share each parameter of an optimizer: from a module, its layouts, and groups."""

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import nn
from torch.optim import Optimizer

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.ddp.param_spec import (
    ParamSpec,
    is_cut,
    layouts_of,
    num_batches,
    refuse_cut,
    summed_over,
)
from torchdistpackage.ddp.param_sync import ReplicatedTensor, sync_module_states
from torchdistpackage.ddp.wrapper_state import batch_group
from torchdistpackage.ddp.zero.shard_bounds import ModuleParam, group_by_module
from torchdistpackage.errors import TopologyError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import layout_of


@dataclass(frozen=True)
class BucketedParamSpec(ParamSpec):
    """It travels with those that have its bucket number."""

    bucket: int = 0

    @property
    def key(self) -> Hashable:
        return super().key, self.bucket


@dataclass(frozen=True)
class ReplicaGroups:
    """Parameters without layout are shared by `group` and copied over `replicas`.

    mean: gradients are divided by the number of batches. both: ranks of `group` and of replicas.
    cut: names of parameters of which this rank holds a part.
    """

    group: Group
    replicas: Group | None
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    mean: bool = True
    both: frozenset[int] = frozenset()
    cut: frozenset[str] = frozenset()

    @classmethod
    def over(
        cls,
        group: Group | None,
        replicas: Group | None,
        module: nn.Module | None,
        named: Sequence[tuple[str, nn.Parameter]],
        layouts: Mapping[str, Layout] | None,
        mean: bool,
    ) -> "ReplicaGroups":
        """Collective over `replicas`, whose members learn what ranks the others share with.

        named: parameters of the optimizer and of `module`.

        Raises:
            LayoutError: ranks that share cut a parameter.
        """
        if group is None:
            group = batch_group()
        both = frozenset(ranks_of(group))
        if replicas is not None:
            told = primitives.gather_objects(ranks_of(group), replicas)
            both = frozenset(rank for ranks in told for rank in ranks)  # type: ignore[union-attr]
        followed = layouts_of(module, named, layouts, both)
        alone = [(name, p) for name, p in named if name not in followed]
        refuse_cut(alone, sorted(both), "ZeroOptimizer")
        cut = frozenset(n for n, p in named if is_cut(followed.get(n) or layout_of(p), p))
        sharing = cls(group, replicas, followed, mean, both, cut)
        if followed:
            tpc.prepare(sums=[x for x in followed.values() if set(summed_over(x)) != both])
        return sharing

    def of(self, name: str, parameter: nn.Parameter) -> ParamSpec:
        layout = self.layouts.get(name)
        if layout is None:
            copies = 1 if self.replicas is None else self.replicas.size()
            return ParamSpec(name, parameter, self.group, self._divide(self.group.size() * copies))
        ranks = summed_over(layout)
        group = self.group if frozenset(ranks) == self.both else tpc.groups.of(ranks)
        divide = self._divide(num_batches(layout))
        return ParamSpec(name, parameter, group, divide, deferred=len(layout.stages) > 1)

    def trained(
        self, optimizer: Optimizer, module: nn.Module | None, names: Mapping[int, str]
    ) -> list[ParamSpec]:
        """The optimizer's parameters that are not frozen, in the order of `module`."""
        given = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        order = () if module is None else module.parameters()
        ordered = {id(p): p for p in order if id(p) in given} | given
        return [self.of(names[i], p) for i, p in ordered.items() if p.requires_grad]

    def replicas_of(self, shared: ParamSpec) -> Group | None:
        """Ranks with a copy of this rank's shard."""
        return self.replicas if ranks_of(shared.group) == ranks_of(self.group) else None

    def is_split(self, name: str) -> bool:
        """Whether this rank holds a part of the parameter only."""
        return name in self.cut

    def sync_params(self, module: nn.Module, trained: Container[int]) -> None:
        """Set buffers, and parameters whose id is not in `trained`, to those of the first rank."""
        held = [
            ReplicatedTensor(name, p, self.of(name, p).group)
            for name, p in module.named_parameters()
            if id(p) not in trained
        ]
        held += [ReplicatedTensor(name, x, self.group) for name, x in module.named_buffers()]
        sync_module_states(held)
        if self.replicas is not None:
            sync_module_states(ReplicatedTensor(x.name, x.tensor, self.replicas) for x in held)

    def _divide(self, batches: int) -> int:
        return batches if self.mean else 1


def named_in(
    optimizer: Optimizer, module: nn.Module | None, names: Mapping[int, str]
) -> list[tuple[str, nn.Parameter]]:
    """The module's parameters, or those of the optimizer without one."""
    if module is not None:
        return list(module.named_parameters())
    return [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]


def assign_buckets(shared: Sequence[ParamSpec], cap_bytes: int) -> list[BucketedParamSpec]:
    """The same, each with its bucket."""
    members = [
        ModuleParam(
            s.name.rpartition(".")[0] or s.name, s.parameter.numel() * s.sum_dtype.itemsize, s.key
        )
        for s in shared
    ]
    return [
        BucketedParamSpec(s.name, s.parameter, s.group, s.divide, s.deferred, bucket=bucket)
        for s, bucket in zip(shared, group_by_module(members, cap_bytes), strict=True)
    ]


def names_of(optimizer: Optimizer, module: nn.Module | None) -> dict[int, str]:
    """id of a parameter -> the module's name for it, else the optimizer's, else its number."""
    names: dict[int, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        known = group.get("param_names") or [
            f"group {number} parameter {i}" for i in range(len(group["params"]))
        ]
        names |= {id(p): name for p, name in zip(group["params"], known, strict=True)}
    if module is not None:
        names |= {id(p): name for name, p in module.named_parameters()}
    return names


def replica_group(group: Group | None, among: Group | None = None) -> Group | None:
    """Ranks of `among` with my place in their own `group`; None where there is one group.

    They hold the same shard where each group shards: shards that stay inside a node make the gather
    cheap, and what is summed inside a node is summed once more over the same place of all nodes.

    group: a part of `among` of equal size on each rank, such as `setup_node_groups()` gives; None
        is all of them. among: ranks that see different batches; default all.

    All ranks of `among` call it.

    Raises:
        TopologyError: the groups do not tile `among` evenly.
    """
    among = resolve_group(among, "global")
    rank = ranks_of(among)[among.rank()]
    mine = ranks_of(among if group is None else group)
    groups = sorted(set(cast(list[tuple[int, ...]], primitives.gather_objects(mine, among))))
    held = sorted(r for ranks in groups for r in ranks)
    if held != sorted(ranks_of(among)) or len({len(ranks) for ranks in groups}) > 1:
        raise TopologyError(
            f"groups {groups} do not tile ranks {ranks_of(among)} evenly, so shards have no "
            f"replicas; give every rank one group, all of one size"
        )
    if len(groups) == 1:
        return None
    place = mine.index(rank)
    made = tpc.groups if tpc.is_set else Groups(rank)
    return made.of([ranks[place] for ranks in groups], name=f"place {place} of each group")
