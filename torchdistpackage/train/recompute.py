"""`train.recompute`: choose which modules of a rank's stages are checkpointed.

`auto` runs one microbatch through the stages, forward only, with gradients on. A stage keeps as
many microbatches as the schedule holds at once, so its memory counts so many times; its times do
not, as every microbatch is recomputed on every stage. Ranks of one pipe index take the choice of
the first of them: with tensor parallelism a recomputed module communicates, which all must do.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.nested import map_tensors
from torchdistpackage.comm.tensor_meta import Message
from torchdistpackage.errors import ConfigError
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.schedule.generators import evaluation
from torchdistpackage.tools.activation_offload import ActivationOffload, offload_modules
from torchdistpackage.tools.module_profiler import (
    Infos,
    register_profile_hooks,
    remove_profile_hooks,
    take_shorter,
)
from torchdistpackage.tools.recompute import checkpoint_modules, propose_recompute
from torchdistpackage.tools.undisturbed import undisturbed
from torchdistpackage.train.staged_model import TrainStages
from torchdistpackage.train.step import Trainer

_REPEATS = 3
"""Number of repeats after a warm-up; the shortest times count."""


def recompute_blocks(stages: TrainStages) -> tuple[str, ...]:
    """Checkpoint every block; return their names."""
    names = block_names(stages)
    checkpoint_modules(stages, names)
    return names


def offload_blocks(stages: TrainStages, device: torch.device) -> tuple[str, ...]:
    """Keep tensors saved for the backward of every block in host memory; return the blocks'
    names.
    """
    names, offload = block_names(stages), ActivationOffload(device)
    compiled = {block.name: block for block in stages.compiled}
    for name, block in compiled.items():
        # around the graph: hooks on saved tensors inside would be part of it
        block.around = partial(offload.run, stages.get_submodule(name))
    offload_modules(stages, [name for name in names if name not in compiled], offload)
    return names


def block_names(stages: TrainStages) -> tuple[str, ...]:
    """Return the names of the blocks of all stages of a rank.

    Blocks are those that a stage names by `block_names()`, else the members of its lists and dicts
    of modules; in a stage without any, such as your own chain, its children that have children.
    """
    names: list[str] = []
    for stage, module in stages.named_children():
        if callable(list_blocks := getattr(module, "block_names", None)):
            names += [f"{stage}.{name}" for name in list_blocks()]
            continue
        lists = [(n, x) for n, x in module.named_children() if _is_list(x)]
        children = [f"{n}.{i}" for n, members in lists for i, _ in members.named_children()]
        if not lists:
            children = [
                n for n, x in module.named_children() if next(x.children(), None) is not None
            ]
        names += [f"{stage}.{name}" for name in children]
    return tuple(names)


def recompute_within(trainer: Trainer, budget_gb: float) -> tuple[str, ...]:
    """Checkpoint the cheapest modules that make activations fit into `budget_gb`; return their
    names.

    Raises:
        ConfigError: they take more on some rank whatever is recomputed; on all ranks.
    """
    chosen: tuple[str, ...] | str
    try:
        chosen = _cheapest(measured(trainer), budget_gb, trainer.stage)
    except ConfigError as error:
        chosen = str(error).partition(": ")[2]
    mesh = trainer.plan.topology.dense

    def of_stages(choices: list[Any]) -> str | dict[int, tuple[str, ...]]:
        """Return for each pipe index the choice of its first rank, or the reason why there is
        none.
        """
        if refused := [(rank, text) for rank, text in enumerate(choices) if isinstance(text, str)]:
            rank, text = refused[0]
            return (
                f"train.recompute=auto: activations of {len(refused)} of {len(choices)} ranks do "
                f"not fit into what weights, gradients and optimizer state leave of "
                f"train.memory_gb; on rank {rank} {text}"
            )
        by_place: dict[int, tuple[str, ...]] = {}
        for rank, names in enumerate(choices):
            by_place.setdefault(mesh.coord(rank)["pipe"], names)
        return by_place

    agreed = primitives.reduce_objects(chosen, of_stages)
    if isinstance(agreed, str):
        raise ConfigError(agreed)
    names = cast(dict[int, tuple[str, ...]], agreed)[mesh.coord(trainer.rank)["pipe"]]
    checkpoint_modules(trainer.stage, names)
    return names


def _cheapest(profile: Infos, budget_gb: float, stages: TrainStages) -> tuple[str, ...]:
    """Return the cheapest modules that make activations fit.

    The memory of the largest chosen module during its recomputation counts too. A stage may limit
    the choice through `may_recompute(name)`.
    """

    def may(name: str) -> bool:
        stage, _, inside = name.partition(".")
        allows = getattr(stages[stage], "may_recompute", None) if inside else None
        return bool(inside) and (allows is None or allows(inside))

    reserve_gb = 0.0
    while True:
        limit_gb = max(budget_gb - reserve_gb, 1e-9)
        plan = propose_recompute(profile, limit_gb, candidates=may)
        largest_gb = max((profile[name]["once_mem"] / 1e3 for name in plan), default=0.0)
        if plan.memory_gb + largest_gb <= budget_gb or largest_gb <= reserve_gb:
            return tuple(plan)
        reserve_gb = largest_gb


class _StageProbe(nn.Module):
    """One stage of a rank; the last one includes the loss, whose activations count too."""

    def __init__(self, trainer: Trainer, stage: int, is_last: bool):
        super().__init__()
        self._number, self._is_last = stage, is_last
        self._call = trainer.forward, trainer.loss  # ZeRO's hooks are on all stages together
        self.add_module(str(stage), trainer.stage[str(stage)])

    def forward(self, x: Message, targets: Tensor | None, position_ids: Tensor | None) -> Message:
        forward, loss = self._call
        output = forward(self._number, x, position_ids)
        if not self._is_last:
            return output
        return loss(output, targets)[0]  # type: ignore[arg-type]


def measured(trainer: Trainer) -> Infos:
    """Return a profile of all stages of this rank; memory is multiplied by the micro-batches held
    at once.

    once_mem: MB that checkpointing frees for one micro-batch, and that its recomputation takes.
    """
    plan, executor = trainer.plan, trainer.executor
    schedule = evaluation(plan.schedule, 1)
    forwards = Executor(
        schedule, executor.group, device=trainer.device, timeout_s=executor.timeout_s
    )
    probes = {
        stage: _StageProbe(trainer, stage, forwards.is_last_stage(stage))
        for stage in forwards.stages
    }
    inputs, targets, positions = trainer.sample()

    def forward(stage: int, m: int, received: Message) -> Message:
        x = inputs if forwards.is_first_stage(stage) else map_tensors(received, _leaf)
        with torch.enable_grad(), trainer.precision():
            output = probes[stage](x, targets, positions)
        return map_tensors(output, Tensor.detach)

    infos: dict[int, Infos] = {stage: {} for stage in probes}
    trainer.stage.train()
    try:
        with undisturbed(trainer.stage), trainer.reducer.no_sync():
            forwards.run(forward)
            for _ in range(_REPEATS):
                profiles = {stage: register_profile_hooks(probe) for stage, probe in probes.items()}
                forwards.run(forward)
                for stage in probes:
                    take_shorter(infos[stage], profiles[stage])
    finally:
        for probe in probes.values():
            remove_profile_hooks(probe)
    profile: Infos = {"root": {"fwd_time": 0.0, "fwd_mem": 0.0}}
    for stage, stage_infos in infos.items():
        live = plan.timeline.peak_live[stage]
        for name, entry in stage_infos.items():
            scaled = {key: entry[key] * live for key in ("fwd_mem", "freed_mem")}
            if name == "root":
                profile["root"]["fwd_mem"] += scaled["fwd_mem"]
            else:
                profile[name] = {**entry, **scaled, "once_mem": entry["freed_mem"]}
    return profile


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)
