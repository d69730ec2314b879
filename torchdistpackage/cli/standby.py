"""Wait on a node of a job with all imports done, and start ranks there when the batch script asks.

srun runs it once on each node, spare nodes too, beside the ranks: a start after a fault then costs
no srun, no interpreter and no imports. Lines come from the batch script through srun's input, and
answers go back through its output, so there is no port and no file:

    ready NODE                  from here: all is imported
    who START                   to here: kill what is left of this job's ranks, and answer
    here START NODE             from here
    run START NODES NUM         to here: start NUM ranks on each of NODES (names, commas)
    done START NODE CODE        from here: its ranks have ended; the code is the first that is not 0
    end START                   to here: ask the ranks of that start to end

The end of the input ends it. It has no threads, as the server of local ranks: a watcher is a fork
of it, and a rank a fork of its watcher.
"""

import contextlib
import gc
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from torchdistpackage.cli.main import main as tdp
from torchdistpackage.launch.fork_server import IGNORED, import_all, why_not_fork
from torchdistpackage.launch.fork_server_client import THREAD_COUNTS
from torchdistpackage.launch.process import die_with_parent, line_stream, name_thread
from torchdistpackage.lazy import resolve

_POLL_S, _LOOK_S, _GONE_S = 0.05, 1.0, 5.0
_MORE = ("torchdistpackage.cli.train", "torchdistpackage.train.build")
_NAMES = ("tdp-watch-", "tdp-rank-")
"""How the names of a rank's watcher and of a rank begin."""


class Standby:
    """The standby of `node` for the run of the file `config`. env: variables of a rank."""

    def __init__(self, config: Path, node: str, env: Mapping[str, str]) -> None:
        self._config, self._node, self._env = config, node, env
        self._watchers: dict[int, str] = {}
        self._codes: dict[str, int] = {}
        self._unread = b""

    def serve(self) -> None:
        """Answer lines until their end."""
        # that module loads numpy, which makes its threads then: `main` has set their number to 1
        preload: tuple[str, ...] = resolve("torchdistpackage.train.job:PRELOAD")
        if problem := import_all([*preload, *_MORE]):
            sys.stderr.write(f"no standby on {self._node}: {problem}\n")
            return
        gc.collect()
        gc.freeze()  # or a collection in each child would copy every page it looks at
        self._say("ready", self._node)
        while True:
            lines = self._lines(_POLL_S if self._watchers else _LOOK_S)
            if lines is None:
                break
            for line in lines:
                self._act(*line.split())
            self._reap()
        self._end(signal.SIGKILL)

    def _lines(self, limit_s: float) -> list[str] | None:
        """Return the lines that have come, after `limit_s` at most; None at the end of all."""
        if not select.select([0], [], [], limit_s)[0]:
            return []
        data = os.read(0, 1 << 16)
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [line.decode() for line in lines] if data else None

    def _act(self, word: str, start: str, *more: str) -> None:
        if word == "who":
            self._end(signal.SIGKILL)
            end_ranks(self._env.get("SLURM_JOB_ID", ""))
            self._say("here", start, self._node)
        elif word == "end":
            self._end(signal.SIGTERM)
        elif word == "run":
            nodes = more[0].split(",")
            if self._node in nodes:
                self._run(start, nodes, int(more[1]))

    def _run(self, start: str, nodes: Sequence[str], per_node: int) -> None:
        if reason := why_not_fork():
            sys.stderr.write(f"no ranks on {self._node}: {reason}\n")
            self._say("done", start, self._node, "1")
            return
        parent = os.getpid()
        for local in range(per_node):
            pid = os.fork()
            if pid == 0:
                env = task_variables(nodes, self._node, local, per_node, start)
                self._be_watcher(parent, {**self._env, **env})
            self._watchers[pid] = start

    def _be_watcher(self, parent: int, env: Mapping[str, str]) -> NoReturn:
        """Be a task as srun would have made it. Only TERM and INT end it until it listens."""
        code = 1
        try:
            die_with_parent(parent)
            os.setpgid(0, 0)
            for signum in (signal.SIGTERM, signal.SIGQUIT):
                signal.signal(signum, signal.SIG_DFL)
            devnull = os.open(os.devnull, os.O_RDONLY)
            # the standby's output is for the batch script alone
            for source, fd in ((devnull, 0), (2, 1)):
                os.dup2(source, fd)
            sys.stdout, sys.stderr = line_stream(1), line_stream(2)
            os.environ.clear()
            os.environ.update(env)
            if (threads := env.get("OMP_NUM_THREADS", "")).isdecimal():
                # the standby loaded libraries with one thread, and the variable comes too late
                sys.modules["torch"].set_num_threads(max(int(threads), 1))
            code = tdp(["train", str(self._config)])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code & 0xFF)

    def _reap(self) -> None:
        while self._watchers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            start = self._watchers.pop(pid, "")
            code = os.waitstatus_to_exitcode(status)
            self._codes[start] = self._codes.get(start) or (128 - code if code < 0 else code)
            if start not in self._watchers.values():
                self._say("done", start, self._node, str(self._codes[start]))

    def _end(self, signum: signal.Signals) -> None:
        for pid in self._watchers:
            with contextlib.suppress(ProcessLookupError):
                # a watcher passes other signals on to its rank
                os.kill(pid, signum)
                if signum == signal.SIGKILL:
                    os.killpg(pid, signum)

    def _say(self, *words: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(1, f"{' '.join(words)}\n".encode())


def task_variables(
    nodes: Sequence[str], node: str, local: int, per_node: int, start: str
) -> dict[str, str]:
    """Return what srun would set for the task number `local` of `node`, and the start's number."""
    index, number = nodes.index(node), len(nodes)
    first = index * per_node
    return {
        "SLURM_PROCID": str(first + local),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(index),
        "SLURM_GTIDS": ",".join(map(str, range(first, first + per_node))),
        "SLURM_STEP_NUM_TASKS": str(number * per_node),
        "SLURM_STEP_NUM_NODES": str(number),
        "SLURM_STEP_NODELIST": ",".join(nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{number})" if number > 1 else str(per_node),
        "SLURM_NTASKS": str(number * per_node),
        "SLURM_NPROCS": str(number * per_node),
        "SLURM_DISTRIBUTION": "block",
        "TDP_ATTEMPT": start.rpartition(".")[2],
    }


def end_ranks(job: str, processes: Path = Path("/proc")) -> None:
    """Kill the watchers and ranks of the job on this node, and wait until they are gone.

    Slurm ends a step that lost a node only after minutes, and its ranks hold devices and memory.
    """
    process_folders: list[Path] = []
    for entry in processes.iterdir():
        with contextlib.suppress(OSError):
            if not entry.name.isdigit() or entry.stat().st_uid != os.getuid():
                continue
            if not (entry / "comm").read_text().startswith(_NAMES):
                continue
            if f"SLURM_JOB_ID={job}" in (entry / "environ").read_text("utf-8", "replace").split(
                "\0"
            ):
                os.kill(int(entry.name), signal.SIGKILL)
                process_folders.append(entry)
    until_s = time.monotonic() + _GONE_S
    while any(_is_alive(entry) for entry in process_folders) and time.monotonic() < until_s:
        time.sleep(_POLL_S)


def _is_alive(process: Path) -> bool:
    try:
        return (process / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main(argv: list[str]) -> int:
    name_thread("tdp-standby")
    env = dict(os.environ)
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    os.environ.update(dict.fromkeys(THREAD_COUNTS, "1") | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
    Standby(Path(argv[1]), env.get("SLURMD_NODENAME", ""), env).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
