"""Loss scaling for float16, with one decision for all ranks whether a step is taken.

A small gradient underflows in float16, so the loss is multiplied by a large scale and gradients
are divided by it in float32 before the step (Micikevicius et al., arXiv:1710.03740).

If any rank has a gradient that is not finite, every rank skips the step. The ranks all-reduce one
number a step, and the scale depends on these decisions only. So it is equal everywhere, also on
stages that never see a loss. Ranks look for the names of bad gradients only after a step with some.
"""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.sharded import ShardedOptimizer

_LOG = logging.getLogger(__name__)


class GradScaler(torch.amp.GradScaler):
    """A torch.amp.GradScaler over ranks: the same calls in the same order, on CPU and CUDA.

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)      # only to clip or look at gradients before the step
        scaler.step(optimizer)          # all ranks step, or all skip
        scaler.update()

    All ranks of `group` make each call but `scale`, even if they hold no parameter of the
    optimizer. `step` makes the host wait once, to learn the decision.

    device: the device of the group's tensors; torch's scaler has this argument too. Default: found.
    init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch's scaler.
    group: ranks that decide together; default: all ranks of tpc's topology, or of the job.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        group: Group | None = None,
    ):
        if growth_factor <= 1 or not 0 < backoff_factor < 1:
            raise ValueError(
                f"growth_factor is {growth_factor:g} and backoff_factor {backoff_factor:g}; "
                f"the first must be above 1 and the second between 0 and 1"
            )
        self._group = resolve_group(group, "global")
        group_device = primitives.device_of(self._group)
        if device is not None and torch.device(device).type != group_device.type:
            raise ValueError(
                f"device is {device}, but the ranks communicate on {group_device.type}; leave "
                f"it out"
            )
        super().__init__(
            group_device.type, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._taken: dict[int, bool] = {}
        if enabled:  # not by the first loss, which some stages never see
            self._lazy_init_scale_growth_tracker(group_device)

    @property
    def skipped(self) -> bool:
        """True if a step was skipped since the last `update`."""
        return not all(self._taken.values())

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and start to check that all are finite.

        Raises:
            RuntimeError: it was called before, since the last `update`.
            ValueError: a gradient is float16, in which unscaled values underflow.
        """
        if not self._enabled:
            return
        if self._found_inf_per_device(optimizer):
            raise RuntimeError(
                "unscale_() was called twice on one optimizer; call update() in between"
            )
        reducer = getattr(optimizer, "reducer", None)
        if isinstance(reducer, Reducer):
            reducer.finish()
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for name, grad in named_gradients(optimizer):
            if grad is None:
                continue
            if grad.dtype == torch.float16:
                raise ValueError(
                    f"the gradient of {name} is float16, in which unscaled values underflow; "
                    "train float32 parameters under autocast, or keep float32 masters of float16 "
                    "parameters with ZeroOptimizer"
                )
            values = grad._values() if grad.is_sparse else grad
            values = torch.view_as_real(values) if values.is_complex() else values
            alike.setdefault((values.device, values.dtype), []).append(values)
        scale, _ = self._check_scale_growth_tracker("unscale_")
        flags = [torch.zeros((), dtype=torch.float32, device=scale.device)]
        for (device, _), grads in alike.items():
            flag = torch.zeros((), dtype=torch.float32, device=device)
            # in float64, as torch's GradScaler does: some compiler options make a division in
            # float32 inexact
            inverse = scale.double().reciprocal().float().to(device, non_blocking=True)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inverse)
            flags.append(flag.to(scale.device, non_blocking=True))
        found_inf = primitives.all_reduce(torch.stack(flags).amax(), self._group, primitives.MAX)
        self._found_inf_per_device(optimizer)[scale.device] = found_inf

    def step(self, optimizer: torch.optim.Optimizer, *args, **kwargs):
        """Call `optimizer.step(...)` and return its result, if all ranks' gradients are finite.

        Otherwise no rank changes anything, and the first rank logs the names of the gradients.

        Raises:
            RuntimeError: it was called before, since the last `update`, or got a closure: once that
                has run, the step cannot be skipped.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if args or "closure" in kwargs:
            raise RuntimeError("GradScaler.step() takes no closure; call backward() before it")
        if id(optimizer) in self._taken:
            raise RuntimeError("step() was called twice on one optimizer; call update() in between")
        if not self._found_inf_per_device(optimizer):
            self.unscale_(optimizer)
        (found_inf,) = self._found_inf_per_device(optimizer).values()
        # the host waits here: whether to step is decided in Python
        self._taken[id(optimizer)] = is_finite = found_inf.item() == 0
        if is_finite:
            return optimizer.step(**kwargs)
        culprits = nonfinite_report(first_nonfinite(named_gradients(optimizer)), self._group)
        if self._group.rank() == 0:
            scale = self.get_scale()
            _LOG.info("step skipped at scale %g: gradients not finite: %s", scale, culprits)
        return None

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Choose the next scale, after the steps of all optimizers, without communication.

        Raises:
            RuntimeError: neither `step` nor `unscale_` was called before it.
        """
        if not self._enabled:
            return
        was_checked = any(s["found_inf_per_device"] for s in self._per_optimizer_states.values())
        if new_scale is None and not was_checked:
            raise RuntimeError("GradScaler.update() was called without a step; call step() first")
        super().update(None if new_scale is None else float(new_scale))
        self._taken.clear()

    def load_state_dict(self, state_dict: dict[str, float | int]) -> None:
        """Continue from a saved state, the same on all ranks.

        Raises:
            ValueError: the state is empty, because a scaler with enabled=False saved it.
        """
        if self._enabled and not state_dict:
            raise ValueError(
                "the scaler's state is empty, because it was saved by a scaler with "
                "enabled=False; load the state of an enabled one, or skip loading"
            )
        super().load_state_dict(state_dict)


def first_nonfinite(named: Iterable[tuple[str, Tensor | None]]) -> str | None:
    """Return the name of the first gradient with a NaN or infinity, or None."""
    for name, grad in named:
        if grad is None:
            continue
        values = grad._values() if grad.is_sparse else grad
        if not torch.isfinite(values).all():
            return name
    return None


def nonfinite_report(own_name: str | None, group: Group) -> str:
    """Return a text that names each rank's gradient in `own_name`, the same on all ranks."""
    where = f"rank {primitives.ranks_of(group)[group.rank()]}"
    if tpc.is_set:
        coord = tpc.topology.dense.coord(tpc.rank)
        where += f" ({' '.join(f'{axis} {index}' for axis, index in coord.items())})"
    phrases = primitives.gather_objects(f"{where}: {own_name}" if own_name else "", group)
    lines = [str(line) for line in phrases if line]
    return "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more ranks" if len(lines) > 4 else "")


def named_gradients(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor | None]]:
    """Return (name, gradient) of each parameter of an optimizer; unnamed ones get a number."""
    names_by_id: dict[int, str] = {}
    if isinstance(optimizer, ShardedOptimizer):
        names_by_id = {id(shard.tensor): shard.name for shard in optimizer.shards}
    named: list[tuple[str, Tensor | None]] = []
    for number, group in enumerate(optimizer.param_groups):
        if not isinstance(optimizer, ShardedOptimizer):
            names_by_id |= zip(map(id, group["params"]), group.get("param_names", ()), strict=False)
        for i, p in enumerate(group["params"]):
            named.append((names_by_id.get(id(p), f"parameter {i} of param group {number}"), p.grad))
    return named
