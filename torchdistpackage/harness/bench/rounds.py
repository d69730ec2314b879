"""Who talks at the same time: the rounds of a measurement, as data. No torch.

One rule: within a round no rank is in two units. A *unit* is the ranks that take part in one call:
a group for a collective, two neighbours for a message. Between rounds all ranks meet.
"""

import itertools
from collections.abc import Iterable, Sequence

Participants = tuple[int, ...]
Round = tuple[Participants, ...]

NODE, NETWORK = "node", "network"
"""What carries a unit's data: one host's own means, or the network between hosts."""


def link_of(unit: Participants, hosts: Sequence[str]) -> str:
    """NODE if all ranks are on one host, else NETWORK; `hosts` by rank."""
    return NODE if len({hosts[rank] for rank in unit}) == 1 else NETWORK


def units_of(groups: Iterable[Sequence[int]], is_message: bool) -> list[Participants]:
    """The groups of more than one rank, or the neighbours in them: (0, 1), (1, 2), ..."""
    found: list[Participants] = []
    for ranks in map(tuple, groups):
        if is_message:
            found += itertools.pairwise(ranks)
        elif len(ranks) > 1:
            found.append(ranks)
    return found


def one_by_one(units: Sequence[Participants], hosts: Sequence[str], limit: int) -> list[Round]:
    """Rounds of one unit: up to `limit` of each link, spread over those there are."""
    chosen: list[Participants] = []
    for link in (NODE, NETWORK):
        same = [unit for unit in units if link_of(unit, hosts) == link]
        number = min(limit, len(same))
        chosen += [same[i * len(same) // number] for i in range(number)]
    return [(unit,) for unit in chosen]


def all_at_once(units: Sequence[Participants]) -> list[Round]:
    """As few rounds as a greedy choice gives: one for groups, two for neighbours along a line."""
    rounds: list[list[Participants]] = []
    busy: list[set[int]] = []
    for unit in units:
        for members, ranks in zip(rounds, busy, strict=True):
            if ranks.isdisjoint(unit):
                members.append(unit)
                ranks.update(unit)
                break
        else:
            rounds.append([unit])
            busy.append(set(unit))
    return [tuple(members) for members in rounds]


def tournament(num_ranks: int) -> list[Round]:
    """Rounds in which every rank meets every other one exactly once.

    The circle method: rank 0 sits still, the others move on by one seat a round and play the seat
    opposite; with an odd number one of them pauses. num_ranks - 1 rounds, or num_ranks if odd.
    """
    seats = list(range(num_ranks)) + ([-1] if num_ranks % 2 else [])
    rounds: list[Round] = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append(tuple((min(p), max(p)) for p in pairs if -1 not in p))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds
