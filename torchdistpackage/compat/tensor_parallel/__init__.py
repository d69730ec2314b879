"""tensor_parallel's names, which are still to come: see compat/not_available.py."""

from torchdistpackage.compat import paths
from torchdistpackage.compat.paths import UnavailableReason

_SHARDED = UnavailableReason(
    "splitting any module by one call is not offered yet; the split layers of "
    "torchdistpackage.parallel are"
)

_TOP = (
    "tensor_parallel",
    "TensorParallel",
    "TensorParallelPreTrainedModel",
    "Config",
    "Sharded",
    "StateAction",
    "make_distributed_shard",
    "save_tensor_parallel",
    "convert_state_dict",
    "infer_sharded_device_map",
)

# not tensor_parallel.tensor_parallel, where the package has its function
for _below, _names in {
    "": _TOP,
    ".autoconfig": ("get_default_config",),
    ".aux_actions": (
        "gather_kv",
        "select_kv_for_rank",
        "split_heads",
        "split_num_heads",
        "split_inner_dim",
        "split_alibi",
    ),
    ".communications": (
        "CollectiveOperation",
        "CollectiveOpetationBase",
        "AllReduce",
        "AllGather",
        "ScatterReduce",
        "NCCLAllReduce",
        "NCCLAllGather",
        "DistributedAllReduce",
        "DistributedAllGather",
    ),
    ".config": ("Config", "add_lora_rules", "get_parameter_name_mapping"),
    ".dispatch": ("save_tensor_parallel", "convert_state_dict", "infer_sharded_device_map"),
    ".factory": ("tensor_parallel",),
    ".per_device_tensors": ("PerDeviceTensors",),
    ".pretrained_model": (
        "TensorParallelPreTrainedModel",
        "find_predefined_tensor_parallel_config",
    ),
    ".shard": ("make_shard", "make_distributed_shard"),
    ".sharding": ("Sharded",),
    ".slicing_configs": (
        "PREDEFINED_CONFIGS",
        "get_bloom_config",
        "get_t5_config",
        "get_bert_config",
        "get_gpt2_config",
        "get_gpt_neox_config",
        "get_codegen_config",
        "get_llama_config",
        "get_refined_web_config",
    ),
    ".state_actions": (
        "StateAction",
        "LegacyStateAction",
        "Split",
        "SplitInChunks",
        "SplitInGroupedChunks",
        "Scale",
    ),
    ".utils": (
        "nested_flatten",
        "nested_pack",
        "nested_map",
        "nested_compare",
        "find_tied_weight_aliases",
    ),
    ".wrapper": ("TensorParallelWrapper",),
}.items():
    paths.announce(__name__ + _below, {_SHARDED: _names})

__all__ = list(_TOP)


def __getattr__(name: str) -> object:
    return paths.lookup(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
