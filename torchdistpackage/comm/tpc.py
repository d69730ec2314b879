"""`tpc`: the place of this process in the grid of ranks, and its groups.

It is the only process-wide state of the package. It is set once from a declarative config. It may
be destroyed and set again, and replaced for a while by `using(topology, rank)`, which needs no
processes. All threads of a process see the same, but a thread that is `isolated` is a rank of its
own. Layers and executors never read it: they receive groups when they are created.

Modes are group names: an axis (`data`, `pipe`, `tensor`, ...), `model` (ranks that share one
batch), `global`, and after `build_moe_groups` also `moe_dp` and `moe_ep`.
"""

import copyreg
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partialmethod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchdistpackage.comm.creation import Group, is_joined, ranks_of, world
from torchdistpackage.comm.group_options import AXIS_OPTIONS, GroupOptions
from torchdistpackage.comm.group_state import name_axis
from torchdistpackage.comm.groups import Groups
from torchdistpackage.errors import CommError, LaunchError, TopologyError
from torchdistpackage.layout.derive import creations
from torchdistpackage.layout.layout import Layout
from torchdistpackage.topology.mesh import (
    DEFAULT_ORDER,
    Axes,
    Mesh,
    Topology,
    topology,
    unknown_axes,
    whole_size,
)

_LOG = logging.getLogger(__name__)


@dataclass
class RankContext:
    """A rank of a topology.

    groups: None if the rank has no process. moe: expert groups exist. found: groups requested so
    far, by mode.
    """

    topology: Topology
    rank: int
    groups: Groups | None
    moe: bool = False
    mesh: DeviceMesh | None = None
    found: dict[str, Group] = field(default_factory=dict)


@dataclass
class ContextHolder:
    """A holder of the current topology, or None; everyone who shares the object sees changes."""

    context: RankContext | None = None


_process = ContextHolder()
_isolated: ContextVar[ContextHolder | None] = ContextVar("tpc_apart", default=None)
_override: ContextVar[RankContext | None] = ContextVar("tpc_override", default=None)


def _holder() -> ContextHolder:
    """Return the holder of this thread: the process's, unless the thread is isolated.

    A new thread has an empty context, so the process's holder cannot live in the context variable;
    it is the default when the variable is unset.
    """
    return _isolated.get() or _process


def _current() -> RankContext | None:
    """Return the rank as which the caller acts; None once the world of that rank has ended."""
    context = _override.get() or _holder().context
    if context is not None and context.groups is not None and not context.groups.are_there:
        return None
    return context


class ProcessTopology:
    """The type of `tpc`; use the instance of this module."""

    def setup_process_groups(
        self,
        config: Axes,
        *,
        expert: int = 1,
        options: Mapping[str, GroupOptions] = AXIS_OPTIONS,
    ) -> None:
        """Tile the world by `[(axis, size), ...]`, outermost first, and create this rank's groups.

        config: or a mapping, in the same order. One size may be None or -1; integral floats pass.
        options: by axis, of its groups over NCCL; by default tensor, context and expert have
        high priority.
        The product is checked against the world on every rank before any group is made. A second
        call replaces the first. Rank 0 logs the groups, and warns of axes that are not known.

        Raises:
            LaunchError: torch.distributed is not initialised.
            TopologyError: the axes do not tile the world.
        """
        group = world()
        self.setup(topology(config, group.size(), expert=expert), group.rank(), options=options)
        if self.rank == 0:
            if warning := unknown_axes(self.topology.dense.names):
                _LOG.warning("%s", warning)
            _LOG.info("%s", self.describe())

    def setup(
        self,
        topology: Topology,
        rank: int,
        *,
        timeout_s: float | None = None,
        options: Mapping[str, GroupOptions] = AXIS_OPTIONS,
    ) -> None:
        """Set up a finished Topology; groups of the axes are created in mesh order.

        timeout_s: for the others to come, and for each later call. options: see
        `setup_process_groups`.
        """
        self.destroy()
        moe = topology.expert.axis_size("expert") > 1
        _holder().context = RankContext(topology, rank, Groups(rank, timeout_s, options), moe)
        self.prepare()
        for mode in (*topology.dense.names, "model", *(("moe_dp", "moe_ep") if moe else ())):
            self.get_group(mode)

    def prepare(
        self,
        *,
        sums: Iterable[Layout] = (),
        copies: Iterable[Layout] = (),
        num_data: int | None = None,
    ) -> None:
        """Create the groups of parameters with these layouts, which this rank holds.

        sums: layouts whose gradients are summed. copies: layouts of equal replicas. num_data:
        number of data ranks that shard each sum. See layout/derive.py.
        """
        context = self._context()
        planned = creations(
            context.topology, context.rank, sums=sums, copies=copies, num_data=num_data
        )
        self.groups.prepare(planned)

    def build_moe_groups(
        self, moe_dp_size: int | None = None, moe_ep_size: int | None = None
    ) -> None:
        """Cut each data group into contiguous `moe_ep` blocks, replicas strided in `moe_dp`.

        A size that is left out is the data axis divided by the other.

        Raises:
            TopologyError: neither is given, or they do not tile the data axis.
        """
        context = self._context()
        data = context.topology.dense.axis_size("data")
        if moe_ep_size is None:
            if moe_dp_size is None:
                raise TopologyError("build_moe_groups needs moe_dp_size or moe_ep_size; give one")
            moe_ep_size = data // moe_dp_size if moe_dp_size > 0 else 0
        moe_dp_size = moe_dp_size if moe_dp_size is not None else data // max(moe_ep_size, 1)
        if moe_dp_size * moe_ep_size != data:
            raise TopologyError(
                f"moe_dp_size={moe_dp_size} x moe_ep_size={moe_ep_size} must be the {data} ranks "
                f"of the data axis; change one of the two"
            )
        context.topology = context.topology.with_expert(moe_ep_size)
        context.moe = True
        context.found.clear()
        if context.groups is not None:
            self.get_group("moe_dp")
            self.get_group("moe_ep")

    # -- what there is ---------------------------------------------------------------

    @property
    def is_set(self) -> bool:
        """True if a topology is set up here."""
        return _current() is not None

    @property
    def topology(self) -> Topology:
        """The topology that is set up."""
        return self._context().topology

    @property
    def rank(self) -> int:
        """This process's rank in the topology."""
        return self._context().rank

    @property
    def groups(self) -> Groups:
        """This rank's groups, also for combinations of axes that no mode names."""
        groups = self._context().groups
        if groups is None:
            raise LaunchError(
                "tpc only describes a rank here, without processes, so it has no groups; ask for "
                "them in a started rank"
            )
        return groups

    @property
    def mesh(self) -> DeviceMesh:
        """The dense axes as torch's DeviceMesh, over the existing groups."""
        context = self._context()
        if context.mesh is None:
            dense = context.topology.dense
            device = "cuda" if dist.get_backend() == "nccl" else "cpu"
            context.mesh = DeviceMesh.from_group(
                [self.get_group(name) for name in dense.names],
                device,
                mesh=torch.arange(dense.size).view([size for _, size in dense.axes]),
                mesh_dim_names=dense.names,
            )
        return context.mesh

    def describe(self) -> str:
        """Return one line for each group with its members: `group pipe, ranks: [0, 8]`; long lists
        are cut.
        """
        context = self._context()
        model = ("model",) if context.topology.model_axes else ()
        moe = ("moe_dp", "moe_ep") if context.moe else ()
        return context.topology.describe((*context.topology.dense.names, *model, *moe))

    def get_group(self, mode: str) -> Group:
        """Return the handle of this rank's group of this mode, for calls of torch.distributed."""
        groups = self._context().found
        if mode not in groups:
            mesh, axes = self._named(mode)
            groups[mode] = self.groups.along(mesh, axes)
            name_axis(groups[mode], mode)
        return groups[mode]

    def get_ranks_in_group(self, mode: str) -> list[int]:
        """Return the global ranks of this rank's group, ascending, which is the order of torch's
        group ranks.
        """
        mesh, axes = self._named(mode)
        return list(mesh.group(self.rank, axes))

    def all_ranks(self, mode: str) -> list[list[int]]:
        """Return the global ranks of every group of this mode."""
        mesh, axes = self._named(mode)
        return [list(ranks) for ranks in mesh.groups(axes)]

    def is_mode_inited(self, mode: str) -> bool:
        """Return True if the mode exists and its groups have more than one rank."""
        if not self.is_set or (mode in ("moe_dp", "moe_ep") and not self._context().moe):
            return False
        return self.get_group_size(mode) > 1

    # -- a rank's questions; a known axis that the topology leaves out is one of size 1 --

    def get_group_rank(self, mode: str) -> int:
        """Return this rank's position in its group; 0 for an axis that the config does not list."""
        return self.get_ranks_in_group(mode).index(self.rank)

    def get_group_size(self, mode: str) -> int:
        """Return the size of this rank's group; 1 for an axis that the config does not list."""
        return len(self.get_ranks_in_group(mode))

    def is_first_in_group(self, mode: str) -> bool:
        return self.get_group_rank(mode) == 0

    def is_last_in_group(self, mode: str) -> bool:
        return self.get_group_rank(mode) == self.get_group_size(mode) - 1

    all_dp_ranks = partialmethod(all_ranks, "data")
    get_tp_rank = partialmethod(get_group_rank, "tensor")
    get_pp_rank = partialmethod(get_group_rank, "pipe")
    get_dp_rank = partialmethod(get_group_rank, "data")
    get_mp_rank = partialmethod(get_group_rank, "model")
    get_tp_size = partialmethod(get_group_size, "tensor")
    get_pp_size = partialmethod(get_group_size, "pipe")
    get_dp_size = partialmethod(get_group_size, "data")
    get_mp_size = partialmethod(get_group_size, "model")
    is_first_in_tensor_group = partialmethod(is_first_in_group, "tensor")
    is_last_in_tensor_group = partialmethod(is_last_in_group, "tensor")
    is_first_in_pipeline_group = partialmethod(is_first_in_group, "pipe")
    is_last_in_pipeline_group = partialmethod(is_last_in_group, "pipe")
    is_first_in_data_group = partialmethod(is_first_in_group, "data")
    is_last_in_data_group = partialmethod(is_last_in_group, "data")
    is_first_in_model_group = partialmethod(is_first_in_group, "model")
    is_last_in_model_group = partialmethod(is_last_in_group, "model")

    def get_prev_global_rank(self, mode: str = "pipe") -> int:
        """Return the rank before this one in its group; the first wraps to the last."""
        return self._beside(mode, -1)

    def get_next_global_rank(self, mode: str = "pipe") -> int:
        """Return the rank after this one in its group; the last wraps to the first."""
        return self._beside(mode, 1)

    def is_first_group(self, mode: str) -> bool:
        """Return True if this rank's group is the first of its kind, the one with rank 0."""
        return 0 in self.get_ranks_in_group(mode)

    def _beside(self, mode: str, step: int) -> int:
        ranks = self.get_ranks_in_group(mode)
        return ranks[(ranks.index(self.rank) + step) % len(ranks)]

    # -- life ------------------------------------------------------------------------

    def destroy(self) -> None:
        """End this rank's groups and forget the topology; the default group stays. Safe to call
        twice.
        """
        context = _holder().context
        if context is not None and context.groups is not None:
            context.groups.destroy()
        _holder().context = None

    @contextmanager
    def using(self, topology: Topology, rank: int) -> Iterator["ProcessTopology"]:
        """Act as `rank` of `topology` inside the block, without processes or groups."""
        moe = topology.expert.axis_size("expert") > 1
        with self.acting(RankContext(topology, rank, None, moe)):
            yield self

    @contextmanager
    def acting(self, context: RankContext) -> Iterator["ProcessTopology"]:
        """Act as the rank of `context` inside the block."""
        token = _override.set(context)
        try:
            yield self
        finally:
            _override.reset(token)

    @contextmanager
    def isolated(self) -> Iterator["ProcessTopology"]:
        """Make only this thread a separate rank inside the block; at first nothing is set up."""
        token = _isolated.set(ContextHolder())
        outer = _override.set(None)
        try:
            yield self
        finally:
            _override.reset(outer)
            _isolated.reset(token)

    def _context(self) -> RankContext:
        context = _current()
        if context is None:
            raise LaunchError("tpc is not set up; call tpc.setup_process_groups([...]) first")
        return context

    def _named(self, mode: str) -> tuple[Mesh, tuple[str, ...]]:
        """Return the mesh and axes of a mode; a known axis that the config leaves out has size
        1.
        """
        context = self._context()
        if mode in ("moe_dp", "moe_ep") and not context.moe:
            raise TopologyError(f"there is no group {mode!r} yet; call tpc.build_moe_groups first")
        if mode in DEFAULT_ORDER and mode not in context.topology.dense.names:
            return context.topology.dense, ()
        return context.topology.named(mode)


tpc = ProcessTopology()
torch_parallel_context = tpc


def is_using_pp() -> bool:
    """Return True if a pipeline of more than one stage is set up."""
    return tpc.is_mode_inited("pipe")


def resolve_group(group: Group | None, mode: str) -> Group:
    """Return `group`, or tpc's group of `mode`, or the default group if tpc is not set up.

    Every public function that takes `group=None` resolves it through this one.
    """
    if group is not None:
        return group
    if tpc.is_set:
        return tpc.get_group(mode)
    if not is_joined():
        raise LaunchError(f"no {mode} group: call setup_distributed() first, or pass group=")
    return world()


def group_again(ranks: Sequence[int]) -> Group:
    """Return the group of these ranks; a pickled group contains only its ranks.

    Raises:
        CommError: this process has no such group, or this rank is not in it.
        LaunchError: torch.distributed is not initialised.
    """
    if tpc.is_set:
        return tpc.groups.of(ranks)
    default = world()
    if ranks_of(default) == tuple(ranks):
        return default
    raise CommError(
        f"this module used a group of ranks {tuple(ranks)} before it was pickled, but the default "
        f"group here has {default.size()} ranks: set up tpc in this process, or make a new module "
        "with a group"
    )


def _reduced(group: Group) -> tuple[Callable[[Sequence[int]], Group], tuple[tuple[int, ...]]]:
    return group_again, (ranks_of(group),)


copyreg.pickle(Group, _reduced)  # of split modules; torch's own groups cannot be pickled


def setup_node_groups(num_per_node: int = 8) -> Group | None:
    """Return the group of this rank's node, for ranks that fill nodes in order, `num_per_node`
    each.

    The answer is None for a single node: its group is the default group, which None also means to
    the optimizers that take such a group. All ranks call this. Where tpc is set up, the group is
    one of tpc's, shared and ended with them.

    Raises:
        LaunchError: torch.distributed is not initialised.
        TopologyError: the nodes would not be equally full.
    """
    size = whole_size("node", num_per_node)
    world_size = world().size()
    rank = world().rank()
    if world_size <= size:
        return None
    if world_size % size:
        raise TopologyError(
            f"{world_size} ranks do not fill nodes of {size} ranks each: {world_size % size} would "
            f"be left over; set num_per_node to a divisor of {world_size}, or start a multiple of "
            f"{size} ranks"
        )
    first = rank - rank % size
    groups = tpc.groups if tpc.is_set else Groups(rank)
    return groups.of(range(first, first + size), name=f"node {first // size}")
