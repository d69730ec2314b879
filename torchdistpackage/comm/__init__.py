"""Communication between ranks, over a named axis or a group of your own.

The files in reading order.

Start           runtime (`setup_distributed`), rendezvous_store (where ranks meet).
Groups          creation (one group, its time limit, the default group), groups (those of one rank,
                their companions, and which lost messages), tpc (their names).
Calls           collective_table (each operation as a row), backends (differences of gloo and
                NCCL), group_state (the state of a group), dtypes, work (a call in flight),
                primitives (the collectives), by_torch (the same by torch's own functions),
                transport/ (collectives made of messages on gloo).
Autograd        autograd (maps and their transposes), collectives (the public functions).
Messages        p2p, tensor_meta (descriptions of messages), tensor_channel (headers, payloads, and
                sends in flight), objects (anything that pickles).
Values          nested (containers inside each other: their leaves, and copies with other ones).
Watching        flight_recorder (the last calls), debug_checks (calls are compared), moments (time
                on a device), streams (of a device).
Random numbers  random (one stream, forked where activations are split).

A name is loaded on first use, so importing this package imports no torch.
"""

from torchdistpackage.comm.collective_table import homes_of_names
from torchdistpackage.lazy import homes, load

_OTHERS: dict[str, tuple[str, ...]] = {
    "comm.collectives": (
        "exchange_sizes",
        # not seen by autograd: messages, objects
        "send",
        "receive",
        "start_send",
        "start_receive",
        "ranks_of",
        "barrier",
        "gather_objects",
        "broadcast_object",
    ),
    "comm.objects": (
        "broadcast_object_list",
        "broadcast_tensor_dict",
        "broadcast_tensors",
        "gather_to",
    ),
    "comm.primitives": ("Group", "SUM", "AVG", "MAX", "MIN"),
    "comm.p2p": ("Post",),
    "comm.work": ("Work", "Pending"),
    "comm.debug_checks": ("checked_calls",),
    "layout.partition": ("even_sizes",),
}

EXPORTS = homes(homes_of_names()) | homes(_OTHERS)
"""Public name -> module that defines it."""

__all__ = list(EXPORTS)


def __getattr__(name: str) -> object:
    return load(__name__, EXPORTS, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
