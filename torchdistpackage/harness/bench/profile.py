"""The stored profile of a cluster: what its links take, by operation, for planning. No torch.

One rule: it says who measured what, when and on how many ranks, and answers for a link only where
that link was measured. A file that is not whole, or not ours, is refused.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar, cast

from torchdistpackage.bounded import parse_json, read_regular
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench.fit import LinkFit
from torchdistpackage.harness.bench.report import CONCURRENT, BenchReport, CostModel
from torchdistpackage.harness.bench.request import NETWORK, NODE
from torchdistpackage.harness.operations import COLLECTIVES

_MAX_BYTES = 1 << 24
FORMAT, VERSION = "torchdistpackage cluster profile", 1


@dataclass(frozen=True, slots=True)
class Profile:
    """by: user and host. hosts: each once. lines: latency and bus bandwidth by axis and link."""

    date: str
    by: str
    backend: str
    hosts: tuple[str, ...]
    topology: tuple[tuple[str, int], ...]
    lines: tuple[CostModel, ...]

    def line(
        self, axis: str, link: str, operation: str, dtype: str, num_ranks: int
    ) -> CostModel | None:
        """The nearest that was measured; None where such a link was not, with this operation.

        The same axis goes first, then all its groups at once, the element type (else a floating
        one), and the number of ranks, by its ratio.
        """
        fitting = [x for x in self.lines if (x.link, x.operation) == (link, operation)]
        if not fitting:
            return None
        return min(
            fitting,
            key=lambda x: (
                x.axis != axis,
                x.mode != CONCURRENT,
                x.dtype != dtype,
                "int" in x.dtype,
                abs(math.log(x.num_ranks / num_ranks)),
            ),
        )


def profile_of(report: BenchReport) -> Profile:
    """What a bench says about the cluster.

    Raises:
        ConfigError: it says nothing; it needs two sizes or more.
    """
    if not report.lines:
        raise ConfigError(
            "a profile needs times at two sizes or more for a line through them, and no operation "
            "has them; give a range, e.g. --sizes 1KiB:4MiB:x4, and more than one rank"
        )
    hosts = tuple(dict.fromkeys(report.hosts))
    return Profile(report.date, report.by, report.backend, hosts, report.topology, report.lines)


def dumps(profile: Profile) -> str:
    """The text of the file."""
    lines = [
        {k: v for k, v in asdict(x).items() if k != "fit"}
        | {
            "latency_s": x.fit.latency_s,
            "bus_bytes_per_s": x.fit.bytes_per_s,
            "deviation": x.fit.deviation,
        }
        for x in profile.lines
    ]
    head = {"format": FORMAT, "version": VERSION}
    return json.dumps(head | asdict(profile) | {"lines": lines}, indent=1) + "\n"


def read(path: Path) -> Profile:
    """The profile in a file that `tdp comm bench --profile` wrote.

    Raises:
        ConfigError: it cannot be read, is damaged, or is something else.
    """
    try:
        found = parse_json(read_regular(path, _MAX_BYTES).decode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name a profile") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no profile, or a damaged one: {error}; {_AGAIN}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"{path} is not a {FORMAT}; {_AGAIN}")
    if found.get("version") != VERSION:
        raise ConfigError(
            f"{path} is a {FORMAT} of version {found.get('version')}, and this package reads "
            f"version {VERSION}; {_AGAIN}"
        )
    try:
        return _profile(cast(dict[str, object], found))
    except (KeyError, TypeError, ValueError) as error:
        why = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} is a damaged {FORMAT}: {why}; {_AGAIN}") from error


T = TypeVar("T")
_AGAIN = "measure one with tdp comm bench --profile FILE"


def _profile(found: dict[str, object]) -> Profile:
    topology = [(_as(str, name), _as(int, size)) for name, size in _as(list, found["topology"])]
    return Profile(
        _as(str, found["date"]),
        _as(str, found["by"]),
        _as(str, found["backend"]),
        tuple(_as(str, host) for host in _as(list, found["hosts"])),
        tuple(topology),
        tuple(_line(_as(dict, line)) for line in _as(list, found["lines"])),
    )


def _line(found: dict[str, object]) -> CostModel:
    link, operation = found["link"], found["operation"]
    if link not in (NODE, NETWORK) or operation not in COLLECTIVES:
        raise ValueError(f"a line of {operation!r} over {link!r}")
    rate, deviation = found["bus_bytes_per_s"], found["deviation"]
    return CostModel(
        _as(str, found["axis"]),
        _as(str, link),
        _as(str, operation),
        _as(str, found["mode"]),
        _as(str, found["dtype"]),
        int(_number(found, "num_ranks", lambda x: x >= 1)),
        _number(found, "largest_bytes", lambda x: x > 0),
        LinkFit(
            _number(found, "latency_s", lambda x: x >= 0),
            None if rate is None else _number(found, "bus_bytes_per_s", lambda x: x > 0),
            None if deviation is None else _number(found, "deviation", lambda x: x >= 0),
        ),
    )


def _number(found: dict[str, object], name: str, fits: Callable[[float], bool]) -> float:
    value = found[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not fits(value):
        raise ValueError(f"{name} is {value!r}")
    return float(value)


def _as(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is where a {kind.__name__} belongs")
    return value
