"""Slurm's variables: lists of hosts, tasks of a step, and what a job may inherit.

Of its host-list grammar, `rack[1-2]n[01-03],login`, the answer equals that of `scontrol show
hostnames`, order included, or there is no answer. `tests/environment/hostlist_corpus.json` holds
scontrol's answers. Refused here, although scontrol guesses: brackets without a partner, blanks or
signs inside a bracket, numbers beyond 64 bits, names of more than 255 characters (DNS has no longer
ones) and lists of more than 65,536 hosts (the most that one range may hold).

    list   = host, host, ...           blanks and commas separate; empty places are skipped
    host   = text[ranges]text[ranges]  nothing may follow the last bracket
    ranges = 3,7-9,010-012             the digits of the lower end give the padding

Only srun makes tasks. sbatch and salloc pass on what they find in their caller's environment, so in
a job that was submitted from inside a step that step's variables stand next to the new job's own;
they count only where nothing contradicts them. A job that we submit gets none of them: what another
job, step or launcher said of itself is not handed on, and all else is. The patterns are those of a
shell's `case`, so that a batch script can follow the same rule.
"""

import itertools
import math
import re
import socket
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
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


def node_name(env: Mapping[str, str]) -> str:
    """Return the name by which Slurm knows this node, or the first label of its host name."""
    return env.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def expand(text: str) -> tuple[str, ...]:
    """Return every host of `text` in Slurm's order, duplicates kept; no host gives ().

    `n[08-10]` is n08, n09, n10. With several brackets the last one varies fastest, and among the
    others the first: this is Slurm's order, and the only one that agrees with node numbers.

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
    """Return the first host of `text`: the one with node number 0 in a step's list.

    Raises:
        LaunchError: the list is invalid or names no host.
    """
    hosts = expand(text)
    if not hosts:
        _refuse(text, "it names no host")
    return hosts[0]


def expand_counts(text: str) -> tuple[int, ...]:
    """Return one number per node from Slurm's repeated counts: `3,1(x2)` is (3, 1, 1).

    Raises:
        LaunchError: `text` is not such a list, or stands for more than 65,536 nodes.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        repeat = int(match[2] or 1) if match else 0
        if match is None or not 0 < repeat <= MAX_HOSTS - len(counts):
            raise LaunchError(
                f"task counts {_short(text)}: {_short(part)} is not a count for 1 to {MAX_HOSTS} "
                "nodes; Slurm writes SLURM_STEP_TASKS_PER_NODE like 3,1(x2)"
            )
        counts += [int(match[1])] * repeat
    return tuple(counts)


def _expand_one(text: str, host: str, *, room: int) -> list[str]:
    """Return the hosts of one element; counting them first keeps huge ranges harmless."""
    *pieces, suffix = _BRACKET.split(host)
    if not pieces:
        if room < 1:
            _refuse(text, f"it has more than {MAX_HOSTS} hosts")
        return [host]
    if suffix:
        _refuse(text, f"{_short(suffix)} follows the last bracket of {_short(host)}")
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
    """Return (lowest, highest, width) of each range between two brackets."""
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
    """Return the position after separators."""
    match = _SEPARATORS.match(text, position)
    return match.end() if match else position


def _short(text: str) -> str:
    """Return a text in quotes, shortened if it is long."""
    return repr(text) if len(text) <= 200 else f"{text[:200]!r}... ({len(text)} characters)"


def _refuse(text: str, why: str) -> NoReturn:
    """Raise LaunchError for a host list."""
    raise LaunchError(
        f"host list {_short(text)}: {why}; give a list as Slurm writes it, like n[1-3,07],login"
    )


Env = Mapping[str, str]

KEPT = ("SLURM_CONF",)
"""Variables that point to Slurm's configuration; its commands may need them."""

RANKS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "TORCHELASTIC_*", "TDP_*", "PMI_*", "PMI2_*", "PMIX_*", "OMPI_*",
)  # fmt: skip
"""Variables that make a process believe it is one of many ranks."""

SLURM = ("SLURM_*", "SLURMD_*", "SLURMCTLD_*", "SBATCH_*", "SRUN_*", "SALLOC_*", "SQUEUE_*")
"""Variables that describe a job, and those that set options of Slurm's commands."""

DEVICES = (
    "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
)  # fmt: skip
"""Variables for a job's devices; outside of a job they are the user's own choice."""

# Slurm numbers what is not a srun step from here: batch script, interactive shell, external.
_FIRST_RESERVED_STEP = 0xFFFF_FFF0


def in_step(env: Env) -> bool:
    """Return True if srun started this process; a batch script or an interactive shell is no
    step.
    """
    step = env.get("SLURM_STEP_ID")
    reserved = step is not None and step.isdecimal() and int(step) >= _FIRST_RESERVED_STEP
    return step is not None and not reserved and not is_inherited(env)


def is_inherited(env: Env) -> bool:
    """Return True if the step variables belong to a step from inside which this job was submitted.

    Any of three facts shows it: the list of tasks on this node is not the step's; the step has
    nodes that the job lacks; or this is a batch script submitted from a node of the step.
    """
    counts, node = env.get("SLURM_STEP_TASKS_PER_NODE"), env.get("SLURM_NODEID", "")
    tasks = env.get("SLURM_GTIDS", "").split(",")
    if counts and node.isdecimal() and tasks != [""]:
        per_node = expand_counts(counts)
        if int(node) < len(per_node) and len(tasks) != per_node[int(node)]:
            return True
    step_nodes, job_nodes = env.get("SLURM_STEP_NODELIST"), env.get("SLURM_JOB_NODELIST")
    if not step_nodes or not job_nodes:
        return False
    hosts = set(expand(step_nodes))
    if step_nodes != job_nodes and not hosts <= set(expand(job_nodes)):
        return True
    # srun gives its tasks a umask; from a batch script Slurm takes the variable away. Not proof
    # enough alone, should a site's srun be set to hand on less.
    is_batch = env.get("ENVIRONMENT") == "BATCH" and "SLURM_UMASK" not in env
    return is_batch and env.get("SLURM_SUBMIT_HOST", "").partition(".")[0] in hosts


def hosts_of_ranks(env: Env, counts: Sequence[int], node: int) -> tuple[str, ...]:
    """Return the host of each rank of a step with `counts` tasks per node, or () if unknown.

    It is known for the block distribution, node after node, if the tasks of this `node` agree with
    it.
    """
    hosts = expand(env.get("SLURM_STEP_NODELIST", ""))
    first = sum(counts[:node])
    own_ranks = ",".join(map(str, range(first, first + counts[node])))
    # with one task per node Slurm calls the same thing cyclic
    other = env.get("SLURM_DISTRIBUTION", "block").partition(":")[0] != "block" and max(counts) > 1
    if other or env.get("SLURM_GTIDS") != own_ranks or len(hosts) != len(counts):
        return ()
    return tuple(host for host, count in zip(hosts, counts, strict=True) for _ in range(count))


def scrub_slurm_env(env: Env) -> dict[str, str]:
    """Return the environment for sbatch and Slurm's other commands."""
    in_job = "SLURM_JOB_ID" in env or "SLURM_JOBID" in env
    patterns = (*RANKS, *SLURM, *(DEVICES if in_job else ()))
    return {
        name: value
        for name, value in env.items()
        if name in KEPT or not any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def options_dropped(env: Env) -> tuple[str, ...]:
    """Return the names of variables with which a user may have meant to set options of sbatch.

    Their values may be secret, and notes end up in logs.
    """
    return tuple(name for name in sorted(env) if name.startswith("SBATCH_"))
