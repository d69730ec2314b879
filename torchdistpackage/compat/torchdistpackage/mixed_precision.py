"""What the earlier package had for 16 bits: ZeRO of a built optimizer alone, and a scaler to call.

Without the module no forward can be watched, so either every backward that brings a gradient sums
what it has and the sums add up, or all of it waits for `step`. The scaler adds nothing of its own
to GradScaler and clip_grad_norm_ but their order.
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
    """Reduces in every backward that brings a gradient; the first one of it arms the reducer.

    No hook of its own: with thousands of small parameters one more a parameter is felt.
    """

    waits = True
    """Whether the end of a backward waits for the sums."""

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
    stage: 1 shards the optimizer's state, 2 gradients too: then each backward sums, and keeps
        its part of the sums alone. Every rank must make as many backwards that reach parameters.
    bucket_size: elements in a bucket at most. bucketize: False sends each parameter alone.
    replicas: ranks that hold the same shard, if `dp_group` is a part of those that see different
        batches: `replica_group(dp_group)`.

    Where a ZeroOptimizer can have the module, it sends earlier and knows which backward counts.

    Raises:
        LayoutError: the optimizer cannot work on a part of the parameters.
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
        """Drop the gradients of parameters and pieces, or set them to zero."""
        with torch.no_grad():
            self.reducer.watch(())  # no backward is running: forget one that failed
        super().zero_grad(set_to_none)

    def _step(self) -> None:
        if not self._in_backward:
            # on every rank alike, with or without a gradient
            with torch.enable_grad():
                self.reducer.watch(())
        super()._step()


class NativeScalerPP:
    """A GradScaler that is called with the loss, on stages, shards and replicas alike.

    layouts, model_group: of the parameters to be clipped, as in `clip_grad_norm_`. scaling: how
        GradScaler is made.
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
        self._layouts, self._model_group = layouts, model_group

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
        """One iteration after the forward; all ranks call it alike.

        loss: not scaled yet. None where a pipeline has run the backwards, of losses that its last
            stage gave to `scaler.scale`.
        clip_grad: largest norm, or largest value of an element where `clip_mode` is "value".
        parameters: to clip; default the optimizer's. A ZeroOptimizer's shards are clipped always.
        need_update: False only accumulates.

        Returns the norm before clipping, where it was made; not finite if the step was skipped.

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
        """That of the scaler, which torch's GradScaler can load."""
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, float | int]) -> None:
        """Go on with a saved scale."""
        self.scaler.load_state_dict(state_dict)

    def _clip(
        self,
        optimizer: torch.optim.Optimizer,
        limit: float,
        mode: str,
        parameters: nn.Parameter | Iterable[nn.Parameter] | None,
    ) -> Tensor | None:
        own = [p for group in optimizer.param_groups for p in group["params"]]
        if mode == "value":
            # what the optimizer steps: its shards, where it has some
            given = (
                own if parameters is None or isinstance(optimizer, ShardedOptimizer) else parameters
            )
            nn.utils.clip_grad_value_(given, limit)
            return None
        if isinstance(optimizer, ShardedOptimizer):
            return clip_grad_norm_(optimizer, limit)
        given = own if parameters is None else parameters
        return clip_grad_norm_(given, limit, layouts=self._layouts, group=self._model_group)
