"""Start child processes by forking a server that has imported everything once.

A rank costs a fork (30 ms) instead of an interpreter with its imports (1.1 s with torch). This
process never forks itself, so it may have threads and CUDA; the server (`launch/fork_server.py`) is
a fresh interpreter that forks before it has either.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.entrypoint import EntryPoint, main_is_loading
from torchdistpackage.launch.ipc import Channel, pack
from torchdistpackage.launch.process import stopped

# Importing a numerical library must not start its threads: that would end forking for good.
THREAD_COUNTS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """Client to server: fork and call the target, with stdout, stderr and optionally a channel."""

    target: EntryPoint
    args: bytes  # a pickled tuple, which only the child opens
    env: dict[str, str]
    cwd: str
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    umask: int


@dataclass(frozen=True, slots=True)
class SignalRequest:
    """Client to server: signal a child if it still exists (SIGKILL reaches its entire group)."""

    pid: int
    signum: int


@dataclass(frozen=True, slots=True)
class ForkReply:
    """Server to client: the child of the last request, or the reason why there is none."""

    pid: int
    refused: str


@dataclass(frozen=True, slots=True)
class Exited:
    """Server to client: a child has ended. `exit_code` is minus the signal if one killed it."""

    pid: int
    exit_code: int
    time_s: float  # time.time() when the server saw it


class ForkedChild:
    """A process made by a `ForkServer`; `ForkServer.reap` fills in `exit`."""

    def __init__(self, server: ForkServer, pid: int, channel: Channel | None) -> None:
        self._server = server
        self.pid = pid
        self.channel = channel
        self.exit: Exited | None = None

    def signal(self, signum: int) -> None:
        """Send `signum` if the process still exists; SIGKILL also reaches the processes it started.

        The server sends it, because only the server knows whether the pid is still the child's.
        """
        if self.exit is None:
            self._server.request(SignalRequest(self.pid, signum))

    @property
    def is_stopped(self) -> bool:
        """Return whether the child is stopped (SIGSTOP, Ctrl-Z), which no exit code shows."""
        return self.exit is None and stopped(self.pid) == "T"


class ForkServer:
    """A process that has imported `preload` and forks children on request; it starts on first use.

    Children die with the server, and the server dies with this object's process, however that ends.
    Libraries in the server were loaded with one thread; a child's own OMP_NUM_THREADS comes too
    late for them, so code that wants more threads asks its library (torch.set_num_threads). Not
    thread-safe.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = tuple(preload)
        self._owner_pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._folder = Path()
        self._has_forked = False
        self._running: dict[int, ForkedChild] = {}
        self._channels: list[Channel] = []

    @property
    def folder(self) -> Path:
        """A folder of mode 0700 that is removed when the server ends, in whatever way."""
        self._start()
        return self._folder

    def spawn(
        self,
        target: str | Callable[..., object] | EntryPoint,
        args: tuple[object, ...] = (),
        *,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] = 1,
        stderr: int | IO[bytes] = 2,
        with_channel: bool = False,
    ) -> ForkedChild:
        """Fork a child that calls `target(*args)`, or with `with_channel` `target(channel, *args)`.

        `env` is its entire environment (default: this process's). `stdout` and `stderr` are open
        descriptors or files; stdin is empty. Working folder, sys.path, sys.argv and umask are this
        process's. The child leads its own process group and its exit code is 0, the argument of
        sys.exit, or 1 after another exception, whose traceback goes to its stderr.

        Raises:
            LaunchError: the target has no name, or the server cannot fork; the text says why.
        """
        if main_is_loading():
            raise LaunchError(
                "processes are started while the main script is still being loaded by a rank; "
                'put the part that starts them under `if __name__ == "__main__":`'
            )
        reference = target if isinstance(target, EntryPoint) else EntryPoint.of(target)
        umask = os.umask(0o077)
        os.umask(umask)
        environment_and_folder = dict(os.environ if env is None else env), str(Path.cwd())
        search, argv = tuple(_absolute_path()), tuple(sys.argv)
        request = ForkRequest(reference, pack(args), *environment_and_folder, search, argv, umask)
        fds = [f if isinstance(f, int) else f.fileno() for f in (stdout, stderr)]
        if not with_channel:
            pid, pidfd = self._fork(request, fds), None
        else:
            pidfd, theirs = Channel.pair()
            try:
                pid = self._fork(request, [*fds, theirs.fileno()])
            except BaseException:
                pidfd.close()
                raise
            finally:
                theirs.close()
            self._channels.append(pidfd)
        child = self._running[pid] = ForkedChild(self, pid, pidfd)
        return child

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when `reap` has something to return."""
        return self._start().fileno()

    def reap(self) -> None:
        """Fill in `exit` of the children that have ended. Never waits.

        Raises:
            LaunchError: the server is gone, and all its children with it.
        """
        messages, open_ = self._start().recv_ready()
        for message in messages:
            if isinstance(message, Exited):
                self._running.pop(message.pid).exit = message
        if not open_:
            raise LaunchError(self._death())

    def request(self, message: SignalRequest) -> None:
        """Send the message if the server still exists."""
        if self._channel is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._channel.send(message)

    def close(self) -> None:
        """Kill all children and the server, and wait until they are gone. May be called twice."""
        if self._owner_pid != os.getpid() or self._process is None or self._channel is None:
            return
        atexit.unregister(self.close)
        self._channel.close()
        if not self._has_forked:  # it has nobody to end, and may still import for seconds
            self._process.kill()
        # the server ends when its channel closes, and kills its children before: so they are gone
        # for the caller, too
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # the server is stopped; its children die with it
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)  # if the server was killed
        for channel in self._channels:
            channel.close()
        self._process = self._channel = None
        self._has_forked = False
        self._channels.clear()
        self._running.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Channel:
        if self._channel is not None:
            return self._channel
        self._folder = Path(tempfile.mkdtemp(prefix="tdp-"))
        own_end, theirs = Channel.pair()
        env = {
            # or torch.cuda.is_available() in a preloaded module would initialise the driver
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            **os.environ,
            **dict.fromkeys(THREAD_COUNTS, "1"),
            "PYTHONPATH": os.pathsep.join(_absolute_path()),
        }
        # -P: `-m` would put the working folder before the caller's own search path.
        module = "torchdistpackage.launch.fork_server"
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(self._folder)]
        # In a session of its own, Ctrl-C in a terminal reaches the supervisor alone.
        self._process = subprocess.Popen(
            [*command, *self._preload],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._channel = own_end
        atexit.register(self.close)
        return own_end

    def _fork(self, request: ForkRequest, fds: list[int]) -> int:
        channel = self._start()
        try:
            channel.send(request, fds)
            while isinstance(answer := channel.recv(), Exited):
                self._running.pop(answer.pid).exit = answer
        except (EOFError, ConnectionError) as error:
            raise LaunchError(self._death()) from error
        assert isinstance(answer, ForkReply)
        if answer.refused:
            raise LaunchError(f"cannot start {request.target} by fork: {answer.refused}")
        self._has_forked = True
        return answer.pid

    def _death(self) -> str:
        # it closes its socket only as it ends, and its exit code says how it did
        code = self._process.wait() if self._process is not None else None
        return (
            f"the fork server ended with exit code {code} (minus a signal), and its children "
            "with it; what it wrote to stderr, or the kernel's log for SIGKILL, says why"
        )


def _absolute_path() -> list[str]:
    return [str(Path(entry).absolute()) for entry in sys.path]
