"""Groups of ranks that share each parameter of an optimizer, from its module, layouts and
groups.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.optim import Optimizer

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.param_spec import (
    ParamSpec,
    ReplicatedTensor,
    batch_group,
    follows,
    group_of,
    layouts_of,
    refuse_cut,
    shard_groups,
    sum_group,
    summed_over,
)
from torchdistpackage.ddp.zero.options import ZeroOptions
from torchdistpackage.ddp.zero.shard_bounds import ModuleParam, group_by_module
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import layout_of


@dataclass(frozen=True)
class ReplicaGroups:
    """The groups that shard and replicate parameters; those without layout use `group`.

    names: id of a parameter -> its name. replicas: ranks with the same shard, or None.
    mean: divide gradients by the number of batches. num_data: neighbours along tpc's data axis that
    shard each sum, whatever ranks it is over.
    both: ranks of `group` and of its replicas. cut: names of parameters that layers split.
    """

    names: Mapping[int, str]
    group: Group
    replicas: Group | None
    layouts: Mapping[str, Layout]
    mean: bool
    both: frozenset[int]
    cut: frozenset[str]
    num_data: int | None = None

    @classmethod
    def over(
        cls,
        optimizer: Optimizer,
        module: nn.Module | None,
        options: ZeroOptions,
    ) -> "ReplicaGroups":
        """Find the groups for an optimizer's parameters; collective over `replicas`.

        Raises:
            LayoutError: ranks of the sharding group split a parameter.
        """
        names = names_of(optimizer, module)
        named = [(names[id(p)], p) for p in parameters_of(optimizer)]
        if module is not None:
            named = list(module.named_parameters())
        num_data = options.zero_group
        group, replicas = options.group or batch_group(), options.replicas
        both = frozenset(ranks_of(group))
        if replicas is not None:
            groups = primitives.gather_objects(ranks_of(group), replicas)
            both = frozenset(rank for ranks in groups for rank in ranks)  # type: ignore[union-attr]
        followed = layouts_of(module, named, options.layouts, both)
        alone = [(name, p) for name, p in named if name not in followed]
        refuse_cut(alone, sorted(both), "ZeroOptimizer")
        cut = frozenset(n for n, p in named if is_cut(followed.get(n) or layout_of(p), p))
        if num_data is not None:
            # all groups in the one order that cannot deadlock, before any is used
            tpc.prepare(sums=followed.values(), num_data=num_data)
            group, replicas = shard_groups(None, num_data)
        elif followed:
            tpc.prepare(sums=[x for x in followed.values() if set(summed_over(x)) != both])
        return cls(names, group, replicas, followed, options.mean, both, cut, num_data)

    def of(self, parameter: nn.Parameter) -> ParamSpec:
        """Return the spec of a parameter, with its group and divisor."""
        layout = self.layouts.get(name := self.names[id(parameter)])
        if self.num_data is not None:
            group, replicas = shard_groups(layout, self.num_data)
        else:
            group = sum_group(layout, self.group, self.both)
            replicas = self.replicas if ranks_of(group) == ranks_of(self.group) else None
        over = self.both if layout is None else summed_over(layout)
        return ParamSpec.from_layout(
            name, parameter, layout, group, mean=self.mean, over=over, replicas=replicas
        )

    def trained(self, optimizer: Optimizer, module: nn.Module | None) -> list[ParamSpec]:
        """Return the optimizer's parameters that are not frozen, in the order of `module`."""
        by_id = {id(p): p for p in parameters_of(optimizer)}
        order = () if module is None else module.parameters()
        ordered = {id(p): p for p in order if id(p) in by_id} | by_id
        return [self.of(p) for p in ordered.values() if p.requires_grad]

    def has_alone(self, spec: ParamSpec) -> bool:
        """Return whether only this rank holds it, so that autograd's own gradient can be
        stepped.
        """
        plain = spec.divide == 1 and not (spec.is_wider or spec.deferred or spec.sparse_rows)
        return plain and spec.group.size() == 1 and spec.replicas is None

    def replicated(
        self, module: nn.Module | None, specs: Sequence[ParamSpec]
    ) -> Iterator[list[ReplicatedTensor]]:
        """Yield buffers, and parameters not in `specs`, first over groups and then over
        replicas.
        """
        if module is None:
            return
        trained = {id(s.parameter) for s in specs}
        frozen = [(n, p) for n, p in module.named_parameters() if id(p) not in trained]
        shared = [(n, p, self.of(p)) for n, p in frozen]
        over: list[tuple[str, Tensor, Group, Group | None]] = [
            (n, p, s.group, s.replicas) for n, p, s in shared
        ]
        over += [(n, x, self.group, self.replicas) for n, x in module.named_buffers()]
        yield [ReplicatedTensor(n, x, group) for n, x, group, _ in over]
        if replicated := [ReplicatedTensor(n, x, same) for n, x, _, same in over if same]:
            yield replicated


def is_cut(layout: Layout | None, parameter: Tensor) -> bool:
    """Return whether this rank holds only a shard of a parameter."""
    if layout is None or not layout.split_axes:
        return False
    if follows(layout, parameter):
        return tpc.topology.view(layout.view).axis_size(*layout.split_axes) > 1
    group = group_of(parameter)
    return group is None or group.size() > 1


def assign_buckets(specs: Sequence[ParamSpec], cap_bytes: int) -> list[ParamSpec]:
    """Return the specs, each with the number of its bucket."""
    units = [s.name.rpartition(".")[0] or s.name for s in specs]
    sizes = [s.parameter.numel() * s.sum_dtype.itemsize for s in specs]
    members = map(ModuleParam, units, sizes, [s.key for s in specs])
    numbers = group_by_module([*members], cap_bytes)
    return [replace(s, bucket=bucket) for s, bucket in zip(specs, numbers, strict=True)]


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of the optimizer's param groups, in their order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def names_of(optimizer: Optimizer, module: nn.Module | None) -> dict[int, str]:
    """Return id -> name: the module's name, or else the optimizer's, or else a number."""
    names: dict[int, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        group_names = group.get("param_names") or [
            f"group {number} parameter {i}" for i in range(len(group["params"]))
        ]
        names |= {id(p): name for p, name in zip(group["params"], group_names, strict=True)}
    if module is not None:
        names |= {id(p): name for name, p in module.named_parameters()}
    return names
