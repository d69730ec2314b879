"""The network of one instance: a namespace for each node, a bridge for each network card.

The one rule: what `remove` takes away is found by name on the machine, not remembered, so it
also clears what an `up` that was killed half-way had made.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import subprocess
from pathlib import Path

from slurm.instance import Failed, Instance, digest


def free_subnets(name: str, cards: int) -> list[str]:
    """A /24 for each card, from the name, stepping on over what this machine routes already."""
    routes = subprocess.run(
        ["ip", "route", "show", "table", "all"], capture_output=True, text=True, check=True
    ).stdout
    taken = [
        ipaddress.ip_network(found, strict=False)
        for found in re.findall(r"\b\d+\.\d+\.\d+\.\d+(?:/\d+)?\b", routes)
    ]
    start = digest(name)
    for step in range(4096):
        # 10.64.0.0 to 10.127.255.255 in blocks of four /24
        block = (start + step) % 4096
        base = ipaddress.ip_network(f"10.{64 + block // 64}.{block % 64 * 4}.0/22")
        if not any(base.overlaps(network) for network in taken):
            return [str(net) for net in list(base.subnets(new_prefix=24))[:cards]]
    raise Failed("every subnet of 10.64.0.0/10 is routed on this machine")


def free_ports(name: str, wanted: list[str]) -> dict[str, int]:
    """A port for each daemon, from the name, below the ports that clients are given."""
    ports: dict[str, int] = {}
    candidate = 20_000 + digest(name) % 10_000
    while len(ports) < len(wanted):
        with socket.socket() as probe:
            try:
                probe.bind(("", candidate))
                ports[wanted[len(ports)]] = candidate
            except OSError:
                pass
        candidate = 20_000 + (candidate - 20_000 + 1) % 10_000
    return ports


def make(instance: Instance) -> None:
    for card, subnet in enumerate(instance.subnets):
        bridge = instance.bridge(card)
        _run("ip", "link", "add", bridge, "type", "bridge")
        if card == 0:
            _run("ip", "address", "add", f"{instance.controller_address}/24", "dev", bridge)
        else:
            # The login host has one card: nodes alone meet on the second network.
            _run("ip", "link", "set", bridge, "alias", f"nodes only, {subnet}")
        _run("ip", "link", "set", bridge, "up")
    for node in instance.node_names:
        netns = instance.netns(node)
        _run("ip", "netns", "add", netns)
        _run("ip", "-n", netns, "link", "set", "lo", "up")
        for card in range(instance.cards):
            _plug(instance, node, card)


def _plug(instance: Instance, node: str, card: int) -> None:
    link, netns, inner = instance.link(node, card), instance.netns(node), f"eth{card}"
    _run("ip", "link", "add", link, "type", "veth", "peer", "name", inner, "netns", netns)
    _run("ip", "link", "set", link, "master", instance.bridge(card), "up")
    address = f"{instance.address(node, card)}/24"
    _run("ip", "-n", netns, "address", "add", address, "dev", inner)
    _run("ip", "-n", netns, "link", "set", inner, "up")
    if instance.rate:
        # A token bucket shapes what leaves a device, so each direction needs its own.
        shape = ["root", "tbf", "rate", instance.rate, "burst", "256kb", "latency", "50ms"]
        _run("tc", "qdisc", "add", "dev", link, *shape)
        _run("tc", "-n", netns, "qdisc", "add", "dev", inner, *shape)


def set_plugged(instance: Instance, node: str, plugged: bool) -> None:
    """Pull or plug the cables of a node."""
    for card in range(instance.cards):
        _run("ip", "link", "set", instance.link(node, card), "up" if plugged else "down")


def remove(instance: Instance) -> None:
    ours = re.compile(rf"tdp-{re.escape(instance.name)}-n\d+")
    for path in sorted(Path("/run/netns").glob("*")):
        if ours.fullmatch(path.name):
            _run("ip", "netns", "delete", path.name)
    for path in sorted(Path("/sys/class/net").glob(f"{instance.link_prefix}[bxy]*")):
        # A link goes by itself, a little later, with the namespace of its other end.
        if path.exists():
            _run("ip", "link", "delete", path.name, missing_ok=True)


def _run(*command: str, missing_ok: bool = False) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode and not (missing_ok and "Cannot find device" in done.stderr):
        raise Failed(f"{' '.join(command)}: {done.stderr.strip()}")
