"""Find collectives that devices have not finished, from NCCL's flight recorder. No torch.

Calls of two groups need one order on all ranks that are in both, because a kernel stays on its
device until it has met all others. Two calls in different orders on two ranks may wait for ever.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from torchdistpackage.harness.hang.waits import grouped
from torchdistpackage.text import ranks_listed

KEPT = 32
"""Largest number of a rank's calls that are kept; later calls wait for them."""


@dataclass(frozen=True, slots=True)
class InFlightCall:
    """A call that has been issued. sequence: among the group's collectives, or its messages.

    state: scheduled if the device has not begun it, or does not tell.
    """

    operation: str
    group: str
    ranks: tuple[int, ...]
    sequence: int
    is_message: bool
    state: str

    @property
    def name(self) -> tuple[object, ...]:
        """A name of the call that is equal on all ranks."""
        return self.ranks, self.group, self.sequence, self.is_message, self.operation

    def __str__(self) -> str:
        """Return `all_reduce number 57 of ranks 0, 2`."""
        return f"{self.operation} number {self.sequence} of {ranks_listed(self.ranks, 'ranks')}"


def of_trace(trace: Mapping[str, Any]) -> tuple[InFlightCall, ...]:
    """Return the first calls in `trace`, the recorder's dump, that have not ended, in order of
    issue.

    KeyError, TypeError, ValueError: `trace` is no such dump.
    """
    groups = trace.get("pg_config", {})
    entries = sorted(trace.get("entries", ()), key=lambda entry: entry.get("record_id", 0))
    unfinished = [entry for entry in entries if entry["state"] != "completed"]
    return tuple(_flight(entry, groups) for entry in unfinished[:KEPT])


def _flight(entry: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> InFlightCall:
    name, described = (*entry["process_group"], "", "")[:2]
    ranks = groups.get(str(name), {}).get("ranks", ())
    if isinstance(ranks, str):
        ranks = json.loads(ranks)
    is_message = bool(entry["is_p2p"])
    return InFlightCall(
        operation=str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
        group=str(name or described),
        ranks=tuple(ranks),
        sequence=int(entry["p2p_seq_id" if is_message else "collective_seq_id"]),
        is_message=is_message,
        state=str(entry["state"]),
    )


def to_json(flights: Iterable[InFlightCall]) -> list[dict[str, Any]]:
    return [{**asdict(flight), "ranks": list(flight.ranks)} for flight in flights]


def from_json(entries: Iterable[Mapping[str, Any]]) -> tuple[InFlightCall, ...]:
    return tuple(InFlightCall(**{**fields, "ranks": tuple(fields["ranks"])}) for fields in entries)


Flights = Mapping[int, Sequence[InFlightCall]]
"""Unfinished calls by rank."""


@dataclass(frozen=True, slots=True)
class OrderConflict:
    """`one` was issued before `other` on rank `first`, and after it on rank `second`."""

    first: int
    second: int
    one: InFlightCall
    other: InFlightCall


def order_conflict(flights: Flights) -> OrderConflict | None:
    """Return two unfinished calls of different groups that two ranks issued in different orders."""
    seen: dict[tuple[object, object], int] = {}
    for rank, flights_of_rank in flights.items():
        for one, other in combinations(flights_of_rank, 2):
            if one.group == other.group:
                continue
            if (first := seen.get((other.name, one.name))) is not None:
                return OrderConflict(first, rank, other, one)
            seen.setdefault((one.name, other.name), rank)
    return None


def met(flights: Flights) -> InFlightCall | None:
    """Return the first unfinished call that each of its ranks has issued."""
    names = {rank: {flight.name for flight in each} for rank, each in flights.items()}
    for flight in (flight for each in flights.values() for flight in each):
        if flight.ranks and all(flight.name in names.get(rank, ()) for rank in flight.ranks):
            return flight
    return None


def lines(flights: Flights, most: int) -> list[str]:
    """Return lines such as `all_reduce number 57 of ranks 0, 2: started on rank 0, scheduled on
    rank 2`, for the first calls.
    """
    by_name: dict[object, list[tuple[InFlightCall, int]]] = {}
    for rank, flights_of_rank in flights.items():
        for flight in flights_of_rank[:most]:
            by_name.setdefault(flight.name, []).append((flight, rank))
    texts: list[str] = []
    for calls in list(by_name.values())[:most]:
        states = grouped((flight.state, rank) for flight, rank in calls)
        each = (f"{state} on {ranks_listed(ranks)}" for state, ranks in states.items())
        texts.append(f"{calls[0][0]}: {', '.join(each)}")
    return texts + ([f"and {len(by_name) - most} more"] if len(by_name) > most else [])
