"""The stages of this rank: how each is called, and what all ranks agree on about them.

What every rank must know of the others' stages (which inputs they name, how far a skip goes) is
exchanged once, when the pipeline is made, and the signature of a stage's forward decides how it is
called. A tuple goes in as positional arguments where the forward takes so many, a dict by name
where it names every key; else either goes in as one argument. A keyword input goes to the stages
that name it. A *skip* is a member of a dict that goes to the later stages that name it; those
between pass it on without seeing it.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast
from zlib import crc32

import torch
from torch import nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tensor_meta import Members, Message, pack_message, unpack_message
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.agreement import Settings, agree_on_settings
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.resolve import CostsOrder, Order, resolve_schedule
from torchdistpackage.tools.undisturbed import in_eval, keep_random_states

Stage = Callable[..., object]
Stages = Stage | Sequence[Stage] | Mapping[int, Stage]
_WRAPPED = ("module", "_orig_mod", "fn")
"""Attributes in which wrappers that take anything keep what they call."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of a forward. positional: names in order; any_*: takes `*args`, `**kwargs`.

    required: names without a default, in order.
    """

    positional: tuple[str, ...]
    named: frozenset[str]
    any_positional: bool
    any_named: bool
    required: tuple[str, ...] = ()

    @classmethod
    def of(cls, stage: Stage) -> "Signature":
        """The signature of `stage`, or of what it wraps if it takes anything.

        Some builtins have none; they are called with what comes.
        """
        called = stage.forward if isinstance(stage, nn.Module) else stage
        try:
            found = list(inspect.signature(called).parameters.values())
        except (TypeError, ValueError):
            return cls((), frozenset(), any_positional=True, any_named=False)
        kinds = {p.kind for p in found}
        anything = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        if kinds == anything:
            inside = (getattr(stage, name, None) for name in _WRAPPED)
            inner = next((x for x in inside if callable(x)), None)
            if inner is not None:
                return cls.of(inner)
        return cls(
            tuple(p.name for p in found if p.kind in _POSITIONAL),
            frozenset(p.name for p in found if p.kind in _NAMED),
            inspect.Parameter.VAR_POSITIONAL in kinds,
            inspect.Parameter.VAR_KEYWORD in kinds,
            tuple(p.name for p in found if p.default is p.empty and p.kind not in anything),
        )

    def takes(self, name: str) -> bool:
        return self.any_named or name in self.named

    def takes_positional(self, number: int, given: Mapping[str, object]) -> bool:
        """Whether so many fit in addition to what is given by name."""
        free = sum(name not in given for name in self.positional)
        return self.any_positional or number <= free

    def misfit(self, number: int, given: Collection[str] = ()) -> str:
        """The mistake in a call of `number` arguments and these by name; or ""."""
        if number > len(self.positional) and not self.any_positional:
            names = f" ({', '.join(self.positional)})" if self.positional else ""
            return f"takes {len(self.positional)} positional arguments{names}, not {number}"
        filled = self.positional[:number]
        if twice := [name for name in filled if name in given and name in self.named]:
            return f"is given {', '.join(twice)} by position and by name"
        missing = [name for name in self.required if name not in filled and name not in given]
        return f"needs {', '.join(missing)}" if missing else ""


class StageAdapter:
    """One stage, ready to be called for a microbatch.

    skips: all names that are skips. onward: those that a later stage names.
    """

    def __init__(self, stage: Stage, signature: Signature, skips: Sequence[str], onward: set[str]):
        self._stage, self._signature = stage, signature
        self._skips, self._forwarded = frozenset(skips), onward

    def first(self, args: tuple[object, ...], inputs: Mapping[str, object]) -> object:
        """Call of the first stage, with the step's own arguments."""
        return self._stage(*args, **inputs)

    def later(self, received: Message, inputs: Mapping[str, object]) -> object:
        """Call of a stage that received a message."""
        takes = self._signature
        if isinstance(received, dict):
            if takes.any_named or takes.named.issuperset(received):
                return self._stage(**received, **inputs)
        elif isinstance(received, tuple | list) and takes.takes_positional(len(received), inputs):
            return self._stage(*received, **inputs)
        return self._stage(received, **inputs)

    def unpack(self, received: Message) -> tuple[Message, Members, Members]:
        """(message, skips that this stage takes, skips that go on)."""
        assert isinstance(received, dict)
        message, skips = unpack_message(received)
        if isinstance(message, dict) and len(message) == 1:
            (message,) = message.values()
        mine = {name: x for name, x in skips.items() if name in self._signature.named}
        return message, mine, {name: x for name, x in skips.items() if name in self._forwarded}

    def pack(self, output: Message, skips: Members) -> Message:
        """`output` with the skips that pass this stage or begin here."""
        if isinstance(output, dict):
            skips = skips | {name: x for name, x in output.items() if name in self._forwarded}
            output = {name: x for name, x in output.items() if name not in self._skips}
        return pack_message(output, skips)


class OwnedStages:
    """The stages of this rank, by number. signatures: of all stages, also those on other ranks."""

    def __init__(
        self,
        modules: dict[int, Stage],
        calls: dict[int, StageAdapter],
        signatures: dict[int, Signature],
        skips: tuple[str, ...],
        device: torch.device,
    ):
        self.modules, self.calls, self.signatures = modules, calls, signatures
        self.skips, self.device, self.num_stages = skips, device, len(signatures)
        self.has_first, self.has_last = 0 in modules, self.num_stages - 1 in modules
        self.last_names_targets = "targets" in signatures[self.num_stages - 1].named

    def is_taken(self, name: str) -> bool:
        """Whether some stage, here or elsewhere, has a parameter `name`."""
        return any(signature.takes(name) for signature in self.signatures.values())

    def names(self) -> list[str]:
        return sorted({name for s in self.signatures.values() for name in s.named})

    def parameters(self) -> dict[int, list[nn.Parameter]]:
        """The parameters that require a gradient now, by stage."""
        return {
            stage: [p for p in module.parameters() if p.requires_grad]
            for stage, module in self.modules.items()
            if isinstance(module, nn.Module)
        }

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, modules are in `eval()`; after it modes and random states are as before."""
        modules = [m for m in self.modules.values() if isinstance(m, nn.Module)]
        with keep_random_states(self.device), in_eval(*modules):
            yield


def agree_on_stages(
    group: Group,
    stages: Stages,
    order: tuple[Order, int | None, int | None, CostsOrder | None],
    lists: Mapping[str, Sequence[str]],
    alike: Settings,
    device: torch.device | str | None,
    loss: object,
) -> tuple[Schedule, OwnedStages]:
    """The schedule, and the stages of this rank, where they fit on all ranks.

    order: schedule, microbatches, chunks, costs of `resolve_schedule`. lists: of names, `skips`
    among them. alike: what else must be the same on all ranks. loss: None or a function. Raises
    ScheduleError: on every rank: they do not fit on some rank, or ranks differ.
    """
    schedule, text, modules, problem, skips = None, "none", {}, "", ()
    wanted, num_microbatches, chunks, costs = order
    try:
        schedule = resolve_schedule(wanted, group.size(), num_microbatches, chunks, costs)
        text = (
            f"{schedule.name} of {schedule.num_stages} stages and {schedule.num_microbatches} "
            f"microbatches ({crc32(str(schedule).encode()):08x})"
        )
        modules = _numbered(stages, schedule, group.rank())
        names = {what: listed(what, given) for what, given in lists.items()}
        skips = names["skips"]
        if loss is not None and not callable(loss):
            raise ScheduleError(f"loss is {loss!r}; give a function of output and targets, or None")
    except ScheduleError as error:
        problem = str(error)
    agree_on_settings(group, (("schedule", text), ("skips", skips), *alike), problem)
    assert schedule is not None
    mine = {stage: Signature.of(module) for stage, module in modules.items()}
    signatures: dict[int, Signature] = {}
    for theirs in primitives.gather_objects(mine, on_cpu(group)):
        signatures |= cast(dict[int, Signature], theirs)
    until: dict[str, int] = {}
    for stage, signature in sorted(signatures.items()):
        until |= {name: stage for name in skips if stage and name in signature.named}
    if lost := [name for name in skips if name not in until]:
        raise ScheduleError(
            f"no stage after the first has a parameter {', '.join(lost)}, named as a skip; a "
            f"stage takes a skip as a parameter of its forward of that name"
        )
    onward = {stage: {name for name in skips if until[name] > stage} for stage in modules}
    calls = {
        stage: StageAdapter(module, signatures[stage], skips, onward[stage])
        for stage, module in modules.items()
    }
    if device is None:  # without parameters or buffers, where messages of the group are
        here = (m for m in modules.values() if isinstance(m, nn.Module))
        tensors = (x for m in here for x in (*m.parameters(), *m.buffers()))
        device = next((x.device for x in tensors), None) or primitives.device_of(group)
    return schedule, OwnedStages(modules, calls, signatures, tuple(skips), torch.device(device))


def listed(what: str, names: Sequence[str]) -> tuple[str, ...]:
    """`names` as a tuple; raises ScheduleError for one str, whose letters would be the names, and
    for what holds none."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ScheduleError(f"{what} is {names!r}; give a list of names: [{str(names)!r}]")
    return tuple(names)


def _numbered(stages: Stages, schedule: Schedule, index: int) -> dict[int, Stage]:
    """My stages by number; raises ScheduleError where the schedule places others on this rank."""
    mine = schedule.stages_of(index)
    if isinstance(stages, Mapping):
        if set(stages) != set(mine):
            raise ScheduleError(
                f"was given stages {sorted(stages)}, but {schedule.name} places {list(mine)} of "
                f"{schedule.num_stages} stages on it"
            )
        given = [stages[stage] for stage in mine]
    else:
        # a Sequential can be called and iterated; it is one stage
        listed = isinstance(stages, list | tuple | nn.ModuleList)
        given = list(cast(Sequence[Stage], stages)) if listed else [cast(Stage, stages)]
    if len(given) != len(mine):
        raise ScheduleError(
            f"was given {len(given)} stages, but {schedule.name} places {len(mine)} of "
            f"{schedule.num_stages} on it: {list(mine)}; give a list of these"
        )
    wrong = [type(stage).__name__ for stage in given if not callable(stage)]
    if wrong:
        raise ScheduleError(f"a stage is a module or a function, not a {wrong[0]}")
    return dict(zip(mine, given, strict=True))
