"""From what each rank saw of a test to what all are told. No torch.

One rule: a rank that waits is a witness and not the culprit. Blamed is who did not come, else who
failed, else a connection that all came to and that delivered nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from torchdistpackage.errors import CommError

HostOf = Callable[[int], str]
"""The host of a rank, "" where it is not known."""

_SHOWN = 8
_DIFFERENT = "give all ranks the same CONFIG or --axes, so that they set up the same groups"
_DAMAGED = (
    "exclude the hosts that got other data, or those that sent it; `tdp comm bench --pairs` shows "
    "which links are bad"
)


class CommTestError(CommError):
    """What `test_comm` found, told alike on all ranks.

    speaker: the lowest rank that came, for those who want to print it once; None: each knows only
    what itself saw.
    """

    def __init__(self, text: str, speaker: int | None = None) -> None:
        super().__init__(text)
        self.speaker = speaker


@dataclass(frozen=True, slots=True)
class StuckAt:
    """Where a rank could not go on.

    step: its number, the same on all ranks. what: operation and group. ranks: who takes part.
    error: what the backend said; "": the rank still waited when its time was up.
    """

    step: int
    what: str
    ranks: tuple[int, ...]
    error: str = ""


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's test: what was wrong, where it ended early, and the seconds of each group."""

    wrong: tuple[str, ...] = ()
    stop: StuckAt | None = None
    times_s: tuple[float, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RankReport:
        """Back from `to_json`."""
        fields = json.loads(text)
        stop = fields["stop"]
        if stop is not None:
            stop = StuckAt(stop["step"], stop["what"], tuple(stop["ranks"]), stop["error"])
        return RankReport(tuple(fields["wrong"]), stop, tuple(fields["times_s"]))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks are told. times_s: of each group, the slowest rank's. advice: what to do."""

    problems: tuple[str, ...] = ()
    speaker: int = 0
    times_s: tuple[float, ...] = field(default=())
    advice: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Verdict:
        """Back from `to_json`."""
        fields = json.loads(text)
        return Verdict(
            tuple(fields["problems"]),
            fields["speaker"],
            tuple(fields["times_s"]),
            tuple(fields["advice"]),
        )

    def raise_problems(self) -> None:
        """Raises CommTestError if there are any."""
        if self.problems:
            many = "1 check" if len(self.problems) == 1 else f"{len(self.problems)} checks"
            shown = "\n  ".join(self.problems[:_SHOWN])
            left_out = len(self.problems) - _SHOWN
            more = f"\n  and {left_out} more" if left_out > 0 else ""
            raise CommTestError(
                "\n".join([f"{many} failed:\n  {shown}{more}", *self.advice]), self.speaker
            )


def check_attendance(
    texts: dict[int, str], host_of: HostOf, *, world_size: int, limit_s: float
) -> Verdict:
    """All must have come, with the same plan and with groups of the right members.

    texts: of those who came, as `attendance_json` writes them.
    """
    rolls = {rank: json.loads(text) for rank, text in texts.items()}
    problems = [text for _, roll in sorted(rolls.items()) for text in roll["wrong"]]
    advice = [_DIFFERENT] if problems else []
    if absent := sorted(set(range(world_size)) - set(rolls)):
        problems.append(
            f"the roll call over the global group of {world_size} ranks: "
            f"{named(absent, host_of)} did not come within {limit_s:g} s; "
            f"{named(sorted(rolls), host_of)} came"
        )
        advice.append(_look_for(absent, host_of))
    by_plan: dict[str, list[int]] = {}
    for rank, roll in sorted(rolls.items()):
        by_plan.setdefault(roll["plan"], []).append(rank)
    if len(by_plan) > 1:
        sides = "; ".join(f"{named(ranks, host_of)}: {plan}" for plan, ranks in by_plan.items())
        problems.append(f"the ranks are set up for different groups: {sides}")
        advice = list(dict.fromkeys([_DIFFERENT, *advice]))
    return Verdict(tuple(problems), min(rolls), advice=tuple(advice))


def attendance_json(plan: str, wrong: Sequence[str]) -> str:
    """What a rank brings to the roll call: what it is going to test, and what it saw is wrong."""
    return json.dumps({"plan": plan, "wrong": list(wrong)})


def judge(
    reports: dict[int, RankReport], host_of: HostOf, *, world_size: int, limit_s: float
) -> Verdict:
    """Who is to blame, if something is."""
    absent = sorted(set(range(world_size)) - set(reports))
    stops = {rank: r.stop for rank, r in sorted(reports.items()) if r.stop is not None}
    problems = _absences(absent, stops, host_of, limit_s)
    advice = [_look_for(absent, host_of)] if absent else []
    if not absent:
        failed = {rank: stop for rank, stop in stops.items() if stop.error}
        problems += [
            f"{stop.what}: {named([rank], host_of)} failed: {stop.error}"
            for rank, stop in failed.items()
        ]
        advice += [_look_at(list(failed), host_of)] if failed else []
        problems += [] if failed else _silences(stops, host_of, limit_s)
    wrong = [text for _, report in sorted(reports.items()) for text in report.wrong]
    problems += wrong
    advice += [_DAMAGED] if wrong else []
    times = [report.times_s for report in reports.values()]
    slowest = tuple(map(max, zip(*times, strict=True))) if not problems else ()
    return Verdict(tuple(problems), min(reports), slowest, tuple(advice))


def named(ranks: Sequence[int], host_of: HostOf) -> str:
    """`rank 3 on node17`, or `ranks 0, 1 on node17, 2 on node18`."""
    by_host: dict[str, list[str]] = {}
    for rank in ranks[:_SHOWN]:
        by_host.setdefault(host_of(rank), []).append(str(rank))
    shown = ", ".join(
        ", ".join(who) + (f" on {host}" if host else "") for host, who in by_host.items()
    )
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _look_at(ranks: Sequence[int], host_of: HostOf) -> str:
    one = len(ranks) == 1
    return f"look at the {'log' if one else 'logs'} of {named(ranks, host_of)}, and at the host"


def _look_for(ranks: Sequence[int], host_of: HostOf) -> str:
    return f"{_look_at(ranks, host_of)}; if it is only slow, allow more with --timeout"


def _absences(
    absent: Sequence[int], stops: dict[int, StuckAt], host_of: HostOf, limit_s: float
) -> list[str]:
    """One line for each operation that somebody did not come through, of those that waited."""
    lines: list[str] = []
    left = set(absent)
    for stop in sorted(stops.values(), key=lambda stop: stop.step):
        if missed := sorted(left & set(stop.ranks)):
            left -= set(missed)
            waiting = [r for r, other in stops.items() if other.what == stop.what]
            told = next((stops[r].error for r in waiting if stops[r].error), "")
            lines.append(
                f"{stop.what}: {named(missed, host_of)} did not come within {limit_s:g} s; "
                f"{named(waiting, host_of)} waited" + (f", and were told: {told}" if told else "")
            )
    if left:
        lines.append(
            f"the end of the test: {named(sorted(left), host_of)} did not come within {limit_s:g} s"
        )
    return lines


def _silences(stops: dict[int, StuckAt], host_of: HostOf, limit_s: float) -> list[str]:
    """All came to the test, and yet some wait: the first operation of those that did not end."""
    if not stops:
        return []
    first = min(stop.step for stop in stops.values())
    lines: dict[str, list[int]] = {}
    for rank, stop in stops.items():
        if stop.step == first:
            lines.setdefault(stop.what, []).append(rank)
    return [
        f"{what}: did not end within {limit_s:g} s on {named(ranks, host_of)}, although all ranks "
        f"run; see whether these hosts reach each other"
        for what, ranks in lines.items()
    ]
