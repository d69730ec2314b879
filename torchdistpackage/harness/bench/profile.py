"""Latency and bandwidth of links from times at several sizes, and the cluster profile. No torch.

A profile says who measured what, when and on how many ranks, and answers for a link only where that
link was measured.
"""

import json
import math
import reprlib
from collections.abc import Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    Field,
    PositiveFloat,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from torchdistpackage.bounded import read_regular
from torchdistpackage.comm.collective_table import COLLECTIVES
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench.request import CONCURRENT
from torchdistpackage.predict.links import LinkModel, fit_line

_MAX_BYTES = 1 << 24
FORMAT, VERSION = "torchdistpackage cluster profile", 1


class _Measured(BaseModel, frozen=True, strict=True, allow_inf_nan=False):
    """Base class of the contents of a profile file: finite numbers and strict types."""


class LinkFit(_Measured):
    """A linear model of times: time_s = latency_s + bytes / bytes_per_s.

    bytes_per_s: None if size made no difference beyond the deviation. deviation: mean of |measured
    - fitted| / measured; None for two sizes, which any line fits.
    """

    latency_s: float = Field(ge=0)
    bytes_per_s: float | None = Field(
        gt=0,
        validation_alias=AliasChoices("bus_bytes_per_s", "bytes_per_s"),
        serialization_alias="bus_bytes_per_s",
    )
    deviation: float | None = Field(ge=0)

    def time_s(self, num_bytes: float) -> float:
        """Return the seconds of a call of `num_bytes` bytes."""
        return LinkModel(self.latency_s, self.bytes_per_s or inf).seconds(num_bytes)


def fit(points: Sequence[tuple[float, float]]) -> LinkFit | None:
    """Return the line through (bytes, seconds) points (`fit_line`) in the form that a profile
    holds.
    """
    model = fit_line(points)
    if model is None:
        return None
    line, deviation = model
    return LinkFit(
        latency_s=line.latency_s,
        bytes_per_s=line.bytes_per_s if isfinite(line.bytes_per_s) else None,
        deviation=deviation if len({x for x, t in points if x > 0 and t > 0}) > 2 else None,
    )


class CostModel(_Measured):
    """A fit of times by *bus* bytes (size x bus factor), so that it holds for other group sizes.

    largest_bytes: bus bytes of the largest size that was measured.
    """

    axis: str
    link: Literal["node", "network"]
    operation: str
    mode: str
    dtype: str
    num_ranks: int = Field(ge=1)
    largest_bytes: float = Field(gt=0)
    fit: LinkFit

    @model_validator(mode="before")
    @classmethod
    def _of_file(cls, values: Any) -> Any:
        """Nest the values of the fit, which the file has beside the others."""
        return (
            values | {"fit": values} if isinstance(values, dict) and "fit" not in values else values
        )

    @field_validator("operation")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in COLLECTIVES:
            raise ValueError(f"there is no such operation; use one of {', '.join(COLLECTIVES)}")
        return name

    def time_s(self, bus_bytes: float) -> float | None:
        """Return the seconds of one call.

        None: the measured times do not depend on the size, and this call is larger than any of
        them.
        """
        flat = self.fit.bytes_per_s is None
        return None if flat and bus_bytes > self.largest_bytes else self.fit.time_s(bus_bytes)


class MeasuredDevice(_Measured):
    """The speed of the slowest rank while `num_ranks` ranks of its host compute.

    name: of the GPU, or "cpu". matmuls: by dtype the (floating-point operations, seconds) of square
    matmuls, ascending. bytes_per_s: read and written by element-wise operations on large tensors.
    call_s: of an operation on one element, a third of its forward and backward; of a host, of an
    operation of a block without much to compute. memory_bytes: of
    the device, or of the host. activation_s: of a host, for a number of a GELU, there and back.
    attention_s: of a host, for an operation of causal attention, there and back.
    """

    name: str
    num_ranks: int = Field(ge=1)
    matmuls: dict[str, tuple[tuple[float, float], ...]]
    bytes_per_s: float = Field(gt=0)
    call_s: float = Field(gt=0)
    memory_bytes: float = Field(gt=0)
    activation_s: tuple[PositiveFloat, PositiveFloat] | None = None
    attention_s: tuple[PositiveFloat, PositiveFloat] | None = None

    @field_validator("matmuls")
    @classmethod
    def _positive(
        cls, matmuls: dict[str, tuple[tuple[float, float], ...]]
    ) -> dict[str, tuple[tuple[float, float], ...]]:
        if not matmuls or any(not x or min(map(min, x)) <= 0 for x in matmuls.values()):
            raise ValueError("every type needs operations and seconds above zero")
        if not matmuls.keys() & {"float32", "bfloat16"}:
            raise ValueError("needs matmuls of float32 or bfloat16")
        return matmuls


def slowest(devices: Sequence[MeasuredDevice]) -> MeasuredDevice:
    """Return the longest times that any of these ranks measured, at the sizes that all have; a rank
    skips sizes that would take it too long."""
    first = devices[0]
    matmuls = {
        dtype: tuple(
            (sizes[0][0], max(seconds for _, seconds in sizes))
            for sizes in zip(*(x.matmuls[dtype] for x in devices), strict=False)
        )
        for dtype in first.matmuls
    }
    return first.model_copy(
        update={
            "matmuls": matmuls,
            "bytes_per_s": min(x.bytes_per_s for x in devices),
            "call_s": max(x.call_s for x in devices),
            "activation_s": _longest([x.activation_s for x in devices]),
            "attention_s": _longest([x.attention_s for x in devices]),
        }
    )


def _longest(times: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    measured = [pair for pair in times if pair is not None]
    return (max(x for x, _ in measured), max(x for _, x in measured)) if measured else None


class Profile(_Measured):
    """A cluster profile. by: user and host. hosts: each once. lines: latency and bus bandwidth by
    axis and link. device: None in files of earlier versions, which have only links.
    """

    format: Literal["torchdistpackage cluster profile"]
    version: Literal[1]
    date: str
    by: str
    backend: str
    hosts: tuple[str, ...]
    topology: tuple[tuple[str, int], ...]
    lines: tuple[CostModel, ...]
    device: MeasuredDevice | None = None

    @field_serializer("lines")
    def _flat(self, lines: tuple[CostModel, ...]) -> list[dict[str, object]]:
        return [x.model_dump(exclude={"fit"}) | x.fit.model_dump(by_alias=True) for x in lines]

    def line(
        self, axis: str, link: str, operation: str, dtype: str, num_ranks: int
    ) -> CostModel | None:
        """Return the nearest measured line; None if this operation was not measured over such a
        link.

        The same axis is preferred, then all its groups at once, the element type (else a floating
        one), and the closest ratio of numbers of ranks.
        """
        return min(
            (x for x in self.lines if (x.link, x.operation) == (link, operation)),
            key=lambda x: (
                x.axis != axis,
                x.mode != CONCURRENT,
                x.dtype != dtype,
                "int" in x.dtype,
                abs(math.log(x.num_ranks / num_ranks)),
            ),
            default=None,
        )


def dumps(profile: Profile) -> str:
    """Return the text of the file."""
    absent = {"device"} if profile.device is None else None
    return json.dumps(profile.model_dump(exclude=absent), indent=1) + "\n"


def read(path: Path) -> Profile:
    """Return the profile in a file that `tdp comm bench --profile` wrote.

    Raises:
        ConfigError: it cannot be read, is damaged, or is something else.
    """
    try:
        return Profile.model_validate_json(read_regular(path, _MAX_BYTES))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name a profile") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part != "fit")
        given_value = "" if first["type"] == "missing" else f", got {reprlib.repr(first['input'])}"
        raise ConfigError(
            f"{path} is not a {FORMAT} of version {VERSION}, or a damaged one: "
            f"{key + ': ' if key else ''}{first['msg']}{given_value}; measure one with tdp comm "
            "bench --profile FILE"
        ) from error
