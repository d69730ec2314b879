"""Which card: nodes of real clusters written as addresses, and laws over every pair of networks."""

import itertools
from ipaddress import ip_interface

import pytest

from torchdistpackage.environment.network import (
    GLOO,
    NCCL,
    Address,
    choose_interface,
    configure_network,
    is_loopback,
)
from torchdistpackage.errors import LaunchError


def node(*lines: str) -> tuple[Address, ...]:
    """`eth0 10.0.0.1/24`, with ` down` behind it where the link is."""
    words = [line.split() for line in lines]
    return tuple(Address(w[0], ip_interface(w[1]), up="down" not in w) for w in words)


LO = "lo 127.0.0.1/8"
DOCKER = "docker0 172.17.0.1/16"
TWO_CARDS = node(LO, "eth0 10.1.0.7/24", "ib0 10.2.0.7/24", DOCKER)

CASES = {
    "this is the master, first card": (TWO_CARDS, "10.1.0.7", None, "eth0", "holds"),
    "this is the master, second card": (TWO_CARDS, "10.2.0.7", None, "ib0", "holds"),
    "master on the first network": (TWO_CARDS, "10.1.0.1", None, "eth0", "in the subnet"),
    "master on the second network": (TWO_CARDS, "10.2.0.1", None, "ib0", "in the subnet"),
    "the narrowest subnet wins": (
        node("eth0 10.0.0.7/8", "eth1 10.1.0.7/16", "eth2 10.1.2.7/24"),
        *("10.1.2.1", None, "eth2", "in the subnet"),
    ),
    "the narrowest subnet that holds it": (
        node("eth0 10.0.0.7/8", "eth1 10.1.0.7/16", "eth2 10.1.2.7/24"),
        *("10.1.3.1", "10.0.0.7", "eth1", "in the subnet"),
    ),
    "behind a router": (TWO_CARDS, "192.168.9.1", "10.2.0.7", "ib0", "is reached"),
    "addresses of their own, as clouds give": (
        node("ens4 10.128.0.9/32", "ens5 10.129.0.9/32"),
        *("10.128.0.2", "10.128.0.9", "ens4", "is reached"),
    ),
    "two cards in one subnet, and the way": (
        node("eth0 10.1.0.7/24", "eth1 10.1.0.8/24"),
        *("10.1.0.1", "10.1.0.8", "eth1", "in the subnet"),
    ),
    "two addresses on one card": (
        node("eth0 10.1.0.7/24", "eth0 10.1.0.8/24", "eth1 10.2.0.7/24"),
        *("10.1.0.1", None, "eth0", "in the subnet"),
    ),
    "the only card, master far and no way known": (
        node(LO, DOCKER, "eth0 10.1.0.7/24"),
        *("192.168.9.1", None, "eth0", "only one"),
    ),
    "the only card, master known as loopback": (
        node(LO, "eth0 10.1.0.7/24"),
        *("127.0.1.1", "127.0.0.1", "eth0", "only one"),
    ),
    "docker's own network is no way to a node": (
        node("eth0 10.1.0.7/24", DOCKER),
        *("172.17.0.5", "172.17.0.1", "eth0", "only one"),
    ),
    "docker's own address is on every node": (
        node("eth0 10.1.0.7/24", DOCKER),
        *("172.17.0.1", None, "eth0", "only one"),
    ),
    "a card without a cable": (
        node("eth0 10.1.0.7/24 down", "eth1 10.1.0.8/24"),
        *("10.1.0.1", None, "eth1", "in the subnet"),
    ),
    "a bridge that people made": (node(LO, "br0 10.1.0.7/24"), "10.1.0.1", None, "br0", "subnet"),
    "IPv6": (
        node("lo ::1/128", "eth0 fd00:1::7/64", "ib0 fd00:2::7/64"),
        *("fd00:2::1", None, "ib0", "in the subnet"),
    ),
    "IPv6 beside IPv4": (
        node("eth0 10.1.0.7/24", "eth0 fe80::7/64", "ib0 fe80::8/64", "ib0 fd00::8/64"),
        *("fd00::1", None, "ib0", "in the subnet"),
    ),
    "IPv4 written as IPv6": (TWO_CARDS, "::ffff:10.2.0.1", None, "ib0", "in the subnet"),
}


@pytest.mark.parametrize("case", CASES)
def test_table(case):
    addresses, master, source, name, reason = CASES[case]
    for order in (addresses, addresses[::-1]):
        choice = choose_interface(order, master, own=source)
        assert choice.name == name
        assert reason in choice.reason
        assert choice.address in {str(a.ip.ip) for a in addresses if a.interface == name}


@pytest.mark.parametrize(
    "made",
    [
        *("docker0", "podman1", "cni0", "cni-podman0", "flannel.1", "cali12ab34cd", "cilium_host"),
        *("kube-ipvs0", "nodelocaldns", "virbr0", "vnet3", "vethe1f2a3b", "lxcbr0", "lxdbr0"),
        "br-0123456789ab",
    ],
)
def test_what_software_made_is_never_chosen_by_accident(made):
    """Even where it holds the master's address, is its subnet, and is the way to it."""
    addresses = node("eth0 10.1.0.7/24", f"{made} 172.17.0.1/16")
    for master in ("172.17.0.1", "172.17.0.2"):
        assert choose_interface(addresses, master, own="172.17.0.1").name == "eth0"
    with pytest.raises(LaunchError, match=f"{made} .*, made for containers"):
        choose_interface(node(f"{made} 172.17.0.1/16"), "172.17.0.2")


@pytest.mark.parametrize(
    ("addresses", "master", "source", "why"),
    [
        (
            node("eth0 10.1.0.7/24", "eth1 10.1.0.8/24"),
            *("10.1.0.1", None, "2 interfaces fit"),
        ),
        (
            node("eth0 10.1.0.7/24", "eth1 10.1.0.8/24", "ib0 10.2.0.7/24"),
            *("10.1.0.1", "10.2.0.7", "2 interfaces fit"),
        ),
        (TWO_CARDS, "192.168.9.1", None, "2 interfaces fit"),
        (TWO_CARDS, "127.0.1.1", "127.0.0.1", "2 interfaces fit"),
        (node(LO, DOCKER), "10.1.0.1", None, "no interface"),
        (node(LO, "eth0 10.1.0.7/24 down"), "10.1.0.1", "10.1.0.7", "no interface"),
        ((), "10.1.0.1", None, "no interface"),
    ],
)
def test_without_an_answer_all_candidates_are_named(addresses, master, source, why):
    with pytest.raises(LaunchError) as error:
        choose_interface(addresses, master, own=source)
    text = str(error.value)
    assert master in text and why in text and GLOO in text
    assert all(str(address) in text for address in addresses)
    assert "\n" not in text


NETWORKS = ["10.1.0.{}/24", "10.2.0.{}/24", "10.0.0.{}/8", "192.168.1.{}/30", "fd00:1::{}/64"]


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(NETWORKS, 2)])
def test_all_nodes_of_a_cluster_choose_the_network_of_the_master(first, second):
    """Two cards each, whatever their order on a node: nobody asks anybody."""
    for master in (first, second):
        at = master.format(1).partition("/")[0]
        for host in (1, 2):
            cards = node(LO, f"a {first.format(host)}", f"b {second.format(host)}")
            right = "a" if master is first else "b"
            for order in itertools.permutations(cards):
                assert choose_interface(order, at).name == right


def test_what_the_user_said_stands():
    for env in ({GLOO: "ib0", NCCL: "ib0"}, {GLOO: "eth0,ib0", NCCL: "^docker"}):
        network = configure_network(env, TWO_CARDS, "10.1.0.1")
        assert network.variables == ()
        assert all(f"{name}={value}" in network.note for name, value in env.items())


@pytest.mark.parametrize(
    ("env", "variables"),
    [
        ({}, {GLOO: "eth0", NCCL: "=eth0"}),
        ({GLOO: "", NCCL: ""}, {GLOO: "eth0", NCCL: "=eth0"}),
        ({GLOO: "ib0"}, {NCCL: "=ib0"}),
        ({GLOO: "ib0,eth0"}, {NCCL: "=ib0,eth0"}),
        ({GLOO: "docker0"}, {NCCL: "=docker0"}),
        ({NCCL: "ib"}, {GLOO: "ib0"}),
        ({NCCL: "=ib0"}, {GLOO: "ib0"}),
        ({NCCL: "docker"}, {GLOO: "docker0"}),
        ({NCCL: "eth,ib"}, {GLOO: "eth0"}),
        ({NCCL: "^docker,lo"}, {GLOO: "eth0"}),
        ({NCCL: "^=eth0,lo,docker0"}, {GLOO: "ib0"}),
        ({NCCL: "^eth"}, {GLOO: "ib0"}),
    ],
)
def test_the_other_variable_follows_the_users(env, variables):
    network = configure_network(env, TWO_CARDS, "10.1.0.1")
    assert dict(network.variables) == variables
    assert network.note.startswith("network: ") and "\n" not in network.note
    assert all(f"{name}={value}" in network.note for name, value in env.items() if value)


@pytest.mark.parametrize(
    "env",
    [
        {GLOO: "eth1"},
        {GLOO: "eth"},
        {GLOO: "eth0,eth1"},
        {NCCL: "hsn"},
        {NCCL: "=eth"},
        {NCCL: "^e,i,l,d"},
        {GLOO: "eth1", NCCL: "hsn"},
    ],
)
def test_a_users_name_that_is_not_on_this_node_is_refused_with_those_that_are(env):
    with pytest.raises(LaunchError) as error:
        configure_network(env, TWO_CARDS, "10.1.0.1")
    text = str(error.value)
    assert all(f"{name}={value}" in text for name, value in env.items())
    assert all(str(address) in text for address in TWO_CARDS)


def test_nccl_would_read_a_bare_name_as_a_beginning():
    cards = node("eth1 10.1.0.7/24", "eth10 10.2.0.7/24")
    told = dict(configure_network({}, cards, "10.1.0.1").variables)
    assert told == {GLOO: "eth1", NCCL: "=eth1"}
    assert configure_network({NCCL: told[NCCL]}, cards, "10.2.0.1").variables == ((GLOO, "eth1"),)


def test_the_note_says_which_and_why():
    note = configure_network({}, TWO_CARDS, "10.1.0.1").note
    assert note == "network: eth0 (10.1.0.7), in the subnet of the master 10.1.0.1"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"])
def test_loopback(address):
    assert is_loopback(address)
    assert not is_loopback("10.0.0.1") and not is_loopback("fe80::1%eth0")
