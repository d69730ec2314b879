"""Two hosts on one machine: network namespaces joined by a cable whose rate is set.

A namespace lives exactly as long as a process in it, and here that is a `cat` that reads from this
process: however this process ends, the kernel takes namespaces and cable away. Nothing has a name
on the machine, so runs side by side do not meet.

Needs root (or CAP_NET_ADMIN and CAP_SYS_ADMIN), and unshare, nsenter, ip and tc.
"""

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

INTERFACE = "link0"
RATES = {"1g": "1gbit", "4g": "4gbit", "free": None}
"""What `shape` takes, by the name it has in tables; free is the bare veth pair."""

CONGESTION = "reno"
"""Which every namespace may choose; over one cable it does what cubic does, Linux's choice. BBR,
which some machines are told to use, paces messages that come one by one at a rate that it guesses
from them: in every second step or so of a pipeline one of 0.1 MB took 75 or 145 ms on an idle link
of 1 Gbit/s."""

_TOOLS = ("unshare", "nsenter", "ip", "tc", "sysctl")
_CLONE_NEWNET = 0x40000000
_START_S = 5.0


class Link:
    """`with Link() as link:` two hosts, 10.0.0.1 and 10.0.0.2, and the cable between them.

    hosts: what `enter` takes, one for each host. env: for the processes that enter.

    Raises:
        PermissionError: not root.
        FileNotFoundError: one of the tools is not installed.
    """

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            raise PermissionError(
                f"user {os.geteuid()} cannot make network namespaces: run this as root"
            )
        if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
            raise FileNotFoundError(
                f"{', '.join(missing)} not found: install iproute2, util-linux and procps"
            )
        self.env = {"GLOO_SOCKET_IFNAME": INTERFACE}
        with ExitStack() as stack:
            pids = [_hold(stack) for _ in range(2)]
            self.hosts = tuple(f"/proc/{pid}/ns/net" for pid in pids)
            peer = f"type veth peer name {INTERFACE} netns {pids[1]}"
            _inside(self.hosts[0], f"ip link add {INTERFACE} {peer}")
            for i, host in enumerate(self.hosts):
                _inside(host, f"ip address add 10.0.0.{i + 1}/24 dev {INTERFACE}")
                _inside(host, f"ip link set {INTERFACE} up")
                _inside(host, "ip link set lo up")
                _inside(host, f"sysctl -w net.ipv4.tcp_congestion_control={CONGESTION}")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def shape(self, rate: str | None) -> None:
        shape(self.hosts, rate)


def shape(hosts: Sequence[str], rate: str | None) -> None:
    """Let each direction carry `rate` (as tc writes it, "1gbit"), None for all it can.

    Also for a process that has entered a host, while connections are open.
    """
    queue = "noqueue"
    if rate is not None:
        burst = "1mb" if rate == RATES["4g"] else "256kb"
        queue = f"tbf rate {rate} burst {burst} latency 50ms"
    for host in hosts:
        _inside(host, f"tc qdisc replace dev {INTERFACE} root {queue}")


def enter(host: str) -> None:
    """Move this thread, and those it starts from now on, to a host of a Link."""
    with Path(host).open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {host}")


def enter_alone(hosts: Sequence[str], rank: int) -> None:
    """`enter` the host of `rank`, and keep to a core of its own.

    Raises:
        OSError: there are fewer cores than hosts.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(hosts):
        raise OSError(f"{len(cores)} cores for {len(hosts)} hosts: each needs one of its own")
    enter(hosts[rank])
    os.sched_setaffinity(0, {cores[rank]})  # threads that start later, as well


def _hold(stack: ExitStack) -> int:
    """Start a process in a namespace of its own; it ends with the stack, or with this process."""
    holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
    stack.callback(holder.wait)
    stack.callback(holder.stdin.close)
    mine, until = Path("/proc/self/ns/net").readlink(), time.monotonic() + _START_S
    while Path(f"/proc/{holder.pid}/ns/net").readlink() == mine:
        if holder.poll() is not None or time.monotonic() > until:
            raise OSError("unshare --net did not make a network namespace")
        time.sleep(0.005)
    return holder.pid


def _inside(host: str, command: str) -> None:
    run = ["nsenter", f"--net={host}", *command.split()]
    subprocess.run(run, check=True, capture_output=True, text=True)
