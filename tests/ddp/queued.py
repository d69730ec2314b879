"""The branch of queued transports over real peers: gloo carries the flat collectives of NCCL."""

from collections.abc import Iterator
from contextlib import contextmanager

from torchdistpackage.comm.backends import GLOO, Transport, register_transport
from torchdistpackage.comm.record import calls


@contextmanager
def as_queued() -> Iterator[None]:
    """Inside, gloo posts nothing ahead and counts as a queue of a device."""
    register_transport(Transport("gloo", queued=True))
    calls.forget_all()
    try:
        yield
    finally:
        register_transport(GLOO)
        calls.forget_all()
