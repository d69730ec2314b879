"""The kinds of value a key may hold: a type, its limits, and the words for what it wants.

One rule: every kind carries its own `Wants`, so an error text is made of our words, whatever
pydantic found. Types are strict: a string is no number, a bool is no int; an int will do for
a float, and a whole float such as 4.0 for a count.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue

from torchdistpackage.config.slurm_options import OPTIONS, OURS
from torchdistpackage.schedule.generate import GENERATORS, canonical
from torchdistpackage.topology.views import DEFAULT_ORDER

AUTO, CUSTOM = "auto", "custom"
SCHEDULES = (*(name for name in GENERATORS if name != "forward"), AUTO, CUSTOM)
"""Pipeline schedules that train; `forward` computes no gradient, so no run can ask for it."""


@dataclass(frozen=True, slots=True)
class Wants:
    """What a key takes, in words; `choices` are the valid names, for "did you mean"."""

    text: str
    choices: tuple[str, ...] = ()


def _names(literal: Any) -> Wants:
    choices: tuple[str, ...] = get_args(literal)
    return Wants(" or ".join(choices), choices)


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


def _axis(value: str) -> str:
    if value not in DEFAULT_ORDER:
        raise ValueError("no such axis")
    return value


def _bf16(value: object) -> object:
    return "bf16" if value == "bfloat16" else value


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=1), Wants("a whole number, 1 or more")]
CountOrZero = Annotated[Whole, Field(ge=0), Wants("a whole number, 0 or more")]
CountOrNull = Annotated[Count | None, Wants("a whole number, 1 or more, or null")]
Degree = Annotated[Count | Literal["auto"], Wants("a whole number, 1 or more, or auto", ("auto",))]
ZeroStage = Annotated[Whole, Field(ge=0, le=3), Wants("0, 1, 2 or 3")]
Seed = Annotated[Whole, Field(ge=0, lt=2**63), Wants("a whole number from 0 to 2**63 - 1")]

_Finite = Field(allow_inf_nan=False)
Positive = Annotated[float, _Finite, Field(gt=0), Wants("a number above 0")]
PositiveOrNull = Annotated[Positive | None, Wants("a number above 0, or null")]
NotNegative = Annotated[float, _Finite, Field(ge=0), Wants("a number, 0 or more")]
Fraction = Annotated[float, _Finite, Field(ge=0, le=1), Wants("a number from 0 to 1")]
BelowOne = Annotated[float, _Finite, Field(ge=0, lt=1), Wants("a number from 0 to below 1")]
UpToHalf = Annotated[float, _Finite, Field(gt=0, le=0.5), Wants("a number above 0, up to 0.5")]
Betas = Annotated[
    tuple[BelowOne, BelowOne],
    BeforeValidator(_sequence),
    Wants("a list of two numbers from 0 to below 1, e.g. [0.9, 0.95]"),
]

Flag = Annotated[bool, Wants("true or false", ("true", "false"))]
Text = Annotated[str, Field(min_length=1), Wants("a text that is not empty")]
TextOrNull = Annotated[Text | None, Wants("a text that is not empty, or null")]
FolderName = Annotated[
    str,
    Field(pattern=r"^\w[\w.+=@-]*$"),
    Wants("a folder name: letters, digits and _ . + = @ -, a letter, digit or _ first"),
]
ImportPath = Annotated[
    Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")] | None,
    Wants("an import path such as pkg.module:build, or null"),
]
FreeForm = Annotated[dict[str, JsonValue], Wants("a mapping of names to plain YAML values")]
SlurmOptions = Annotated[
    dict[str, JsonValue],
    Wants("a mapping of names of sbatch's options, and a few of ours, to plain YAML values"),
    Field(
        json_schema_extra={
            "properties": {
                **{
                    name: {"description": f"sbatch: {kind.wants}."}
                    for name, kind in OPTIONS.items()
                },
                **{name: {"description": f"{text}."} for name, text in OURS.items()},
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
    Wants(
        f"a list of different axes out of {', '.join(DEFAULT_ORDER)}, outermost first",
        DEFAULT_ORDER,
    ),
]
ScheduleName = Annotated[
    str,
    AfterValidator(_schedule),
    Field(json_schema_extra={"enum": list[JsonValue](SCHEDULES)}),
    Wants(" or ".join(SCHEDULES), SCHEDULES),
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
    Wants(f"a list of different signals out of {', '.join(SIGNALS)}", SIGNALS),
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
