"""Faults of a node, their repair, and visits: one function for each word of the command line.

The one rule: what does not fit the state of the node (a boot while it runs) is refused, so a
test that lost count of its faults notices.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from slurm import daemons, network, processes
from slurm.instance import Failed, Instance


def crash(instance: Instance, node: str, words: list[str]) -> None:
    """Power off: process 1 of the node dies with its parent, and every process with it."""
    init = _init(instance, node)
    processes.stop(instance, node, term=False)
    gone = Path(f"/proc/{init}")
    processes.wait_until(lambda: not gone.exists(), 10, f"end of {node}")


def boot(instance: Instance, node: str, words: list[str]) -> None:
    if pid := processes.pid_of(instance, node):
        raise Failed(f"{node} runs already (process {pid})")
    daemons.boot(instance, node)
    processes.wait_until(lambda: processes.slurmd_pid(instance, node), 20, f"slurmd of {node}")


def cut(instance: Instance, node: str, words: list[str]) -> None:
    """Pull all network cables; the processes live on."""
    network.set_plugged(instance, node, False)


def join(instance: Instance, node: str, words: list[str]) -> None:
    network.set_plugged(instance, node, True)


def kill_slurmd(instance: Instance, node: str, words: list[str]) -> None:
    """The daemon dies, the ranks on the node live on."""
    _init(instance, node)
    pid = processes.slurmd_pid(instance, node)
    if pid is None:
        raise Failed(f"slurmd of {node} does not run")
    os.kill(pid, signal.SIGKILL)
    processes.wait_until(
        lambda: processes.slurmd_pid(instance, node) != pid, 5, f"end of slurmd of {node}"
    )


def start_slurmd(instance: Instance, node: str, words: list[str]) -> None:
    command = _inside(instance, node, ["slurmd", "-f", str(instance.conf), "-N", node])
    if pid := processes.slurmd_pid(instance, node):
        raise Failed(f"slurmd of {node} runs already (process {pid})")
    subprocess.run(command, env=instance.env(), timeout=60, check=True)


def execute(instance: Instance, node: str, words: list[str]) -> None:
    """Become the command, or a shell, in the namespaces of the node and in this folder."""
    command = _inside(instance, node, words or ["bash"])
    sys.stdout.flush()
    os.execvpe(command[0], command, instance.env())


def repair(instance: Instance, node: str) -> None:
    """Cables in, power on, slurmd running."""
    join(instance, node, [])
    if not processes.init_pid(instance, node):
        boot(instance, node, [])
    elif not processes.slurmd_pid(instance, node):
        start_slurmd(instance, node, [])


COMMANDS: dict[str, Callable[[Instance, str, list[str]], None]] = {
    "crash": crash,
    "boot": boot,
    "cut": cut,
    "join": join,
    "kill-slurmd": kill_slurmd,
    "start-slurmd": start_slurmd,
    "exec": execute,
}


def _inside(instance: Instance, node: str, words: list[str]) -> list[str]:
    enter = ["nsenter", f"--target={_init(instance, node)}", "--net", "--uts", "--ipc", "--pid"]
    # A new mount namespace begins at the root folder.
    stay = ["sh", "-c", 'cd "$0" 2>/dev/null; exec "$@"', str(Path.cwd())]
    return [*enter, "--mount", "--", *stay, *words]


def _init(instance: Instance, node: str) -> int:
    pid = processes.init_pid(instance, node)
    if pid is None:
        raise Failed(f"{node} does not run; `node boot {node}` starts it")
    return pid
