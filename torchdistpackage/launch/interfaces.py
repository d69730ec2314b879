"""What this node says of its network: its addresses, the way to a host, the name of a host.

The one rule: questions to the kernel and the resolver only, no process is started, and what
cannot be found out is empty rather than an error: the choice in `network.py` says what is missing.
"""

import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing
from ipaddress import ip_interface
from pathlib import Path

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.network import GLOO, Address, is_loopback

# Linux netlink (man 7 rtnetlink): kinds of message, of attribute, and flags
_GET_LINK, _GET_ADDRESS, _DONE, _ERROR = 18, 22, 3, 2
_REQUEST_DUMP = 0x1 | 0x300
_LINK_NAME, _ADDRESS, _OWN_ADDRESS = 3, 1, 2
_UP_AND_RUNNING = 0x1 | 0x40
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_LINK, _PLACE = struct.Struct("=BxHiII"), struct.Struct("=BBBBI")
_TIMEOUT_S = 5.0

LOOPBACK_NAMES = ("lo", "lo0")


def read_addresses() -> tuple[Address, ...]:
    """Every address of this node, interfaces in the kernel's order; () where Linux is not asked."""
    try:
        links: dict[int, tuple[str, bool]] = {}
        for body in _dump(_GET_LINK):
            _, _, index, flags, _ = _LINK.unpack_from(body)
            name = _attributes(body[_LINK.size :])[_LINK_NAME].rstrip(b"\0").decode()
            links[index] = (name, flags & _UP_AND_RUNNING == _UP_AND_RUNNING)
        found: list[Address] = []
        for body in _dump(_GET_ADDRESS):
            _, prefix, _, _, index = _PLACE.unpack_from(body)
            said = _attributes(body[_PLACE.size :])
            # at a point-to-point link ADDRESS is the other end's
            own = said.get(_OWN_ADDRESS) or said.get(_ADDRESS)
            if own is not None and len(own) in (4, 16) and index in links:
                name, up = links[index]
                found.append(Address(name, ip_interface((own, prefix)), up))
    except (AttributeError, OSError):  # no netlink on this system, or not for us
        return ()
    return tuple(found)


def resolve(host: str) -> tuple[str, ...]:
    """The addresses of a name, each once, in the resolver's order; () for an unknown name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def master_address(env: Mapping[str, str], host: str, *, rank: int, here: bool) -> str | None:
    """The address by which several nodes know rank 0's `host`; None where this node cannot say.

    here: this is rank 0's own node. There the host's own name may well mean loopback (Debian maps
    it to 127.0.1.1), or be unknown.

    Raises:
        LaunchError: it is a loopback address, which leads every node to itself.
    """
    found = resolve(host)
    outside = [address for address in found if not is_loopback(address)]
    if outside:
        own = {str(address.ip.ip) for address in read_addresses()} if here else set[str]()
        return next((address for address in outside if address in own), outside[0])
    told_so = env.get(GLOO) in LOOPBACK_NAMES
    if found and told_so:
        return found[0]
    if not found or (here and host != "localhost" and not _is_address(host)):
        return None
    name = socket.gethostname()
    said = hosts_lines(host)
    raise LaunchError(
        f"rank {rank} on {name}: the master address {host} is {found[0]} here, loopback, which no "
        f"other node can reach, but the job has more than one node"
        f"{f' (/etc/hosts, {said[0]})' if said else ''}; set MASTER_ADDR to rank 0's address on "
        f"the network, or correct /etc/hosts on {name} (if all ranks are on one machine, "
        f"set {GLOO}={LOOPBACK_NAMES[0]})"
    )


def source_address_for(address: str) -> str | None:
    """This node's own address on packets to `address`; None without a way. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def hosts_lines(name: str, path: Path = Path("/etc/hosts")) -> tuple[str, ...]:
    """The lines of the hosts file that speak of `name`, as `line 3: 127.0.1.1 n1`."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(
        f"line {i}: {' '.join(line.split())}"
        for i, line in enumerate(lines, 1)
        if name in line.partition("#")[0].split()[1:]
    )


def _is_address(host: str) -> bool:
    try:
        ip_interface(host)
    except ValueError:
        return False
    return True


def _dump(kind: int) -> Iterator[bytes]:
    """The bodies of the kernel's answers to "list all"."""
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
    found: dict[int, bytes] = {}
    while len(block) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(block)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = block[_ATTRIBUTE.size : length]
        block = block[_aligned(length) :]
    return found


def _aligned(length: int) -> int:
    return (length + 3) & ~3
