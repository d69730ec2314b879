"""The stages of this rank: how each is called, and the agreement of all ranks about them.

When a pipeline is created, ranks exchange once what each must know of the others' stages: which
inputs they name, and how far a skip goes. The signature of a stage's forward decides how it is
called. A tuple is passed as positional arguments if the forward takes so many, and a dict by name
if it names every key; otherwise either is passed as one argument. A keyword input goes to the
stages that name it. A *skip* is a member of a dict that goes to later stages that name it; stages
between pass it on unseen.
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
"""Attributes in which wrappers with `*args, **kwargs` keep the wrapped function."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a forward.

    positional: names in order. any_positional, any_named: it has `*args`, `**kwargs`.
    required: names without a default, in order.
    """

    positional: tuple[str, ...]
    named: frozenset[str]
    any_positional: bool
    any_named: bool
    required: tuple[str, ...] = ()

    @classmethod
    def of(cls, stage: Stage) -> "Signature":
        """Return the signature of `stage`, or of the function that it wraps if it takes anything.

        Some builtins have no signature; they accept any positional arguments here.
        """
        called = stage.forward if isinstance(stage, nn.Module) else stage
        try:
            parameters = list(inspect.signature(called).parameters.values())
        except (TypeError, ValueError):
            return cls((), frozenset(), any_positional=True, any_named=False)
        kinds = {p.kind for p in parameters}
        anything = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        if kinds == anything:
            inside = (getattr(stage, name, None) for name in _WRAPPED)
            inner = next((x for x in inside if callable(x)), None)
            if inner is not None:
                return cls.of(inner)
        return cls(
            tuple(p.name for p in parameters if p.kind in _POSITIONAL),
            frozenset(p.name for p in parameters if p.kind in _NAMED),
            inspect.Parameter.VAR_POSITIONAL in kinds,
            inspect.Parameter.VAR_KEYWORD in kinds,
            tuple(p.name for p in parameters if p.default is p.empty and p.kind not in anything),
        )

    def takes(self, name: str) -> bool:
        return self.any_named or name in self.named

    def takes_positional(self, number: int, by_name: Mapping[str, object]) -> bool:
        """Return whether `number` positional arguments fit beside those given by name."""
        free = sum(name not in by_name for name in self.positional)
        return self.any_positional or number <= free

    def misfit(self, number: int, by_name: Collection[str] = ()) -> str:
        """Return the mistake in a call with `number` arguments and these by name; or ""."""
        if number > len(self.positional) and not self.any_positional:
            names = f" ({', '.join(self.positional)})" if self.positional else ""
            return f"takes {len(self.positional)} positional arguments{names}, not {number}"
        filled = self.positional[:number]
        if twice := [name for name in filled if name in by_name and name in self.named]:
            return f"is given {', '.join(twice)} by position and by name"
        missing = [name for name in self.required if name not in filled and name not in by_name]
        return f"needs {', '.join(missing)}" if missing else ""


class StageAdapter:
    """One stage, ready to be called for a micro-batch.

    skips: names of all skips. onward: those that a later stage names.
    """

    def __init__(self, stage: Stage, signature: Signature, skips: Sequence[str], onward: set[str]):
        self._stage, self._signature = stage, signature
        self._skips, self._forwarded = frozenset(skips), onward

    def first(self, args: tuple[object, ...], inputs: Mapping[str, object]) -> object:
        """Call the first stage, with the step's own arguments."""
        return self._stage(*args, **inputs)

    def later(self, received: Message, inputs: Mapping[str, object]) -> object:
        """Call a stage that received a message."""
        takes = self._signature
        if isinstance(received, dict):
            if takes.any_named or takes.named.issuperset(received):
                return self._stage(**received, **inputs)
        elif isinstance(received, tuple | list) and takes.takes_positional(len(received), inputs):
            return self._stage(*received, **inputs)
        return self._stage(received, **inputs)

    def unpack(self, received: Message) -> tuple[Message, Members, Members]:
        """Return (message, skips that this stage takes, skips that are passed on)."""
        assert isinstance(received, dict)
        message, skips = unpack_message(received)
        if isinstance(message, dict) and len(message) == 1:
            (message,) = message.values()
        taken_skips = {name: x for name, x in skips.items() if name in self._signature.named}
        return (
            message,
            taken_skips,
            {name: x for name, x in skips.items() if name in self._forwarded},
        )

    def pack(self, output: Message, skips: Members) -> Message:
        """Return `output` packed with the skips that pass this stage or start here."""
        if isinstance(output, dict):
            skips = skips | {name: x for name, x in output.items() if name in self._forwarded}
            output = {name: x for name, x in output.items() if name not in self._skips}
        return pack_message(output, skips)


class OwnedStages:
    """The stages of this rank, by number.

    signatures: those of all stages, also on other ranks.
    """

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
        """Return whether some stage, on any rank, has a parameter `name`."""
        return any(signature.takes(name) for signature in self.signatures.values())

    def names(self) -> list[str]:
        return sorted({name for s in self.signatures.values() for name in s.named})

    def parameters(self) -> dict[int, list[nn.Parameter]]:
        """Return the parameters that require a gradient now, by stage."""
        return {
            stage: [p for p in module.parameters() if p.requires_grad]
            for stage, module in self.modules.items()
            if isinstance(module, nn.Module)
        }

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put modules in `eval()` in the block; restore modes and random states after it."""
        modules = [m for m in self.modules.values() if isinstance(m, nn.Module)]
        with keep_random_states(self.device), in_eval(*modules):
            yield


def agree_on_stages(
    group: Group,
    stages: Stages,
    order: tuple[Order, int | None, int | None, CostsOrder | None],
    lists: Mapping[str, Sequence[str]],
    equal_settings: Settings,
    device: torch.device | str | None,
    loss: object,
) -> tuple[Schedule, OwnedStages]:
    """Return the schedule and this rank's stages, once all ranks agree that they fit.

    order: schedule, micro-batches, chunks and costs, as in `resolve_schedule`.
    lists: lists of names, `skips` among them.
    equal_settings: other settings that must be equal on all ranks.
    loss: None or a function.

    Raises:
        ScheduleError: on every rank: stages do not fit on some rank, or ranks differ.
    """
    schedule, text, modules, problem, skips = None, "none", {}, "", ()
    schedule_order, num_microbatches, chunks, costs = order
    try:
        schedule = resolve_schedule(schedule_order, group.size(), num_microbatches, chunks, costs)
        text = (
            f"{schedule.name} of {schedule.num_stages} stages and {schedule.num_microbatches} "
            f"microbatches ({crc32(str(schedule).encode()):08x})"
        )
        modules = _numbered(stages, schedule, group.rank())
        names = {option: listed(option, names_given) for option, names_given in lists.items()}
        skips = names["skips"]
        if loss is not None and not callable(loss):
            raise ScheduleError(f"loss is {loss!r}; give a function of output and targets, or None")
    except ScheduleError as error:
        problem = str(error)
    agree_on_settings(group, (("schedule", text), ("skips", skips), *equal_settings), problem)
    assert schedule is not None
    own_signatures = {stage: Signature.of(module) for stage, module in modules.items()}
    signatures: dict[int, Signature] = {}
    for theirs in primitives.gather_objects(own_signatures, on_cpu(group)):
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
    if device is None:  # that of the parameters, or else that of the group's messages
        own_modules = (m for m in modules.values() if isinstance(m, nn.Module))
        tensors = (x for m in own_modules for x in (*m.parameters(), *m.buffers()))
        device = next((x.device for x in tensors), None) or primitives.device_of(group)
    return schedule, OwnedStages(modules, calls, signatures, tuple(skips), torch.device(device))


def listed(option: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return `names` as a tuple; refuse a str, whose letters would count as names.

    Raises:
        ScheduleError: `names` is a str or not iterable.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ScheduleError(f"{option} is {names!r}; give a list of names: [{str(names)!r}]")
    return tuple(names)


def _numbered(stages: Stages, schedule: Schedule, index: int) -> dict[int, Stage]:
    """Return this rank's stages by number; raise ScheduleError if the schedule has others here."""
    own_numbers = schedule.stages_of(index)
    if isinstance(stages, Mapping):
        if set(stages) != set(own_numbers):
            raise ScheduleError(
                f"was given stages {sorted(stages)}, but {schedule.name} places "
                f"{list(own_numbers)} of "
                f"{schedule.num_stages} stages on it"
            )
        stage_list = [stages[stage] for stage in own_numbers]
    else:
        # a Sequential can be called and iterated; it is one stage
        listed = isinstance(stages, list | tuple | nn.ModuleList)
        stage_list = list(cast(Sequence[Stage], stages)) if listed else [cast(Stage, stages)]
    if len(stage_list) != len(own_numbers):
        raise ScheduleError(
            f"was given {len(stage_list)} stages, but {schedule.name} places {len(own_numbers)} of "
            f"{schedule.num_stages} on it: {list(own_numbers)}; give a list of these"
        )
    wrong = [type(stage).__name__ for stage in stage_list if not callable(stage)]
    if wrong:
        raise ScheduleError(f"a stage is a {wrong[0]}; give a module or a function")
    return dict(zip(own_numbers, stage_list, strict=True))
