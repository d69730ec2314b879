"""The earlier package's mixed precision: ZeRO over a built optimizer, and a callable scaler.

Without the module the optimizer cannot watch a forward. So either every backward that brings a
gradient reduces it and adds up the results, or all gradients wait for `step`. The scaler only calls
GradScaler and clip_grad_norm_ in order.
"""

from collections.abc import Iterable, Sequence
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchdistpackage.comm.creation import world
from torchdistpackage.comm.primitives import Group, is_queued
from torchdistpackage.ddp.bucket_plan import MIB, bucket_sizes
from torchdistpackage.ddp.grad_hooks import OnGradReady
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.layout.layout import Layout
from torchdistpackage.optim.clip import clip_grad_norm_
from torchdistpackage.optim.scaler import GradScaler


class EveryBackwardReducer(Reducer):
    """Reduces in every backward that brings a gradient; its first gradient arms the reducer.

    It extends the existing hook: with thousands of small parameters a second hook takes noticeable
    time.
    """

    waits = True
    """True if the end of a backward waits for the reductions."""

    def grad_ready_hook(self) -> OnGradReady:
        accumulated = super().grad_ready_hook()

        def arm_and_accumulate(
            me: "ref[EveryBackwardReducer]", index: int, parameter: Tensor
        ) -> None:
            reducer = me()
            if reducer is not None and reducer._task == -1:
                reducer.watch((), wait=reducer.waits)
            accumulated(me, index, parameter)

        return arm_and_accumulate


class Bf16ZeroOptimizer(ZeroOptimizer):
    """Shard `optim` over `dp_group`; bf16 and fp16 parameters get fp32 masters.

    optim: built over the parameters. dp_group: ranks that see different batches, by default
        tpc's data (and context) ranks, or all ranks.
    bf16_master_weights: the optimizer works on the parameters as they are, without masters.
    overlap_comm: reduce during the backward, and gather parameters after `step`; the first read of
        a parameter waits for it.
    stage: 1 shards the optimizer's state, 2 gradients too: each backward then reduces and keeps
        only this rank's shard. Every rank must run the same number of backwards.
    bucket_size: largest number of elements in a bucket. bucketize: False sends each parameter
        alone.
    replicas: ranks with the same shard, if `dp_group` is only some of the ranks that see different
        batches: `replica_group(dp_group)`.

    Prefer a ZeroOptimizer with the module: it sends earlier and knows which backward is the last.

    Raises:
        LayoutError: the optimizer cannot work on shards of the parameters.
        ValueError: `stage` is neither 1 nor 2.
    """

    def __init__(
        self,
        optim: Optimizer,
        dp_group: Group | None = None,
        bf16_master_weights: bool = False,
        overlap_comm: bool = False,
        stage: int = 2,
        bucket_size: float = 5e8,
        bucketize: bool = True,
        *,
        replicas: Group | None = None,
    ):
        if stage not in (1, 2):
            raise ValueError(
                f"stage is {stage}; use 1 or 2, or ZeroOptimizer with the module for stage 3"
            )
        self._in_backward = overlap_comm or stage == 2
        if self._in_backward:
            self._reducer_type = EveryBackwardReducer
        sizes = [p.element_size() for group in optim.param_groups for p in group["params"]]
        default_bytes = bucket_sizes(queued=is_queued(world())).default_bytes
        cap_mib = min(default_bytes, bucket_size * min(sizes, default=1)) / MIB
        super().__init__(
            optim,
            stage=stage,
            group=dp_group,
            overlap=overlap_comm,
            bucket_cap_mb=cap_mib if bucketize else 1 / MIB,
            replicas=replicas,
            master_dtype=torch.bfloat16 if bf16_master_weights else None,
        )
        if isinstance(self.reducer, EveryBackwardReducer):
            self.reducer.waits = not overlap_comm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of parameters and shards, or set them to zero."""
        with torch.no_grad():
            self.reducer.watch(())  # no backward is running: forget one that failed
        super().zero_grad(set_to_none)

    def _step(self) -> None:
        if not self._in_backward:
            # all ranks must reduce here, even one without a gradient
            with torch.enable_grad():
                self.reducer.watch(())
        super()._step()


class NativeScalerPP:
    """A GradScaler that is called with the loss; works on stages, shards and replicas.

    layouts, model_group: of the parameters to clip, as in `clip_grad_norm_`. scaling: arguments of
        GradScaler.
    """

    state_dict_key = "amp_scaler"

    def __init__(
        self,
        *,
        layouts: Sequence[Layout] | None = None,
        model_group: Group | None = None,
        **scaling,
    ):
        self.scaler = GradScaler(**scaling)
        self._layouts = layouts
        self._model_group = model_group

    def __call__(
        self,
        loss: Tensor | None,
        optimizer: torch.optim.Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: nn.Parameter | Iterable[nn.Parameter] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> Tensor | None:
        """Run backward, clipping and step of an iteration; all ranks call it.

        loss: not scaled yet. None if a pipeline has run the backwards, with losses that its last
            stage scaled by `scaler.scale`.
        clip_grad: largest norm, or largest value of an element where `clip_mode` is "value".
        parameters: parameters to clip; default the optimizer's. A ZeroOptimizer always clips its
            shards.
        need_update: False only accumulates.

        Returns the norm before clipping, None if not computed; not finite if the step was skipped.

        Raises:
            ValueError: `clip_mode` is neither "norm" nor "value".
        """
        if clip_mode not in ("norm", "value"):
            raise ValueError(
                f"clip_mode is {clip_mode!r}; use 'norm' or 'value': adaptive clipping needs whole "
                f"rows, which no rank of a sharded model has"
            )
        if loss is not None:
            self.scaler.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return None
        norm = None
        if clip_grad is not None:
            self.scaler.unscale_(optimizer)
            norm = self._clip(optimizer, clip_grad, clip_mode, parameters)
        self.scaler.step(optimizer)
        self.scaler.update()
        return norm

    def state_dict(self) -> dict[str, float | int]:
        """Return the scaler's state, which torch's GradScaler can load."""
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, float | int]) -> None:
        """Continue with a saved scale."""
        self.scaler.load_state_dict(state_dict)

    def _clip(
        self,
        optimizer: torch.optim.Optimizer,
        limit: float,
        mode: str,
        parameters: nn.Parameter | Iterable[nn.Parameter] | None,
    ) -> Tensor | None:
        if parameters is None or isinstance(optimizer, ShardedOptimizer):
            # a sharded optimizer steps its shards, so clip those
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if mode == "value":
            nn.utils.clip_grad_value_(parameters, limit)
            return None
        if isinstance(optimizer, ShardedOptimizer):
            return clip_grad_norm_(optimizer, limit)
        return clip_grad_norm_(parameters, limit, layouts=self._layouts, group=self._model_group)
