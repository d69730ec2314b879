"""The process that ranks are forked from: it imports once, then only forks (Linux).

Run as `python -m torchdistpackage.launch.fork_server FD FOLDER MODULE ...` by
`launch/fork_server_client.py`, with FD one end of a socket pair. A fork copies only the calling
thread and cannot copy a CUDA context, so the one rule here is: no threads and no CUDA in this
process, checked before every fork.

The server ends with its client (end of file on FD), each child with the server (PR_SET_PDEATHSIG),
and what a child leaves behind in its process group with the child. FOLDER, which they share, is
removed last.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from typing import NamedTuple, NoReturn, cast

from torchdistpackage.launch.fork_server_client import Exited, ForkReply, ForkRequest, SignalRequest
from torchdistpackage.launch.ipc import Channel, unpack
from torchdistpackage.launch.process import (
    die_with_parent,
    line_stream,
    name_thread,
    num_threads,
    thread_names,
    why_cuda_initialised,
)

# What a terminal or a batch system sends to every process it can see. The server must outlast the
# ranks, which get these from their supervisor and have a grace period.
IGNORED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class _Child(NamedTuple):
    """The inputs of a new child after the fork: its request, file descriptors and the server's
    pid.
    """

    request: ForkRequest
    fds: list[int]
    server_pid: int


class _Server:
    def __init__(self, channel: Channel, preload: list[str]) -> None:
        self._channel = channel
        self._children: set[int] = set()
        self._wake_read, self._wake_write = socket.socketpair()
        gc.disable()  # what imports make stays, and collections take a seventh of their time
        self._problem = import_all(preload)
        for stream in (sys.stdout, sys.stderr):  # or every child would write it again
            stream.flush()
        gc.collect()
        gc.freeze()  # or the first collection in each child would copy every page it looks at
        gc.enable()

    def serve(self) -> _Child | None:
        """Answer requests until the client is gone (None); in a child, return its task."""
        for sock in (self._wake_read, self._wake_write):
            sock.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        for signum in IGNORED:
            signal.signal(signum, signal.SIG_IGN)
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            with contextlib.suppress(OSError):  # the client is gone
                open_ = True
                while open_:
                    ready = {key.fileobj for key, _ in selector.select()}
                    if self._wake_read in ready:
                        self._wake_read.recv(4096)
                    self._reap()
                    requests, open_ = self._channel.recv_ready()
                    for request in requests:
                        if isinstance(request, SignalRequest):
                            self._signal(request)
                        elif child := self._fork(cast(ForkRequest, request)):
                            return child
        for pid in self._children:
            _kill_group(pid)
        for pid in self._children:
            os.waitpid(pid, 0)
        return None

    def become(self, child: _Child) -> None:
        """Turn this fresh fork of the server into the requested child."""
        die_with_parent(child.server_pid)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, *IGNORED):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end in (self._channel, self._wake_read, self._wake_write):
            end.close()
        devnull = os.open(os.devnull, os.O_RDONLY)
        for source, fd in ((devnull, 0), (child.fds[0], 1), (child.fds[1], 2)):
            os.dup2(source, fd)
            os.close(source)
        sys.stdout, sys.stderr = line_stream(1), line_stream(2)
        request = child.request
        os.environ.clear()
        os.environ.update(request.env)
        os.umask(request.umask)
        os.chdir(request.cwd)
        sys.path[:] = request.sys_path
        sys.argv[:] = request.argv

    def _fork(self, request: ForkRequest) -> _Child | None:
        """Return the child's task in the child; in the server answer the request and return
        None.
        """
        fds, server_pid = self._channel.take_fds(), os.getpid()
        pid, reason = 0, self._problem or why_not_fork()
        if not reason:
            try:
                pid = os.fork()
            except OSError as error:
                reason = f"the kernel made no new process: {error}"
            else:
                with contextlib.suppress(OSError):  # in both processes: whichever comes first
                    os.setpgid(pid, pid)
                if pid == 0:
                    return _Child(request, fds, server_pid)
                self._children.add(pid)
        for fd in fds:
            os.close(fd)
        self._channel.send(ForkReply(pid, reason))
        return None

    def _signal(self, request: SignalRequest) -> None:
        if request.pid not in self._children:
            return
        if request.signum == signal.SIGKILL:
            _kill_group(request.pid)
        else:
            os.kill(request.pid, request.signum)

    def _reap(self) -> None:
        # A dead child keeps its pid until waitpid, so the group that is killed is surely its own.
        while self._children and (
            gone := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ):
            _kill_group(gone.si_pid)
            _, status = os.waitpid(gone.si_pid, 0)
            self._children.discard(gone.si_pid)
            self._channel.send(Exited(gone.si_pid, os.waitstatus_to_exitcode(status), time.time()))


def _kill_group(pid: int) -> None:
    """Kill the child `pid` and the processes it started, even if it moved to another group."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def import_all(modules: list[str]) -> str:
    """Import `modules`; return why this process must not fork afterwards, or ""."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception:
            return f"preloading {module!r} failed:\n{traceback.format_exc()}"
        if reason := why_not_fork(f"importing {module!r}"):
            return reason
    return ""


def why_not_fork(cause: str = "a preloaded module, after its import,") -> str:
    if (num := num_threads()) > 1:
        return (
            f"{cause} started {num - 1} thread(s) ({thread_names()}), and a process with threads "
            "must not fork; leave the module out of the preload list or keep it from starting "
            "threads"
        )
    torch, sign = sys.modules.get("torch"), why_cuda_initialised()
    if sign or (torch is not None and torch.cuda.is_initialized()):
        return (
            f"{cause} touched a GPU: {sign or 'torch says so'}, and a forked rank cannot use the "
            "driver then; leave the module out of the preload list, or let it ask for devices only "
            "when it is called"
        )
    return ""


def _run(child: _Child) -> NoReturn:
    """Call the target with its arguments (the channel first, if one came), and exit."""
    code = 1
    try:
        function = child.request.target.resolve()
        args = cast(tuple[object, ...], unpack(child.request.args))
        function(*(Channel.from_fd(fd) for fd in child.fds[2:]), *args)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
    except BaseException:
        traceback.print_exc()
    if code == 0:
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()  # as Python does at exit, which this child skips
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Not sys.exit: tearing the interpreter down would copy the shared pages one by one, and after
    # a failure it would wait for native threads that wait for peers.
    os._exit(code & 0xFF)


def main(argv: list[str]) -> None:
    name_thread("tdp-fork-server")
    server = _Server(Channel.from_fd(int(argv[1])), argv[3:])
    child = server.serve()
    if child is not None:
        server.become(child)
        _run(child)
    shutil.rmtree(argv[2], ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv)
