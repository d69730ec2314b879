"""Backward, clipping, step and scale of a float16 iteration in one call, as earlier loops have it.

One rule: it adds nothing of its own to GradScaler and clip_grad_norm_ but their order.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.layout.layout import Layout
from torchdistpackage.optim.clip import ShardedOptimizer, clip_grad_norm_
from torchdistpackage.optim.scaler import GradScaler


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
