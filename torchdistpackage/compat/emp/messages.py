"""easy-model-parallel's `send_tensor` and `receive_tensor`: a tensor that says its shape and dtype.

Any dtype, any strides, from a CPU or a GPU; it arrives on the CPU. A tag keeps messages apart.
"""

import logging

import torch
from torch import Tensor

from torchdistpackage.comm.creation import is_joined, world
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.p2p import P2PChannel
from torchdistpackage.comm.tensor_meta import (
    MessageSpec,
    decode,
    describe,
    encode,
    receive_header,
)
from torchdistpackage.errors import PlacementError

DTYPE_MAP = {
    torch.float32: 0,
    torch.float64: 1,
    torch.int32: 2,
    torch.int64: 3,
    torch.int16: 4,
    torch.int8: 5,
    torch.uint8: 6,
    torch.bool: 7,
    torch.bfloat16: 8,
    # the ones below it had no number for
    torch.float16: 9,
    torch.complex64: 10,
    torch.complex128: 11,
    torch.float8_e4m3fn: 12,
    torch.float8_e5m2: 13,
    torch.uint16: 14,
    torch.uint32: 15,
    torch.uint64: 16,
}
"""Numbers of dtypes in its messages; ours carry their names, so other dtypes travel too."""

_FIRST_TAG = 0x10000
_NUM_TAGS = 0x40000000
_CPU = torch.device("cpu")
log = logging.getLogger(__name__)


def send_tensor(tensor: Tensor, dst: int, tag: int = 0, debug: bool = False) -> None:
    """Send `tensor` to rank `dst`, which calls `receive_tensor` with the same tag; waits for it.

    Raises:
        PlacementError: it is no dense tensor with memory, or `dst` no other rank.
    """
    _check_peer("send_tensor", dst)
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        raise PlacementError(
            f"send_tensor: only dense tensors with memory can be sent, not a "
            f"{type(tensor).__name__}"
            + (f" ({tensor.layout}, {tensor.device})" if isinstance(tensor, Tensor) else "")
        )
    sent = tensor.detach().cpu()
    spec = MessageSpec(describe(sent), _CPU)
    channel = _channel(tag)
    works = [
        channel.send(encode(spec.description), dst),
        channel.send(spec.travelling([sent]), dst),
    ]
    for work in works:
        work.wait()
    if debug:
        log.warning("sent %s to rank %d", spec.description, dst)


def receive_tensor(src: int, tag: int = 0, debug: bool = False) -> Tensor:
    """The tensor that rank `src` sends with this tag.

    Raises:
        PlacementError: `src` is no other rank.
    """
    _check_peer("receive_tensor", src)
    channel = _channel(tag)
    spec = MessageSpec(decode(receive_header(channel, src)), _CPU)
    (room,) = spec.allocate()
    assert room is not None
    channel.receive(spec.travelling([room]), src).wait()
    if debug:
        log.warning("received %s from rank %d", spec.description, src)
    return room


def check_rank(used_by: str, rank: object) -> None:
    """Raises PlacementError if `rank` is none of the world, or none is joined."""
    size = world().size() if is_joined() else 1
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise PlacementError(
            f"{used_by}: rank {rank!r} is none of the {size} ranks, 0 to {size - 1}"
        )


def _check_peer(used_by: str, rank: int) -> None:
    check_rank(used_by, rank)
    if not is_joined() or rank == world().rank():
        raise PlacementError(f"{used_by}: rank {rank} is this rank itself; name another one")


def _channel(tag: int) -> P2PChannel:
    return P2PChannel(on_cpu(world()), tag=_FIRST_TAG + tag % _NUM_TAGS)
