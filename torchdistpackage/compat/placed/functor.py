"""`DeviceFunctor`: gives tensors, modules and functions a place.

    F = DeviceFunctor(devices)
    first, second = F.allocate_device(), F.allocate_device()
    with F.under(first):
        x, encoder = F(x), F(encoder)
    with F.under(second):
        head, loss = F(head), F(lambda y, t: (y - t).square().mean())
    loss(head(encoder(x)), x).backward()

Every rank runs all of this. An operation on `first` runs on its rank alone, and the other ranks go
on to their operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from torchdistpackage.comm.creation import Group
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.primitives import gather_objects
from torchdistpackage.compat.placed.draws import own_draws
from torchdistpackage.compat.placed.managed import (
    AbsentModule,
    ManagedModule,
    ManagedOperation,
    ManagedTensor,
)
from torchdistpackage.compat.placed.place import Devices, Place, devices_by_rank, problem_of
from torchdistpackage.compat.placed.program import Program, program_of
from torchdistpackage.errors import PlacementError


class DeviceFunctor:
    """The places of a program; all ranks make it together.

    devices: one device for each rank, a list of devices for each, or one list with k for each rank.
    group: ranks of the program; default the world, or this process alone without a world.

    Raises:
        PlacementError: on all ranks: the ranks cannot share the devices, or one does not exist.
    """

    tensor_class: type[ManagedTensor] = ManagedTensor
    module_class: type[ManagedModule] = ManagedModule
    operation_class: type[ManagedOperation] = ManagedOperation

    def __init__(self, devices: Devices, group: Group | None = None):
        self.program: Program = program_of(group)
        self._devices = devices_by_rank(devices, len(self.program.ranks))
        local_devices = self._devices[self.program.ranks.index(self.program.rank)]
        problem = "; ".join(filter(None, map(problem_of, local_devices)))
        self._agree(problem, group)
        self._places = [
            self.make_place((device,), (rank,))
            for rank, own_devices in zip(self.program.ranks, self._devices, strict=True)
            for device in own_devices
        ]
        self._next = 0
        self._under: list[Place] = []
        self._groups: Groups | None = None

    def allocate_device(self, num_ranks: int = 1) -> Place:
        """Return the next place, cyclically. num_ranks: ranks of the place, from the next one on.

        Raises:
            PlacementError: there are not that many ranks from there on.
        """
        place = self._places[self._next % len(self._places)]
        if num_ranks == 1:
            self._next += 1
            return place
        ranks = self.program.ranks
        begin = ranks.index(place.rank)
        if not 1 <= num_ranks <= len(ranks) - begin:
            raise PlacementError(
                f"a place of {num_ranks} ranks, from rank {place.rank} on, does not fit into the "
                f"{len(ranks)} ranks of the program; use a place of fewer ranks, or start more "
                "ranks"
            )
        chosen = ranks[begin : begin + num_ranks]
        places_of_last = [
            i for i, candidate in enumerate(self._places) if candidate.rank == chosen[-1]
        ]
        self._next = places_of_last[-1] + 1
        return self.place(chosen)

    def place(self, ranks: int | Sequence[int], device: str | torch.device | None = None) -> Place:
        """Return the place of one rank, or of several that compute the same.

        device: default the first device of each of these ranks.

        Raises:
            PlacementError: there is no such rank, or it does not have the device.
        """
        chosen = tuple(ranks) if isinstance(ranks, Sequence) else (ranks,)
        if (
            not chosen
            or len(set(chosen)) < len(chosen)
            or not set(chosen) <= set(self.program.ranks)
        ):
            raise PlacementError(
                f"cannot make a place on ranks {list(chosen)}: name different ranks out of "
                f"{list(self.program.ranks)}"
            )
        devices = dict(zip(self.program.ranks, self._devices, strict=True))
        if device is None:
            return self.make_place([devices[rank][0] for rank in chosen], chosen)
        problem = problem_of(device, is_here=False)
        problems = (
            [problem]
            if problem
            else [
                f"rank {rank} has no device {device}; it has {', '.join(map(str, devices[rank]))}"
                for rank in chosen
                if torch.device(device) not in devices[rank]
            ]
        )
        if problems:
            raise PlacementError("; ".join(problems))
        return self.make_place([torch.device(device)] * len(chosen), chosen)

    def make_place(self, devices: Sequence[torch.device], ranks: Sequence[int]) -> Place:
        """Return the object for a place with a device for each rank; subclasses have their own."""
        own_index = ranks.index(self.program.rank) if self.program.rank in ranks else 0
        return Place(devices[own_index], tuple(ranks), tuple(devices))

    def group_of(self, place: Place) -> Group | None:
        """Return the process group of a place, which its ranks make together; None on other
        ranks.
        """
        if not self.program.is_on(place):
            return None
        if self._groups is None:
            self._groups = Groups(self.program.rank)
        return self._groups.of(place.ranks)

    @contextmanager
    def under(self, place: Place) -> Iterator[DeviceFunctor]:
        """Apply the functor to `place` within the context."""
        if not isinstance(place, Place):
            raise PlacementError(
                f"under() takes a place (allocate_device() gives one), not {place!r}"
            )
        self._under.append(place)
        try:
            yield self
        finally:
            self._under.pop()

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Delay operations until a value is needed or the context ends, and send first.

        Operations keep their order, but tensors that other ranks wait for leave before them.
        Without it `f(x)` here keeps a later `g(x)` on another rank waiting for x. Inside, do not
        change tensors that operations read, nor modes of modules.
        """
        with self.program.ahead():
            yield

    def __call__(self, obj: Any, *, dynamic: bool = False) -> Any:
        """Put a tensor, module or function on the place of the enclosing `under`.

        A tensor must be a leaf without a graph; the user's tensor gets its gradient. A module on
        the meta device gets memory here, on ranks of the place only, and values from its
        `reset_parameters`. dynamic: the number of outputs changes from call to call.

        Raises:
            PlacementError: there is no enclosing `under`, the tensor has a graph, or the object is
                none of these.
        """
        place = self._place()
        if isinstance(obj, Tensor):
            if obj.grad_fn is not None:
                raise PlacementError(
                    "Device functor can be applied only to leaf tensors: this one has a graph "
                    "behind it (grad_fn is set); make it by an operation on a place, or give its "
                    "detach()"
                )
            return self.tensor_class(obj, place, self.program)
        if isinstance(obj, Module):
            return self._module(obj, place, dynamic)
        if callable(obj):
            operation = self.operation_class(obj, place, self.program)
            operation.set_dynamic(dynamic)
            return operation
        raise PlacementError(
            f"Object must be a tensor, a module or a function, not a {type(obj).__name__}"
        )

    def build(self, make: Callable[..., Module], *args: Any, **kwargs: Any) -> Any:
        """Call `make(*args, **kwargs)` on the ranks of the place only, and manage the module.

        Its random values do not depend on the place.

        Raises:
            PlacementError: there is no enclosing `under`, or (on the place) it makes no module.
        """
        place = self._place()
        if not callable(make):
            raise PlacementError(f"build takes a function that makes a module, not {make!r}")
        number = self.program.begin(f"build {getattr(make, '__name__', make)}", place)
        module: Module = AbsentModule()
        if self.program.is_on(place):
            with own_draws(number, place.device), place.device:
                module = make(*args, **kwargs)
            if not isinstance(module, Module):
                raise PlacementError(
                    f"build: {getattr(make, '__name__', make)} made a {type(module).__name__}, "
                    f"not a module"
                )
        return self._module(module, place, False)

    def optimizer(
        self, make: Callable[..., torch.optim.Optimizer], modules: Any, **options: Any
    ) -> torch.optim.Optimizer:
        """Return an optimizer of this rank's parameters; ranks without any may step it too.

        modules: managed modules and tensors, or parameter groups with such `params`.
        """
        return make_optimizer(make, modules, **options)

    def finish(self) -> None:
        """Wait until all messages of this rank have left; `launch` calls it at the end."""
        self.program.finish()

    def _place(self) -> Place:
        if not self._under:
            raise PlacementError(
                "You must be under a device context: with F.under(F.allocate_device()): ..."
            )
        return self._under[-1]

    def _module(self, module: Module, place: Place, dynamic: bool) -> Any:
        number = self.program.begin("a module", place)
        if not self.program.is_on(place):
            module = AbsentModule()
        elif any(x.is_meta for x in (*module.parameters(), *module.buffers())):
            with own_draws(number, place.device):
                materialize(module, place.device)
        else:
            module = module.to(place.device)
        managed = self.module_class(module, place, self.program)
        managed.set_dynamic(dynamic)
        return managed

    def _agree(self, problem: str, group: Group | None) -> None:
        texts = [problem] if self.program.mail is None else gather_objects(problem, group)
        problems = [
            f"rank {rank}: {text}"
            for rank, text in zip(self.program.ranks, texts, strict=True)
            if text
        ]
        if problems:
            raise PlacementError("; ".join(problems))


def materialize(module: Module, device: torch.device) -> None:
    """Give a module on the meta device memory, and values by its submodules' `reset_parameters`.

    Raises:
        PlacementError: a submodule with tensors has no `reset_parameters`.
    """
    owners = [
        (name, submodule)
        for name, submodule in module.named_modules()
        if any(
            x.is_meta
            for x in (*submodule.parameters(recurse=False), *submodule.buffers(recurse=False))
        )
    ]
    if unknown := [
        name or "(root)" for name, submodule in owners if not hasattr(submodule, "reset_parameters")
    ]:
        raise PlacementError(
            f"modules {unknown} are on the meta device and have no reset_parameters(), so their "
            f"initial values are not known; give them one, or make the module with F.build(...)"
        )
    module.to_empty(device=device)
    for _, submodule in owners:
        submodule.reset_parameters()  # type: ignore[operator]


def make_optimizer(
    make: Callable[..., torch.optim.Optimizer], params: Any, **options: Any
) -> torch.optim.Optimizer:
    """Return `make(...)` over this rank's tensors of `params`; all ranks have the same groups.

    A rank without tensors gets an empty one without a gradient, so that it can step and schedule
    like the others.

    params: managed modules, managed leaf tensors, parameters, or parameter groups, each a dict with
    such `params`.

    Raises:
        PlacementError: `params` contains something else, or a group has no `params`.
    """
    single = isinstance(params, ManagedModule | ManagedTensor | Tensor)
    if not single and not isinstance(params, Iterable):
        raise _unknown(params)
    entries = [params] if single else list(params)
    groups = [
        {**entry, "params": list(_tensors_here(entry.get("params")))}
        for entry in entries
        if isinstance(entry, dict)
    ]
    plain = [p for entry in entries if not isinstance(entry, dict) for p in _tensors_here(entry)]
    if plain or not groups:
        groups.append({"params": plain})
    if not any(group["params"] for group in groups):
        groups[0]["params"] = [torch.nn.Parameter(torch.empty(0))]
    return make(groups, **options)


def _tensors_here(params: Any) -> Iterable[Tensor]:
    """Yield this rank's tensors of modules, leaf tensors, parameters, or iterables of them."""
    if isinstance(params, Tensor):
        yield params
    elif isinstance(params, ManagedModule):
        yield from params.parameters()
    elif isinstance(params, ManagedTensor):
        if params.is_here:
            yield params.tensor
    elif isinstance(params, Iterable) and not isinstance(params, str | dict):
        for parameter in params:
            yield from _tensors_here(parameter)
    else:
        raise _unknown(params)


def _unknown(params: object) -> PlacementError:
    return PlacementError(
        "an optimizer takes managed modules, managed tensors, parameters, or dicts with such "
        f"'params', not {params!r}"
    )
