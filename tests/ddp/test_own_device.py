"""What goes over a group lives where its tensors do: shown with parameters on another device."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.ddp.reference import ReferenceDDP


def sent_by_the_reference() -> list[str]:
    """Devices of all that it hands to the group."""
    sent: list[str] = []

    def send(x: Tensor, group: object, op: object = None) -> Tensor:
        sent.append(x.device.type)
        return torch.zeros(1)  # no rank used it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitives, "all_reduce", send)
        patch.setattr(primitives, "broadcast", send)
        ReferenceDDP(nn.Linear(2, 2, device="meta"), dist.group.WORLD).average()
    return sent


def test_the_reference_asks_on_the_device_of_the_parameter(ranks):
    assert ranks(1).run(sent_by_the_reference) == [["meta"] * 4]
