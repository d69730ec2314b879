"""Ranks as a launcher would start them: an environment each, forked from a server with torch.

The one rule: nothing of this process's own launcher reaches a rank.
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator, Mapping

from torchdistpackage.comm import primitives
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.environment.failure import Failure
from torchdistpackage.launch.entrypoint import EntryPoint, Result, pack_arguments
from torchdistpackage.launch.fork_server_client import ForkServer
from torchdistpackage.launch.ipc import unpack

LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC", "TDP_")
PLAIN = {
    **{k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_NAMES)},
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


def by_hand(rank: int, world_size: int, port: int | str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def in_step(rank: int, world_size: int, job: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(world_size),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": str(world_size),
    }


def two_nodes(rank: int, job: int, tasks: int = 2) -> dict[str, str]:
    """Of two nodes with `tasks` tasks each, the first is this machine."""
    node = rank // tasks
    return in_step(rank, 2 * tasks, job) | {
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(rank % tasks),
        "SLURM_GTIDS": ",".join(str(node * tasks + i) for i in range(tasks)),
        "SLURM_STEP_NODELIST": "localhost,n9",
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x2)",
        "SLURM_DISTRIBUTION": "block",
    }


class Start:
    """Processes with an environment each, forked from a server that has torch."""

    def __init__(self, server: ForkServer):
        self._server = server

    def __call__(self, fn, environments: list[Mapping[str, str]], *args, limit_s: float = 20):
        """What fn(*args) returned, or its Failure, in order."""
        children = []
        for i, env in enumerate(environments):
            children.append(
                self._server.spawn(
                    "torchdistpackage.launch.entrypoint:run_rank",
                    (EntryPoint.of(fn), pack_arguments(*args), i),
                    env={**PLAIN, **env},
                    stdout=sys.__stderr__.fileno(),
                    stderr=sys.__stderr__.fileno(),
                    with_channel=True,
                )
            )
        answers: dict[int, Result | Failure] = {}
        end = time.monotonic() + limit_s
        while len(answers) < len(children):
            assert time.monotonic() < end, f"only {sorted(answers)} of {len(children)} came back"
            for i, child in enumerate(children):
                if i not in answers and (messages := child.channel.recv_ready()[0]):
                    answers[i] = messages[0]
            time.sleep(0.01)
        return [
            a if isinstance(a, Failure) else unpack(a.value) for _, a in sorted(answers.items())
        ]


@contextlib.contextmanager
def bound(port: int):
    """A plain server that accepts and never says a word."""
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        silent.bind(("127.0.0.1", port))
        silent.listen()
        yield silent


@contextlib.contextmanager
def answering(words: bytes) -> Iterator[int]:
    """Yield the port of a server of another kind, which says these words to each visitor."""

    class Words(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(words)
            self.request.recv(1 << 16)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Words) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()


def meet(*args, **kwargs) -> tuple[int, int, int | None, str, list[object]]:
    place = setup_distributed(*args, **kwargs)
    said = primitives.gather_objects((os.environ.get("SLURM_JOB_ID"), place[0]))
    leave()
    return (*place, said)


def meet_within(limit_s: float):
    return meet(init_timeout_s=limit_s)
