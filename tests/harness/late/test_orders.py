"""Late, early and drawn orders of completion give the same bits."""

import pytest
import torch

from tests.harness.late.programs import PROGRAMS
from torchdistpackage.comm.creation import world
from torchdistpackage.comm.primitives import start_all_reduce
from torchdistpackage.errors import RaceError
from torchdistpackage.harness.late.group import mirror


def run(name: str, transport: str) -> list[torch.Tensor]:
    with mirror(4, transport=transport):
        return PROGRAMS[name]()


@pytest.mark.few(3)
@pytest.mark.parametrize("num_seeds", [1, pytest.param(20, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_order_gives_the_same_bits(name: str, num_seeds: int):
    late = run(name, "late")
    assert late and all(x.isfinite().all() for x in late)
    for transport in ("late:early", *(f"late:{seed}" for seed in range(num_seeds))):
        assert all(map(torch.equal, late, run(name, transport))), transport


def test_a_failure_in_a_mirrored_world_names_its_order():
    def write_in_flight() -> None:
        x = torch.ones(4)
        pending = start_all_reduce(x, world())
        x += 1
        pending.wait()

    with pytest.raises(RaceError, match="written to while in flight") as caught, mirror(2):
        write_in_flight()
    assert caught.value.__notes__ == ["transport: late"]
