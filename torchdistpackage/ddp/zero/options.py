"""The options of ZeroOptimizer: one frozen value that all its files read.

This file does not implement the options; the code that does reads the fields. So a new option is a
few lines here, and its use.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypedDict, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.ddp.options import common_problems, dtype_problems, refuse
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.errors import TopologyError
from torchdistpackage.layout.layout import Layout

Init = TypeVar("Init", bound=Callable[..., None])


class ZeroKeywords(TypedDict, total=False):
    """The fields of `ZeroOptions` as keywords, for type checkers."""

    stage: int
    group: Group | None
    layouts: Mapping[str, Layout] | None
    overlap: bool
    bucket_cap_mb: float | None
    wire_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    offload: bool
    replicas: Group | None
    zero_group: int | None
    num_grad_acc_iter: int
    reduce_op: str
    reshard_after_forward: bool
    whole: bool | None
    master_dtype: torch.dtype | None


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """The keywords of `ZeroOptimizer`.

    stage: 1 shards the optimizer's state, 2 gradients too, 3 parameters too.
    group: ranks to shard over; default: tpc's data (and context) ranks, or all ranks if tpc is not
        set up.
    replicas: ranks that hold the same shard. As in HSDP, `group` may be a node and `replicas` the
        ranks of the same index on all nodes.
    zero_group: shard over this number of neighbours along tpc's data axis and replicate over the
        others, for parameters of all layouts; instead of `group` and `replicas`.
    layouts: name -> Layout, as in NaiveDDP; default: those of the module's layers.
    overlap: communicate during backward and forward; False waits at the end of the backward and
        of `step`.
    bucket_cap_mb: size of a bucket in MiB; default 4, over NCCL 32.
    wire_dtype: dtype in which gradients and parameters are sent, such as torch.bfloat16; sums and
        masters keep at least float32.
    reduce_dtype: dtype in which gradients are sent; default: `wire_dtype`.
    offload: keep masters, optimizer state and reduced gradients in host memory, and step there.
    num_grad_acc_iter: stage 1 reduces only in every n-th backward, for example after n
        micro-batches; stages 2 and 3, which keep no full gradients, reduce in each.
    reduce_op: "avg", or "sum".
    reshard_after_forward: in stage 3, free parameters between forward and backward too; all
        ranks must then run the same submodules.
    whole: give each parameter one owner, for an optimizer that needs full parameters; default:
        True for all classes that are not known to be element-wise.
    master_dtype: dtype of the masters of bf16 and fp16 parameters; with torch.bfloat16, bf16
        parameters have no masters.
    """

    stage: int = 1
    group: Group | None = None
    layouts: Mapping[str, Layout] | None = None
    overlap: bool = True
    bucket_cap_mb: float | None = None
    wire_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    offload: bool = False
    replicas: Group | None = None
    zero_group: int | None = None
    num_grad_acc_iter: int = 1
    reduce_op: str = "avg"
    reshard_after_forward: bool = False
    whole: bool | None = None
    master_dtype: torch.dtype | None = None

    def check(self, optimizer: Optimizer, module: nn.Module | None) -> None:
        """Raise ValueError with all invalid options, and an invalid optimizer or module."""
        module_or_empty = nn.Module() if module is None else module
        problems = common_problems(
            module_or_empty, self.reduce_op, self.bucket_cap_mb, self.num_grad_acc_iter
        )
        if self.stage not in (1, 2, 3):
            problems.append(f"stage is {self.stage!r}; use 1, 2 or 3")
        if not hasattr(optimizer, "param_groups"):
            problems.append(f"optimizer is of type {type(optimizer).__name__}; give an optimizer")
        names = ("wire_dtype", "reduce_dtype", "master_dtype")
        problems += dtype_problems({name: getattr(self, name) for name in names})
        if self.zero_group is not None:
            problems += self._group_problems(self.zero_group)
        if self.stage == 3 and module is None:
            problems.append(
                "stage 3 frees and gathers parameters while a module runs; pass this module"
            )
        refuse(problems)

    def _group_problems(self, number: int) -> list[str]:
        if self.group is not None or self.replicas is not None:
            return [
                f"zero_group is {number} together with group or replicas; give one or the other"
            ]
        if not tpc.is_set:
            return [f"zero_group is {number} without tpc; call tpc.setup_process_groups first"]
        data = tpc.topology.dense.axis_size("data")
        if number < 1 or data % number:
            return [
                f"zero_group is {number}, which does not divide the {data} data ranks; use a "
                "divisor"
            ]
        return []

    @property
    def mean(self) -> bool:
        """True if gradients are averaged."""
        return self.reduce_op.lower() == "avg"

    @property
    def frees_gradients(self) -> bool:
        """True if full gradients are freed once they are summed."""
        return self.stage > 1

    @property
    def num_backwards(self) -> int:
        """Number of backwards for each reduction."""
        return self.num_grad_acc_iter if self.stage == 1 else 1

    # -- answers about one bucket, from its first parameter ---------------------------------

    def gathers(self, first: ParamSpec) -> bool:
        """Return whether its parameters are gathered only where they are used."""
        # Not for a weight shared by pipeline stages: these run their forwards at different times,
        # so a gather inside one forward would wait for the other stage.
        return self.stage == 3 and not first.deferred

    def param_dtype(self, first: ParamSpec) -> torch.dtype | None:
        """Return the dtype in which parameters like this one are sent, if narrower than their
        own."""
        return _if_narrower(self.wire_dtype, first.parameter.dtype)

    def grad_dtype(self, first: ParamSpec) -> torch.dtype | None:
        """Return the dtype in which gradients of this parameter are sent, if narrower than that of
        the sum."""
        return _if_narrower(self.reduce_dtype or self.wire_dtype, first.sum_dtype)

    def shard_dtype(self, first: ParamSpec) -> torch.dtype:
        """Return the dtype of the shards that the optimizer steps, and of their gradients."""
        dtype = first.parameter.dtype
        # fp32 if gradients accumulate in it, so that small updates are not lost, unless the user
        # sets `master_dtype`
        return dtype if first.sum_dtype == dtype else self.master_dtype or first.sum_dtype

    def is_rounded(self, first: ParamSpec) -> bool:
        """Return whether its parameters have fewer digits than the shards that are stepped."""
        is_wider = self.shard_dtype(first) != first.parameter.dtype
        return is_wider or self.param_dtype(first) is not None

    def narrowest_bytes(self, first: ParamSpec) -> int:
        """Return the bytes of an element in the narrowest dtype of its slices."""
        dtypes = first.parameter.dtype, self.param_dtype(first), self.grad_dtype(first)
        return min(x.itemsize for x in dtypes if x is not None)


def with_options(init: Init) -> Init:
    """Show the fields of `ZeroOptions` in the signature of `init` instead of its `**keywords`."""
    parameters = [*inspect.signature(init).parameters.values()][:-1]
    options = inspect.signature(ZeroOptions).parameters.values()
    init.__signature__ = inspect.Signature([*parameters, *options])  # type: ignore[attr-defined]
    return init


def _if_narrower(sent: torch.dtype | None, dtype: torch.dtype) -> torch.dtype | None:
    """Return `sent` if it is a narrower float dtype than `dtype`, else None."""
    is_narrower = sent is not None and dtype.is_floating_point and sent.itemsize < dtype.itemsize
    return sent if is_narrower else None


def replica_group(group: Group | None, among: Group | None = None) -> Group | None:
    """Return the ranks of `among` with this rank's index in their own `group`; None for one group.

    If each group shards, these ranks hold the same shard. Sharding inside a node makes gathers
    cheap, and gradients summed inside nodes are summed again over the same index of all nodes. All
    ranks of `among` call it.

    group: ranks of `among`, equally many for each rank, such as those of `setup_node_groups()`;
        None: all of them.
    among: ranks that see different batches; default: all ranks.

    Raises:
        TopologyError: the groups do not tile `among` evenly.
    """
    among = resolve_group(among, "global")
    rank = ranks_of(among)[among.rank()]
    own_ranks = ranks_of(among if group is None else group)
    groups = sorted(set(cast(list[tuple[int, ...]], primitives.gather_objects(own_ranks, among))))
    covered = sorted(r for ranks in groups for r in ranks)
    if covered != sorted(ranks_of(among)) or len({len(ranks) for ranks in groups}) > 1:
        raise TopologyError(
            f"groups {groups} do not tile ranks {ranks_of(among)} evenly, so shards have no "
            f"replicas; give every rank one group, all of one size"
        )
    if len(groups) == 1:
        return None
    index = own_ranks.index(rank)
    cache = tpc.groups if tpc.is_set else Groups(rank)
    return cache.of([ranks[index] for ranks in groups], name=f"place {index} of each group")
