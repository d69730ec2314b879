"""Checks that a ZeroOptimizer's steps still reach its module.

They do only as long as the parameters are the same objects with the same memory, and have one
optimizer. These checks cover each of that, and errors name the parameter.
"""

from collections.abc import Iterable, Sequence
from weakref import finalize

import torch
from torch import Tensor, nn

from torchdistpackage.ddp.grad_hooks import Removable, hooked_names, remove_hooks
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.zero.param_buffer import wait_gathered
from torchdistpackage.ddp.zero.param_shard import FlatLayout
from torchdistpackage.errors import LayoutError


class ParamGuards:
    """A guard that ties an optimizer to its module, if it has one, and to its parameters.

    layouts: each with its memory. specs: all parameters of the optimizer, frozen ones too.
    """

    def __init__(
        self,
        module: nn.Module | None,
        layouts: Iterable[tuple[FlatLayout, Tensor]],
        specs: Iterable[ParamSpec],
    ):
        self._module, self.handles = module, list[Removable]()
        self._layouts = [
            (flat, layout, [flat.element_size() * offset for offset in layout.offsets])
            for layout, flat in layouts
        ]
        specs = list(specs)
        trained_names = {id(s.parameter): s.name for s in specs if s.parameter.requires_grad}
        self._registered: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = [
            (m._parameters, key, p)
            for m in (() if module is None else module.modules())
            if not isinstance(m, torch.jit.ScriptModule)
            for key, p in m._parameters.items()
            if p is not None and id(p) in trained_names
        ]
        self._names = trained_names
        self._frozen = [s for s in specs if not s.parameter.requires_grad]
        self._cut = False
        self._end = finalize(self, remove_hooks, self.handles)
        self._end.atexit = False

    def check(self) -> None:
        """Raise LayoutError if a step would not reach the module."""
        if self._cut:
            raise LayoutError(
                f"this optimizer was removed from its {len(self._names)} parameters; step the one "
                f"that was wrapped after it"
            )
        if unfrozen := [s.name for s in self._frozen if s.parameter.requires_grad]:
            raise LayoutError(
                f"{len(unfrozen)} parameters were frozen when this optimizer laid out what each "
                f"rank owns and now require gradients: {', '.join(unfrozen[:3])}; freeze them "
                f"again, or remove() this one, wrap a new one and load its state_dict() into it"
            )
        # only addresses are read, so this works for absent parameters too
        with torch._C.DisableTorchFunctionSubclass():
            for flat, layout, offsets in self._layouts:
                first = flat.data_ptr()
                for spec, offset in zip(layout.members, offsets, strict=True):
                    p = spec.parameter
                    if p.data_ptr() != first + offset and p.numel():  # an empty one has no address
                        raise LayoutError(
                            f"parameter {spec.name} ({p.dtype}, {p.device}) was given other "
                            f"memory than this optimizer steps, by p.data = ..., "
                            f"vector_to_parameters or module.to(...): write into it with "
                            f"p.data.copy_(...) and call refresh_masters(), or move and cast the "
                            f"module before it is wrapped"
                        )
        self.check_objects()

    def check_objects(self) -> None:
        """Raise LayoutError if a parameter of the module was replaced by another object."""
        for parameters, key, p in self._registered:
            current = parameters.get(key)
            if current is p or current is None:
                continue
            assert self._module is not None
            if all(other is not p for other in self._module.parameters()):
                raise LayoutError(
                    f"parameter {self._names[id(p)]} of the module is another object than the one "
                    f"that is trained, as after load_state_dict(assign=True): load with "
                    f"assign=False, or remove() this optimizer, replace it, and wrap a new one"
                )

    def cut(self) -> None:
        """Remove all hooks from the module, and give the gathered parameters their own memory."""
        self._end()
        for _, layout, _ in self._layouts:
            for spec in layout.members:
                spec.parameter.data = spec.parameter.data.clone()
        self._cut = True


def refuse_others(specs: Sequence[ParamSpec], module: nn.Module | None) -> None:
    """Refuse parameters of another module, and those whose gradients have an owner already.

    Raises:
        LayoutError: a parameter belongs to another optimizer or wrapper.
        ValueError: the optimizer is over another module.
    """
    module_ids = None if module is None else {id(p) for p in module.parameters()}
    if specs and module_ids is not None and module_ids.isdisjoint(id(s.parameter) for s in specs):
        raise ValueError(
            f"none of the optimizer's {len(specs)} parameters is in the module; build it over "
            f"those of this module"
        )
    if names := hooked_names(specs):
        raise LayoutError(
            f"{len(names)} of {len(specs)} parameters have an owner of their gradients already, "
            f"another ZeroOptimizer or a NaiveDDP: {', '.join(names[:3])}; call the remove() of "
            f"that optimizer first, or wrap the plain module"
        )
    for s in specs:
        wait_gathered(s.parameter)  # an earlier optimizer's gather may still be in flight
