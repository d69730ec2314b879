"""What ties an optimizer to the module and the parameters that it was made for.

One rule: what is stepped reaches the module only as long as its parameters are the same objects
with the same memory, told to one optimizer alone. So each of these is looked at, and where it no
longer holds the user hears which parameter it is and what to do; nothing trains on in vain.
"""

from collections.abc import Iterable, Sequence
from weakref import finalize

import torch
from torch import Tensor, nn

from torchdistpackage.ddp.grad_hooks import already_hooked, remove_hooks
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.zero.param_buffer import UngatheredParameter
from torchdistpackage.ddp.zero.param_shard import FlatLayout
from torchdistpackage.ddp.zero.stage3 import Handle
from torchdistpackage.errors import LayoutError


class ParamGuards:
    """Of an optimizer to `module`, None if it has none, and the parameters on `lines`.

    lines: each with the memory that it is in. given: all parameters of the optimizer, frozen ones
    too.
    """

    def __init__(
        self,
        module: nn.Module | None,
        lines: Iterable[tuple[FlatLayout, Tensor]],
        given: Iterable[ParamSpec],
    ):
        self._module, self.handles = module, list[Handle]()
        self._lines = [
            (flat, line, [flat.element_size() * offset for offset in line.offsets])
            for line, flat in lines
        ]
        ours = {id(s.parameter): s.name for _, line, _ in self._lines for s in line.members}
        self._places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = [
            (m._parameters, key, p)
            for m in (() if module is None else module.modules())
            if not isinstance(m, torch.jit.ScriptModule)
            for key, p in m._parameters.items()
            if p is not None and id(p) in ours
        ]
        self._names = ours
        self._frozen = [s for s in given if not s.parameter.requires_grad]
        self._cut = False
        self._end = finalize(self, remove_hooks, self.handles)
        self._end.atexit = False

    def check(self) -> None:
        """Before a step.

        Raises:
            LayoutError: it would not reach the module.
        """
        if self._cut:
            raise LayoutError(
                f"this optimizer was removed from its {len(self._names)} parameters; step the one "
                f"that was wrapped after it"
            )
        if any(s.parameter.requires_grad for s in self._frozen):
            self._raise_unfrozen()
        # of one that is absent too the address is all that counts
        with torch._C.DisableTorchFunctionSubclass():
            for flat, line, places in self._lines:
                first = flat.data_ptr()
                for shared, place in zip(line.members, places, strict=True):
                    p = shared.parameter
                    if p.data_ptr() != first + place and p.numel():  # without elements it has none
                        self._raise_moved(shared)
        self.check_objects()

    def check_objects(self) -> None:
        """Whether the module's parameters are those that it had.

        Raises:
            LayoutError: one is another.
        """
        for parameters, key, p in self._places:
            now = parameters.get(key)
            if now is not p and now is not None and not self._has(p):
                raise LayoutError(
                    f"parameter {self._names[id(p)]} of the module is another object than the one "
                    f"that is trained, as after load_state_dict(assign=True): load with "
                    f"assign=False, or remove() this optimizer, replace it, and wrap a new one"
                )

    def cut(self) -> None:
        """Take all hooks off the module, and give parameters, which are whole, memory of their
        own."""
        self._end()
        for _, line, _ in self._lines:
            for shared in line.members:
                shared.parameter.data = shared.parameter.data.clone()
        self._cut = True

    def _has(self, parameter: nn.Parameter) -> bool:
        assert self._module is not None
        return any(p is parameter for p in self._module.parameters())

    def _raise_unfrozen(self) -> None:
        names = [s.name for s in self._frozen if s.parameter.requires_grad]
        raise LayoutError(
            f"{len(names)} parameters were frozen when this optimizer laid out what each rank owns "
            f"and now require gradients: {', '.join(names[:3])}; freeze them again, or remove() "
            f"this one, wrap a new one and load the state_dict() of this into it"
        )

    def _raise_moved(self, shared: ParamSpec) -> None:
        p = shared.parameter
        raise LayoutError(
            f"parameter {shared.name} ({p.dtype}, {p.device}) was given other memory than this "
            f"optimizer steps, by p.data = ..., vector_to_parameters or module.to(...): write into "
            f"it with p.data.copy_(...) and call refresh_masters(), or move and cast the module "
            f"before it is wrapped"
        )


def refuse_owned(shared: Sequence[ParamSpec]) -> None:
    """Each may have one owner of its gradient.

    Raises:
        LayoutError: some has one.
    """
    found = {id(p) for p in already_hooked([s.parameter for s in shared])}
    if found:
        names = [s.name for s in shared if id(s.parameter) in found]
        raise LayoutError(
            f"{len(names)} of {len(shared)} parameters have an owner of their gradients already, "
            f"another ZeroOptimizer or a NaiveDDP: {', '.join(names[:3])}; call the remove() of "
            f"that optimizer first, or wrap the plain module"
        )
    for s in shared:
        if type(s.parameter) is UngatheredParameter:
            s.parameter.source.wait_gathered(s.parameter)
