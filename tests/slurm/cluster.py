"""A running Slurm cluster as tests see it: client programs, jobs, faults of nodes.

The one rule: no call waits without a limit, and what ran out of time says what it last saw.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "slurm_cluster"
REQUIRE = "TDP_REQUIRE_SLURM"
# Of a job that will not change any more; squeue remembers it for an hour.
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"}
ENDED |= {"OUT_OF_MEMORY", "TIMEOUT"}
ASK_EVERY_S = 0.3


class CannotRun(Exception):
    """This machine cannot have a cluster; the text is the script's reason."""


class Cluster:
    """An instance of scripts/slurm_cluster, from construction to `down()`.

    Options are those of `up`: `Cluster("a", nodes=3, accounting=True)`. With a `with` statement
    it is taken down at the end; its logs are then in `logs`, if given. Methods may be called
    from several threads.
    """

    python = sys.executable

    def __init__(self, name: str, logs: Path | None = None, **options: object) -> None:
        self.name = name
        self.logs = logs
        self._ended = False
        self._siblings: list[Cluster] = []
        self._numbers = itertools.count(1)
        self._states: dict[str, list[str]] = {}
        self._asked_s, self._asking = 0.0, threading.Lock()
        self._is_down, self._taking_down = False, threading.Lock()
        self._threads = ThreadPoolExecutor(max_workers=16, thread_name_prefix=name)
        # Where a cluster must be, its packages may have to be installed.
        install = ["--install"] if os.environ.get(REQUIRE) == "1" else []
        done = self.script("up", *install, *_options(options), limit_s=1200, check=False)
        if done.returncode == 3:
            raise CannotRun(done.stderr.strip())
        if done.returncode:
            raise RuntimeError(f"slurm_cluster up: code {done.returncode}\n{done.stderr}")
        self.conf = Path(self.script("conf").stdout.strip())
        self.env = clean_environment() | {"SLURM_CONF": str(self.conf), "OMP_NUM_THREADS": "1"}

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.down()

    def down(self) -> None:
        """Take it down with its siblings and all jobs; harmless when it is down already."""
        # Scenarios that wait for something give up now.
        self._ended = True
        for sibling in self._siblings:
            sibling.down()
        # A scenario may take its own cluster down while the session takes down all of them.
        with self._taking_down:
            if self._is_down:
                return
            written = self.conf.parents[1] / "log"
            if self.logs and written.exists():
                shutil.copytree(written, self.logs / self.name)
            self.script("down")
            self._is_down = True
        self._threads.shutdown(wait=True, cancel_futures=True)

    def sibling(self, **options: object) -> Cluster:
        """Another cluster beside this one, for faults or another shape; up in about a second."""
        other = Cluster(f"{self.name}-{next(self._numbers)}", self.logs, **options)
        self._siblings.append(other)
        if self._ended:
            other.down()
        return other

    def beside(self, scenario: Callable[..., T], *args: object) -> Future[T]:
        """Start a scenario that waits long; a test asks for its `.result()` later."""
        return self._threads.submit(scenario, *args)

    # Client programs

    def run(
        self,
        *command: str | Path,
        limit_s: float = 240,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """A command on the login host, with SLURM_CONF and none of Slurm's other variables.

        limit_s: long, as each job is a session of its own, and a kernel that shares the cores out
        by sessions leaves little to this one while many start. `env` adds variables. Where `check`
        is on, a code other than 0 raises with both outputs.
        """
        done = subprocess.run(
            [str(word) for word in command],
            env=self.env | dict(env or {}),
            cwd=cwd,
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        return _checked(done) if check else done

    def tdp(self, *words: str | Path, **kwargs) -> subprocess.CompletedProcess[str]:
        """`tdp WORDS` on the login host; keywords as for `run`."""
        return self.run(self.python, "-m", "torchdistpackage", *words, **kwargs)

    def sbatch(self, *words: str | Path, script: str | None = None, **kwargs) -> str:
        """Submit, and return the job's id; `script` is the text of a script without a file."""
        if script is not None and not script.startswith("#!"):
            script = f"#!/bin/bash\n{script}"
        done = self.run("sbatch", "--parsable", *words, input=script, **kwargs)
        return done.stdout.strip().partition(";")[0]

    def job_state(self, job: str) -> str:
        """The state as the controller has it (RUNNING, COMPLETED, ...); "" for an unknown job."""
        done = self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T", check=False)
        return done.stdout.strip()

    def _last_state(self, job: str) -> str:
        """As `job_state`, but of a moment ago: those who wait side by side ask Slurm once for all.

        A dozen that each ask for themselves take a good part of a core.
        """
        if not job.isdecimal():  # a task of an array
            return self.job_state(job)
        with self._asking:
            if time.monotonic() - self._asked_s > ASK_EVERY_S:
                done = self.run("squeue", "-h", "-t", "all", "-o", "%F %T", check=False)
                self._states = {}
                for line in done.stdout.splitlines():
                    name, state = line.split()
                    self._states.setdefault(name, []).append(state)
                self._asked_s = time.monotonic()
            return "\n".join(self._states.get(job, []))

    def job(self, job: str) -> dict[str, str]:
        """`scontrol show job` as a dictionary: JobState, Reason, Restarts, ExitCode, NodeList."""
        text = self.run("scontrol", "-o", "show", "job", job).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def cancel(self, job: str) -> None:
        self.run("scancel", job)

    # Waiting

    def wait_for(
        self, condition: Callable[[], T], limit_s: float = 60, what: str = "", every_s: float = 0.2
    ) -> T:
        """The first true value of `condition`; `what` names it when the time is over."""
        end = time.monotonic() + limit_s
        while not (value := condition()):
            if self._ended:
                raise RuntimeError(f"{what or condition}: {self.name} is taken down")
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{what or condition}: not within {limit_s:g} s; last {value!r}; {self.look()}"
                )
            time.sleep(every_s)
        return value

    def wait_state(self, job: str, *states: str, limit_s: float = 60) -> str:
        """Wait until the job is in one of `states`; a job that ended in another one raises."""

        def seen() -> str:
            state = self._last_state(job)
            if state in ENDED and state not in states:
                raise AssertionError(f"job {job} is {state}, not {' or '.join(states)}")
            return state if state in states else ""

        return self.wait_for(seen, limit_s, f"job {job} {' or '.join(states)}")

    def wait_end(self, job: str, limit_s: float = 60) -> str:
        """Wait until all of the job (of an array: every task) has ended; its last state."""

        def ended() -> str:
            states = self._last_state(job).split()
            return states[-1] if states and set(states) <= ENDED else ""

        return self.wait_for(ended, limit_s, f"end of job {job}")

    # Nodes

    def node(self, what: str, node: str, *words: str, **kwargs) -> subprocess.CompletedProcess[str]:
        """`node("crash", "n2")`, `node("exec", "n2", "hostname")`: see scripts/slurm_cluster."""
        return self.script("node", what, node, *words, **kwargs)

    def power_off(self, node: str) -> None:
        """Crash a node, and tell the controller, which would need half a minute to see it."""
        self.node("crash", node)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=crash")

    def node_states(self) -> dict[str, str]:
        lines = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").stdout.splitlines()
        return dict(line.split() for line in lines)

    def settle(self, limit_s: float = 60) -> None:
        """No job is left and every node idle, whatever tests have done to them."""
        self.script("repair")
        # Those that wait first: none of them shall start where another one ends.
        self.run("scancel", "--user=root", "--state=PENDING")
        self.run("scancel", "--user=root")

        def settled() -> bool:
            jobs = self.run("squeue", "-h", "-o", "%i").stdout
            return not jobs and set(self.node_states().values()) == {"idle"}

        self.wait_for(settled, limit_s, "no job and all nodes idle")

    def look(self) -> str:
        """Jobs and nodes in a few lines, for messages."""
        jobs = self.run("squeue", "-t", "all", "-o", "%i %P %T %M %N %r", check=False).stdout
        return f"nodes {self.node_states()}; the last jobs:\n" + "\n".join(jobs.splitlines()[:12])

    def script(
        self, *words: str, limit_s: float = 120, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """A command of scripts/slurm_cluster on this instance."""
        done = subprocess.run(
            [self.python, str(SCRIPT), "--name", self.name, *words],
            env=clean_environment(),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        return _checked(done) if check else done


def take_down_leftovers() -> None:
    """Take down clusters of test sessions that were killed before they could."""
    for folder in Path("/tmp").glob("tdp-slurm-tests-*"):
        name = folder.name.removeprefix("tdp-slurm-")
        command = Path("/proc", name.split("-")[1], "cmdline")
        if not command.exists() or b"pytest" not in command.read_bytes():
            subprocess.run(
                [sys.executable, str(SCRIPT), "--name", name, "down"],
                capture_output=True,
                timeout=120,
                check=False,
            )


def clean_environment() -> dict[str, str]:
    """This process's environment without what Slurm, torchrun or a launcher had put there."""
    prefixes = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SUBMITIT_", "TORCHELASTIC_", "TDP_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes) and k not in names}


def _options(options: Mapping[str, object]) -> Sequence[str]:
    """`{"kill_wait": 3, "accounting": True}` as words of a command line."""
    words: list[str] = []
    for name, value in options.items():
        for item in value if isinstance(value, list) else [value]:
            if item is not False:
                words += [f"--{name.replace('_', '-')}", *([] if item is True else [str(item)])]
    return words


def _checked(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    if done.returncode:
        raise AssertionError(
            f"{' '.join(done.args)}: code {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    return done
