"""The report of a hang, from what the ranks left: who is to blame, who waits for whom. No torch.

One rule: the first lines name the culprits, and each line below says in the user's words what one
rank, or many alike, wait for. See diagnosis.py for how they are found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchdistpackage.harness.hang.diagnosis import Cause, Hang, Suspect
from torchdistpackage.harness.hang.dump import Dump
from torchdistpackage.harness.hang.flights import lines
from torchdistpackage.harness.hang.waits import (
    SHOWN,
    RankWait,
    called,
    exactly,
    format_call,
    ranks_listed,
)
from torchdistpackage.launch.failure import Failure, FailureKind
from torchdistpackage.topology.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The culprits, the first one to blame first; `text` is the report."""

    suspects: tuple[Suspect, ...]
    text: str

    def failure(self, time_s: float) -> Failure:
        """The first culprit's, for a supervisor. time_s: of the alarm."""
        first = self.suspects[0]
        return Failure(
            first.rank, first.host, first.pid, time_s, FailureKind.HUNG, 1, first.what, self.text
        )


def diagnose(
    world_size: int,
    dumps: Mapping[int, Dump],
    stacks: Mapping[int, str] | None = None,
    *,
    mesh: Mesh | None = None,
    noted: Mapping[int, str] | None = None,
) -> Diagnosis:
    """The culprits of a hang and the report; see `Hang` for the arguments."""
    hang = Hang(world_size, dumps, stacks or {}, mesh, noted or {})
    culprits = hang.suspects()
    parts = [
        _heads(hang, culprits),
        *_details(culprits),
        _waiting(hang),
        _others(hang),
        _devices(hang),
        _stacks(hang, culprits),
    ]
    return Diagnosis(culprits, "\n".join(part for part in parts if part))


def _heads(hang: Hang, culprits: Sequence[Suspect]) -> str:
    blamed = _blamed(culprits)
    lines = [f"{hang.describe_rank(c.rank)} {c.what}" for c in blamed[:SHOWN]]
    if len(blamed) > SHOWN:
        lines.append(f"and {ranks_listed([c.rank for c in blamed[SHOWN:]])} as well")
    if followed := [c.rank for c in culprits if c not in blamed]:
        lines.append(f"then {ranks_listed(followed)} raised what the loss of a peer brings about")
    longest = max(hang.dumps.values(), key=lambda dump: dump.over_s, default=None)
    parts = ["hang: " + "\n      ".join(lines)]
    if longest is not None and longest.over_s > longest.limit_s:
        taken_s, limit_s = longest.over_s, longest.limit_s
        parts.append(f"the longest step has taken {taken_s:.1f} s, and may take {limit_s:g} s")
    return "\n".join(parts)


def _blamed(culprits: Sequence[Suspect]) -> Sequence[Suspect]:
    """Without those that failed because others had; if there is nobody else, the first of them."""
    return [c for c in culprits if c.cause is not Cause.FOLLOWED] or culprits[:1]


def _details(culprits: Sequence[Suspect]) -> list[str]:
    shown = _blamed(culprits)[:SHOWN]
    return [f"rank {c.rank}:\n{_indented(c.detail)}" for c in shown if c.detail]


def _waiting(hang: Hang) -> str:
    """Who waits for whom; those that say the same in one line."""
    alike: dict[tuple[object, ...], list[RankWait]] = {}
    for wait in hang.waits:
        call, own = wait.call, wait.rank if wait.call.peer is not None or wait.other else -1
        key = (own, call.group, call.operation, call.sequence, wait.behind)
        alike.setdefault(key, []).append(wait)
    lines: list[str] = []
    for first, *more in alike.values():
        lines.append(
            f"  {hang.who(first.rank)} waits in {format_call(first.call)}{_for_whom(hang, first)}"
        )
        lines.append(f"    (rank {first.rank}: {exactly(first.call)})")
        if more:
            do = "do" if len(more) > 1 else "does"
            lines.append(f"    so {do} {ranks_listed([wait.rank for wait in more])}")
    return "\n".join(["who waits for whom:", *lines]) if lines else ""


def _for_whom(hang: Hang, wait: RankWait) -> str:
    if not wait.behind:
        return ", in which all others have been"
    role = {"receive": "its sender ", "send": "its receiver "}.get(wait.call.operation, "")
    if wait.disagrees and wait.other is not None:
        return f"; there {role}{hang.who(wait.behind[0])} is in {called(wait.other)}"
    waiting = {other.rank for other in hang.waits}
    issued_by = dict(zip(wait.behind, wait.issued or [-1] * len(wait.behind), strict=True))
    behind = sorted(wait.behind, key=lambda rank: rank in waiting)
    said: list[str] = []
    for rank in behind[:SHOWN]:
        issued = issued_by[rank]
        count = f", which has issued {issued}," if issued >= 0 and not role else ""
        said.append(f"{role}{hang.who(rank)}{count} {hang.doing(rank)}")
    if len(wait.behind) > SHOWN:
        said.append(f"and {ranks_listed(behind[SHOWN:])}")
    return "; " + "; ".join(said)


def _others(hang: Hang) -> str:
    """Ranks that neither wait nor are waited for."""
    waiting = {wait.rank for wait in hang.waits}
    left = [r for r in sorted(hang.answered) if r not in waiting and r not in hang.blocked_by]
    said: dict[str, list[int]] = {}
    for rank in left:
        said.setdefault(hang.doing(rank), []).append(rank)
    lines = [f"  {hang.describe_rank(r)} {what}" for what, (r, *_) in said.items()]
    return "\n".join(["not in it:", *lines]) if lines and hang.waits else ""


def _devices(hang: Hang) -> str:
    """Calls that devices have not ended, where there is a recorder."""
    said = lines(hang.flights, SHOWN)
    return "\n".join(["on the devices:", *(f"  {line}" for line in said)]) if said else ""


def _stacks(hang: Hang, culprits: Sequence[Suspect]) -> str:
    """Of all ranks that answered and are not above, equal ones once."""
    alike: dict[tuple[str, ...], list[int]] = {}
    blamed = _blamed(culprits)
    above = {c.rank for c in blamed[:SHOWN] if (c.detail,) == hang.stacks_of(c.rank)}
    for rank in sorted(hang.answered - above):
        alike.setdefault(hang.stacks_of(rank), []).append(rank)
    for culprit in culprits:
        if culprit not in blamed:
            alike.setdefault((culprit.detail,), []).append(culprit.rank)
    parts = [
        f"  {ranks_listed(ranks)}:\n{_indented(_joined(stacks), 4)}"
        for stacks, ranks in alike.items()
    ]
    return "\n".join(["stacks:", *parts]) if parts else ""


def _indented(text: str, by: int = 2) -> str:
    return "\n".join(" " * by + line for line in text.rstrip().splitlines())


def _joined(stacks: Sequence[str]) -> str:
    return "\n".join(stack.rstrip() for stack in stacks)
