"""The stages of this rank: how each is called, and what all ranks agree on about them.

One rule: what every rank must know of the others' stages (which inputs they name, how far a skip
goes) is exchanged once, when the pipeline is made, and the signature of a stage's forward decides
once how it is called. A tuple goes in as positional arguments where the forward takes so many, a
dict by name where it names every key; else either goes in whole. A keyword input goes to the stages
that name it. A *skip* is a member of a dict that goes to the stages that name it, however far
ahead: those between hand it on without seeing it.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast
from zlib import crc32

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.companions import on_cpu
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tensor_meta import Message
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.agreement import Settings, agree_on_settings
from torchdistpackage.parallel.pipeline.resolve_schedule import CostsOrder, Order, resolve_schedule
from torchdistpackage.schedule.actions import Schedule

Stage = Callable[..., object]
Stages = Stage | Sequence[Stage] | Mapping[int, Stage]
Members = dict[str, Tensor | None]
_WRAPPED = ("module", "_orig_mod", "fn")
"""Where wrappers that take anything keep what they call."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Signature:
    """What a forward takes. positional: names in order; any_*: takes `*args`, `**kwargs`.

    required: names without a default, in order.
    """

    positional: tuple[str, ...]
    named: frozenset[str]
    any_positional: bool
    any_named: bool
    required: tuple[str, ...] = ()

    @classmethod
    def of(cls, stage: Stage) -> "Signature":
        """Of what `stage` wraps, if it takes anything itself; some builtins do not tell theirs."""
        called = stage.forward if isinstance(stage, nn.Module) else stage
        try:
            found = list(inspect.signature(called).parameters.values())
        except (TypeError, ValueError):
            return cls((), frozenset(), any_positional=True, any_named=False)
        kinds = {p.kind for p in found}
        if kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            inside = [getattr(stage, name, None) for name in _WRAPPED]
            inner = next((x for x in inside if callable(x)), None)
            if inner is not None:
                return cls.of(inner)
        return cls(
            tuple(p.name for p in found if p.kind in _POSITIONAL),
            frozenset(p.name for p in found if p.kind in _NAMED),
            inspect.Parameter.VAR_POSITIONAL in kinds,
            inspect.Parameter.VAR_KEYWORD in kinds,
            tuple(
                p.name
                for p in found
                if p.default is p.empty and p.kind in (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
            ),
        )

    def takes(self, name: str) -> bool:
        return self.any_named or name in self.named

    def takes_positional(self, number: int, given: Mapping[str, object]) -> bool:
        """Whether so many fit beside what is given by name."""
        free = sum(name not in given for name in self.positional)
        return self.any_positional or number <= free

    def misfit(self, number: int, given: Collection[str] = ()) -> str:
        """What is wrong with a call of `number` arguments and these by name; or nothing."""
        if number > len(self.positional) and not self.any_positional:
            told = f" ({', '.join(self.positional)})" if self.positional else ""
            return f"takes {len(self.positional)} positional arguments{told}, not {number}"
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
        """Of the first stage, with a microbatch of the step's own arguments."""
        return self._stage(*args, **inputs)

    def later(self, received: Message, inputs: Mapping[str, object]) -> object:
        """Of a stage that got `received`."""
        takes = self._signature
        if isinstance(received, dict):
            if takes.any_named or takes.named.issuperset(received):
                return self._stage(**received, **inputs)
        elif isinstance(received, tuple | list) and takes.takes_positional(len(received), inputs):
            return self._stage(*received, **inputs)
        return self._stage(received, **inputs)

    def unpack(self, received: Message) -> tuple[Message, Members, Members]:
        """(message, skips that this stage takes, skips that go on) of what came with skips."""
        assert isinstance(received, dict)
        message, skips = unpack_with_skips(received)
        if isinstance(message, dict) and len(message) == 1:
            (message,) = message.values()
        mine = {name: x for name, x in skips.items() if name in self._signature.named}
        return message, mine, {name: x for name, x in skips.items() if name in self._forwarded}

    def pack(self, output: Message, skips: Members) -> Message:
        """`output` with the skips that pass this stage or begin in it."""
        if isinstance(output, dict):
            skips = skips | {name: x for name, x in output.items() if name in self._forwarded}
            output = {name: x for name, x in output.items() if name not in self._skips}
        return pack_with_skips(output, skips)


def pack_with_skips(message: Message, more: Members) -> Members:
    """`message` and `more` as one flat dict, whose keys say what the message was.

    `=` a tensor, `(0`, `(1`, ... a tuple, `.name` a dict; `+name` a member of `more`. So the
    receiver needs no other description.
    """
    if isinstance(message, dict):
        sealed = {f".{key}": x for key, x in message.items()}
    elif isinstance(message, tuple | list):
        sealed = {f"({i}": x for i, x in enumerate(message)}
    else:
        sealed = {"=": message}
    for key, x in more.items():
        sealed[f"+{key}"] = x
    return sealed


def unpack_with_skips(sealed: Members) -> tuple[Message, Members]:
    """What `pack_with_skips` was given; a list comes back as a tuple."""
    more = {key[1:]: x for key, x in sealed.items() if key[0] == "+"}
    kept = [(key, x) for key, x in sealed.items() if key[0] != "+"]
    if not kept or kept[0][0][0] == "(":
        return tuple(x for _, x in kept), more
    if kept[0][0] == "=":
        return kept[0][1], more
    return {key[1:]: x for key, x in kept}, more


@dataclass(frozen=True)
class OwnedStages:
    """By number of the stage. signatures: of all stages of the pipeline, of the others too."""

    modules: dict[int, Stage]
    calls: dict[int, StageAdapter]
    signatures: dict[int, Signature]
    skips: tuple[str, ...]
    device: torch.device

    @property
    def has_first(self) -> bool:
        return 0 in self.modules

    @property
    def has_last(self) -> bool:
        return self.num_stages - 1 in self.modules

    @property
    def num_stages(self) -> int:
        return len(self.signatures)

    @property
    def last_names_targets(self) -> bool:
        return "targets" in self.signatures[self.num_stages - 1].named

    def is_taken(self, name: str) -> bool:
        """Whether some stage, here or elsewhere, has a parameter `name`."""
        return any(signature.takes(name) for signature in self.signatures.values())

    def names(self) -> list[str]:
        return sorted({name for s in self.signatures.values() for name in s.named})

    def parameters(self) -> dict[int, list[nn.Parameter]]:
        """Those that are trained now."""
        return {
            stage: [p for p in module.parameters() if p.requires_grad]
            for stage, module in self.modules.items()
            if isinstance(module, nn.Module)
        }

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, modules are in `eval()`; after it modes and random states are as before."""
        held = [m for m in self.modules.values() if isinstance(m, nn.Module)]
        index = self.device.index
        with torch.random.fork_rng(devices=[] if index is None else [index]), in_eval(*held):
            yield


@contextmanager
def in_eval(*modules: nn.Module) -> Iterator[None]:
    """Inside, these are in `eval()`; after it all of their parts are in the modes of before."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def agree_on_stages(
    group: Group,
    stages: Stages,
    order: tuple[Order, int | None, int | None, CostsOrder | None],
    skips: Sequence[str],
    alike: Settings,
    device: torch.device | str | None,
) -> tuple[Schedule, OwnedStages]:
    """The schedule, and the stages of this rank, where they fit on all ranks.

    order: as `resolve_schedule` takes it: schedule, microbatches, chunks, costs. alike: what else
    must be the same on all ranks.

    Raises:
        ScheduleError: on every rank: they do not fit on some rank, or ranks differ.
    """
    schedule, modules, problem = None, {}, ""
    wanted, num_microbatches, chunks, costs = order
    try:
        schedule = resolve_schedule(wanted, group.size(), num_microbatches, chunks, costs)
        modules = _numbered(stages, schedule, group.rank())
        skips = listed("skips", skips)
    except ScheduleError as error:
        problem = str(error)
    settings = (("schedule", _schedule_text(schedule)), ("skips", skips), *alike)
    agree_on_settings(group, settings, problem)
    assert schedule is not None
    mine = {stage: Signature.of(module) for stage, module in modules.items()}
    signatures: dict[int, Signature] = {}
    for theirs in primitives.gather_objects(mine, on_cpu(group)):
        signatures |= cast(dict[int, Signature], theirs)
    until = last_takers(skips, signatures)
    if lost := [name for name in skips if name not in until]:
        raise ScheduleError(
            f"no stage after the first has a parameter {', '.join(lost)}, named as a skip; a "
            f"stage takes a skip as a parameter of its forward of that name"
        )
    calls = {
        stage: StageAdapter(
            module, signatures[stage], skips, {name for name in skips if until[name] > stage}
        )
        for stage, module in modules.items()
    }
    place = _device(modules, group) if device is None else torch.device(device)
    return schedule, OwnedStages(modules, calls, signatures, tuple(skips), place)


def last_takers(skips: Sequence[str], signatures: Mapping[int, Signature]) -> dict[str, int]:
    """Of each skip the last stage that names it; without one it is not listed."""
    found: dict[str, int] = {}
    for stage, signature in sorted(signatures.items()):
        found |= {name: stage for name in skips if stage and name in signature.named}
    return found


def listed(what: str, names: Sequence[str]) -> tuple[str, ...]:
    """Raises ScheduleError where one text was given, whose letters would be the names."""
    if isinstance(names, str):
        raise ScheduleError(f"{what} is {names!r}; give a list of names: [{names!r}]")
    return tuple(names)


def _numbered(stages: Stages, schedule: Schedule, index: int) -> dict[int, Stage]:
    """My stages by their numbers.

    Raises:
        ScheduleError: others, or more or fewer, than the schedule places on this rank.
    """
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


def _schedule_text(schedule: Schedule | None) -> str:
    if schedule is None:
        return "none"
    stages, number = schedule.num_stages, schedule.num_microbatches
    digest = crc32(str(schedule).encode())
    return f"{schedule.name} of {stages} stages and {number} microbatches ({digest:08x})"


def _device(modules: Mapping[int, Stage], group: Group) -> torch.device:
    """Where the stages live; without parameters or buffers, where messages of the group do."""
    for module in modules.values():
        if isinstance(module, nn.Module):
            for x in (*module.parameters(), *module.buffers()):
                return x.device
    return primitives.device_of(group)
