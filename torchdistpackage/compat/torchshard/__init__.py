"""torchshard's names, by `import torchdistpackage.compat.torchshard as ts`.

A module is loaded when one of its names is first used.
"""

from importlib.metadata import version

from torchdistpackage.compat import paths

__version__ = "0.1.0"
"""Version of torchshard that has these names."""

_PARALLEL_DIM = _PARALLEL_ATTR = "parallel_dim"
_ORDER_ATTR = _ORDER_TYPE = "order_type"
"""Attributes in which torchshard keeps how a tensor is split; the second name of each is that of
its pages and templates."""

_STATE_DICTS = ("collect_state_dict", "relocate_state_dict")
_DDP = ("register_ddp_parameters_to_ignore",)
_REGISTER = ("register_parallel_attribute", "register_parallel_dim", "get_parallel_dim")
_LINEAR = ("ParallelLinear", "RegisterParallelDim")
_LOSS = ("ParallelCrossEntropyLoss",)
_SPARSE = ("ParallelEmbedding",)
_PLAIN = ("copy", "scatter", "reduce", "gather", "_reduce", "_split", "_gather")
_CLASSES = ("Copy", "Scatter", "Reduce", "Gather")
_GROUPS = (
    "init_process_group",
    "is_initialized",
    "destroy_process_group",
    "get_group",
    "get_rank",
    "get_world_size",
    "get_group_size",
)
_FUNCTIONS = (
    "parallel_linear",
    "parallel_embedding",
    "parallel_cross_entropy",
    "cross_entropy_loss",
    "ParallelCrossEntropy",
)
_REDUCTION = ("get_enum", "legacy_get_string", "legacy_get_enum")
_HERE = "compat.torchshard"

for _below, _names in {
    "": {
        f"{_HERE}.cuts": ("slice",),
        f"{_HERE}.marks": ("set_attribute", *_REGISTER),
        f"{_HERE}.state": (*_DDP, *_STATE_DICTS),
    },
    "._tensor": {f"{_HERE}.cuts": ("slice",)},
    ".distributed": {},
    ".distributed.comm": {f"{_HERE}.distributed": (*_PLAIN, *_CLASSES)},
    ".distributed.core": {f"{_HERE}.distributed": _GROUPS},
    ".nn": {
        f"{_HERE}.layers": (*_LINEAR, *_SPARSE, "Embedding"),
        f"{_HERE}.loss": _LOSS,
        f"{_HERE}.base": ("shard_init_helper_",),
    },
    ".nn._reduction": {f"{_HERE}.reduction": _REDUCTION},
    ".nn.functional": {f"{_HERE}.functional": _FUNCTIONS},
    ".nn.init": {f"{_HERE}.base": ("shard_init_helper_",)},
    ".nn.modules": {f"{_HERE}.layers": (*_LINEAR, *_SPARSE), f"{_HERE}.loss": _LOSS},
    ".nn.modules.linear": {f"{_HERE}.layers": _LINEAR},
    ".nn.modules.loss": {f"{_HERE}.loss": _LOSS},
    ".nn.modules.sparse": {f"{_HERE}.layers": _SPARSE},
    ".utils": {f"{_HERE}.cuts": ("check_divisibility", "divide", "VocabUtility")},
    ".serialization": {f"{_HERE}.state": _STATE_DICTS},
    ".overrides": {f"{_HERE}.state": _DDP, f"{_HERE}.marks": _REGISTER},
}.items():
    paths.announce(__name__ + _below, _names)

__all__ = ["distributed", *paths.MODULES[__name__]]


def __getattr__(name: str) -> object:
    if name == "TORCH_VERSION":
        return tuple(int(part) for part in version("torch").split(".")[:2])
    return paths.lookup(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
