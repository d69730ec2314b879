"""Corrections of torch's clipping, loss scaler and optimizers for split and replicated parameters.

torch treats each tensor of this process as a whole parameter. `watch()`, which split modules call,
corrects the result for split ones: `clip_grad_norm_` clips by the norm of the whole model, and
`GradScaler` skips a step on all ranks that share a parameter or on none. An optimizer that needs
whole parameters refuses parts. Other parameters are left to torch.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.param_spec import group_of
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.mark import layout_of, place_of
from torchdistpackage.optim.clip import norm_of_counted, scale_gradients

OF_WHOLE = {
    "Adafactor", "AdaFactor", "GaLoreAdafactor", "CAME", "AdamMini", "Adam_mini", "Lamb",
    "LAMB", "LAMB8bit", "LAMB32bit", "FusedLAMB", "FusedMixedPrecisionLamb", "Lars", "LARS",
    "LARS8bit", "LARS32bit", "PytorchLARS", "NovoGrad", "FusedNovoGrad", "LBFGS", "Muon",
    "Shampoo", "SOAP", "GaLoreAdamW", "Apollo", "APOLLO",
}  # fmt: skip
"""Names of optimizers whose step of an element depends on others: rows, norms, dot products."""


@cache
def watch() -> None:
    """Correct torch's functions from now on; further calls do nothing."""
    _replace_clipping()
    _replace_check_of_scaler()
    register_optimizer_step_pre_hook(_check_optimizer)


def groups_of(parameters: Iterable[Tensor]) -> list[Group]:
    """Return the groups that split some of these parameters, in the same order on all ranks."""
    by_ranks: dict[tuple[int, ...], Group] = {}
    for parameter in parameters:
        layout, group = layout_of(parameter), group_of(parameter)
        if layout is not None and layout.split_axes and group is not None and group.size() > 1:
            by_ranks.setdefault(ranks_of(group), group)
    return [by_ranks[ranks] for ranks in sorted(by_ranks)]


def _replace_clipping() -> None:
    """Replace the clipping inside torch's own function, which programs have imported by name."""
    torch_function: Any = nn.utils.clip_grad_norm_
    names = torch_function.__code__.co_freevars
    if "func" not in names:  # a torch in which it has no such wrapper: replace the name alone
        nn.utils.clip_grad_norm_ = _clipping(torch_function)
        return
    cell = torch_function.__closure__[names.index("func")]
    cell.cell_contents = _clipping(cell.cell_contents)


def _clipping(torch_function: Any) -> Any:
    """Return a clipping that uses the norm of the whole model if parameters are split."""

    def clip_grad_norm_(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        tensors = parameters if isinstance(parameters, Tensor) else list(parameters)
        every = [tensors] if isinstance(tensors, Tensor) else tensors
        groups = groups_of(every)
        if not groups and not any(place_of(p) is not None for p in every):
            clipped = tensors if tensors else parameters  # torch warns if a generator is empty
            return torch_function(clipped, max_norm, norm_type, error_if_nonfinite, foreach)
        group = groups[0] if len(groups) == 1 else None
        if len(groups) > 1 and tpc.is_set:
            group = tpc.get_group("model")
        with torch.no_grad():
            norm = norm_of_counted(every, float(norm_type), group)
            if error_if_nonfinite and not bool(norm.isfinite()):
                raise RuntimeError(
                    f"the total norm of order {norm_type} of the gradients of all ranks is "
                    f"{norm.item()}, so it cannot be clipped; look for the first step with a large "
                    "loss, or set error_if_nonfinite=False"
                )
            scale_gradients(every, (float(max_norm) / (norm + 1e-6)).clamp(max=1.0))
        first = next((p.grad for p in every if p.grad is not None), None)
        return norm if first is None else norm.to(first.device, first.abs().dtype)

    return clip_grad_norm_


def _replace_check_of_scaler() -> None:
    """Let torch's scaler combine its flags over the ranks that split a parameter."""
    kind: Any = torch.amp.GradScaler
    torch_method = kind._unscale_grads_

    def _unscale_grads_(
        self: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        flags_by_device = torch_method(self, optimizer, inv_scale, found_inf, allow_fp16)
        for group in groups_of(p for some in optimizer.param_groups for p in some["params"]):
            where = primitives.device_of(group)
            own_flags = (flag.to(where) for flag in flags_by_device.values())
            flags = [torch.zeros((), dtype=torch.float32, device=where), *own_flags]
            flag = primitives.all_reduce(torch.stack(flags).amax(), group, primitives.MAX)
            flags_by_device = {d: flag.to(d) for d in flags_by_device or (found_inf.device,)}
        return flags_by_device

    kind._unscale_grads_ = _unscale_grads_


def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise LayoutError if an optimizer that needs whole parameters is about to step parts."""
    if (name := _name_of_whole(type(optimizer))) is None:
        return
    for number, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            position = place_of(parameter)
            layout = layout_of(parameter) if position is None else position.layout
            if layout is None or not layout.split_axes:
                continue
            if position is None and not groups_of([parameter]):
                continue
            raise LayoutError(
                f"{name} computes with whole parameters, but parameter {i} of param group {number} "
                f"is a part {tuple(parameter.shape)} of {layout.shape}, so its step would differ "
                f"from that of one process; use an optimizer that steps each element by itself, "
                f"such as AdamW or SGD"
            )


@cache
def _name_of_whole(kind: type) -> str | None:
    """Return the listed name of an optimizer that needs whole parameters; None for others."""
    if getattr(kind, "takes_split", False):
        return None
    return next((each.__name__ for each in kind.__mro__ if each.__name__ in OF_WHOLE), None)
