"""torchshard's names, by `import torchdistpackage.compat.torchshard as ts`.

One rule: nothing is loaded before it is asked for, and a name that is still to come can be
imported, and says so when it is used.
"""

from importlib.metadata import version

from torchdistpackage.compat import paths
from torchdistpackage.compat.paths import UnavailableReason

__version__ = "0.1.0"
"""Of the torchshard whose names these are."""

_PARALLEL_DIM = _PARALLEL_ATTR = "parallel_dim"
_ORDER_ATTR = _ORDER_TYPE = "order_type"
"""Attributes in which torchshard keeps how a tensor is split; the second name of each is that of
its pages and templates."""

_LAYERS = UnavailableReason(
    "layers go by this package's own names so far, in torchdistpackage.parallel"
)
_MARKS = UnavailableReason(
    "how a tensor is split is said by the layouts of layers, not by marks on tensors"
)
_STATE = UnavailableReason(
    "a sharded state dict is saved and loaded by torchdistpackage.checkpoint so far"
)

_STATE_DICTS = ("collect_state_dict", "relocate_state_dict")
_DDP = ("register_ddp_parameters_to_ignore",)
_LINEAR, _LOSS = ("ParallelLinear", "RegisterParallelDim"), ("ParallelCrossEntropyLoss",)
_MODULES = (*_LINEAR, *_LOSS, "ParallelEmbedding")
_PLAIN = ("copy", "scatter", "reduce", "gather", "_reduce", "_split", "_gather")
_GROUPS = (
    "init_process_group",
    "is_initialized",
    "destroy_process_group",
    "get_group",
    "get_rank",
    "get_world_size",
    "get_group_size",
)
_REGISTER = ("register_parallel_attribute", "register_parallel_dim", "get_parallel_dim")

for _below, _names in {
    "": {
        _LAYERS: ("slice", *_DDP),
        _MARKS: ("set_attribute", *_REGISTER),
        _STATE: _STATE_DICTS,
    },
    ".distributed": {},
    ".distributed.comm": {
        "compat.torchshard.distributed": _PLAIN,
        _LAYERS: ("Copy", "Scatter", "Reduce", "Gather"),
    },
    ".distributed.core": {"compat.torchshard.distributed": _GROUPS},
    ".nn": {_LAYERS: (*_MODULES, "Embedding", "shard_init_helper_")},
    ".nn.functional": {
        _LAYERS: (
            "parallel_linear",
            "parallel_embedding",
            "parallel_cross_entropy",
            "cross_entropy_loss",
            "ParallelCrossEntropy",
        ),
    },
    ".nn.init": {_LAYERS: ("shard_init_helper_",)},
    ".nn.modules": {_LAYERS: _MODULES},
    ".nn.modules.linear": {_LAYERS: _LINEAR},
    ".nn.modules.loss": {_LAYERS: _LOSS},
    ".nn.modules.sparse": {_LAYERS: ("ParallelEmbedding",)},
    ".utils": {_LAYERS: ("check_divisibility", "divide", "VocabUtility")},
    ".serialization": {_STATE: _STATE_DICTS},
    ".overrides": {_LAYERS: _DDP, _MARKS: _REGISTER},
}.items():
    paths.announce(__name__ + _below, _names)

__all__ = ["distributed", *paths.MODULES[__name__]]


def __getattr__(name: str) -> object:
    if name == "TORCH_VERSION":
        return tuple(int(part) for part in version("torch").split(".")[:2])
    return paths.lookup(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
