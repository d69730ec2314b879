"""Mixed-parallelism training for Slurm users, from one YAML file.

A name is loaded on first use, so that importing this package, or anything in it that
only computes (topologies, layouts, schedules, configurations, launching), imports no torch.
"""

import importlib
from types import ModuleType

__version__ = "0.1.0"

NAMES: dict[str, str] = {
    # who is where, and how the ranks come together
    "setup_distributed": "comm.runtime:setup_distributed",
    "setup_distributed_slurm": "comm.runtime:setup_distributed_slurm",
    "find_free_port": "comm.runtime:find_free_port",
    "setup_node_groups": "comm.tpc:setup_node_groups",
    "tpc": "comm.tpc:tpc",
    "is_using_pp": "comm.tpc:is_using_pp",
    "test_comm": "harness.comm_test:test_comm",
    "watch": "harness.watchdog:watch",
    "Phases": "harness.stragglers.compare:Phases",
    "Comparison": "harness.stragglers.compare:Comparison",
    "lint": "harness.lint.linter:lint",
    "seed_rank": "comm.random:seed_rank",
    "fix_rand": "comm.random:fix_rand",
    "run_local": "launch.workers:run_local",
    "run_or_launch": "launch.workers:run_or_launch",
    "run_here": "launch.workers:run_or_launch",  # its earlier name
    # collectives that autograd sees; the rest of communication is in torchdistpackage.comm
    "copy": "comm.collectives:copy",
    "reduce": "comm.collectives:reduce",
    "scatter": "comm.collectives:scatter",
    "gather": "comm.collectives:gather",
    "all_gather": "comm.collectives:all_gather",
    "reduce_scatter": "comm.collectives:reduce_scatter",
    "all_to_all": "comm.collectives:all_to_all",
    "broadcast": "comm.collectives:broadcast",
    # values: planned, checked and compared without processes
    "Mesh": "topology.mesh:Mesh",
    "Topology": "topology.mesh:Topology",
    "make_topology": "topology.mesh:topology",
    "Layout": "layout.layout:Layout",
    "Schedule": "schedule.actions:Schedule",
    "Timeline": "schedule.engine:Timeline",
    "build_schedule": "schedule.generators:build",
    "simulate": "schedule.engine:simulate",
    "Run": "report.run:Run",
    "RunConfig": "config.schema:RunConfig",
    "load_config": "config.load:load",
    # a training step
    "data_parallel": "ddp.auto:data_parallel",
    "NaiveDDP": "ddp.naive_ddp:NaiveDDP",
    "bf16_compress": "ddp.comm_hooks:bf16_compress",
    "fp16_compress": "ddp.comm_hooks:fp16_compress",
    "PowerSGD": "ddp.comm_hooks:PowerSGD",
    "join": "ddp.join:join",
    "convert_sync_batchnorm": "ddp.sync_batch_norm:convert_sync_batchnorm",
    "check_replicas": "ddp.param_sync:check_replicas",
    "ShardedEMA": "ddp.ema:ShardedEMA",
    "partition_params": "layout.partition:partition_params",
    "ZeroOptimizer": "ddp.zero.optimizer:ZeroOptimizer",
    "ZeroOptions": "ddp.zero.options:ZeroOptions",
    "replica_group": "ddp.zero.options:replica_group",
    "same_place": "ddp.zero.options:replica_group",  # its earlier name
    "Pipeline": "parallel.pipeline.pipeline:Pipeline",
    "partition_uniform": "parallel.pipeline.partition.policies:partition_uniform",
    "partition_balanced": "parallel.pipeline.partition.policies:partition_balanced",
    "partition_by_time": "parallel.pipeline.partition.policies:partition_by_time",
    "flatten_model": "parallel.pipeline.partition.sequential:flatten_model",
    "tensor_parallel": "models.tensor_parallel:tensor_parallel",
    "save_tensor_parallel": "parallel.auto.saving:save_tensor_parallel",
    "clip_grad_norm_": "optim.clip:clip_grad_norm_",
    "Muon": "optim.muon:Muon",
    "GradScaler": "optim.scaler:GradScaler",
    "Callback": "train.loop:Callback",
    # tools around any model; more in torchdistpackage.tools
    "register_profile_hooks": "tools.module_profiler:register_profile_hooks",
    "remove_profile_hooks": "tools.module_profiler:remove_profile_hooks",
    "get_model_profile": "tools.module_profiler:get_model_profile",
    "report_prof": "tools.module_profiler:report_prof",
    "propose_recompute": "tools.recompute:propose_recompute",
    "checkpoint_modules": "tools.recompute:checkpoint_modules",
    "watch_nonfinite": "tools.debug_nan:watch_nonfinite",
    "replace_all_module": "tools.module_replace:replace_all_module",
    "replace_linear_by_bnb": "tools.int8_linear:replace_linear_by_bnb",
    "replace_linear_by_bminf": "tools.int8_linear:replace_linear_by_bminf",
    "replace_linear_by_int8": "tools.int8_linear:replace_linear_by_int8",
    # what may be raised
    "TorchDistError": "errors:TorchDistError",
    "ConfigError": "errors:ConfigError",
    "TopologyError": "errors:TopologyError",
    "LayoutError": "errors:LayoutError",
    "ScheduleError": "errors:ScheduleError",
    "LaunchError": "errors:LaunchError",
    "AbsentError": "errors:AbsentError",
    "HeldError": "errors:HeldError",
    "RankError": "errors:RankError",
    "CommError": "errors:CommError",
    "PlacementError": "errors:PlacementError",
    "DataError": "errors:DataError",
    "CheckpointError": "errors:CheckpointError",
    "NonFiniteError": "errors:NonFiniteError",
    "RaceError": "errors:RaceError",
    "NotAvailableError": "errors:NotAvailableError",
}
"""Public name -> "module:attribute" inside this package."""


def _import_wing() -> ModuleType | None:
    """Import what serves the names and paths of earlier libraries; None where it was deleted.

    Nothing else in the core knows the wing for guests, `compat/`.
    """
    wing = f"{__name__}.compat"
    try:
        return importlib.import_module(f"{wing}.paths")
    except ModuleNotFoundError as error:
        if error.name not in (wing, f"{wing}.paths"):
            raise
        return None


_wing = _import_wing()
if _wing is not None:
    NAMES |= _wing.PUBLIC
    _wing.install()

__all__ = list(NAMES)


def __getattr__(name: str) -> object:
    if name not in NAMES:
        if _wing is not None:
            return _wing.lookup(__name__, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = NAMES[name].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
