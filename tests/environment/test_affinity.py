"""The cores near each GPU, from a folder like /sys."""

from pathlib import Path

import pytest

from torchdistpackage.environment.affinity import cores_of_rank, near_cores

GPUS = {"0000:17:00.0": 0, "0000:3b:00.0": 0, "0000:86:00.0": 1, "0000:af:00.0": -1}
EVERY = frozenset(range(8))


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    for address, node in GPUS.items():
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    for node, cores in enumerate(("0-1,4-5", "2-3,6,7")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    return tmp_path


def test_cores_are_those_of_the_node_of_the_device(sys):
    first, second, third, unknown = GPUS
    assert near_cores(first, sys) == near_cores(second, sys) == {0, 1, 4, 5}
    assert near_cores(third, sys) == {2, 3, 6, 7}
    for address in (unknown, "", "0000:99:00.0"):
        assert near_cores(address, sys) == frozenset()


def test_ranks_stay_on_all_cores_unless_their_gpus_are_near_different_ones(sys):
    first, second, third, unknown = GPUS
    assert cores_of_rank([first, third], 1, EVERY, sys) == {2, 3, 6, 7}
    assert cores_of_rank([first, third], 0, EVERY - {0}, sys) == {1, 4, 5}
    assert cores_of_rank([first, second], 0, EVERY, sys) == frozenset()
    assert cores_of_rank([first, third, unknown], 0, EVERY, sys) == frozenset()
    assert cores_of_rank([first, third], 0, frozenset({0, 1}), sys) == frozenset()
