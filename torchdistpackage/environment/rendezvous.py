"""Find this process's rank and the meeting point of all ranks in a launcher's variables.

The first launcher of `LAUNCHERS` that recognises its variables answers, completely or with an
error; numbers of two launchers are never mixed. Inner launchers come first: torchrun inside srun
beats Slurm, a step beats its job. A process without a launcher runs alone.

Pure: the environment is an argument, no process is started and nothing is looked up.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchdistpackage.environment.slurm_env import (
    expand_counts,
    first_host,
    hosts_of_ranks,
    in_step,
    is_inherited,
)
from torchdistpackage.errors import LaunchError
from torchdistpackage.topology.mesh import adjacent_on_a_host

Env = Mapping[str, str]

NUM_PORTS = 16
# Below the range from which Linux hands out ports (32768 and up), above the well-known ones.
_FIRST_PORT, _LAST_PORT = 20_000, 29_999
_NUMBER = re.compile(r"[0-9]{1,18}")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rank of one process and the meeting point of all ranks.

    The meeting point is equal on all ranks.

    ports: TCP ports at `address` (rank 0's host) to try in this order; empty where `store`
        serves instead or no one else comes.
    token: equal on the ranks of one start, different between jobs, steps and restarts.
    source: "local", "torchrun", "environment" (variables set by hand), "slurm" or "alone".
    store: path of a file store, if this package's own starter made the processes.
    served: the launcher already serves a store at the port, so rank 0 too joins as a client.
    note: one line worth printing, or "".
    hosts: the host of each rank where the launcher says so, else ().
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    address: str
    ports: tuple[int, ...]
    token: str
    source: str
    store: str | None = None
    served: bool = False
    note: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def ranks_per_node(self) -> int:
        """Largest number of adjacent ranks, aligned to it, that no node boundary cuts."""
        if not self.hosts:
            return self.local_world_size
        return adjacent_on_a_host(self.hosts)

    @property
    def keeps_store(self) -> bool:
        """True if the store lives in this process, which therefore must end last."""
        return self.rank == 0 and not self.served and self.store is None


OWN_DESCRIPTORS = 64
"""Number of open files of a rank besides its connections."""
STORE_CONNECTIONS = 2
"""Connections of each rank to rank 0's store: torch's own and one for objects."""


def store_descriptors(world_size: int) -> int:
    """Return the number of open files that rank 0 needs to serve the store to `world_size`
    ranks.
    """
    return OWN_DESCRIPTORS + STORE_CONNECTIONS * (world_size - 1)


def detect(env: Env) -> Rendezvous:
    """Return this process's rank, from the first launcher whose variables are set.

    Raises:
        LaunchError: a launcher's variables are there in part, are not numbers, or disagree.
    """
    rendezvous = next(answer for launcher in LAUNCHERS if (answer := launcher(env)) is not None)
    if rendezvous.rank < rendezvous.world_size and (
        rendezvous.local_rank < rendezvous.local_world_size <= rendezvous.world_size
    ):
        return rendezvous
    raise LaunchError(
        f"{rendezvous.source} launcher: rank {rendezvous.rank} of {rendezvous.world_size}, "
        f"local rank "
        f"{rendezvous.local_rank} of {rendezvous.local_world_size} cannot be: ranks count from "
        f"0 and a node "
        f"has no more of them than the world; correct these variables, or unset them all"
    )


def candidate_ports(token: str) -> tuple[int, ...]:
    """Return 16 different ports from 20000 to 29999; all holders of `token` try them in this
    order.
    """
    draws = (int(_digest(token, draw), 16) for draw in itertools.count())
    ports: dict[int, None] = {}
    while len(ports) < NUM_PORTS:
        ports[_FIRST_PORT + next(draws) % (_LAST_PORT - _FIRST_PORT + 1)] = None
    return tuple(ports)


def _local(env: Env) -> Rendezvous | None:
    """Return the rendezvous of this package's starter, whose processes meet at a file."""
    if "TDP_STORE" not in env:
        return None
    numbers = _integers(
        env,
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        present="TDP_STORE",
        advice="unset TDP_STORE, which another run left behind",
    )
    return Rendezvous(
        *numbers,
        node=0,
        address="127.0.0.1",
        ports=(),
        token=_digest("local", env["TDP_STORE"]),
        source="local",
        store=env["TDP_STORE"],
    )


def _torchrun(env: Env) -> Rendezvous | None:
    """Return the rendezvous of torchrun, or of the same variables set by hand or by a cluster's
    operator.
    """
    agent = "TORCHELASTIC_RUN_ID" in env
    if not agent:
        # A batch script that exports WORLD_SIZE, or all of Slurm's numbers under torch's
        # names, means the step; Slurm then also knows the node, which the copy leaves out.
        if "RANK" not in env and ("WORLD_SIZE" not in env or in_step(env)):
            return None
        if in_step(env) and (env["RANK"], env.get("WORLD_SIZE")) == (
            env.get("SLURM_PROCID"),
            env.get("SLURM_STEP_NUM_TASKS"),
        ):
            return None
    same_host = env.get("MASTER_ADDR") in _LOOPBACK
    knows_node = agent or "LOCAL_WORLD_SIZE" in env or ("LOCAL_RANK" in env and not same_host)
    rank, world_size, port, *local = _integers(
        env,
        ("RANK", "WORLD_SIZE", "MASTER_PORT")
        + (("LOCAL_RANK", "LOCAL_WORLD_SIZE") if knows_node else ()),
        texts=("MASTER_ADDR",),
        present=next(n for n in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE") if n in env),
        advice="set what is missing, start with `torchrun`, or unset RANK and WORLD_SIZE to run "
        "as one process",
    )
    if not local:
        # Without knowledge of the node: all ranks are here if rank 0 is, else each has its own.
        everyone = (_integer(env, "LOCAL_RANK", default=rank), world_size)
        local = everyone if same_host else (0, 1)
    local_rank, local_world_size = local
    return Rendezvous(
        rank,
        world_size,
        local_rank,
        local_world_size,
        node=_integer(env, "GROUP_RANK", default=rank // max(local_world_size, 1)),
        address=env["MASTER_ADDR"],
        ports=_user_port(env),
        # Without address and restart count: people name one host in several ways, and the
        # agent of a node that joins late counts its restarts from zero.
        token=_digest("torchrun", env.get("TORCHELASTIC_RUN_ID", ""), port, world_size),
        source="torchrun" if agent else "environment",
        served=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _slurm(env: Env) -> Rendezvous | None:
    """Return the rendezvous of a task of a Slurm step.

    Variables of the job may count more tasks than the step has.
    """
    if not in_step(env):
        return None
    job, step, rank, local_rank, node, world_size = _integers(
        env,
        (
            "SLURM_JOB_ID",
            "SLURM_STEP_ID",
            "SLURM_PROCID",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_STEP_NUM_TASKS",
        ),
        texts=("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"),
        present="SLURM_STEP_ID",
        advice="start the ranks with `srun`, or unset SLURM_STEP_ID to run as one process",
    )
    counts = expand_counts(env["SLURM_STEP_TASKS_PER_NODE"])
    if sum(counts) != world_size or node >= len(counts):
        raise LaunchError(
            f"Slurm step {job}.{step}: SLURM_STEP_TASKS_PER_NODE="
            f"{env['SLURM_STEP_TASKS_PER_NODE']} gives {sum(counts)} tasks on {len(counts)} nodes, "
            f"but SLURM_STEP_NUM_TASKS={world_size} and SLURM_NODEID={node}; pass on all of "
            f"srun's variables or none"
        )
    arbitrary = env.get("SLURM_DISTRIBUTION") == "arbitrary"
    if len(counts) > 1 and arbitrary and "MASTER_ADDR" not in env:
        raise LaunchError(
            f"Slurm step {job}.{step}: with SLURM_DISTRIBUTION=arbitrary rank 0 may be on any of "
            f"the {len(counts)} nodes; set MASTER_ADDR to the first host of your host file"
        )
    token = _digest(
        "slurm",
        env.get("SLURM_CLUSTER_NAME", ""),
        job,
        step,
        _integer(env, "SLURM_RESTART_COUNT", default=0),  # unset in the first run
        # ranks that a standby of the job starts again are of the same step
        *([attempt] if (attempt := _integer(env, "TDP_ATTEMPT", default=0)) else []),
    )
    return Rendezvous(
        rank,
        world_size,
        local_rank,
        local_world_size=counts[node],
        node=node,
        address=env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"]),
        ports=_user_port(env) or candidate_ports(token),
        token=token,
        source="slurm",
        hosts=hosts_of_ranks(env, counts, node),
    )


def _single(env: Env) -> Rendezvous:
    """Return the rendezvous of one process, with a note if the user might expect more."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if (size := _integer(env, name, default=1)) > 1:
            raise LaunchError(
                f"{name}={size}: mpirun started {size} processes, but it does not say where they "
                f"can meet; use `srun` or `torchrun`, or set RANK, WORLD_SIZE, MASTER_ADDR and "
                f"MASTER_PORT for each (or unset {name} to run as one process)"
            )
    task = _integer(env, "SLURM_PROCID", default=0)
    if task and "SLURM_STEP_ID" not in env:
        raise LaunchError(
            f"SLURM_PROCID={task} says that this is one of several tasks, but SLURM_STEP_ID is "
            f"missing; start the ranks with `srun`, or unset SLURM_PROCID to run as one process"
        )
    note = ""
    if job := env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID"):
        state = "with the step variables of another job" if is_inherited(env) else "without a step"
        note = f"Slurm job {job} {state}: running as one process; `srun` starts one per task"
    return Rendezvous(0, 1, 0, 1, 0, "127.0.0.1", (), _digest("alone"), "alone", note=note)


LAUNCHERS: tuple[Callable[[Env], Rendezvous | None], ...] = (_local, _torchrun, _slurm, _single)


def _integers(
    env: Env, names: Sequence[str], *, present: str, advice: str, texts: Sequence[str] = ()
) -> list[int]:
    """Return the values of `names`. The error for a missing one names `present`, whose presence
    requires it.
    """
    if missing := [name for name in (*names, *texts) if not env.get(name)]:
        raise LaunchError(
            f"the environment has {present}={env[present]} but not {', '.join(missing)}; {advice}"
        )
    if wrong := [name for name in names if not _NUMBER.fullmatch(env[name])]:
        raise LaunchError(
            f"{', '.join(f'{name}={env[name]!r}' for name in wrong)}: not a whole number from 0 "
            f"up; {advice}"
        )
    return [int(env[name]) for name in names]


def _integer(env: Env, name: str, *, default: int) -> int:
    """Return a variable as a number, or `default` if it is unset."""
    if not env.get(name):
        return default
    return _integers(env, (name,), present=name, advice="correct or unset it")[0]


def _user_port(env: Env) -> tuple[int, ...]:
    """Return the user's MASTER_PORT as the only candidate, or () if unset."""
    port = _integer(env, "MASTER_PORT", default=0)
    if env.get("MASTER_PORT") and not 0 < port < 65_536:
        raise LaunchError(f"MASTER_PORT={port} is not a TCP port; use 1 to 65535, or unset it")
    return (port,) if port else ()


def _digest(*parts: object) -> str:
    """Return a short digest of the arguments."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]
