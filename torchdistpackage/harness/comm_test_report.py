"""Combine the ranks' observations of a test into one verdict. No torch.

A rank that waits is a witness, not the culprit. The verdict blames the rank that did not come, else
the rank that failed, else a connection that delivered nothing although all ranks came.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import TypeAdapter

from torchdistpackage.errors import CommError

HostOf = Callable[[int], str]
"""Maps a rank to its host, or "" if unknown."""

_SHOWN = 8
_DIFFERENT = "give all ranks the same CONFIG or --axes, so that they set up the same groups"
_DAMAGED = (
    "exclude the hosts that got other data, or those that sent it; `tdp comm bench --pairs` shows "
    "which links are bad"
)


class CommTestError(CommError):
    """The findings of `test_comm`, equal on all ranks.

    speaker: the lowest rank that came, to print it once; None: each rank knows only what it saw.
    """

    def __init__(self, text: str, speaker: int | None = None) -> None:
        super().__init__(text)
        self.speaker = speaker


class _JsonText:
    """Base class of dataclasses that travel as text."""

    __slots__ = ()

    def to_json(self) -> str:
        return TypeAdapter(type(self)).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the object that `to_json` wrote."""
        return TypeAdapter(cls).validate_json(text)


@dataclass(frozen=True, slots=True)
class StuckAt:
    """The operation in which a rank got stuck.

    step: its number, the same on all ranks. what: operation and group. ranks: members of the group.
    error: message of the back end; "": the rank was still waiting at its timeout.
    """

    step: int
    what: str
    ranks: tuple[int, ...]
    error: str = ""


@dataclass(frozen=True, slots=True)
class RankReport(_JsonText):
    """One rank's test: its problems, where it ended early, and the seconds of each group.

    plan: before a test, what the rank is going to test.
    """

    wrong: tuple[str, ...] = ()
    stop: StuckAt | None = None
    times_s: tuple[float, ...] = ()
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Verdict(_JsonText):
    """The result of the test, the same on all ranks.

    times_s: time of the slowest rank of each group. advice: what to do.
    """

    problems: tuple[str, ...] = ()
    speaker: int = 0
    times_s: tuple[float, ...] = ()
    advice: tuple[str, ...] = ()

    def raise_problems(self, title: str = "") -> None:
        """Raise CommTestError if there are problems; title: text in place of their number."""
        if self.problems:
            number = len(self.problems)
            title = title or ("1 check failed" if number == 1 else f"{number} checks failed")
            lines = [f"{title}:", *(f"  {text}" for text in self.problems[:_SHOWN])]
            lines += [f"  and {number - _SHOWN} more"] if number > _SHOWN else []
            raise CommTestError("\n".join([*lines, *self.advice]), self.speaker)


def judge(
    reports: dict[int, RankReport],
    host_of: HostOf,
    *,
    world_size: int,
    limit_s: float,
    meeting: str,
) -> Verdict:
    """Return which ranks or hosts are to blame, if any."""
    absent = sorted(set(range(world_size)) - set(reports))
    stops = {rank: r.stop for rank, r in sorted(reports.items()) if r.stop is not None}
    failed = [rank for rank, stop in stops.items() if stop.error]
    if absent:
        problems = _absences(absent, stops, host_of, limit_s, meeting, sorted(reports))
        advice = [f"{_look_at(absent, host_of)}; if it is only slow, allow more with --timeout"]
    elif failed:
        problems = [
            f"{stops[r].what}: {named([r], host_of)} failed: {stops[r].error}" for r in failed
        ]
        advice = [_look_at(failed, host_of)]
    else:
        problems, advice = _silences(stops, host_of, limit_s), []
    plans: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        plans.setdefault(report.plan, []).append(rank)
    if len(plans) > 1:
        sides = "; ".join(f"{named(ranks, host_of)}: {plan}" for plan, ranks in plans.items())
        problems.append(f"the ranks are set up for different groups: {sides}")
    wrong = [text for _, report in sorted(reports.items()) for text in report.wrong]
    if wrong or len(plans) > 1:
        advice.insert(0, _DIFFERENT if any(plans) else _DAMAGED)
    times = [report.times_s for report in reports.values()]
    slowest = tuple(map(max, zip(*times, strict=True))) if not problems + wrong else ()
    return Verdict((*problems, *wrong), min(reports), slowest, tuple(advice))


def named(ranks: Sequence[int], host_of: HostOf) -> str:
    """Return `rank 3 on node17`, or `ranks 0, 1 on node17, 2 on node18`."""
    by_host: dict[str, list[str]] = {}
    for rank in ranks[:_SHOWN]:
        by_host.setdefault(host_of(rank), []).append(str(rank))
    shown = ", ".join(
        ", ".join(on_it) + (f" on {host}" if host else "") for host, on_it in by_host.items()
    )
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _look_at(ranks: Sequence[int], host_of: HostOf) -> str:
    logs = "log" if len(ranks) == 1 else "logs"
    return f"look at the {logs} of {named(ranks, host_of)}, and at the host"


def _absences(
    absent: Sequence[int],
    stops: dict[int, StuckAt],
    host_of: HostOf,
    limit_s: float,
    meeting: str,
    present: Sequence[int],
) -> list[str]:
    """Return one line for each operation in which some ranks waited and others did not come."""
    lines: list[str] = []
    missing = set(absent)
    for stop in sorted(stops.values(), key=lambda stop: stop.step):
        if missed := sorted(missing & set(stop.ranks)):
            missing -= set(missed)
            waiting = [r for r, other in stops.items() if other.what == stop.what]
            error = next((stops[r].error for r in waiting if stops[r].error), "")
            lines.append(
                f"{stop.what}: {named(missed, host_of)} did not come within {limit_s:g} s; "
                f"{named(waiting, host_of)} waited"
                + (f", with the error: {error}" if error else "")
            )
    if missing:
        lines.append(
            f"{meeting}: {named(sorted(missing), host_of)} did not come within {limit_s:g} s; "
            f"{named(present, host_of)} came"
        )
    return lines


def _silences(stops: dict[int, StuckAt], host_of: HostOf, limit_s: float) -> list[str]:
    """Describe ranks that wait although all came to the test, by the first operation that did not
    end.
    """
    first = min((stop.step for stop in stops.values()), default=0)
    waiting: dict[str, list[int]] = {}
    for rank, stop in stops.items():
        if stop.step == first:
            waiting.setdefault(stop.what, []).append(rank)
    return [
        f"{operation}: did not end within {limit_s:g} s on {named(ranks, host_of)}, although all "
        "ranks run; see whether these hosts reach each other"
        for operation, ranks in waiting.items()
    ]
