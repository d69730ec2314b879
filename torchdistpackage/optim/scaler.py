"""Loss scaling for float16, with one decision for all ranks whether a step is taken.

A small gradient underflows in float16, so the loss is multiplied by a large scale and gradients
are divided by it in float32 before the step (Micikevicius et al., arXiv:1710.03740).

One rule: a gradient that is not finite on any rank makes every rank skip the step. One number a
step is reduced over all ranks, and the scale is a number on the host that follows from these
decisions alone. So it is equal everywhere, also on stages that never see a loss.
"""

import logging

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.optim.nonfinite import first_nonfinite, named_gradients, nonfinite_report

_LOG = logging.getLogger(__name__)
_LARGEST = torch.finfo(torch.float32).max


class GradScaler:
    """torch.amp.GradScaler over ranks: the same calls in the same order, on CPU and CUDA.

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)      # only to clip or look at gradients before the step
        scaler.step(optimizer)          # or not, on all ranks alike
        scaler.update()

    All ranks of `group` make each call but `scale`, also those that hold no parameter of an
    optimizer. `step` waits for the host, once, to learn the decision.

    init_scale, growth_factor, backoff_factor, growth_interval: as torch's. A skipped step
        multiplies the scale by `backoff_factor`, `growth_interval` steps taken in a row by
        `growth_factor`.
    enabled: False makes every call what it is without scaling.
    group: who decides together; default all ranks of tpc's topology, or everybody.
    """

    def __init__(
        self,
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
        self._enabled = enabled
        self._group = resolve_group(group, "global")
        self._scale, self._num_taken = float(init_scale), 0
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval
        self._found: dict[int, Tensor] = {}
        self._stepped: dict[int, bool] = {}

    @property
    def skipped(self) -> bool:
        """Whether a step was skipped since the last `update`."""
        return not all(self._stepped.values())

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> float:
        return self._scale if self._enabled else 1.0

    def scale(self, outputs):
        """Outputs times the scale: a tensor, or a list or tuple of them. No communication."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, list | tuple):
            return type(outputs)(self.scale(x) for x in outputs)
        # a tensor and not a number: a float16 loss becomes float32 by it and cannot overflow
        return outputs * torch.tensor(self._scale, dtype=torch.float32)

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and begin to find out whether all are finite.

        Raises:
            RuntimeError: this was done since the last `update`.
            ValueError: a gradient is float16, too narrow for what unscaled gradients are.
        """
        if not self._enabled:
            return
        if id(optimizer) in self._found:
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
                    f"the gradient of {name} is float16, in which what is unscaled underflows; "
                    f"train float32 parameters under autocast, or keep float32 masters of "
                    f"float16 ones with ZeroOptimizer"
                )
            values = grad._values() if grad.is_sparse else grad
            values = torch.view_as_real(values) if values.is_complex() else values
            alike.setdefault((values.device, values.dtype), []).append(values)
        # filled on the devices: copies from the host would wait for them
        device = primitives.device_of(self._group)
        flags = [torch.zeros((), device=device)]
        for (where, _), grads in alike.items():
            flag = torch.zeros((), device=where)
            inverse = torch.full((), 1.0 / self._scale, device=where)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inverse)
            flags.append(flag.to(device, non_blocking=True))
        found = torch.stack(flags).amax()
        self._found[id(optimizer)] = primitives.all_reduce(found, self._group, primitives.MAX)

    def step(self, optimizer: torch.optim.Optimizer, *args, **kwargs):
        """`optimizer.step(...)` and what it returns, unless a gradient is not finite somewhere.

        Then nothing is touched, on any rank, and the first rank logs whose gradient it was.

        Raises:
            RuntimeError: this was done since the last `update`, or a closure is given, which
                could not be skipped once it has run.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if args or "closure" in kwargs:
            raise RuntimeError("step() of a scaler takes no closure; compute gradients before it")
        if id(optimizer) in self._stepped:
            raise RuntimeError("step() was called twice on one optimizer; call update() in between")
        if id(optimizer) not in self._found:
            self.unscale_(optimizer)
        taken = self._found[id(optimizer)].item() == 0
        self._stepped[id(optimizer)] = taken
        if taken:
            return optimizer.step(**kwargs)
        self._report(optimizer)
        return None

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Choose the next scale; after the steps of all optimizers. No communication.

        Raises:
            RuntimeError: there was neither a step nor an `unscale_` before it.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = float(new_scale)
        elif not self._found:
            raise RuntimeError("update() of a scaler comes after step(); there was none")
        elif not all(self._was_finite(key) for key in self._found):
            self._scale *= self._backoff_factor
            self._num_taken = 0
        else:
            self._num_taken += 1
            if self._num_taken == self._growth_interval:
                grown = self._scale * self._growth_factor
                self._scale = grown if grown <= _LARGEST else self._scale
                self._num_taken = 0
        self._found.clear()
        self._stepped.clear()

    def _was_finite(self, key: int) -> bool:
        """What `step` decided, else what `unscale_` found, which is read here.

        A read after the step was launched would wait for the whole of it.
        """
        taken = self._stepped.get(key)
        return self._found[key].item() == 0 if taken is None else taken

    def state_dict(self) -> dict[str, float | int]:
        """As torch's GradScaler has it, so that either loads the other's."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._num_taken,
        }

    def load_state_dict(self, state_dict: dict[str, float | int]) -> None:
        """Go on where that state was saved; all ranks load the same.

        Raises:
            ValueError: it is empty, as that of a scaler that was not enabled.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise ValueError("the scaler's state is empty: it was saved by one with enabled=False")
        self._scale = float(state_dict["scale"])
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = int(state_dict["growth_interval"])
        self._num_taken = int(state_dict["_growth_tracker"])

    def _report(self, optimizer: torch.optim.Optimizer) -> None:
        bad = first_nonfinite(named_gradients(optimizer))
        culprits = nonfinite_report(bad, self._group)
        if self._group.rank() == 0:
            _LOG.info("step skipped at scale %g: gradients not finite: %s", self._scale, culprits)
