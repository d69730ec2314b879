"""A table of all names of the earlier TorchDistPackage and their homes now, by old module path;
public names that the wing for guests adds to the package; and modules that moved into it.

Nothing is loaded before a name is asked for. An old path imports as a module whose names are looked
up here; a module of this package at an old path keeps its own names and gets the missing ones. A
name that is still to come can be imported and handed on, and refuses use: the program may not use
it at all. What an import or a type annotation does to its value therefore passes.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NoReturn, Union

from torchdistpackage.errors import NotAvailableError
from torchdistpackage.lazy import EXTENSIONS

PACKAGE = __name__.partition(".")[0]


Names = dict[str, tuple[str, ...]]
"""Module of this package, or a `UnavailableReason`, -> names."""

_ENGINE = "compat.tensor_parallel.engine"
_EXPERT_GRADS = "compat.torchdistpackage.expert_grads"
_FORWARD_BACKWARD = "compat.torchdistpackage.forward_backward"
_SCHEDULER: Names = {
    _FORWARD_BACKWARD: ("forward_backward", "forward_eval"),
}
_PARTITION: Names = {
    "parallel.pipeline.partition.sequential": (
        "flatten_model",
        "flatten_sequence",
        "CallableModule",
    ),
    "parallel.pipeline.partition.policies": (
        "partition_uniform",
        "partition_balanced",
        "flat_and_partition",
    ),
}
_CLIP: Names = {
    "optim.clip": ("clip_grad_norm_",),
    "compat.torchdistpackage.mixed_precision": ("NativeScalerPP",),
}
_P2P: Names = {
    "compat.torchdistpackage.p2p": (
        "send_obj_meta",
        "recv_obj_meta",
        "recv_forward",
        "recv_backward",
        "send_forward",
        "send_backward",
        "send_forward_recv_backward",
        "send_backward_recv_forward",
        "send_forward_recv_forward",
        "send_backward_recv_backward",
        "send_forward_backward_recv_forward_backward",
        "split_tensor_into_1d_equal_chunks",
        "gather_split_1d_tensor",
    ),
}
_LAYERS: Names = {
    "compat.torchdistpackage.tensor_layers": (
        "set_tp_group",
        "get_tp_group",
        "get_tensor_model_parallel_world_size",
        "TpLinear",
        "ColParallelLinear",
        "RowParallelLinear",
        "gather_from_sequence_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
        "maybe_gather_from_sequence_parallel",
        "maybe_split_into_sequence_parallel",
        "set_sequence_parallel_attr",
        "is_squence_parallel_tensor",
    ),
}
_BLOCKS = "compat.torchdistpackage.tensor_blocks"
_MLP: Names = {_BLOCKS: ("Mlp", "TpMlp")}
_ATTENTION: Names = {_BLOCKS: ("Attention", "TpAttention")}
_TRANSFORMER: Names = {_BLOCKS: ("Block", "ParallelBlock", "Transformer")}
_ZERO_OPTIMIZER: Names = {"compat.torchdistpackage.mixed_precision": ("Bf16ZeroOptimizer",)}

OLD_PATHS: dict[str, Names] = {
    "dist.launch_from_slurm": {
        "comm.runtime": ("setup_distributed", "setup_distributed_slurm", "find_free_port"),
    },
    "dist.process_topo": {
        "comm.tpc": ("ProcessTopology", "torch_parallel_context", "is_using_pp"),
        "compat.torchdistpackage.ranks": ("gen_inner_ranks", "gen_groups"),
        "harness.comm_test": ("test_comm",),
    },
    "dist.node_group": {"comm.tpc": ("setup_node_groups",)},
    "dist.model_parallel_ckpt": {"compat.torchdistpackage.dist": ("get_mp_ckpt_suffix",)},
    "dist.sharded_ema": {"ddp.ema": ("ShardedEMA",)},
    "dist.py_comm_test": {
        "compat.torchdistpackage.dist": ("test_collection", "test_all2all_balanced")
    },
    "dist.utils": {
        "tools.ranges": ("cu_prof_start", "cu_prof_stop", "nvtx_decorator", "NVTXContext"),
        "tools.printing": ("disable_non_master_print",),
        "tools.debug_nan": ("_has_inf_or_nan",),
    },
    "utils": {"comm.random": ("fix_rand",), "layout.partition": ("partition_params",)},
    "ddp.naive_ddp": {_EXPERT_GRADS: ("MoEDP", "create_moe_dp_hooks", "moe_dp_iter_step")},
    "ddp.zero_optim": _ZERO_OPTIMIZER,
    "ddp.zer_optim": _ZERO_OPTIMIZER,
    "parallel.pipeline_sched": _SCHEDULER,
    "parallel.pipeline_helper": _PARTITION,
    "parallel.clip_grad_parallel": _CLIP,
    "parallel.comm": _P2P,
    "parallel.pipeline_parallel.pipeline_sched": _SCHEDULER,
    "parallel.pipeline_parallel.pipeline_helper": _PARTITION,
    "parallel.pipeline_parallel.clip_grad_parallel": _CLIP,
    "parallel.pipeline_parallel.comm": _P2P,
    "parallel.tensor_parallel.tp_utils": _LAYERS,
    "parallel.tensor_parallel.mlp": _MLP,
    "parallel.tensor_parallel.attn": _ATTENTION,
    "parallel.tensor_parallel.transformer": _TRANSFORMER,
    "parallel": _LAYERS
    | {_BLOCKS: ("Mlp", "TpMlp", "Attention", "TpAttention", "Block", "ParallelBlock")},
    "tools.bnb_fc": {"tools.int8_linear": ("replace_linear_by_bnb",)},
    "tools.bminf_int8": {"tools.int8_linear": ("replace_linear_by_bminf",)},
    "tools.slurm_job_monitor": {
        "compat.torchdistpackage.job_monitor": (
            "launch_job",
            "get_slurm_jobinfo",
            "determine_job_is_alive",
            "job_is_finished",
            "scancel_slurm_job",
            "monitor_job",
        ),
    },
}
"""Old path below the package -> home of its names; a file that exists there now has its own."""

PUBLIC = {
    "gen_inner_ranks": "compat.torchdistpackage.ranks:gen_inner_ranks",
    "gen_groups": "compat.torchdistpackage.ranks:gen_groups",
    "Bf16ZeroOptimizer": "compat.torchdistpackage.mixed_precision:Bf16ZeroOptimizer",
    "NativeScalerPP": "compat.torchdistpackage.mixed_precision:NativeScalerPP",
    "create_moe_dp_hooks": f"{_EXPERT_GRADS}:create_moe_dp_hooks",
    "moe_dp_iter_step": f"{_EXPERT_GRADS}:moe_dp_iter_step",
    "forward_backward": f"{_FORWARD_BACKWARD}:forward_backward",
    "forward_eval": f"{_FORWARD_BACKWARD}:forward_eval",
}
"""Public names of the package that are defined here -> "module:attribute" inside the package."""

_ROOMS = {
    "data": ("batches", "bins", "blend", "corpus", "packing", "preference_data"),
    "data.tokens": (
        "chat",
        "chat_jinja",
        "chat_rows",
        "chat_turns",
        "data_fingerprint",
        "documents",
        "mapped",
        "pair_rows",
        "parquet_rows",
        "preference_pairs",
        "prompts",
        "row_notes",
        "split",
        "template_date",
        "texts",
        "token_bar",
        "token_cache",
        "token_checks",
        "token_encoder",
        "token_workers",
    ),
    "plan": (
        "context_plan",
        "elastic",
        "estimate",
        "expert_plan",
        "memory",
        "parity_model",
        "parity_plan",
        "refusals",
        "resume_check",
        "shrink",
        "smaller_arguments",
        "stage_partition",
        "traffic",
        "user_code",
    ),
}
"""Room that was made of a part of `train` -> its modules that kept their names."""

MOVED = {
    "parallel.placed": "compat.placed",
    "ddp.expert_grads": _EXPERT_GRADS,
    "parallel.pipeline.functional": _FORWARD_BACKWARD,
    "parallel.pipeline.function_call": "compat.torchdistpackage.function_call",
    "parallel.pipeline.scatter_gather": "compat.torchdistpackage.scatter_gather",
    "parallel.tensor.entrance": f"{_ENGINE}.entrance",
    **{
        f"parallel.auto.{name}": f"{_ENGINE}.{name}"
        for name in (
            "actions",
            "adapters",
            "changed",
            "explain",
            "factory",
            "family_plan",
            "gradients",
            "heads",
            "hugging_face",
            "layerwise",
            "layouts",
            "model",
            "ops",
            "own_forward",
            "pairs",
            "products",
            "read_weights",
            "rules",
            "shard",
            "verify",
            "wrapper",
        )
    },
    "harness.operations": "comm.collective_table",
    "train.data": "data.source",
    "train.plan": "plan.run_plan",
    "train.run_folder": "launch.run_folder",
    **{f"train.{name}": f"{room}.{name}" for room, names in _ROOMS.items() for name in names},
}
"""Module or folder that moved -> where it is now; both paths import one module."""

PROGRAMS = {
    "dist.py_comm_test": "compat/torchdistpackage/dist.py",
    "tools.slurm_job_monitor": "cli/jobs.py",
}
"""Old path that was run with `python -m` -> the file of this package that is run now."""


def _flat() -> dict[str, dict[str, str]]:
    """Return the names of each old module by its full path; packages above it have no names."""
    flat: dict[str, dict[str, str]] = {}
    for path, names in OLD_PATHS.items():
        full = f"{PACKAGE}.{path}" if path else PACKAGE
        while full not in flat:
            flat[full] = {}
            full = full.rpartition(".")[0] or full
        full = f"{PACKAGE}.{path}" if path else PACKAGE
        flat[full] = {
            name: module for module, public_names in names.items() for name in public_names
        }
    return flat


MODULES = _flat()


def announce(module: str, names: Names) -> None:
    """Look up `names` of a module of this package that is not an old path in the same way."""
    module_names = MODULES.setdefault(module, {})
    module_names |= {name: path for path, public_names in names.items() for name in public_names}


announce(f"{PACKAGE}.parallel", {_BLOCKS: ("Transformer",)} | _SCHEDULER)
announce(
    f"{PACKAGE}.parallel.auto",  # where these of ours were before
    {
        "compat.tensor_parallel.call": ("tensor_parallel",),
        "compat.tensor_parallel.model": ("TensorParallel",),
        "compat.tensor_parallel.shard_states": ("convert_state_dict", "infer_sharded_device_map"),
        "compat.tensor_parallel.plans": ("find_predefined_tensor_parallel_config",),
        f"{_ENGINE}.factory": ("parallelize_module",),
        f"{_ENGINE}.model": ("ParallelModule",),
        f"{_ENGINE}.rules": ("Config", "match_report"),
        f"{_ENGINE}.layerwise": ("get_default_config",),
        f"{_ENGINE}.explain": ("explain",),
        f"{_ENGINE}.shard": ("make_shard", "make_distributed_shard"),
        f"{_ENGINE}.actions": (
            "StateAction",
            "Split",
            "SplitInChunks",
            "SplitInGroupedChunks",
            "TakeChunks",
            "FirstOnly",
            "Partial",
            "Scale",
        ),
    },
)


def lookup(module: str, name: str) -> object:
    """Return the attribute that the old `module` called `name`, loaded now; a submodule counts as a
    name.

    Raises:
        AttributeError: it never had that name.
    """
    path = MODULES[module].get(name)
    if isinstance(path, UnavailableReason):
        return NotAvailable(module, name, path)
    if path is not None:
        return getattr(importlib.import_module(f"{PACKAGE}.{path}"), name)
    if f"{module}.{name}" in MODULES:
        return importlib.import_module(f"{module}.{name}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def serve(module: ModuleType) -> None:
    """Give `module` the names of its old path, behind those that it has."""
    own_getattr = vars(module).get("__getattr__")

    def find(name: str) -> object:
        if own_getattr is not None:
            try:
                return own_getattr(name)
            except AttributeError:
                full = module.__name__
                if name not in MODULES[full] and f"{full}.{name}" not in MODULES:
                    raise
        return lookup(module.__name__, name)

    vars(module)["__getattr__"] = find


class OldModule:
    """Loader of an old path that has no file now."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        names = MODULES[module.__name__]
        below = [path.rpartition(".") for path in MODULES]
        children = [name for parent, _, name in below if parent == module.__name__]
        vars(module).update(
            __doc__=f"The earlier path of {', '.join(names) or 'other modules'}.",
            __all__=list(names),
            __dir__=lambda: sorted({*vars(module), *names, *children}),
        )
        vars(module).pop("__getattr__", None)  # of before a reload
        serve(module)


class SharedModule(SourceFileLoader):
    """Loader of a file of this package at an old path."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module).pop("__getattr__", None)  # of before a reload
        super().exec_module(module)
        serve(module)


class MovedModule:
    """Loader of the earlier path of a module that moved: it imports as the module itself."""

    def __init__(self, target: str):
        self.target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self.target)


def moved_to(fullname: str) -> str | None:
    """Return the present full name of a module that moved, or None."""
    for old, new in MOVED.items():
        if f"{fullname}.".startswith(f"{PACKAGE}.{old}."):
            return fullname.replace(f"{PACKAGE}.{old}", f"{PACKAGE}.{new}", 1)
    return None


class OldPaths:
    """Finds the old paths, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if moved := moved_to(fullname):
            return ModuleSpec(fullname, MovedModule(moved), origin=__name__)
        if fullname in MODULES and fullname != PACKAGE:
            spec = PathFinder.find_spec(fullname, path)
            if spec is None:
                return ModuleSpec(fullname, OldModule(), origin=__name__, is_package=True)
            if isinstance(spec.loader, SourceFileLoader):
                spec.loader = SharedModule(spec.loader.name, spec.loader.path)
            return spec
        module, _, name = fullname.rpartition(".")
        if name == "__main__" and (file := PROGRAMS.get(module.removeprefix(f"{PACKAGE}."))):
            # An old path counts as a package, and of a package Python runs the __main__.
            return spec_from_file_location(fullname, Path(__file__).parents[1] / file)
        return None


FINDER = OldPaths()


def install() -> None:
    """Let old paths be imported from now on, and the core know what is here beside it.

    Safe to call twice.
    """
    EXTENSIONS["explained_rules"] = f"{PACKAGE}.{_ENGINE}.explain:explained_rules"
    EXTENSIONS["tensor_parallel"] = f"{PACKAGE}.compat.tensor_parallel.call:tensor_parallel"
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)


class NotAvailable:
    """Stands for `name` of `module`; each use raises NotAvailableError with the reason."""

    __slots__ = ("_name", "_why")

    def __init__(self, module: str, name: str, why: str):
        self._name, self._why = f"{module}.{name}", why

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotAvailableError(f"{self._name} is not available yet: {self._why}")

    __call__ = __mro_entries__ = _refuse
    """A call, and `class Mine(name)`."""

    __instancecheck__ = __subclasscheck__ = _refuse
    __getitem__ = __iter__ = __enter__ = __exit__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    def __or__(self, other: object) -> object:
        return Union[self, other]  # noqa: UP007  # an annotation `Name | None`

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<{self._name}, not available yet>"


class UnavailableReason(str):
    """The reason why a name is not available yet; the text ends a sentence."""

    __slots__ = ()
