"""Find the CPU cores near a GPU in /sys. No torch."""

from collections.abc import Sequence
from pathlib import Path

SYS = Path("/sys")


def near_cores(address: str, sys: Path = SYS) -> frozenset[int]:
    """Return the cores of the NUMA node of a PCI device such as 0000:3b:00.0, or none if
    unknown.
    """
    try:
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
        listed = (sys / f"devices/system/node/node{node}/cpulist").read_text()
        ends = [part.partition("-") for part in listed.strip().split(",")]
        return frozenset(n for a, _, b in ends for n in range(int(a), int(b or a) + 1))
    except (OSError, ValueError):  # one node alone has number -1, and no such file
        return frozenset()


def cores_of_rank(
    addresses: Sequence[str], local_rank: int, allowed: frozenset[int], sys: Path = SYS
) -> frozenset[int]:
    """Return the cores to which a local rank should be bound; none if it may stay on all.

    Ranks are bound only if the GPUs of the local ranks are near different cores.

    addresses: those of the local ranks' GPUs. allowed: cores that the process may use.
    """
    each = [near_cores(address, sys) & allowed for address in addresses]
    return each[local_rank] if all(each) and len({*each}) > 1 else frozenset()
