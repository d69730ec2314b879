"""Costs of a schedule's actions, stage by stage, as a value and as a file.

The file is YAML (or JSON) with one number a stage in each row. Any unit will do, because only
ratios change an order; a run writes seconds:

    forward: [0.8, 1.0]
    backward: [1.7, 2.0]      # default: input + weight
    input: [0.9, 1.0]         # the halves of a split backward; default: half of it each
    weight: [0.8, 1.0]
    message: [0.1, 0.1]       # default: 0
    pieces:                   # optional: forward and backward of each piece, for any cut
      embed: [0.0, 0.1]

A single number instead of a row applies to every stage. YAML aliases are refused. Costs by piece
can time any cut of the model; costs by stage only the cut that was measured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import add, sub
from pathlib import Path
from typing import Any, Self, cast

import yaml

from torchdistpackage.bounded import read_regular
from torchdistpackage.bounded_yaml import BoundedLoader, BoundError
from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import ActionKind

ROWS = ("forward", "backward", "input", "weight", "message")


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs of the actions, one number a stage in each tuple.

    forward: an F. backward: a B.
    input, weight: an I and a W, which together may cost more than the B that they replace.
    message: sending the stage's output to the next stage, or a gradient back, if the two are on
        different ranks.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    message: tuple[float, ...]

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ROWS}
        if len(set(lengths.values())) != 1 or not self.forward:
            raise ScheduleError(
                f"rows of costs have {lengths} numbers; give each row one number for each stage"
            )
        if (lowest := min(min(getattr(self, name)) for name in ROWS)) < 0:
            raise ScheduleError(f"a cost is {lowest:g}; use numbers of zero or more")

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward: float = 1.0,
        input: float = 1.0,
        weight: float = 1.0,
        message: float = 0.0,
        backward: float | None = None,
    ) -> Self:
        """Return equal costs for all stages; `backward` defaults to input + weight."""
        full = input + weight if backward is None else backward
        return cls(*((x,) * num_stages for x in (forward, full, input, weight, message)))

    @classmethod
    def of(cls, costs: "Costs", num_stages: int) -> "StageCosts":
        """Return `costs` stage by stage; raise ScheduleError for another number of stages.

        For costs by kind, I and W default to half of B, B defaults to their sum, and a message
        costs the largest of the messages named.
        """
        if isinstance(costs, StageCosts):
            if len(costs.forward) != num_stages:
                raise ScheduleError(
                    f"costs of {len(costs.forward)} stages cannot time a schedule of "
                    f"{num_stages}; give costs for each stage"
                )
            return costs
        full = costs.get(ActionKind.B, costs.get(ActionKind.I, 0.0) + costs.get(ActionKind.W, 0.0))
        messages = [cost for kind, cost in costs.items() if kind.is_message]
        return StageCosts.uniform(
            num_stages,
            costs.get(ActionKind.F, 0.0),
            costs.get(ActionKind.I, full / 2),
            costs.get(ActionKind.W, full / 2),
            max(messages, default=0.0),
            full,
        )


Costs = Mapping[ActionKind, float] | StageCosts
"""Costs by kind, equal for all stages (missing kinds cost nothing), or costs stage by stage."""

PIECES = "pieces"
MAX_BYTES = 1 << 21


@dataclass(frozen=True, slots=True)
class PieceCosts:
    """Costs of one microbatch in one piece of the model, in the unit of the file."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class CostsFile:
    """The contents of a file of costs.

    rows: numbers by name; a single number applies to every stage.
    source: name of the file, for errors.
    """

    rows: Mapping[str, tuple[float, ...]]
    pieces: Mapping[str, PieceCosts] = field(default_factory=dict[str, PieceCosts])
    source: str = "costs"

    @property
    def num_stages(self) -> int | None:
        """Number of stages in the rows; None if each row is one number."""
        longest = max(map(len, self.rows.values()))
        return longest if longest > 1 else None

    def of(self, num_stages: int) -> StageCosts:
        """Return the measured costs of the stages; raise ScheduleError for another number
        of them.
        """
        for name, row in self.rows.items():
            if len(row) not in (1, num_stages):
                raise ScheduleError(
                    f"{self.source}: {name} has {len(row)} numbers for {num_stages} stages; give "
                    "one for each stage, or one for all"
                )
        wide = {n: row * num_stages if len(row) == 1 else row for n, row in self.rows.items()}
        if "backward" not in wide:
            wide["backward"] = tuple(map(add, wide["input"], wide["weight"]))
        halves = tuple(b / 2 for b in wide["backward"])
        for name, other in (("input", "weight"), ("weight", "input")):
            if name not in wide:
                differences = map(sub, wide["backward"], wide.get(other, halves))
                wide[name] = tuple(max(x, 0.0) for x in differences)
        wide.setdefault("message", (0.0,) * num_stages)
        return StageCosts(**wide)

    def of_cut(self, cut: Sequence[Sequence[str]]) -> StageCosts:
        """Return costs of stages that hold these pieces, as sums over them.

        The backward is split in the ratio of the file's stages.

        Raises:
            ScheduleError: as in `check_pieces`.
        """
        self.check_pieces([name for names in cut for name in names])
        c = self.of(self.num_stages or 1)
        halves, full = sum(c.input) + sum(c.weight), sum(c.backward)
        share = sum(c.input) / halves if halves else 0.5
        more = halves / full if full else 1.0  # cost of a split backward relative to a full one
        backward = tuple(sum(self.pieces[n].backward for n in names) for names in cut)
        return StageCosts(
            tuple(sum(self.pieces[n].forward for n in names) for names in cut),
            backward,
            tuple(b * more * share for b in backward),
            tuple(b * more * (1 - share) for b in backward),
            (max(c.message),) * len(cut),
        )

    def weights(self, names: Sequence[str]) -> list[float]:
        """Return the cost of each piece, forward plus backward; raise as `check_pieces`."""
        self.check_pieces(names)
        return [self.pieces[name].forward + self.pieces[name].backward for name in names]

    def check_pieces(self, names: Sequence[str]) -> None:
        """Raise ScheduleError, naming pieces, if the file lacks some."""
        missing = [name for name in names if name not in self.pieces]
        if missing:
            raise ScheduleError(
                f"{self.source} has no costs of {len(missing)} pieces: {', '.join(missing[:3])}; "
                f"it has {', '.join(list(self.pieces)[:3]) or 'none'}; measure this model"
            )


def read_costs(path: str | Path) -> CostsFile:
    """Read a file of costs; raise ScheduleError with file and key if it is invalid."""
    costs = _parse(read_text(Path(path), "file of costs"), str(path))
    if isinstance(costs, ScheduleError):
        raise costs.with_traceback(None)
    return costs


def read_text(path: Path, noun: str) -> str:
    """Return the text of a file of at most MAX_BYTES; raise ScheduleError if it cannot be read."""
    try:
        return read_regular(path, MAX_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ScheduleError(f"{path} cannot be read: {why}; name a {noun}") from error


class _CostsLoader(BoundedLoader):
    """A YAML loader that refuses aliases, with which a few hundred bytes can expand to
    gigabytes.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if cast(Any, self).check_event(yaml.AliasEvent):
            raise BoundError("aliases are not read here; write the numbers themselves", None)
        return super().compose_node(parent, index)


@lru_cache(maxsize=4)
def _parse(text: str, path: str) -> CostsFile | ScheduleError:
    """Parse the text, and cache the result or error: configuration rules read a file many times."""
    try:
        return _costs_of(text, path)
    except ScheduleError as error:
        return error


def _costs_of(text: str, path: str) -> CostsFile:
    """Parse and check a document of costs."""
    try:
        document: object = yaml.load(text, Loader=_CostsLoader)
    except yaml.YAMLError as error:
        raise ScheduleError(
            f"{path} is not YAML: {' '.join(str(error).split())}; correct it"
        ) from error
    except (ValueError, ArithmeticError, TypeError, AttributeError, LookupError) as error:
        # for example a tag on an unsuitable value, or a number of thousands of digits
        raise ScheduleError(f"{path} is not YAML: {error!r}; correct it") from error
    if not isinstance(document, dict):
        raise ScheduleError(
            f"{path} holds a {type(document).__name__}; costs are rows such as `forward: [1, 1]`"
        )
    content = cast(dict[str, object], document)
    unknown = [str(key)[:40] for key in content if key not in (*ROWS, PIECES)][:10]
    if unknown:
        raise ScheduleError(
            f"{path} has unknown keys {', '.join(unknown)}; use {', '.join(ROWS)}, {PIECES}"
        )
    rows = {name: _row(f"{path}: {name}", content[name]) for name in ROWS if name in content}
    if "forward" not in rows or ("backward" not in rows and not {"input", "weight"} <= {*rows}):
        raise ScheduleError(
            f"{path} has rows {', '.join(rows) or 'of no costs'}; it needs forward, and backward "
            f"or both of input and weight"
        )
    costs = CostsFile(rows, _pieces(f"{path}: {PIECES}", content.get(PIECES, {})), path)
    costs.of(costs.num_stages or 1)
    return costs


def costs_text(
    costs: StageCosts, pieces: Mapping[str, PieceCosts] | None = None, note: str = ""
) -> str:
    """Return costs as text that `read_costs` reads. note: a comment for its first line."""
    lines = [f"# {note}"] if note else []
    lines += [f"{name}: [{_numbers(getattr(costs, name))}]" for name in ROWS]
    if pieces:
        lines.append(f"{PIECES}:")
        lines += [f"  {name}: [{_numbers((x.forward, x.backward))}]" for name, x in pieces.items()]
    return "\n".join(lines) + "\n"


def _numbers(row: Sequence[float]) -> str:
    return ", ".join(f"{x:.6e}" for x in row)


def _row(where: str, value: object) -> tuple[float, ...]:
    """Return the numbers of a row; raise ScheduleError if one is not finite or below zero."""
    numbers: list[float] = []
    for item in cast(list[object], value) if isinstance(value, list) else [value]:
        try:  # YAML 1.1 reads 1e-3 as text, because it has no decimal point
            numbers.append(math.nan if isinstance(item, bool) else float(cast(float, item)))
        except (TypeError, ValueError, OverflowError):
            numbers.append(math.nan)
        if not 0 <= numbers[-1] < math.inf:
            raise ScheduleError(
                f"{where} holds {_shown(item)}; write finite numbers of zero or more, one for each "
                "stage"
            )
    return tuple(numbers)


def _shown(value: object) -> str:
    """Return a value as text for messages."""
    try:
        return f"{value!r}"[:80]
    except ValueError:  # Python refuses to print numbers of thousands of digits
        return "a number too large"


def _pieces(where: str, value: object) -> dict[str, PieceCosts]:
    """Return the costs of the pieces; raise ScheduleError if one is invalid."""
    if not isinstance(value, dict):
        raise ScheduleError(f"{where} is {_shown(value)}; write `name: [forward, backward]`")
    pieces: dict[str, PieceCosts] = {}
    for name, pair in cast(dict[str, object], value).items():
        row = _row(f"{where}.{name}", pair)
        if len(row) != 2:
            raise ScheduleError(f"{where}.{name} has {len(row)} numbers; write [forward, backward]")
        pieces[str(name)] = PieceCosts(*row)
    return pieces
