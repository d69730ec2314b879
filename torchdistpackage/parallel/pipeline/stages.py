"""The stages of this rank and how they are called, agreed on with the other ranks.

One rule: what every rank must know of the others' stages (which inputs they name, how far a skip
goes) is exchanged once, when the pipeline is made.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast
from zlib import crc32

import torch
from torch import nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.companions import on_cpu
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.agreement import Settings, agree_on_settings
from torchdistpackage.parallel.pipeline.resolve_schedule import CostsOrder, Order, resolve_schedule
from torchdistpackage.parallel.pipeline.stage_call import (
    Signature,
    Stage,
    StageAdapter,
    last_takers,
)
from torchdistpackage.schedule.actions import Schedule

Stages = Stage | Sequence[Stage] | Mapping[int, Stage]


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
    must
        be the same on all ranks.

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
