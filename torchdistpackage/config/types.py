"""The kinds of value a key may hold: a type, its limits, and the words for what it wants.

One rule: every kind carries its own `Expected`, so an error text is made of our words, whatever
pydantic found. Types are strict: a string is no number, a bool is no int; an int will do for
a float, and a whole float such as 4.0 for a count. How large a number may be stands with its key
in the schema.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast, get_args

from annotated_types import Le
from pydantic import AfterValidator, BeforeValidator, Field, JsonValue
from pydantic.fields import FieldInfo

from torchdistpackage.config.slurm import EXTRA, OPTIONS
from torchdistpackage.schedule.generators.registry import GENERATORS, canonical
from torchdistpackage.topology.views import DEFAULT_ORDER

AUTO, CUSTOM = "auto", "custom"
SCHEDULES = (*(name for name in GENERATORS if name != "forward"), AUTO, CUSTOM)
"""Pipeline schedules that train; `forward` computes no gradient, so no run can ask for it."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a key takes, in words; `choices` are the valid names, for "did you mean"."""

    text: str
    choices: tuple[str, ...] = ()


def expected_of(field: FieldInfo) -> Expected:
    """What a key takes; the most that its line in the schema allows comes first in the metadata."""
    wants = next(m for m in reversed(field.metadata) if isinstance(m, Expected))
    first = field.metadata[0]
    if not isinstance(first, Le):
        return wants
    return Expected(f"{wants.text}, up to {first.le:,}", wants.choices)


def _names(literal: Any) -> Expected:
    choices: tuple[str, ...] = get_args(literal)
    return Expected(" or ".join(choices), choices)


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _sequence(value: object) -> object:
    """YAML has lists, a frozen value has tuples."""
    return tuple(cast(list[object], value)) if isinstance(value, list) else value


def _different(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) != len(value):
        raise ValueError("a name is given twice")
    return value


def _schedule(value: str) -> str:
    """One name for all spellings: zb_h1 and ZB-H1 are zb-h1."""
    name = value if value in SCHEDULES else canonical(value)
    if name not in SCHEDULES:
        raise ValueError("no such schedule")
    return name


_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""What ends a line, or the text itself, on its way into a script or a call of the system."""
MAX_NAME_BYTES = 200
"""Of a folder's name, which file systems end at 255: what a sweep adds has to fit as well."""
_MAX_PATH_BYTES, _MAX_PART_BYTES = 4000, 255


def _path(value: str) -> str:
    parts = [part.encode() for part in value.split("/")]
    if _UNPRINTABLE.search(value) or sum(map(len, parts)) + len(parts) > _MAX_PATH_BYTES:
        raise ValueError("no path")
    if max(map(len, parts)) > _MAX_PART_BYTES:
        raise ValueError("no file has such a name")
    return value


def _short(value: str) -> str:
    if len(value.encode()) > MAX_NAME_BYTES:
        raise ValueError("too long")
    return value


def _axis(value: str) -> str:
    if value not in DEFAULT_ORDER:
        raise ValueError("no such axis")
    return value


def _bf16(value: object) -> object:
    return "bf16" if value == "bfloat16" else value


MAX_RANKS = 1 << 18
MAX_CHUNKS = 64
MAX_MLP_RATIO = 1024
MAX_PROCS = 4096
"""Processes on one machine."""
MAX_STEPS = 1_000_000_000
MAX_TIME = 1_000_000
"""In seconds more than 11 days: what waits longer waits for ever, and the clocks of systems end."""

_Whole = BeforeValidator(_whole)
Count = Annotated[int, Field(ge=1), _Whole, Expected("a whole number, 1 or more")]
CountOrZero = Annotated[int, Field(ge=0), _Whole, Expected("a whole number, 0 or more")]
Degree = Annotated[
    Annotated[int, Field(ge=1, le=MAX_RANKS), _Whole] | Literal["auto"],
    Expected(f"a whole number, 1 or more, or auto, up to {MAX_RANKS:,}", ("auto",)),
]
ChunksOrNull = Annotated[
    Annotated[int, Field(ge=1, le=MAX_CHUNKS), _Whole] | None,
    Expected(f"a whole number, 1 or more, or null, up to {MAX_CHUNKS}"),
]
ProcsOrNull = Annotated[
    Annotated[int, Field(ge=1, le=MAX_PROCS), _Whole] | None,
    Expected(f"a whole number, 1 or more, or null, up to {MAX_PROCS:,}"),
]
Steps = Annotated[
    int,
    Field(ge=1, le=MAX_STEPS),
    _Whole,
    Expected(f"a whole number, 1 or more, up to {MAX_STEPS:,}"),
]
StepsOrZero = Annotated[
    int,
    Field(ge=0, le=MAX_STEPS),
    _Whole,
    Expected(f"a whole number, 0 or more, up to {MAX_STEPS:,}"),
]
Restarts = Annotated[
    int, Field(ge=0, le=1000), _Whole, Expected("a whole number, 0 or more, up to 1,000")
]
ZeroStage = Annotated[int, Field(ge=0, le=3), _Whole, Expected("0, 1, 2 or 3")]
Seed = Annotated[int, Field(ge=0, lt=2**63), _Whole, Expected("a whole number from 0 to 2**63 - 1")]

_Finite = Field(allow_inf_nan=False)
Positive = Annotated[float, _Finite, Field(gt=0), Expected("a number above 0")]
NotNegative = Annotated[float, _Finite, Field(ge=0), Expected("a number, 0 or more")]
_TIME = f"up to {MAX_TIME:,}"
Seconds = Annotated[Positive, Field(le=MAX_TIME), Expected(f"a number above 0, {_TIME}")]
SecondsOrZero = Annotated[
    NotNegative, Field(le=MAX_TIME), Expected(f"a number, 0 or more, {_TIME}")
]
MinutesOrNull = Annotated[Seconds | None, Expected(f"a number above 0, or null, {_TIME}")]
Fraction = Annotated[float, _Finite, Field(ge=0, le=1), Expected("a number from 0 to 1")]
BelowOne = Annotated[float, _Finite, Field(ge=0, lt=1), Expected("a number from 0 to below 1")]
UpToHalf = Annotated[float, _Finite, Field(gt=0, le=0.5), Expected("a number above 0, up to 0.5")]
Betas = Annotated[
    tuple[BelowOne, BelowOne],
    BeforeValidator(_sequence),
    Expected("a list of two numbers from 0 to below 1, e.g. [0.9, 0.95]"),
]

Flag = Annotated[bool, Expected("true or false", ("true", "false"))]
_A_PATH = "a path: a text without control characters, in names of up to 255 bytes"
Path = Annotated[str, Field(min_length=1), AfterValidator(_path), Expected(_A_PATH)]
PathOrNull = Annotated[Path | None, Expected(f"{_A_PATH}, or null")]
FolderName = Annotated[
    str,
    Field(pattern=r"^\w[\w.+=@-]*$", max_length=MAX_NAME_BYTES),
    AfterValidator(_short),
    Expected(
        "a folder name: letters, digits and _ . + = @ -, a letter, digit or _ first; at most "
        f"{MAX_NAME_BYTES} bytes"
    ),
]
ImportPath = Annotated[
    Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", max_length=200)] | None,
    Expected("an import path such as pkg.module:build, of at most 200 characters, or null"),
]
FreeForm = Annotated[dict[str, JsonValue], Expected("a mapping of names to plain YAML values")]
SlurmOptions = Annotated[
    dict[str, JsonValue],
    Expected("a mapping of names of sbatch's options, and a few of ours, to plain YAML values"),
    Field(
        json_schema_extra={
            "properties": {
                **{
                    name: {"description": f"sbatch: {kind.expected}."}
                    for name, kind in OPTIONS.items()
                },
                **{name: {"description": f"{text}."} for name, text in EXTRA.items()},
            }
        }
    ),
]

Axis = Annotated[
    str, AfterValidator(_axis), Field(json_schema_extra={"enum": list[JsonValue](DEFAULT_ORDER)})
]
Order = Annotated[
    tuple[Axis, ...],
    BeforeValidator(_sequence),
    AfterValidator(_different),
    Expected(
        f"a list of different axes out of {', '.join(DEFAULT_ORDER)}, outermost first",
        DEFAULT_ORDER,
    ),
]
ScheduleName = Annotated[
    str,
    AfterValidator(_schedule),
    Field(json_schema_extra={"enum": list[JsonValue](SCHEDULES)}),
    Expected(" or ".join(SCHEDULES), SCHEDULES),
]

SIGNALS = ("USR1", "USR2", "TERM", "HUP")
"""Signals that may mean: save and end. The others have meanings of their own."""


def _signal(value: str) -> str:
    if value not in SIGNALS:
        raise ValueError("no such signal")
    return value


Signal = Annotated[
    str, AfterValidator(_signal), Field(json_schema_extra={"enum": list[JsonValue](SIGNALS)})
]
Signals = Annotated[
    tuple[Signal, ...],
    BeforeValidator(_sequence),
    AfterValidator(_different),
    Expected(f"a list of different signals out of {', '.join(SIGNALS)}", SIGNALS),
]

_RequeueMode = Literal["requeue", "chain", "never"]
_ModelName = Literal["gpt"]
_Partition = Literal["cost", "parameters", "uniform", "time"]
_DataName = Literal["python_stdlib", "text", "tokens"]
_Optimizer = Literal["adamw"]
_Dtype = Literal["float32", "float64", "bf16"]
_OnNonfinite = Literal["stop", "skip"]
_WeightDtype = Literal["float32", "bf16"]
_Matmul = Literal["highest", "high", "medium"]
_Position = Literal["rotary", "learned"]
_TokenDtype = Literal["uint8", "uint16"]
ModelName = Annotated[_ModelName | None, _names(_ModelName)]
DataName = Annotated[_DataName | None, _names(_DataName)]
OptimizerName = Annotated[_Optimizer, _names(_Optimizer)]
Partition = Annotated[_Partition, _names(_Partition)]
RequeueMode = Annotated[_RequeueMode, _names(_RequeueMode)]
Dtype = Annotated[_Dtype, BeforeValidator(_bf16), _names(_Dtype)]
OnNonfinite = Annotated[_OnNonfinite, _names(_OnNonfinite)]
WeightDtype = Annotated[_WeightDtype, BeforeValidator(_bf16), _names(_WeightDtype)]
Matmul = Annotated[_Matmul, _names(_Matmul)]
Position = Annotated[_Position, _names(_Position)]
TokenDtype = Annotated[_TokenDtype, _names(_TokenDtype)]
