"""Choose the network interface over which the ranks talk.

All nodes choose the network in which rank 0's host is known, so they agree without asking each
other. If two networks fit equally well, the user must choose. Settings of GLOO_SOCKET_IFNAME or
NCCL_SOCKET_IFNAME win. The choice is a pure function of the addresses.

Addresses are read from the kernel and the resolver, without starting a process. Missing facts are
empty values, not errors; the choice then says what is missing.
"""

import fcntl
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv6Address,
    IPv6Interface,
    ip_address,
    ip_interface,
)
from pathlib import Path

from torchdistpackage.errors import LaunchError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

# Made by container and virtual-machine software: every node has the same one, and none of them
# leads to another node. Bridges that people make (br0, br-lan) are not among them.
_VIRTUAL = re.compile(
    r"(docker|podman|cni|flannel|cali|cilium|kube-|nodelocaldns|virbr|vnet|veth|lxcbr|lxdbr)"
    r"|br-[0-9a-f]{12}$"
)

# Linux netlink (man 7 rtnetlink): kinds of message, of attribute, and flags
_GET_LINK, _GET_ADDRESS, _DONE, _ERROR = 18, 22, 3, 2
_REQUEST_DUMP = 0x1 | 0x300
_LINK_NAME, _ADDRESS, _OWN_ADDRESS = 3, 1, 2
_UP_AND_RUNNING = 0x1 | 0x40
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_LINK, _PLACE = struct.Struct("=BxHiII"), struct.Struct("=BBBBI")
_TIMEOUT_S = 5.0

LOOPBACK_NAMES = ("lo", "lo0")


@dataclass(frozen=True, slots=True)
class Address:
    """An address of this node: its interface, `10.1.2.3/24`, and whether the link is up."""

    interface: str
    ip: IPv4Interface | IPv6Interface
    up: bool = True

    def __str__(self) -> str:
        return f"{self.interface} ({self.ip})"


@dataclass(frozen=True, slots=True)
class InterfaceChoice:
    """The chosen interface, its address, and the reason as the end of a sentence."""

    name: str
    address: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address}), {self.reason}"


@dataclass(frozen=True, slots=True)
class Network:
    """The variables to set, as (name, value), and one line worth printing."""

    variables: tuple[tuple[str, str], ...]
    note: str


def choose_interface(
    addresses: Iterable[Address], master: str, *, own: str | None = None
) -> InterfaceChoice:
    """Return the interface of a node with `addresses` for a job whose rank 0 is at `master`.

    It is the interface that holds `master`, else the one with the narrowest subnet around it, else
    the one that holds `own`: this node's address on packets to `master`, which also breaks ties.
    Loopback, links that are down and interfaces of containers or virtual machines are left out.

    Raises:
        LaunchError: none fits, or several do; names them all.
    """
    all_addresses = tuple(addresses)
    goal, source = _plain(master), _plain(own) if own else None
    usable = [a for a in all_addresses if _left_out(a) is None]
    inside = [a for a in usable if goal in a.ip.network]
    narrowest = max((a.ip.network.prefixlen for a in inside), default=0)
    rules = (
        (f"which holds the master's address {goal}", [a for a in usable if a.ip.ip == goal]),
        (
            f"in the subnet of the master {goal}",
            [a for a in inside if a.ip.network.prefixlen == narrowest],
        ),
        (f"from which the master {goal} is reached", [a for a in usable if a.ip.ip == source]),
        (f"the only one that is up (master {goal})", usable),
    )
    for reason, candidates in rules:
        names = {a.interface for a in candidates}
        best = candidates if len(names) == 1 else [a for a in candidates if a.ip.ip == source]
        if len({a.interface for a in best}) == 1:
            return InterfaceChoice(best[0].interface, str(best[0].ip.ip), reason)
        if candidates:
            _refuse(goal, f"{len(names)} interfaces fit equally well", all_addresses)
    return _refuse(goal, "no interface of this node is known to lead there", all_addresses)


def configure_network(
    env: Mapping[str, str],
    addresses: Sequence[Address],
    master: str,
    *,
    own: str | None = None,
) -> Network:
    """Return the settings for gloo and NCCL on a node with `addresses`, given the user's own.

    A variable that is not set follows the one that is; if neither is, `choose_interface` answers.

    Raises:
        LaunchError: a variable of the user names no interface of this node, or as
            `choose_interface`.
    """
    users = {name: env[name] for name in (GLOO, NCCL) if env.get(name)}
    interfaces = users_interfaces(env, addresses)
    shown = " and ".join(f"{name}={value}" for name, value in users.items())
    if len(users) == 2:
        return Network((), f"network: as set by {shown}")
    if GLOO in users:
        return Network(((NCCL, "=" + ",".join(interfaces[GLOO])),), f"network: as set by {shown}")
    if NCCL in users and len(interfaces[NCCL]) == 1:
        return Network(((GLOO, interfaces[NCCL][0]),), f"network: as set by {shown}")
    allowed = [a for a in addresses if NCCL not in users or a.interface in interfaces[NCCL]]
    choice = choose_interface(allowed, master, own=own)
    among = f", among those of {shown}" if users else ""
    # "=": NCCL reads a bare name as the beginning of names, so that eth1 would also be eth10
    variables = ((GLOO, choice.name), (NCCL, f"={choice.name}"))
    return Network(variables[: 2 - len(users)], f"network: {choice}{among}")


def users_interfaces(
    env: Mapping[str, str], addresses: Sequence[Address]
) -> dict[str, tuple[str, ...]]:
    """Return the interfaces of this node named by each variable of the user; unset ones are left
    out.

    Raises:
        LaunchError: a variable means none, or one that is not there.
    """
    names = tuple(dict.fromkeys(a.interface for a in addresses))
    users = {name: env[name] for name in (GLOO, NCCL) if env.get(name)}
    chosen = {name: _READ[name](value, names) for name, value in users.items()}
    if wrong := [f"{name}={users[name]}" for name, interfaces in chosen.items() if not interfaces]:
        raise LaunchError(
            f"{' and '.join(wrong)}: no such interface with an address on this node, which has "
            f"{_listed(addresses)}; correct or unset it"
        )
    return chosen


def is_loopback(address: str) -> bool:
    """Return True if this address never leaves its machine."""
    return _plain(address).is_loopback


def _read_gloo(value: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the interfaces that gloo uses; all listed ones must exist."""
    interfaces = tuple(value.split(","))
    return interfaces if set(interfaces) <= set(names) else ()


def _read_nccl(value: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the interfaces that NCCL uses: `^` excludes, `=` matches full names, otherwise
    prefixes match.
    """
    text = value.removeprefix("^")
    leave_out, exact = text != value, text.startswith("=")
    patterns = [part for part in text.removeprefix("=").split(",") if part]

    def is_meant(name: str) -> bool:
        return any(name == part if exact else name.startswith(part) for part in patterns)

    return tuple(name for name in names if is_meant(name) != leave_out)


_READ = {GLOO: _read_gloo, NCCL: _read_nccl}


def _plain(address: str) -> IPv4Address | IPv6Address:
    """Return an address without the zone of a link-local one, with IPv4-mapped IPv6 as IPv4."""
    ip = ip_address(address.partition("%")[0])
    return ip.ipv4_mapped or ip if isinstance(ip, IPv6Address) else ip


def _left_out(address: Address) -> str | None:
    """Return why this address is never chosen, or None."""
    if address.ip.is_loopback:
        return "loopback"
    if not address.up:
        return "down"
    if _VIRTUAL.match(address.interface):
        return "made for containers or virtual machines"
    # every interface has one in the same subnet fe80::/64
    if address.ip.version == 6 and address.ip.is_link_local:
        return "link-local"
    return None


def _listed(addresses: Iterable[Address]) -> str:
    """Return the addresses as text, each with the reason why it is left out."""
    texts = [f"{a}, {why}" if (why := _left_out(a)) else f"{a}" for a in addresses]
    return "; ".join(texts) or "none"


def _refuse(goal: object, why: str, addresses: Iterable[Address]) -> InterfaceChoice:
    """Raise LaunchError for a node whose interface cannot be chosen."""
    raise LaunchError(
        f"network to the master {goal}: {why}; this node has: {_listed(addresses)}; set {GLOO} "
        f"(and {NCCL} for GPUs) to the interface to use, or MASTER_ADDR to rank 0's address on the "
        f"network to use"
    )


def read_addresses() -> tuple[Address, ...]:
    """Return every address of this node, in the kernel's order of interfaces; () if not on
    Linux.
    """
    try:
        links: dict[int, tuple[str, bool]] = {}
        for body in _dump(_GET_LINK):
            _, _, index, flags, _ = _LINK.unpack_from(body)
            name = _attributes(body[_LINK.size :])[_LINK_NAME].rstrip(b"\0").decode()
            links[index] = (name, flags & _UP_AND_RUNNING == _UP_AND_RUNNING)
        addresses: list[Address] = []
        for body in _dump(_GET_ADDRESS):
            _, prefix, _, _, index = _PLACE.unpack_from(body)
            attributes = _attributes(body[_PLACE.size :])
            # at a point-to-point link ADDRESS is the other end's
            local = attributes.get(_OWN_ADDRESS) or attributes.get(_ADDRESS)
            if local is not None and len(local) in (4, 16) and index in links:
                name, up = links[index]
                addresses.append(Address(name, ip_interface((local, prefix)), up))
    except (AttributeError, OSError):  # no netlink on this system, or not for us
        return ()
    return tuple(addresses)


def resolve(host: str) -> tuple[str, ...]:
    """Return the addresses of a name, each once, in the resolver's order; () for an unknown
    name.
    """
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


def master_address(env: Mapping[str, str], host: str, *, rank: int, here: bool) -> str | None:
    """Return the address by which several nodes reach rank 0's `host`, or None if this node cannot
    tell.

    here: this is rank 0's own node, where the host's name may mean loopback (Debian maps it to
    127.0.1.1) or be unknown.

    Raises:
        LaunchError: it is a loopback address, which leads every node to itself.
    """
    addresses = resolve(host)
    outside = [address for address in addresses if not is_loopback(address)]
    if outside:
        own_addresses = {str(address.ip.ip) for address in read_addresses()} if here else set[str]()
        return next((address for address in outside if address in own_addresses), outside[0])
    is_allowed = env.get(GLOO) in LOOPBACK_NAMES
    if addresses and is_allowed:
        return addresses[0]
    # a numeric address is what it resolves to
    if not addresses or (here and host not in ("localhost", *addresses)):
        return None
    name = socket.gethostname()
    lines = hosts_lines(host)
    raise LaunchError(
        f"rank {rank} on {name}: the master address {host} is {addresses[0]} here, loopback, "
        f"which no "
        f"other node can reach, but the job has more than one node"
        f"{f' (/etc/hosts, {lines[0]})' if lines else ''}; set MASTER_ADDR to rank 0's address on "
        f"the network, or correct /etc/hosts on {name} (if all ranks are on one machine, "
        f"set {GLOO}={LOOPBACK_NAMES[0]})"
    )


def source_address_for(address: str) -> str | None:
    """Return this node's address on packets to `address`, or None without a route.

    Nothing is sent.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def hosts_lines(name: str, path: Path = Path("/etc/hosts")) -> tuple[str, ...]:
    """Return the lines of the hosts file that name `name`, as `line 3: 127.0.1.1 n1`."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(
        f"line {i}: {' '.join(line.split())}"
        for i, line in enumerate(lines, 1)
        if name in line.partition("#")[0].split()[1:]
    )


def _dump(kind: int) -> Iterator[bytes]:
    """Yield the bodies of the kernel's answers to "list all"."""
    with closing(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        kernel.sendall(_HEADER.pack(_HEADER.size + 4, kind, _REQUEST_DUMP, 1, 0) + bytes(4))
        while True:
            block = kernel.recv(1 << 18)
            while len(block) >= _HEADER.size:
                length, answer, *_ = _HEADER.unpack_from(block)
                if answer == _DONE:
                    return
                if answer == _ERROR or length < _HEADER.size:
                    raise OSError("the kernel refused to list its network")
                yield block[_HEADER.size : length]
                block = block[_aligned(length) :]


def _attributes(block: bytes) -> dict[int, bytes]:
    """Return the attributes of a netlink message, by number."""
    attributes: dict[int, bytes] = {}
    while len(block) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(block)
        if length < _ATTRIBUTE.size:
            break
        attributes[kind] = block[_ATTRIBUTE.size : length]
        block = block[_aligned(length) :]
    return attributes


def _aligned(length: int) -> int:
    """Return a length rounded up to 4 bytes, as netlink pads."""
    return (length + 3) & ~3


_GET_FLAGS, _UP, _RUNNING = 0x8913, 0x1, 0x40
"""Linux: SIOCGIFFLAGS, IFF_UP, IFF_RUNNING."""


def interface_trouble(env: Mapping[str, str]) -> str:
    """Return which interface of gloo or NCCL has no link; "" if each has one, or it is not known.

    The kernel is asked about this process's network namespace, which /sys may not show.
    """
    names = (env.get("GLOO_SOCKET_IFNAME", ""), env.get("NCCL_SOCKET_IFNAME", ""))
    for name in dict.fromkeys(text.strip("=^").partition(",")[0] for text in names):
        if not name:
            continue
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                request = struct.pack("16sH14x", name.encode()[:15], 0)
                answer = fcntl.ioctl(sock.fileno(), _GET_FLAGS, request)
        except OSError:  # a prefix of several names, or one that is gone
            continue
        flags = struct.unpack("16sH14x", answer)[1]
        if not flags & _UP:
            return f"its interface {name} is down"
        if not flags & _RUNNING:
            return f"its interface {name} has no link"
    return ""
