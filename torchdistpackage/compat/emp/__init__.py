"""easy-model-parallel's names (`emp`), which are still to come: see compat/not_available.py."""

from torchdistpackage.compat import paths
from torchdistpackage.compat.paths import UnavailableReason

_PLACED = UnavailableReason("programs whose tensors each live on one rank are not offered yet")

_CORE = (
    "DeviceFunctor",
    "launch",
    "Device",
    "DeviceManagedTensor",
    "DeviceManagedModule",
    "DeviceManagedCallable",
    "DeviceManagedOperation",
)

for _below, _names in {
    "": _CORE[:2],
    ".core": _CORE,
    ".core.function": (
        "to_rank_fn",
        "ToRankFunction",
        "EmptyFunction",
        "empty_fn",
        "EmptyModule",
    ),
    ".core.distributed": ("send_tensor", "receive_tensor", "DTYPE_MAP"),
    ".core.random": ("seed_all",),
}.items():
    paths.announce(__name__ + _below, {_PLACED: _names})

__all__ = list(_CORE[:2])


def __getattr__(name: str) -> object:
    return paths.lookup(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
