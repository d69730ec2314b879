"""What happens around a module, also where torch.compile has made it one function.

One rule: nothing of ours is compiled. A compiled module reads its parameters without asking their
class, and would take hooks into its graph, so both are dealt with before it runs and after.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch
from torch import nn

from torchdistpackage.ddp.weak_hook import WeakHook
from torchdistpackage.ddp.zero.param_buffer import UngatheredParameter
from torchdistpackage.errors import LayoutError

Before = Callable[[nn.Module, tuple], object]
After = Callable[[nn.Module, tuple, object], object]


class Handle(Protocol):
    def remove(self) -> None: ...


class ForwardHooks:
    """Calls what `module.compile()` made. (It is not copied with the module, as torch has it.)"""

    def __init__(self, module: nn.Module):
        assert module._compiled_call_impl is not None
        self._module, self._call = module, module._compiled_call_impl
        self._before: list[Before] = []
        self._after: list[After] = []

    def __call__(self, *args, **kwargs):
        for before in self._before:
            before(self._module, args)
        outputs = self._call(*args, **kwargs)
        for after in self._after:
            changed = after(self._module, args, outputs)
            outputs = outputs if changed is None else changed
        return outputs

    def add(self, before: Before, after: After | None) -> "list[Handle]":
        handles: list[Handle] = [_Added(self._before, before)]
        if after is not None:
            handles.append(_Added(self._after, after))
        return handles


class _Added:
    """Something in a list, until it is removed."""

    def __init__(self, among: list, one: object):
        self._among, self._one = among, one
        among.append(one)

    def remove(self) -> None:
        self._among.remove(self._one)


def gather_ahead(module: nn.Module, may_follow: bool) -> list[Handle]:
    """Before a compiled part of `module` runs, its parameters come.

    may_follow: whether parts may be compiled later on.
    """
    eager: list[nn.Module] = []
    handles: list[Handle] = []
    for m in eager_parts(module):
        if is_compiled(m):
            handles += around(m, wait_gathered)
        else:
            eager.append(m)
    look = WeakHook(partial(_look, eager, may_follow))
    return [*handles, module.register_forward_pre_hook(look, prepend=True)]


def around(module: nn.Module, before: Before, after: After | None = None) -> list[Handle]:
    """Calls, eagerly, `before(module, args)` and `after(module, args, outputs)`, which returns the
    outputs or None, whenever the module runs."""
    before, after = WeakHook(before), None if after is None else WeakHook(after)
    if module._compiled_call_impl is None:
        handles: list[Handle] = [module.register_forward_pre_hook(before)]
        if after is not None:
            handles.append(module.register_forward_hook(after))
        return handles
    if not isinstance(module._compiled_call_impl, ForwardHooks):
        module._compiled_call_impl = ForwardHooks(module)
    return module._compiled_call_impl.add(before, after)


def is_compiled(module: nn.Module) -> bool:
    """By `module.compile()`, or it is what `torch.compile(module)` returned."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def eager_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Its submodules as eager code calls them, itself first: of a compiled one no parts."""
    seen: set[nn.Module] = set()
    left = [module]
    while left:
        m = left.pop()
        if m not in seen:
            seen.add(m)
            yield m
            if not is_compiled(m):
                left.extend(reversed(list(m.children())))


def may_overlap(module: nn.Module | None, stage: int) -> bool:
    """Whether parameters may be on their way while it runs: scripted parts do not ask for them.

    Raises:
        LayoutError: in stage 3 they would have to be.
    """
    scripted = [
        name
        for name, m in (() if module is None else module.named_modules())
        if isinstance(m, torch.jit.ScriptModule) and next(m.parameters(), None) is not None
    ]
    if scripted and stage == 3:
        raise LayoutError(
            f"stage 3 frees parameters, and {len(scripted)} modules made by torch.jit read theirs "
            f"without asking: {', '.join(scripted[:3])}; use stage 1 or 2, or torch.compile"
        )
    return not scripted


def wait_gathered(module: nn.Module, args: tuple) -> None:
    """All parameters of the module are here afterwards."""
    for parameter in module.parameters():
        if type(parameter) is UngatheredParameter:
            parameter.source.wait_gathered(parameter)


def _look(eager: list[nn.Module], may_follow: bool, module: nn.Module, args: tuple) -> None:
    """Somebody may have compiled one of these since the last forward."""
    for m in eager:
        call = m._compiled_call_impl
        if call is not None and type(call) is not ForwardHooks:
            if not may_follow:
                raise LayoutError(
                    f"a {type(m).__name__} was compiled after the optimizer had put hooks on its "
                    f"{sum(1 for _ in m.modules())} modules, to free and fetch their parameters; "
                    f"compile before the optimizer is wrapped"
                )
            around(m, wait_gathered)
