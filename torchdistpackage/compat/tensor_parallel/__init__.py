"""tensor_parallel's names, by `import torchdistpackage.compat.tensor_parallel as tp`.

Nothing is loaded before it is asked for.
"""

import sys
from types import ModuleType

from torchdistpackage.compat import paths

_AUTO, _HERE = "parallel.auto", "compat.tensor_parallel"
_ENGINE = f"{_HERE}.engine"
_CONFIG = {f"{_HERE}.earlier": ("Config",)}
_STATE_ACTION = {f"{_ENGINE}.actions": ("StateAction",)}
_SAVING = {
    f"{_AUTO}.saving": ("save_tensor_parallel",),
    f"{_HERE}.shard_states": ("convert_state_dict", "infer_sharded_device_map"),
}
_ACTIONS = ("Split", "SplitInChunks", "SplitInGroupedChunks", "Scale")
_CALL = {f"{_HERE}.call": ("tensor_parallel",)}
_KEY_VALUES = ("gather_kv", "select_kv_for_rank")
_SPLITS = ("split_heads", "split_num_heads", "split_inner_dim", "split_alibi")
_OPS = ("CollectiveOpetationBase", "AllReduce", "AllGather", "NCCLAllReduce", "NCCLAllGather")
_RANKS = ("DistributedAllReduce", "DistributedAllGather")
_NESTED = ("nested_flatten", "nested_pack", "nested_map", "nested_compare")
_LOGGER = {f"{_HERE}.helpers": ("logger",)}
_RULES = ("Arg", "Action", "MappedActions", "StateRules", "ModuleRules")
_CONVERTING = (
    "infer_sharded_data_device_id",
    "convert_data",
    "convert_names",
    "prefix_names_with_shard_id",
    "convert_state_dict_single_shard",
)
_DEVICES = ("broadcast_coalesced", "gather", "reduce_add", "all_gather")
_NCCL = ("NCCLAllReduceFunction", "NCCLAllGatherFunction")

_FAMILIES = ("bert", "bloom", "codegen", "gpt2", "gpt_neox", "llama", "refined_web", "t5")

for _below, _names in {
    "": {
        **(_CALL | _STATE_ACTION | _SAVING),
        f"{_HERE}.model": ("TensorParallel",),
        f"{_ENGINE}.shard": ("make_distributed_shard",),
        f"{_HERE}.earlier": ("Config", "TensorParallelPreTrainedModel", "Sharded"),
    },
    ".autoconfig": {f"{_HERE}.plans": ("get_default_config",)},
    ".aux_actions": {f"{_HERE}.earlier": (*_KEY_VALUES, *_SPLITS)},
    ".communications": {
        f"{_HERE}.earlier": _OPS,
        f"{_HERE}.rendezvous": ("CollectiveOperation", "ScatterReduce"),
        f"{_ENGINE}.ops": _RANKS,
    },
    ".config": {
        **_CONFIG,
        f"{_ENGINE}.rules": ("add_lora_rules", "get_parameter_name_mapping"),
        f"{_HERE}.helpers": (
            "logger",
            *_RULES,
            "convert_legacy_state_action",
            "create_collective_ops",
        ),
    },
    ".cross_device_ops": {f"{_HERE}.device_ops": (*_DEVICES, *_NCCL)},
    ".dispatch": _SAVING | {f"{_HERE}.helpers": _CONVERTING},
    ".factory": _CALL | _LOGGER,
    ".imports": {f"{_HERE}.helpers": ("verify_peft_version",)},
    ".legacy": {f"{_HERE}.earlier": ("Sharded",)} | _LOGGER,
    ".per_device_tensors": {f"{_HERE}.thread_caches": ("PerDeviceTensors",)},
    ".pretrained_model": {
        f"{_HERE}.earlier": ("TensorParallelPreTrainedModel",),
        f"{_HERE}.plans": ("find_predefined_tensor_parallel_config",),
        **_LOGGER,
    },
    ".shard": {
        f"{_ENGINE}.shard": ("make_shard", "make_distributed_shard"),
        f"{_ENGINE}.rules": ("find_matching_actions",),
        f"{_HERE}.helpers": (
            "logger",
            "process_state_",
            "process_attrs_",
            "fix_general_attributes",
        ),
    },
    ".sharding": {f"{_HERE}.zero3_sharded": ("Sharded",)} | _LOGGER,
    ".slicing_configs": {
        f"{_HERE}.plans": (
            "PREDEFINED_CONFIGS",
            "ConfigGetter",
            *(f"get_{family}_config" for family in _FAMILIES),
        ),
    },
    ".state_actions": {
        f"{_ENGINE}.actions": ("StateAction", *_ACTIONS),
        f"{_HERE}.earlier": ("LegacyStateAction",),
    },
    ".tensor_parallel": {
        f"{_HERE}.model": ("TensorParallel",),
        f"{_HERE}.devices": ("canonicalize_device", "check_device_ids"),
        f"{_HERE}.helpers": ("logger", "parallel_apply_simple", "get_a_var"),
    },
    ".utils": {
        f"{_HERE}.nested": _NESTED,
        f"{_AUTO}.nested": ("is_namedtuple", "find_tied_weight_aliases"),
        f"{_HERE}.helpers": ("check_lora",),
    },
    ".wrapper": {
        f"{_ENGINE}.wrapper": ("TensorParallelWrapper",),
        f"{_ENGINE}.ops": ("apply_action",),
        f"{_HERE}.helpers": ("process_input", "process_output"),
    },
}.items():
    paths.announce(__name__ + _below, _names)

__all__ = list(paths.MODULES[__name__])


def __getattr__(name: str) -> object:
    return paths.lookup(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps its function `tensor_parallel` where the module of that name is imported too."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "tensor_parallel" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
