"""What ZeroOptimizer is given for its options: host memory, stage 3, compiled parts, checks.

The core knows the protocol alone; `SERVED_BY` of extensions.py names what makes it.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from torchdistpackage.ddp.grad_hooks import Removable
from torchdistpackage.ddp.options import common_problems, refuse
from torchdistpackage.ddp.param_spec import ParamSpec, ReplicatedTensor
from torchdistpackage.ddp.param_sync import sync_module_states
from torchdistpackage.ddp.zero.bucket import ShardedBucket
from torchdistpackage.ddp.zero.guards import ParamGuards, refuse_owned
from torchdistpackage.ddp.zero.offload import Offload, check_offload
from torchdistpackage.ddp.zero.param_buffer import ParamBuffer
from torchdistpackage.ddp.zero.stage3 import ParamCoordinator, gather_ahead, may_overlap


class ResolvedZeroOptions:
    """The `ZeroExtensions` of one ZeroOptimizer, which has these options."""

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
        embedding_rows: bool,
    ):
        """dtypes: options that are one, by name."""
        given = nn.Module() if module is None else module
        problems = common_problems(given, reduce_op, bucket_cap_mb, num_grad_acc_iter)
        if stage not in (1, 2, 3):
            problems.append(f"stage is {stage!r}; use 1, 2 or 3")
        if not hasattr(optimizer, "param_groups"):
            problems.append(f"optimizer is of type {type(optimizer).__name__}; give an optimizer")
        for name, dtype in dtypes.items():
            if dtype is not None and not getattr(dtype, "is_floating_point", False):
                problems.append(f"{name} is {dtype!r}; give a torch.dtype of floats, or None")
        if embedding_rows:
            problems.append(
                "embedding_rows is an option of NaiveDDP: a ZeroOptimizer scatters gradients of "
                "embeddings like all others; leave it out, or wrap the module in NaiveDDP"
            )
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
        self, shared: Sequence[ParamSpec], others: Iterable[Sequence[ReplicatedTensor]]
    ) -> None:
        """Raises ValueError: the optimizer is over another module."""
        mine = None if self._module is None else {id(p) for p in self._module.parameters()}
        if shared and mine is not None and mine.isdisjoint(id(s.parameter) for s in shared):
            raise ValueError(
                f"none of the optimizer's {len(shared)} parameters is in the module; build it over "
                f"those of this module"
            )
        refuse_owned(shared)
        for replicas in others:
            sync_module_states(replicas)

    def attach(
        self, buckets: Sequence[ShardedBucket], given: list[ParamSpec], handles: list[Removable]
    ) -> None:
        module = self._module
        lines = [(bucket.line, bucket.parameters.flat) for bucket in buckets]
        self._guards = ParamGuards(module, lines, given)
        self._guards.handles += handles
        if module is None:
            return
        order = [bucket.parameters for bucket in reversed(buckets) if bucket.passes]
        if order:
            self._coordinator = ParamCoordinator(module, order, self._keeps)
            self._guards.handles += self._coordinator.handles
        self._guards.handles += gather_ahead(module, self._may_follow)

    def detach(self) -> None:
        assert self._guards is not None
        self._guards.cut()

    def check(self) -> None:
        assert self._guards is not None
        self._guards.check()

    def check_objects(self) -> None:
        assert self._guards is not None
        self._guards.check_objects()

    # -- stage 3 -----------------------------------------------------------------------

    def on_read(self, parameters: ParamBuffer) -> None:
        if self._coordinator is not None:
            self._coordinator.on_read(parameters)

    def release(self, parameters: ParamBuffer) -> None:
        if self._coordinator is not None:
            self._coordinator.release(parameters)

    def fetch_all(self) -> None:
        if self._coordinator is not None:
            self._coordinator.fetch_all()

    def stepped(self) -> None:
        if self._coordinator is not None:
            self._coordinator.stepped()
