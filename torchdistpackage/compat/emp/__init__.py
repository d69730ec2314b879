"""easy-model-parallel's names, by `import torchdistpackage.compat.emp as emp`.

A module is loaded when one of its names is first used.
"""

from torchdistpackage.compat import paths

_HERE = "compat.emp"
_TOP = ("DeviceFunctor", "launch")
_CLASSES = (
    "Device",
    "DeviceManagedTensor",
    "DeviceManagedModule",
    "DeviceManagedCallable",
    "DeviceManagedOperation",
)

for _below, _names in {
    "": {
        f"{_HERE}.devices": _TOP,
        f"{_HERE}.environment": ("DATA_DIR", "LOG_DIR", "default_log_level"),
    },
    ".core": {
        f"{_HERE}.devices": (*_TOP, *_CLASSES, "EmptyModule", "to_rank_fn"),
        "comm.random": ("seed_all",),
    },
    ".core.function": {
        f"{_HERE}.devices": (
            "to_rank_fn",
            "ToRankFunction",
            "EmptyFunction",
            "empty_fn",
            "EmptyModule",
        )
    },
    ".core.distributed": {
        f"{_HERE}.devices": ("send_tensor", "receive_tensor", "DTYPE_MAP", "REV_DTYPE_MAP")
    },
    ".core.random": {"comm.random": ("seed_all",)},
    ".utils": {f"{_HERE}.environment": ("setup_logging",)},
    ".utils.config": {f"{_HERE}.environment": ("BaseConfig",)},
    ".utils.log": {f"{_HERE}.environment": ("setup_logging",)},
}.items():
    paths.announce(__name__ + _below, _names)

__all__ = list(paths.MODULES[__name__])


def __getattr__(name: str) -> object:
    return paths.lookup(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
