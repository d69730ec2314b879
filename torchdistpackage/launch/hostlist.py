"""Slurm's host-list grammar: `rack[1-2]n[01-03],login` to the names it stands for.

The one rule: the answer equals that of `scontrol show hostnames`, order included, or there
is no answer. `tests/launch/hostlist_corpus.json` holds what scontrol said. Refused here,
although scontrol guesses: brackets without a partner, blanks or signs inside a bracket,
numbers beyond 64 bits, names of more than 255 characters (DNS has no longer ones) and lists
of more than 65,536 hosts (the most that one range may hold).

    list   = host, host, ...           blanks and commas separate; empty places are skipped
    host   = text[ranges]text[ranges]  nothing may follow the last bracket
    ranges = 3,7-9,010-012             the digits of the lower end give the padding
"""

import itertools
import math
import re
from typing import NoReturn

from torchdistpackage.errors import LaunchError

MAX_HOSTS = 65_536
MAX_NAME = 255
_MAX_NUMBER = 2**64 - 1

_SEPARATORS = re.compile(r"[, \t\n]*")
_HOST = re.compile(r"(?:[^][, \t\n]+|\[[^][]*\])+")
_BRACKET = re.compile(r"\[([^][]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]*))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand(text: str) -> tuple[str, ...]:
    """Every host of `text` in Slurm's order, duplicates kept; no host gives ().

    `n[08-10]` is n08, n09, n10. With several brackets the last one varies fastest and, of
    those before it, the first: Slurm's order, and the only one in which node numbers agree.

    Raises:
        LaunchError: Slurm calls the list invalid, or it has more than 65,536 hosts.
    """
    hosts: list[str] = []
    position = _skip(text, 0)
    while position < len(text):
        match = _HOST.match(text, position)
        end = match.end() if match else position
        if match is None or text[end : end + 1] in ("[", "]"):
            _refuse(text, f"the bracket at character {end + 1} has no partner")
        hosts += _expand_one(text, match.group(), room=MAX_HOSTS - len(hosts))
        position = _skip(text, end)
    return tuple(hosts)


def first_host(text: str) -> str:
    """The first host of `text`: the one with node number 0 in a step's list.

    Raises:
        LaunchError: the list is invalid or names no host.
    """
    hosts = expand(text)
    if not hosts:
        _refuse(text, "it names no host")
    return hosts[0]


def expand_counts(text: str) -> tuple[int, ...]:
    """One number per node of Slurm's repeated counts: `3,1(x2)` is (3, 1, 1).

    Raises:
        LaunchError: `text` is not such a list, or stands for more than 65,536 nodes.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        repeat = int(match[2] or 1) if match else 0
        if match is None or not 0 < repeat <= MAX_HOSTS - len(counts):
            raise LaunchError(
                f"task counts {_short(text)}: {_short(part)} is no count for 1 to {MAX_HOSTS} "
                f"nodes; Slurm writes SLURM_STEP_TASKS_PER_NODE like 3,1(x2)"
            )
        counts += [int(match[1])] * repeat
    return tuple(counts)


def _expand_one(text: str, host: str, *, room: int) -> list[str]:
    """The hosts of one element; counted before any is built, so that size cannot hurt."""
    *pieces, rest = _BRACKET.split(host)
    if not pieces:
        if room < 1:
            _refuse(text, f"it has more than {MAX_HOSTS} hosts")
        return [host]
    if rest:
        _refuse(text, f"{_short(rest)} follows the last bracket of {_short(host)}")
    prefixes = pieces[0::2]
    brackets = [_ranges(text, inside) for inside in pieces[1::2]]
    widths = [max(width for _, _, width in ranges) for ranges in brackets]
    if sum(map(len, prefixes)) + sum(widths) > MAX_NAME:
        _refuse(text, f"it has host names of more than {MAX_NAME} characters")
    size = math.prod(sum(hi - lo + 1 for lo, hi, _ in ranges) for ranges in brackets)
    if size > room:
        _refuse(text, f"it has more than {MAX_HOSTS} hosts")

    numbers = [
        [str(n).zfill(width) for lo, hi, width in ranges for n in range(lo, hi + 1)]
        for ranges in brackets
    ]
    *leading, last = numbers
    return [
        "".join(itertools.chain(*zip(prefixes, (*reversed(slow_first), fastest), strict=True)))
        for *slow_first, fastest in itertools.product(*reversed(leading), last)
    ]


def _ranges(text: str, inside: str) -> list[tuple[int, int, int]]:
    """(lowest, highest, width) of each range between two brackets."""
    ranges: list[tuple[int, int, int]] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            _refuse(text, f"{_short(part)} between brackets is not a number or a range")
        first, last = match[1], match[2] or match[1]
        if max(len(first), len(last)) > MAX_NAME:
            _refuse(text, f"a number has more than the {MAX_NAME} characters of a host name")
        lo, hi = int(first), int(last)
        if lo > hi:
            _refuse(text, f"the range {part} runs backwards")
        if hi > _MAX_NUMBER:
            _refuse(text, f"{hi} is above {_MAX_NUMBER}")
        ranges.append((lo, hi, len(first)))
    return ranges


def _skip(text: str, position: int) -> int:
    match = _SEPARATORS.match(text, position)
    return match.end() if match else position


def _short(text: str) -> str:
    return repr(text) if len(text) <= 200 else f"{text[:200]!r}... ({len(text)} characters)"


def _refuse(text: str, why: str) -> NoReturn:
    raise LaunchError(
        f"host list {_short(text)}: {why}; give a list as Slurm writes it, like n[1-3,07],login"
    )
