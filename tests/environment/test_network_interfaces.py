"""What this machine says of its network, and what becomes of a master that is loopback."""

import socket
from ipaddress import ip_address
from pathlib import Path

import pytest

from torchdistpackage.environment import network
from torchdistpackage.environment.network import (
    GLOO,
    hosts_lines,
    is_loopback,
    master_address,
    read_addresses,
    resolve,
    source_address_for,
)
from torchdistpackage.errors import LaunchError


def test_the_kernels_list_has_loopback_and_all_that_can_be_reached():
    addresses = read_addresses()
    assert {a.interface for a in addresses} <= {name for _, name in socket.if_nameindex()}
    local = next(a for a in addresses if str(a.ip) == "127.0.0.1/8")
    assert local.up and local.interface == "lo"
    for address in addresses:
        if not address.ip.is_link_local:
            with socket.socket(
                socket.AF_INET6 if address.ip.version == 6 else socket.AF_INET
            ) as here:
                here.bind((str(address.ip.ip), 0))  # only a node's own addresses can be bound
            assert ip_address(source_address_for(str(address.ip.ip)) or "") == address.ip.ip


def test_ipv6_is_as_the_kernel_writes_it():
    table = Path("/proc/net/if_inet6")
    if not table.exists():
        pytest.skip("no IPv6 here")
    rows = [line.split() for line in table.read_text().splitlines()]
    wanted = {(row[5], bytes.fromhex(row[0]), int(row[2], 16)) for row in rows}
    found = {
        (a.interface, a.ip.packed, a.ip.network.prefixlen)
        for a in read_addresses()
        if a.ip.version == 6
    }
    assert found == wanted


def test_where_nobody_answers_there_is_nothing_rather_than_an_error(monkeypatch):
    assert resolve("no-such-host.invalid") == ()
    assert "127.0.0.1" in resolve("127.0.0.1")
    assert hosts_lines("n1", Path("/no/such/file")) == ()
    monkeypatch.delattr(socket, "AF_NETLINK")
    assert read_addresses() == ()


def test_the_hosts_file_is_quoted_by_line(tmp_path: Path):
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n\n127.0.1.1\tn1.site  n1 # n2\n10.0.0.2 n2 n10\n")
    assert hosts_lines("n1", hosts) == ("line 3: 127.0.1.1 n1.site n1 # n2",)
    assert hosts_lines("n2", hosts) == ("line 4: 10.0.0.2 n2 n10",)
    assert hosts_lines("127.0.0.1", hosts) == ()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "localhost"])
@pytest.mark.parametrize("here", [True, False])
def test_a_loopback_master_is_refused_on_every_node(address, here):
    with pytest.raises(LaunchError) as error:
        master_address({}, address, rank=3, here=here)
    text = str(error.value)
    assert "rank 3" in text and f"the master address {address} is" in text
    assert "MASTER_ADDR" in text and socket.gethostname() in text
    # whoever says that all nodes are this machine may have it so
    assert is_loopback(master_address({GLOO: "lo"}, address, rank=3, here=here) or "")


def test_a_name_that_means_loopback_is_refused_but_on_its_own_host(monkeypatch):
    """Debian maps a host's own name to 127.0.1.1 in /etc/hosts."""
    monkeypatch.setattr(network, "resolve", lambda host: ("127.0.1.1",))
    monkeypatch.setattr(network, "hosts_lines", lambda host: (f"line 2: 127.0.1.1 {host}",))
    assert master_address({}, "n1", rank=0, here=True) is None
    with pytest.raises(LaunchError, match=r"/etc/hosts, line 2: 127\.0\.1\.1 n1"):
        master_address({}, "n1", rank=1, here=False)


def test_the_masters_own_node_takes_the_address_it_has(monkeypatch):
    own = next(str(a.ip.ip) for a in read_addresses() if a.up)
    found = ("127.0.1.1", "192.0.2.77", "192.0.2.78")
    monkeypatch.setattr(network, "resolve", lambda host: found)
    assert master_address({}, "n1", rank=1, here=False) == "192.0.2.77"
    assert master_address({}, "n1", rank=0, here=True) == "192.0.2.77"
    monkeypatch.setattr(network, "is_loopback", lambda address: address == "127.0.1.1")
    monkeypatch.setattr(network, "resolve", lambda host: (*found, own))
    assert master_address({}, "n1", rank=0, here=True) == own
    monkeypatch.setattr(network, "resolve", lambda host: ())
    assert master_address({}, "n1", rank=0, here=True) is None
