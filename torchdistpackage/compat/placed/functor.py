"""`DeviceFunctor`: makes tensors, modules and functions belong to a place.

    F = DeviceFunctor(devices)
    first, second = F.allocate_device(), F.allocate_device()
    with F.under(first):
        x, encoder = F(x), F(encoder)
    with F.under(second):
        head, loss = F(head), F(lambda y, t: (y - t).square().mean())
    loss(head(encoder(x)), x).backward()

Every rank runs all of this. What runs on `first` runs on its rank alone, while the others go on to
what is theirs.
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

    devices: one for each rank, a list of devices for each, or k for each rank in one list.
    group: its ranks; default the world, or this process alone where there is none.

    Raises:
        PlacementError: on all ranks: the devices do not go round, or one is not there.
    """

    tensor_class: type[ManagedTensor] = ManagedTensor
    module_class: type[ManagedModule] = ManagedModule
    operation_class: type[ManagedOperation] = ManagedOperation

    def __init__(self, devices: Devices, group: Group | None = None):
        self.program: Program = program_of(group)
        self._devices = devices_by_rank(devices, len(self.program.ranks))
        mine = self._devices[self.program.ranks.index(self.program.rank)]
        problem = "; ".join(filter(None, map(problem_of, mine)))
        self._agree(problem, group)
        self._places = [
            self.make_place((device,), (rank,))
            for rank, one in zip(self.program.ranks, self._devices, strict=True)
            for device in one
        ]
        self._next = 0
        self._under: list[Place] = []
        self._groups: Groups | None = None

    def allocate_device(self, num_ranks: int = 1) -> Place:
        """The next place, round and round. num_ranks: of that many ranks, from the next one on.

        Raises:
            PlacementError: there are not so many ranks.
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
                f"{len(ranks)} ranks of the program"
            )
        chosen = ranks[begin : begin + num_ranks]
        of_last = [i for i, one in enumerate(self._places) if one.rank == chosen[-1]]
        self._next = of_last[-1] + 1
        return self.place(chosen)

    def place(self, ranks: int | Sequence[int], device: str | torch.device | None = None) -> Place:
        """The place of one rank, or of several that compute the same.

        device: default the first of each of these ranks.

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
                f"no place on ranks {list(chosen)}: name different ones of "
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
        """The value that stands for a place, a device a rank; subclasses have their own."""
        here = ranks.index(self.program.rank) if self.program.rank in ranks else 0
        return Place(devices[here], tuple(ranks), tuple(devices))

    def group_of(self, place: Place) -> Group | None:
        """The process group of the ranks of a place, made by them; None on other ranks."""
        if not self.program.is_on(place):
            return None
        if self._groups is None:
            self._groups = Groups(self.program.rank)
        return self._groups.of(place.ranks)

    @contextmanager
    def under(self, place: Place) -> Iterator[DeviceFunctor]:
        """Inside, what the functor is applied to goes to `place`; afterwards to where it did."""
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
        """Inside, operations run when a value is asked for, or at the end, in their order; what
        other ranks wait for is sent first. Without it `f(x)` here keeps a later `g(x)` on another
        rank waiting for x.

        What operations read must not be changed inside, nor modes of modules.
        """
        with self.program.ahead():
            yield

    def __call__(self, obj: Any, *, dynamic: bool = False) -> Any:
        """The tensor, module or function on the place that this is under.

        A tensor is a leaf: it has no graph behind it, and its gradient comes to the user's tensor.
        A module on the meta device gets its memory here, on ranks of the place alone, and its
        values by its own `reset_parameters`. dynamic: the number of outputs changes from call to
        call.

        Raises:
            PlacementError: under no place, or the tensor has a graph behind it, or it is none of
                these.
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
            made = self.operation_class(obj, place, self.program)
            made.set_dynamic(dynamic)
            return made
        raise PlacementError(
            f"Object must be a tensor, a module or a function, not a {type(obj).__name__}"
        )

    def build(self, make: Callable[..., Module], *args: Any, **kwargs: Any) -> Any:
        """`make(*args, **kwargs)` on the ranks of the place; on others nothing is made.

        The numbers it draws are the same wherever it is made.

        Raises:
            PlacementError: under no place; on ranks of the place: it makes no module.
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
        """An optimizer of what this rank holds; ranks that hold nothing may step it too.

        modules: managed modules and tensors, or groups of options with such `params`.
        """
        return make_optimizer(make, modules, **options)

    def finish(self) -> None:
        """Wait until all that this rank sent has left; `launch` calls it at the end."""
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
        made = self.module_class(module, place, self.program)
        made.set_dynamic(dynamic)
        return made

    def _agree(self, problem: str, group: Group | None) -> None:
        said = [problem] if self.program.mail is None else gather_objects(problem, group)
        problems = [
            f"rank {rank}: {text}"
            for rank, text in zip(self.program.ranks, said, strict=True)
            if text
        ]
        if problems:
            raise PlacementError("; ".join(problems))


def materialize(module: Module, device: torch.device) -> None:
    """Give a module of the meta device memory, and values by `reset_parameters` of each part.

    Raises:
        PlacementError: a part with tensors of its own has no `reset_parameters`.
    """
    owners = [
        (name, one)
        for name, one in module.named_modules()
        if any(x.is_meta for x in (*one.parameters(recurse=False), *one.buffers(recurse=False)))
    ]
    if unknown := [
        name or "(root)" for name, one in owners if not hasattr(one, "reset_parameters")
    ]:
        raise PlacementError(
            f"modules {unknown} are on the meta device and have no reset_parameters(), so their "
            f"initial values are not known; give them one, or make the module with F.build(...)"
        )
    module.to_empty(device=device)
    for _, one in owners:
        one.reset_parameters()  # type: ignore[operator]


def make_optimizer(
    make: Callable[..., torch.optim.Optimizer], params: Any, **options: Any
) -> torch.optim.Optimizer:
    """`make(...)` over what this rank holds of `params`; the groups are the same on all ranks.

    A rank that holds nothing gets one of an empty tensor, without a gradient, so that it steps and
    schedules as the others do.

    params: managed modules, managed leaf tensors, parameters, or groups of options, each a dict
    with such `params`.

    Raises:
        PlacementError: something else is among them, or a group has no `params`.
    """
    single = isinstance(params, ManagedModule | ManagedTensor | Tensor)
    if not single and not isinstance(params, Iterable):
        raise _unknown(params)
    given = [params] if single else list(params)
    groups = [
        {**one, "params": list(_tensors_here(one.get("params")))}
        for one in given
        if isinstance(one, dict)
    ]
    plain = [p for one in given if not isinstance(one, dict) for p in _tensors_here(one)]
    if plain or not groups:
        groups.append({"params": plain})
    if not any(group["params"] for group in groups):
        groups[0]["params"] = [torch.nn.Parameter(torch.empty(0))]
    return make(groups, **options)


def _tensors_here(params: Any) -> Iterable[Tensor]:
    """The tensors that this rank has of modules, leaf tensors, parameters, or iterables of them."""
    if isinstance(params, Tensor):
        yield params
    elif isinstance(params, ManagedModule):
        yield from params.parameters()
    elif isinstance(params, ManagedTensor):
        if params.is_here:
            yield params.tensor
    elif isinstance(params, Iterable) and not isinstance(params, str | dict):
        for one in params:
            yield from _tensors_here(one)
    else:
        raise _unknown(params)


def _unknown(params: object) -> PlacementError:
    return PlacementError(
        f"an optimizer is of managed modules, managed tensors, parameters, or dicts with such "
        f"'params', not of {params!r}"
    )
