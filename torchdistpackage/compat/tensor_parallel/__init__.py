"""tensor_parallel's names, by `import torchdistpackage.compat.tensor_parallel as tp`.

Nothing is loaded before it is asked for.
"""

import sys
from types import ModuleType

from torchdistpackage.compat import paths

_AUTO, _HERE = "parallel.auto", "compat.tensor_parallel"
_CONFIG = {f"{_AUTO}.rules": ("Config",)}
_STATE_ACTION = {f"{_AUTO}.actions": ("StateAction",)}
_SAVING = {
    f"{_AUTO}.saving": ("save_tensor_parallel", "convert_state_dict", "infer_sharded_device_map")
}
_ACTIONS = ("LegacyStateAction", "Split", "SplitInChunks", "SplitInGroupedChunks", "Scale")
_CALL = {f"{_AUTO}.factory": ("tensor_parallel",)}
_KEY_VALUES = ("gather_kv", "select_kv_for_rank")
_SPLITS = ("split_heads", "split_num_heads", "split_inner_dim", "split_alibi")
_OPS = ("CollectiveOpetationBase", "AllReduce", "AllGather", "NCCLAllReduce", "NCCLAllGather")
_RANKS = ("DistributedAllReduce", "DistributedAllGather")
_NESTED = ("nested_flatten", "nested_pack", "nested_map", "nested_compare", "is_namedtuple")
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

_MORE = {
    "bloom": "get_bloom_config",
    "t5": "get_t5_config",
    "bert": "get_bert_config",
    "gpt_neox": "get_gpt_neox_config",
    "codegen": "get_codegen_config",
    "falcon": "get_refined_web_config",
}

for _below, _names in {
    "": {
        **(_CALL | _CONFIG | _STATE_ACTION | _SAVING),
        f"{_AUTO}.model": ("TensorParallel",),
        f"{_AUTO}.shard": ("make_distributed_shard",),
        f"{_HERE}.earlier": ("TensorParallelPreTrainedModel", "Sharded"),
    },
    ".autoconfig": {f"{_AUTO}.layerwise": ("get_default_config",)},
    ".aux_actions": {f"{_HERE}.earlier": (*_KEY_VALUES, *_SPLITS)},
    ".communications": {
        f"{_HERE}.earlier": _OPS,
        f"{_AUTO}.rendezvous": ("CollectiveOperation", "ScatterReduce"),
        f"{_AUTO}.ops": _RANKS,
    },
    ".config": {
        f"{_AUTO}.rules": ("Config", "add_lora_rules", "get_parameter_name_mapping"),
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
    ".per_device_tensors": {f"{_AUTO}.caches": ("PerDeviceTensors",)},
    ".pretrained_model": {
        f"{_HERE}.earlier": ("TensorParallelPreTrainedModel",),
        f"{_AUTO}.families.registry": ("find_predefined_tensor_parallel_config",),
        **_LOGGER,
    },
    ".shard": {
        f"{_AUTO}.shard": ("make_shard", "make_distributed_shard"),
        f"{_AUTO}.rules": ("find_matching_actions",),
        f"{_HERE}.helpers": (
            *("logger", "process_state_", "process_attrs_", "fix_general_attributes"),
        ),
    },
    ".sharding": {f"{_HERE}.zero3_sharded": ("Sharded",)} | _LOGGER,
    ".slicing_configs": {
        f"{_AUTO}.families.registry": ("PREDEFINED_CONFIGS",),
        f"{_AUTO}.families.gpt2": ("get_gpt2_config",),
        f"{_AUTO}.families.llama": ("get_llama_config",),
        **{f"{_AUTO}.families.{family}": (name,) for family, name in _MORE.items()},
        f"{_HERE}.helpers": ("ConfigGetter",),
    },
    ".state_actions": _STATE_ACTION | {f"{_AUTO}.actions": ("StateAction", *_ACTIONS)},
    ".tensor_parallel": {
        f"{_AUTO}.model": ("TensorParallel",),
        f"{_AUTO}.devices": ("canonicalize_device", "check_device_ids"),
        f"{_HERE}.helpers": ("logger", "parallel_apply_simple", "get_a_var"),
    },
    ".utils": {
        f"{_AUTO}.nested": (*_NESTED, "find_tied_weight_aliases"),
        f"{_HERE}.helpers": ("check_lora",),
    },
    ".wrapper": {
        f"{_AUTO}.wrapper": ("TensorParallelWrapper",),
        f"{_AUTO}.ops": ("apply_action",),
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
