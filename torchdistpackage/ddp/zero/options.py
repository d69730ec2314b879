"""The options of ZeroOptimizer, resolved: replicas, host memory, stage 3, parts, checks.

What is stepped reaches the module only as long as its parameters are the same objects with the same
memory, and have one optimizer. Each of these is checked, and an error names the parameter.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.ddp.grad_hooks import Removable, hooked_names, remove_hooks
from torchdistpackage.ddp.options import common_problems, dtype_problems, refuse
from torchdistpackage.ddp.param_spec import ParamSpec, ReplicatedTensor
from torchdistpackage.ddp.param_sync import sync_module_states
from torchdistpackage.ddp.zero.bucket import ShardedBucket
from torchdistpackage.ddp.zero.offload import Offload, check_offload
from torchdistpackage.ddp.zero.param_buffer import ParamBuffer, wait_gathered
from torchdistpackage.ddp.zero.param_shard import FlatLayout
from torchdistpackage.ddp.zero.stage3 import ParamCoordinator, gather_ahead, may_overlap
from torchdistpackage.errors import LayoutError, TopologyError


class ResolvedZeroOptions:
    """The options of one ZeroOptimizer.

    mean: whether gradients are averaged. overlaps: whether parameters may travel while the module
    runs. make_store: of masters and sums, where they are in host memory.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module | None,
        stage: int,
        *,
        offload: bool,
        reshard_after_forward: bool,
        reduce_op: str,
        bucket_cap_mb: float | None,
        num_grad_acc_iter: int,
        dtypes: Mapping[str, torch.dtype | None],
    ):
        """dtypes: options that are one, by name."""
        given = nn.Module() if module is None else module
        problems = common_problems(given, reduce_op, bucket_cap_mb, num_grad_acc_iter)
        if stage not in (1, 2, 3):
            problems.append(f"stage is {stage!r}; use 1, 2 or 3")
        if not hasattr(optimizer, "param_groups"):
            problems.append(f"optimizer is of type {type(optimizer).__name__}; give an optimizer")
        problems += dtype_problems(dtypes)
        if stage == 3 and module is None:
            problems.append("stage is 3 without a module, whose use frees and gathers; give it")
        refuse(problems)
        self.mean = reduce_op.lower() == "avg"
        self._module, self._keeps = module, not reshard_after_forward
        self.overlaps, self._may_follow = may_overlap(module, stage), stage < 3 or self._keeps
        if offload:
            check_offload(optimizer)
        self.make_store = Offload if offload else None
        self._guards: ParamGuards | None = None
        self._coordinator: ParamCoordinator | None = None

    def claim(
        self, specs: Sequence[ParamSpec], others: Iterable[Sequence[ReplicatedTensor]]
    ) -> None:
        """Raise if a gradient has an owner already; set `others`, which are not trained, to the
        first rank's.

        Raises:
            LayoutError: a parameter belongs to another optimizer or wrapper.
            ValueError: the optimizer is over another module.
        """
        mine = None if self._module is None else {id(p) for p in self._module.parameters()}
        if specs and mine is not None and mine.isdisjoint(id(s.parameter) for s in specs):
            raise ValueError(
                f"none of the optimizer's {len(specs)} parameters is in the module; build it over "
                f"those of this module"
            )
        refuse_owned(specs)
        for replicas in others:
            sync_module_states(replicas)

    def attach(
        self, buckets: Sequence[ShardedBucket], given: list[ParamSpec], handles: list[Removable]
    ) -> None:
        """Watch over the buckets and the parameters `given`; `detach` removes `handles` too."""
        module = self._module
        layouts = [(bucket.layout, bucket.parameters.flat) for bucket in buckets]
        self._guards = ParamGuards(module, layouts, given)
        self._guards.handles += handles
        if module is None:
            return
        order = [bucket.parameters for bucket in reversed(buckets) if bucket.gathers]
        if order:
            self._coordinator = ParamCoordinator(module, order, self._keeps)
            self._guards.handles += self._coordinator.handles
        self._guards.handles += gather_ahead(module, self._may_follow)

    def detach(self) -> None:
        """Take all hooks off the module."""
        assert self._guards is not None
        self._guards.cut()

    def check(self) -> None:
        """Raise LayoutError if a step would not reach the module."""
        assert self._guards is not None
        self._guards.check()

    def check_objects(self) -> None:
        """Raise LayoutError if parameters of the module are other objects than they were."""
        assert self._guards is not None
        self._guards.check_objects()

    # -- stage 3 -----------------------------------------------------------------------

    def on_read(self, parameters: ParamBuffer) -> None:
        """Freed parameters are read."""
        if self._coordinator is not None:
            self._coordinator.on_read(parameters)

    def release(self, parameters: ParamBuffer) -> None:
        """All gradients of these are there."""
        if self._coordinator is not None:
            self._coordinator.release(parameters)

    @property
    def has_freed(self) -> bool:
        """Whether parameters are in pieces, which only all ranks together can bring."""
        return self._coordinator is not None and self._coordinator.has_freed

    def fetch_all(self) -> None:
        """Gather all that is freed; all ranks call it."""
        if self._coordinator is not None:
            self._coordinator.fetch_all()

    def stepped(self) -> None:
        """The parameters have new values."""
        if self._coordinator is not None:
            self._coordinator.stepped()


class ParamGuards:
    """Ties an optimizer to `module`, if it has one, and to the parameters of these layouts.

    layouts: each with its memory. given: all parameters of the optimizer, frozen ones too.
    """

    def __init__(
        self,
        module: nn.Module | None,
        layouts: Iterable[tuple[FlatLayout, Tensor]],
        given: Iterable[ParamSpec],
    ):
        self._module, self.handles = module, list[Removable]()
        self._layouts = [
            (flat, layout, [flat.element_size() * offset for offset in layout.offsets])
            for layout, flat in layouts
        ]
        given = list(given)
        ours = {id(s.parameter): s.name for s in given if s.parameter.requires_grad}
        self._registered: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = [
            (m._parameters, key, p)
            for m in (() if module is None else module.modules())
            if not isinstance(m, torch.jit.ScriptModule)
            for key, p in m._parameters.items()
            if p is not None and id(p) in ours
        ]
        self._names = ours
        self._frozen = [s for s in given if not s.parameter.requires_grad]
        self._cut = False
        self._end = finalize(self, remove_hooks, self.handles)
        self._end.atexit = False

    def check(self) -> None:
        """Raise LayoutError if a step would not reach the module."""
        if self._cut:
            raise LayoutError(
                f"this optimizer was removed from its {len(self._names)} parameters; step the one "
                f"that was wrapped after it"
            )
        if unfrozen := [s.name for s in self._frozen if s.parameter.requires_grad]:
            raise LayoutError(
                f"{len(unfrozen)} parameters were frozen when this optimizer laid out what each "
                f"rank owns and now require gradients: {', '.join(unfrozen[:3])}; freeze them "
                f"again, or remove() this one, wrap a new one and load its state_dict() into it"
            )
        # of one that is absent too the address is all that counts
        with torch._C.DisableTorchFunctionSubclass():
            for flat, layout, offsets in self._layouts:
                first = flat.data_ptr()
                for spec, offset in zip(layout.members, offsets, strict=True):
                    p = spec.parameter
                    if p.data_ptr() != first + offset and p.numel():  # without elements it has none
                        raise LayoutError(
                            f"parameter {spec.name} ({p.dtype}, {p.device}) was given other "
                            f"memory than this optimizer steps, by p.data = ..., "
                            f"vector_to_parameters or module.to(...): write into it with "
                            f"p.data.copy_(...) and call refresh_masters(), or move and cast the "
                            f"module before it is wrapped"
                        )
        self.check_objects()

    def check_objects(self) -> None:
        """Raise LayoutError if a parameter of the module is another object than it was."""
        for parameters, key, p in self._registered:
            now = parameters.get(key)
            if now is p or now is None:
                continue
            assert self._module is not None
            if all(other is not p for other in self._module.parameters()):
                raise LayoutError(
                    f"parameter {self._names[id(p)]} of the module is another object than the one "
                    f"that is trained, as after load_state_dict(assign=True): load with "
                    f"assign=False, or remove() this optimizer, replace it, and wrap a new one"
                )

    def cut(self) -> None:
        """Take all hooks off the module, and give the gathered parameters memory of their own."""
        self._end()
        for _, layout, _ in self._layouts:
            for spec in layout.members:
                spec.parameter.data = spec.parameter.data.clone()
        self._cut = True


def refuse_owned(specs: Sequence[ParamSpec]) -> None:
    """Raise LayoutError if a gradient has an owner already."""
    if names := hooked_names(specs):
        raise LayoutError(
            f"{len(names)} of {len(specs)} parameters have an owner of their gradients already, "
            f"another ZeroOptimizer or a NaiveDDP: {', '.join(names[:3])}; call the remove() of "
            f"that optimizer first, or wrap the plain module"
        )
    for s in specs:
        wait_gathered(s.parameter)


def replica_group(group: Group | None, among: Group | None = None) -> Group | None:
    """Ranks of `among` with my place in their own `group`; None where there is one group.

    They hold the same shard where each group shards: shards inside a node make the gather cheap,
    and what is summed inside a node is summed once more over the same index of all nodes.

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
    index = mine.index(rank)
    made = tpc.groups if tpc.is_set else Groups(rank)
    return made.of([ranks[index] for ranks in groups], name=f"place {index} of each group")
