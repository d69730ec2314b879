"""The types of keys, with their limits and descriptions, and the base class of all sections.

Types are strict: a string is not a number, a bool is not an int. An int is accepted for a float,
and an integral float such as 4.0 for a count. The schema has the upper limits of numbers.
"""

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from datetime import date
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    model_validator,
)
from pydantic.fields import FieldInfo

from torchdistpackage.config.optimizers import OPTIMIZERS
from torchdistpackage.config.preference_losses import PREFERENCE_LOSSES
from torchdistpackage.config.slurm import EXTRA, OPTIONS
from torchdistpackage.layout.balances import BALANCES
from torchdistpackage.layout.exchanges import EXCHANGES
from torchdistpackage.schedule.generators import GENERATORS, canonical
from torchdistpackage.topology.mesh import DEFAULT_ORDER

AUTO, CUSTOM = "auto", "custom"
SCHEDULES = (*(name for name in GENERATORS if name != "forward"), AUTO, CUSTOM)
"""Pipeline schedules that train; `forward` computes no gradient, so no run can ask for it."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A description of a key's values; `choices` are the valid names, for "did you mean"."""

    text: str
    choices: tuple[str, ...] = ()


def expected_of(field: FieldInfo) -> Expected:
    """Return a description of a key's values: the `Expected` of its type, or a text from type and
    limits.
    """
    return _expected(field.annotation, field.metadata)


def _expected(kind: Any, limits: Iterable[Any]) -> Expected:
    limits = [x for m in limits for x in (m.metadata if isinstance(m, FieldInfo) else [m])]
    if explicit := [x for x in limits if isinstance(x, Expected)]:
        return explicit[-1]
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _expected(args[0], (*args[1:], *limits))
    if origin in (Union, UnionType):
        branches = [_expected(arg, ()) for arg in args]
        text = ", or ".join(x.text for x in branches)
        return Expected(text, tuple(choice for x in branches for choice in x.choices))
    if kind is NoneType:
        return Expected("null")
    if kind is bool or origin is Literal:
        choices: tuple[str, ...] = ("true", "false") if kind is bool else args
        return Expected(" or ".join(choices), choices)
    text = "a whole number" if kind is int else "a number"
    text += "".join(f", {x.ge:,} or more" for x in limits if isinstance(x, Ge))
    text += "".join(f" above {x.gt:,}" for x in limits if isinstance(x, Gt))
    text += "".join(f", below {x.lt:,}" for x in limits if isinstance(x, Lt))
    most = min((cast(float, x.le) for x in limits if isinstance(x, Le)), default=None)
    return Expected(text if most is None else f"{text}, up to {most:,}")


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _sequence(value: object) -> object:
    """Convert a YAML list to a tuple, because sections are frozen."""
    return tuple(cast(list[object], value)) if isinstance(value, list) else value


Listed = BeforeValidator(_sequence)


def _different(names: tuple[str, ...]) -> AfterValidator:
    """Return a validator of tuples that hold each of `names` at most once."""

    def check(value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value) or not set(value) <= set(names):
            raise ValueError("another name, or one twice")
        return value

    return AfterValidator(check)


def enum(names: tuple[str, ...]) -> FieldInfo:
    """Return the JSON schema's list of a key's values."""
    return cast(FieldInfo, Field(json_schema_extra={"enum": list[JsonValue](names)}))


def _schedule(value: str) -> str:
    """Return the canonical name of a schedule: zb_h1 for zb-h1 and ZB-H1."""
    name = value if value in SCHEDULES else canonical(value)
    if name not in SCHEDULES:
        raise ValueError("no such schedule")
    return name


def one_of(names: Iterable[str]) -> tuple[Any, ...]:
    """Return the metadata of a key whose value is one of `names`."""
    names = tuple(names)
    return _name_in(names), enum(names), Expected(" or ".join(names), names)


def _name_in(table: Container[str]) -> AfterValidator:

    def check(value: str) -> str:
        if value not in table:
            raise ValueError("no such name")
        return value

    return AfterValidator(check)


_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that would end a line of a script, or a path in a system call."""
_FOR_A_SHELL = re.compile(r"^~|\$[A-Za-z_{]")
"""Characters that a shell would expand but that would become part of a name here."""
MAX_NAME_BYTES = 200
"""Longest name of a run in bytes: file systems allow 255, and a sweep adds to the name."""
_MAX_PATH_BYTES, _MAX_PART_BYTES = 4000, 255


def _path(value: str) -> str:
    parts = [part.encode() for part in value.split("/")]
    if _UNPRINTABLE.search(value) or sum(map(len, parts)) + len(parts) > _MAX_PATH_BYTES:
        raise ValueError("no path")
    if max(map(len, parts)) > _MAX_PART_BYTES:
        raise ValueError("no file has such a name")
    if _FOR_A_SHELL.search(value):
        raise ValueError("a shell would have expanded it")
    return value


def _short(value: str) -> str:
    if len(value.encode()) > MAX_NAME_BYTES:
        raise ValueError("too long")
    return value


def _bf16(value: object) -> object:
    return "bf16" if value == "bfloat16" else value


MAX_RANKS = 1 << 18
MAX_CHUNKS = 64
MAX_MLP_RATIO = 1024
MAX_HEADS = 1 << 16
MAX_LENGTH = 1 << 27
"""Longest sequence in tokens."""
MAX_WIDTH = 1 << 28
"""Largest number of channels between the two matmuls of an MLP."""
MAX_PROCS = 4096
"""Largest number of processes on one machine."""
MAX_STEPS = 1_000_000_000
MAX_TIME = 1_000_000
"""Longest time in seconds, more than 11 days: system calls overflow at larger values."""

_Whole = BeforeValidator(_whole)
Count = Annotated[int, Field(ge=1), _Whole]
CountOrZero = Annotated[int, Field(ge=0), _Whole]
Degree = Annotated[int, Field(ge=1, le=MAX_RANKS), _Whole] | Literal["auto"]
ChunksOrNull = Annotated[int, Field(ge=1, le=MAX_CHUNKS), _Whole] | None
TensorOrNull = Annotated[int, Field(ge=1, le=1024), _Whole] | None
ProcsOrNull = Annotated[int, Field(ge=1, le=MAX_PROCS), _Whole] | None
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS), _Whole]
TeacherZero = Annotated[Literal[0, 3], Expected("0 or 3")]
StepsOrZero = Annotated[int, Field(ge=0, le=MAX_STEPS), _Whole]
StepsOrNull = StepsOrZero | None
Restarts = Annotated[int, Field(ge=0, le=1000), _Whole]
Spares = Annotated[int, Field(ge=0, le=1000), _Whole]
ZeroGroup = Annotated[int, Field(ge=1, le=MAX_RANKS), _Whole] | Literal["node"] | None
ZeroStage = Annotated[int, Field(ge=0, le=3), _Whole, Expected("0, 1, 2 or 3")]
Seed = Annotated[int, Field(ge=0, lt=2**63), _Whole, Expected("a whole number from 0 to 2**63 - 1")]

_Finite = Field(allow_inf_nan=False)
Positive = Annotated[float, _Finite, Field(gt=0)]
NotNegative = Annotated[float, _Finite, Field(ge=0)]
Seconds = Annotated[Positive, Field(le=MAX_TIME)]
MiB = Annotated[Positive, Field(le=4096)]
SecondsOrZero = Annotated[NotNegative, Field(le=MAX_TIME)]
MinutesOrNull = Seconds | None
Fraction = Annotated[float, _Finite, Field(ge=0, le=1)]
BelowOne = Annotated[float, _Finite, Field(ge=0, lt=1)]
BelowHalf = Annotated[float, _Finite, Field(ge=0, lt=0.5)]
UpToHalf = Annotated[float, _Finite, Field(gt=0, le=0.5)]
DecayOrNull = Annotated[float, _Finite, Field(gt=0, lt=1)] | None
Betas = Annotated[
    tuple[BelowOne, BelowOne],
    BeforeValidator(_sequence),
    Expected("a list of two numbers from 0 to below 1, e.g. [0.9, 0.95]"),
]

_A_PATH = "a path without ~, $NAME or control characters, names of at most 255 bytes"
Path = Annotated[str, Field(min_length=1), AfterValidator(_path), Expected(_A_PATH)]
PathOrNull = Path | None
FolderName = Annotated[
    str,
    Field(pattern=r"^\w[\w.+=@-]*$", max_length=MAX_NAME_BYTES),
    AfterValidator(_short),
    Expected(
        "a folder name: letters, digits and _ . + = @ -, a letter, digit or _ first; at most "
        f"{MAX_NAME_BYTES} bytes"
    ),
]
ImportPath = (
    Annotated[
        str,
        Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", max_length=200),
        Expected("an import path such as pkg.module:build, of at most 200 characters"),
    ]
    | None
)
ImportPaths = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", max_length=200)], ...],
    Field(max_length=100),
    BeforeValidator(_sequence),
    Expected("a list of import paths, such as [pkg.module:Extra]"),
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

Order = Annotated[
    tuple[Annotated[str, enum(DEFAULT_ORDER)], ...],
    BeforeValidator(_sequence),
    _different(DEFAULT_ORDER),
    Expected(
        f"a list of different axes out of {', '.join(DEFAULT_ORDER)}, outermost first",
        DEFAULT_ORDER,
    ),
]
GROUP_AXES = (*DEFAULT_ORDER, "expert", "expert_data")
"""Axes that have groups."""
GroupAxes = Annotated[
    tuple[Annotated[str, enum(GROUP_AXES)], ...],
    BeforeValidator(_sequence),
    _different(GROUP_AXES),
    Expected(f"a list of different axes out of {', '.join(GROUP_AXES)}", GROUP_AXES),
]


def _group_axes(value: dict[str, int]) -> dict[str, int]:
    if not value.keys() <= {*GROUP_AXES}:
        raise ValueError("no such axis")
    return value


CtasOfAxis = Annotated[
    dict[str, Annotated[int, Field(ge=1, le=64), _Whole]],
    AfterValidator(_group_axes),
    cast(FieldInfo, Field(json_schema_extra={"propertyNames": {"enum": [*GROUP_AXES]}})),
    Expected(
        f"a mapping of axes ({', '.join(GROUP_AXES)}) to numbers of blocks, 1 to 64", GROUP_AXES
    ),
]
ScheduleName = Annotated[
    str,
    AfterValidator(_schedule),
    enum(SCHEDULES),
    Expected(" or ".join(SCHEDULES), SCHEDULES),
]

SIGNALS = ("USR1", "USR2", "TERM", "HUP")
"""Signals that a run may treat as a request to save and exit; others have their own meanings."""


Signals = Annotated[
    tuple[Annotated[str, enum(SIGNALS)], ...],
    BeforeValidator(_sequence),
    _different(SIGNALS),
    Expected(f"a list of different signals out of {', '.join(SIGNALS)}", SIGNALS),
]

TRACKERS = ("tensorboard", "wandb", "mlflow")
"""Services that a run can log to; each is named like its package and the extra."""
TrackerNames = Annotated[
    tuple[Annotated[str, enum(TRACKERS)], ...],
    BeforeValidator(_sequence),
    _different(TRACKERS),
    Expected(f"a list of different services out of {', '.join(TRACKERS)}", TRACKERS),
]
ModelName = Literal["gpt"] | None
Pooling = Literal["mean", "last", "cls"]
Dims = Annotated[
    tuple[Annotated[int, Field(ge=1, le=1 << 20), _Whole], ...],
    Field(max_length=64),
    BeforeValidator(_sequence),
    Expected("a list of whole numbers above 0, e.g. [768, 256, 64]"),
]
Weights = Annotated[
    tuple[Positive, ...],
    Field(max_length=64),
    BeforeValidator(_sequence),
    Expected("a list of numbers above 0, e.g. [1.0, 0.5]"),
]
OptimizerName = Annotated[str, *one_of(OPTIMIZERS)]
QuantType = Literal["nf4", "fp4"]
MuonScale = Literal["moonlight", "original"]
MuonExchange = Literal["auto", "gather", "together"]
LrSchedule = Literal[
    "warmup_cosine",
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
CpCommType = Annotated[str, *one_of((AUTO, *EXCHANGES))]
Partition = Literal["cost", "parameters", "uniform", "time"]
ExportFormat = Literal["hf"] | None
KeepBest = (
    Annotated[
        str,
        Field(min_length=1, max_length=MAX_NAME_BYTES),
        Expected("val_loss or a name of data.eval"),
    ]
    | None
)
MetricName = (
    Annotated[
        str,
        Field(min_length=1, max_length=MAX_NAME_BYTES),
        Expected("val_loss, a name of data.eval, or eval_NAME of another value"),
    ]
    | None
)
BestMode = Literal["auto", "min", "max"]
AsyncMode = Literal["auto", "async", "disabled"]
OnSaveError = Literal["stop", "continue"]
RequeueMode = Literal["requeue", "chain", "never"]
Dtype = Annotated[Literal["float32", "float64", "bf16"], BeforeValidator(_bf16)]
Float32OrBf16 = Annotated[Literal["float32", "bf16"], BeforeValidator(_bf16)]
PreferenceLoss = Annotated[str, *one_of(PREFERENCE_LOSSES)]
OnNonfinite = Literal["stop", "skip"]
OnReplicasDiffer = Literal["stop", "continue"]
_STEP_RANGE = re.compile(r"([1-9]\d{0,8})\.\.([1-9]\d{0,8})")


def _step_range(value: object) -> object:
    """Turn a single step into a range: 10 into 10..10."""
    is_number = type(value) in (int, str) and str(value).isdecimal()
    return f"{value}..{value}" if is_number else value


def _ascends(value: str) -> str:
    match = _STEP_RANGE.fullmatch(value)
    if match is None or int(match[1]) > int(match[2]) or int(match[2]) >= int(match[1]) + 100:
        raise ValueError("no range of steps")
    return value


StepRangeOrNull = (
    Annotated[
        str,
        BeforeValidator(_step_range),
        AfterValidator(_ascends),
        Expected("steps as FIRST..LAST, such as 10..12, at most 100 of them"),
    ]
    | None
)
Recompute = Literal["none", "blocks", "offload", "auto"]
Compile = Literal["off", "blocks", "auto"]
NodeCheck = Literal["off", "fast"]
CompileBackend = Literal["inductor", "aot_eager", "eager"]
GigabytesOrNull = Annotated[Positive, Field(le=1_000_000)] | None
Float8 = Literal["off", "linear"]
Matmul = Literal["highest", "high", "medium"]
Position = Literal["rotary", "learned"]
Norm = Literal["layer", "rms"]
Mlp = Literal["gelu", "gelu_tanh", "swiglu"]
RouterScore = Literal["softmax", "sigmoid"]
ExpertBalance = Annotated[str, *one_of(BALANCES)]
ExpertsOrNull = Annotated[int, Field(ge=1, le=1 << 14), _Whole] | None
MtpUse = Literal["keep", "leave_out", "train"]
RopeScaling = Literal["default", "linear", "llama3", "yarn"]
PositiveOrNull = Positive | None
NotNegativeOrNull = NotNegative | None
LengthOrNull = Annotated[int, Field(ge=1, le=MAX_LENGTH), _Whole] | None
HeadsOrNull = Annotated[int, Field(ge=1, le=MAX_HEADS), _Whole] | None
WidthOrNull = Annotated[int, Field(ge=1, le=MAX_WIDTH), _Whole] | None
BoolOrNull = bool | None
NamesOrNull = (
    Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=200)], ...],
        Field(min_length=1, max_length=1000),
        BeforeValidator(_sequence),
        Expected("a list of names, e.g. [q_proj, v_proj]"),
    ]
    | None
)
TokenIdsOrNull = (
    Annotated[
        tuple[Annotated[int, Field(ge=0, lt=1 << 24), _Whole], ...],
        Field(min_length=1, max_length=100_000),
        BeforeValidator(_sequence),
        Expected("a list of token ids, e.g. [32000, 32001]"),
    ]
    | None
)
Patterns = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=200)], ...],
    Field(max_length=1000),
    BeforeValidator(_sequence),
    Expected("a list of patterns, e.g. ['*embed*', '*.bias']"),
]
TextField = Annotated[
    str,
    Field(min_length=1, max_length=200),
    Expected("the name of a field, prompt+completion, or messages"),
]
TextFieldOrNull = TextField | None
FieldName = Annotated[
    str, Field(min_length=1, max_length=200), Expected("the name of a field of a line")
]


def _labels(value: object) -> object:
    """Convert a number of classes to names, and numeric names to texts."""
    if type(value) is int and 1 <= value <= MAX_LABELS:
        return tuple(map(str, range(value)))
    if not isinstance(value, list):
        return value
    items = cast(list[object], value)
    return tuple(str(x).lower() if isinstance(x, bool | int) else x for x in items)


MAX_LABELS = 1 << 16
"""Largest number of classes of a head."""
Labels = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=200)], ...],
    Field(max_length=MAX_LABELS),
    BeforeValidator(_labels),
    Expected("a list of names, e.g. [negative, positive], or their number"),
]
ClassWeights = Annotated[
    tuple[Positive, ...],
    Field(max_length=MAX_LABELS),
    BeforeValidator(_sequence),
    Expected("a list of numbers above 0, one for each class, e.g. [1.0, 4.0]"),
]
LabelOrNull = FolderName | None
EvalSets = Annotated[
    dict[FolderName, Path],
    Expected("a mapping of names, as those of folders, to paths, e.g. {web: data/web.jsonl}"),
]
Packing = Literal["auto", "wrapped", "whole", "none"]
TokenDtype = Literal["uint8", "uint16", "uint32"]
TextEnd = Literal["auto", "on", "off"]

DateOrNull = (
    Annotated[
        str,
        AfterValidator(lambda text: date.fromisoformat(text).isoformat()),
        Expected("a date such as 2024-07-26"),
    ]
    | None
)


class Section(BaseModel):
    """Base class of all sections: frozen, strictly typed, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_means_defaults(cls, value: object) -> object:
        """Treat a section without keys, such as `log:` with all keys commented out, as its
        defaults.
        """
        return {} if value is None else value

    def __hash__(self) -> int:
        return hash(tuple(v for v in self.__dict__.values() if not isinstance(v, dict)))


SectionT = TypeVar("SectionT", bound=Section)


def default(section: type[SectionT]) -> SectionT:
    """Return a field for a subsection with its defaults; its docstring is the description."""
    return Field(default_factory=section, description=section.__doc__)


class NamedSection(Section):
    """Base class of sections that take a built-in name or the user's code by import path."""

    @model_validator(mode="before")
    @classmethod
    def _target_needs_no_name(cls, value: Any) -> Any:
        """Remove the default name if another key replaces it; an explicit name stays."""
        if not isinstance(value, dict):
            return value
        keys = cast(dict[str, Any], value)
        others = (keys.get("target"), keys.get("hf"), keys.get("sources") or None)
        return keys if "name" in keys or others == (None,) * 3 else {**keys, "name": None}
