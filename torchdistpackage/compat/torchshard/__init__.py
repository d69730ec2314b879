"""torchshard's names, by `import torchdistpackage.compat.torchshard as ts`.

One rule: nothing is loaded before it is asked for, and what is not there yet says so and why.
"""

from torchdistpackage.compat import paths
from torchdistpackage.compat.paths import Later

_LAYERS = Later("layers go by this package's own names so far, in torchdistpackage.parallel")
_DIMS = Later("how a tensor is split is said by the layouts of layers, not by marks on tensors")
_STATE = Later("a sharded state dict is saved and loaded by torchdistpackage.checkpoint so far")

paths.announce(
    __name__,
    {
        _LAYERS: ("nn", "utils", "slice", "register_ddp_parameters_to_ignore"),
        _DIMS: (
            "set_attribute",
            "register_parallel_attribute",
            "register_parallel_dim",
            "get_parallel_dim",
        ),
        _STATE: ("collect_state_dict", "relocate_state_dict"),
    },
)
paths.announce(f"{__name__}.distributed", {})

__all__ = ["distributed"]


def __getattr__(name: str) -> object:
    return paths.lookup(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
