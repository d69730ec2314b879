"""Build the objects of a plan; only this file translates configuration into objects.

All other files receive plain arguments. They are decided here, in the order in which a run needs
them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from torchdistpackage.checkpoint.local_copies import LocalCopies
from torchdistpackage.checkpoint.retention import Retention
from torchdistpackage.checkpoint.save import fail_together
from torchdistpackage.comm import primitives
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.group_options import GroupOptions, merged
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.random import seed_rank
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.config.head_of_run import head_of
from torchdistpackage.config.model_section import is_adapter
from torchdistpackage.config.optim_section import OptimSection
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.data.source import DataSource, SequenceSource
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.frozen import ShardedWeights
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import ConfigError, ScheduleError
from torchdistpackage.harness.watchdog import HangWatchdog
from torchdistpackage.launch.entrypoint import user_object
from torchdistpackage.layout.derive import BATCH_AXES
from torchdistpackage.layout.layout import Layout
from torchdistpackage.lazy import resolve
from torchdistpackage.parallel.context.model import sequence_over
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.partition.cost_split import split_by_cost
from torchdistpackage.parallel.tensor.attention import SequenceAttention
from torchdistpackage.parallel.tensor.float8 import use_float8
from torchdistpackage.parallel.tensor.init import collect_initials, initialize
from torchdistpackage.plan.logits_file import wrong_logits
from torchdistpackage.plan.measured import measured_step_seconds
from torchdistpackage.plan.memory import activation_budget_gb
from torchdistpackage.plan.reference_file import wrong_reference
from torchdistpackage.plan.run_plan import Plan, rank_memory
from torchdistpackage.plan.step_time import known_step_seconds
from torchdistpackage.plan.teacher import sharing_groups
from torchdistpackage.run_files import CHECKPOINTS
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.generators import evaluation
from torchdistpackage.train.callbacks import (
    DeadExperts,
    NonFiniteCheck,
    SaveEvents,
    SourceShares,
    StragglerCheck,
    own_callback,
)
from torchdistpackage.train.compiled import compile_blocks
from torchdistpackage.train.data_build import blend_of, build_data, build_eval_sets
from torchdistpackage.train.distillation import LogitsOf, TeacherLoss, TeacherMembers
from torchdistpackage.train.early_stop import EarlyStop
from torchdistpackage.train.embedding import EmbeddingLoss
from torchdistpackage.train.embedding_noise import EmbeddingNoise
from torchdistpackage.train.head_losses import HeadLoss
from torchdistpackage.train.learning_rate import learning_rate
from torchdistpackage.train.log import StepLog, print_line
from torchdistpackage.train.logits_file import LogitsFileLoss
from torchdistpackage.train.loop import Callback, Loop
from torchdistpackage.train.losses import from_user, smoothed, token_cross_entropy
from torchdistpackage.train.optimizers import make_optimizer
from torchdistpackage.train.own_model import own_stages
from torchdistpackage.train.preference import PreferenceLoss
from torchdistpackage.train.profiler import StepProfiler
from torchdistpackage.train.rank_times import RankTimes
from torchdistpackage.train.recompute import offload_blocks, recompute_blocks, recompute_within
from torchdistpackage.train.reference_cache import CachedReference
from torchdistpackage.train.replica_check import ReplicaCheck
from torchdistpackage.train.saving import RunSaver
from torchdistpackage.train.staged_model import (
    LossFn,
    StagedModel,
    TrainStages,
    check_declared,
)
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.stop import StopController
from torchdistpackage.train.task import TaskLoss
from torchdistpackage.train.trace import StepTrace
from torchdistpackage.train.train_state import TrainState
from torchdistpackage.train.unpaired_preference import UnpairedLoss
from torchdistpackage.train.update import Update, reduced_grads
from torchdistpackage.train.weight_averages import WeightAverages

_PreferenceT = TypeVar("_PreferenceT", bound=PreferenceLoss)


def build(plan: Plan, rank: int, device: torch.device, data: DataSource | None = None) -> Trainer:
    """Build everything that `rank` trains with. It needs the default process group and sets up
    `tpc`.

    data: replaces the data section, for callers with their own source.

    Raises:
        TorchDistError: the plan does not fit the user's own model, loss or data.
    """
    config, model = plan.config, build_model(plan, rank, device)
    stage, layouts = model.stage, model.layouts
    if (alpha := config.train.neftune_noise_alpha) is not None and model.has_first:
        first = stage.get_submodule("0")
        first.add_embedding_noise(EmbeddingNoise(alpha, config.data.seq_len))
        # making layers has drawn numbers, more where a rank has more of them
        seed_rank(config.run.seed, plan.topology.dense, rank)
    task = build_task(model)  # before the optimizer, as it may freeze weights
    compile_blocks(stage, config.train.compile_backend, config.train.compile)
    tables = {name for name, layout in layouts.items() if layout.is_table}
    global_names = {name: layout.name for name, layout in layouts.items()}
    if plan.model is None and config.optim.groups:
        _refuse_unmatched(stage, global_names, config.optim)
    inner = make_optimizer(stage, config.optim, tables, global_names, layouts)
    replicas = _data_parallel(stage, layouts, inner, plan)
    optimizer = inner if isinstance(replicas, NaiveDDP) else replicas
    pipe, optim = tpc.get_group("pipe"), config.optim
    rate = learning_rate(optim, config.train.steps)

    _refuse_wrong_files(config, rank)
    source = data if data is not None else build_data(plan)
    ranges = model.sequence.ranges if isinstance(source, SequenceSource) else None

    def executor(schedule: Schedule) -> Executor:
        return Executor(schedule, pipe, device=device, timeout_s=start_timeout_s(config))

    trainer = Trainer(
        plan=plan,
        rank=rank,
        device=device,
        stage=stage,
        layouts=layouts,
        loss=model.loss,
        autocast=model.autocast,
        sequence=model.sequence,
        data=source,
        replicas=replicas,
        optimizer=optimizer,
        update=Update(
            reduced_grads(stage, layouts, optimizer),
            optimizer,
            inner,
            device,
            learning_rate=lambda step: rate(step - 1),
            clip=optim.clip,
            halts=config.train.on_nonfinite == "stop",
            averages=None
            if optimizer is None or optim.ema_decay is None
            else WeightAverages(optimizer, optim.ema_decay),
        ),
        executor=executor(plan.schedule),
        evaluator=executor(evaluation(plan.schedule, config.pipeline.microbatches)),
        name=config.run.name,
        seed=config.run.seed,
        num_steps=config.train.steps,
        rounds=config.train.accumulate,
        # from stage 2 on there is no room for full gradients beyond a round
        sums_each_round=config.parallel.zero >= 2,
        eval_batches=config.train.eval_batches,
        eval_sets=build_eval_sets(plan, tpc.get_dp_rank(), ranges),
        task=task,
        has_own_data=data is None and config.data.target is None,
        validates_averages=config.train.eval_ema,
    )
    if config.train.dpo.reference is not None and isinstance(trainer.task, PreferenceLoss):
        rows = plan.samples_per_microbatch
        trainer.task.cached = CachedReference(
            Path(config.train.dpo.reference),
            source,
            device,
            seed=config.run.seed,
            data_index=tpc.get_dp_rank(),
            num_data=plan.topology.dense.axis_size("data"),
            per_round=plan.schedule.num_microbatches * rows,
            per_microbatch=rows,
        ).of_round
    if config.train.recompute == "blocks":
        trainer.recomputed = recompute_blocks(stage)
    elif config.train.recompute == "offload":
        trainer.offloaded = offload_blocks(stage, device)
    elif config.train.recompute == "auto":
        state = rank_memory(plan, rank, layouts.values(), on_gpu=device.type == "cuda")
        budget_gb = activation_budget_gb(config, state, f"rank {rank}")
        trainer.recomputed = recompute_within(trainer, budget_gb)
    return trainer


def _refuse_wrong_files(config: RunConfig, rank: int) -> None:
    """Raise an error on all ranks if a reference or teacher file belongs to another run.

    Ranks that a launcher starts have not been checked before.
    """
    if config.train.dpo.reference is None and config.train.distill.logits is None:
        return
    with fail_together(tpc.get_group("global"), "reading log-probabilities"):
        problems = wrong_reference(config) + wrong_logits(config) if rank == 0 else []
        if problems:
            raise ConfigError("; ".join(x.text for x in problems))


def _refuse_unmatched(
    stage: nn.Module, global_names: Mapping[str, str], section: OptimSection
) -> None:
    """Raise ConfigError on all ranks for optimizer groups that match no parameter.

    The names of a user's own model are unknown before it is built.
    """
    local = [global_names[name] for name, p in stage.named_parameters() if p.requires_grad]
    everywhere = primitives.gather_objects(local, tpc.get_group("global"))
    names = sorted({name for names in everywhere for name in names})
    if problems := section.unmatched_groups(names):
        raise ConfigError("; ".join(problems.values()))


def build_task(model: StagedModel) -> TaskLoss | None:
    """Return the task that computes a run's loss; None if the model's next-token loss is used.

    Call it before training, while the weights are those of a reference.
    """
    spec, teacher = model.plan.config.data.spec, model.plan.teacher
    if teacher is not None:
        return distillation_task(model, teacher)
    if (options := model.plan.config.train.distill).logits is not None:
        return LogitsFileLoss(model, options, model.plan.config.data.global_batch)
    return None if spec is None or not spec.task else resolve(spec.task)(model)


def unpaired_task(model: StagedModel) -> UnpairedLoss:
    """Return the loss of a run on labelled answers."""
    return preference_task(model, UnpairedLoss)


def preference_task(model: StagedModel, kind: type[_PreferenceT] = PreferenceLoss) -> _PreferenceT:
    """Return the loss of a run on preference pairs, or another loss relative to a reference."""
    config = model.plan.config
    reference = None
    if config.has_reference_copy:
        stage, layouts, loss = _stage(model.plan, model.device, model.sequence)
        stage.requires_grad_(False).eval()
        reference = replace(model, stage=stage, layouts=layouts, loss=loss)
        seed_rank(config.run.seed, model.plan.topology.dense, model.rank)
    model_stage = next(iter(model.stage.children()))
    return kind(
        reference,
        model.device,
        config.train.dpo,
        tpc.get_group("context"),
        rows_dim=getattr(model_stage, "rows_dim", 0),
    )


def distillation_task(model: StagedModel, teacher_plan: Plan) -> TeacherLoss:
    """Return the loss of a run with a teacher; all ranks read the teacher's weights together."""
    config, mesh = model.plan.config, teacher_plan.topology.dense
    options, student_mesh = config.train.distill, model.plan.topology.dense
    # in the order of `Plan.creations`, as first uses create and connect groups
    group, pipe = tpc.groups.along(mesh, ("tensor",)), tpc.groups.along(mesh, ("pipe",))
    stage, layouts, loss = _stage(teacher_plan, model.device, model.sequence, group)
    stage.requires_grad_(False).eval()
    shards = None
    if options.teacher_zero:
        data = tpc.groups.along(mesh, BATCH_AXES)
        shards = ShardedWeights(stage, data, model.plan.bucket_bytes)
    teacher = replace(model, plan=teacher_plan, stage=stage, layouts=layouts, loss=loss)
    seed_rank(config.run.seed, model.plan.topology.dense, model.rank)
    executor = Executor(
        evaluation(teacher_plan.schedule, config.pipeline.microbatches),
        pipe,
        device=model.device,
        timeout_s=start_timeout_s(config),
    )
    logits_of, teacher_logits_of = LogitsOf.last_stage(model.stage), LogitsOf.last_stage(stage)
    members = None
    if mesh != student_mesh:
        sharing = tpc.groups.of(sharing_groups(student_mesh, mesh)[model.rank])
        members = TeacherMembers.of(model.plan, teacher_plan, sharing, logits_of, teacher_logits_of)
    return TeacherLoss(
        teacher,
        executor,
        options,
        logits_of=logits_of,
        teacher_logits_of=teacher_logits_of,
        members=members,
        shards=shards,
    )


def embedding_task(model: StagedModel) -> EmbeddingLoss:
    """Return the loss of a run that compares texts; its model returns hidden states from now on."""
    config = model.plan.config
    any_stage: Any
    for any_stage in model.stage.children():
        any_stage.return_hidden()
    return EmbeddingLoss(
        model.device,
        config.train.embedding,
        config.data.rows_per_sample,
        tpc.get_group("data"),
        tpc.get_group("context"),
    )


def head_task(model: StagedModel) -> HeadLoss:
    """Return the loss of a run with a head."""
    config = model.plan.config
    head = head_of(config)
    assert head is not None
    return resolve(head.task.loss)(
        head,
        model.device,
        tpc.get_group("context"),
        class_weights=config.data.class_weights,
        center=config.data.center_rewards,
    )


def build_model(plan: Plan, rank: int, device: torch.device) -> StagedModel:
    """Return the stages of `rank` with their initial weights. It has the same requirements and side
    effects as `build`.

    Raises:
        TorchDistError: the plan does not fit the user's own model or loss.
    """
    config = plan.config
    recorder.checks = config.train.check_calls
    torch.set_float32_matmul_precision(config.precision.matmul)
    options = group_options(config)
    tpc.setup(plan.topology, rank, timeout_s=start_timeout_s(config), options=options)
    seed_rank(config.run.seed, plan.topology.dense, rank)
    sequence = sequence_over(tpc.get_group("context"), config.parallel.cp_comm_type)
    stage, layouts, loss = _stage(plan, device, sequence)
    tpc.prepare(sums=layouts.values(), num_data=plan.zero_group)
    check_declared(stage, layouts)
    use_float8(stage, device, config.precision.fp8)
    autocast = torch.bfloat16 if config.precision.dtype == "bf16" else None
    return StagedModel(plan, rank, device, stage, layouts, loss, autocast, sequence)


def group_options(config: RunConfig) -> dict[str, GroupOptions]:
    """Return the options of each axis's groups."""
    section = config.parallel
    return {
        axis: GroupOptions(axis in section.high_priority, section.max_ctas.get(axis))
        for axis in {*section.high_priority, *section.max_ctas}
    }


def world_options(plan: Plan) -> GroupOptions:
    """Return the options of the default group, which serves every axis that spans all ranks."""
    options, world = group_options(plan.config), plan.world_size
    meshes = plan.topology.expert, plan.topology.dense
    axes = {axis for mesh in meshes for axis in mesh.names if mesh.axis_size(axis) == world}
    if plan.topology.dense.axis_size(*BATCH_AXES) == world:
        axes.add("data")  # sums of gradients go over all ranks
    return merged(options.get(axis, GroupOptions()) for axis in axes)


def start_timeout_s(config: RunConfig) -> float:
    """Return the time limit for collectives and messages until the first step is done, while ranks
    warm up.
    """
    return max(config.launch.init_timeout_s, config.train.step_timeout_s)


def make_loop(
    trainer: Trainer,
    state: TrainState,
    folder: Path,
    stop: StopController | None = None,
    watch: HangWatchdog | None = None,
    more: Iterable[Callback] = (),
    local: LocalCopies | None = None,
) -> Loop:
    """Return the loop of the run for which `trainer` was built; all ranks call it together.

    local: the result of `make_local_copies`, after a `resume` with it.
    """
    plan, config = trainer.plan, trainer.plan.config
    train, checkpoint, every = config.train, config.checkpoint, config.log.every
    has_pipeline = config.parallel.pipe > 1
    unit = "tokens" if trainer.task is None else trainer.task.unit
    model = plan.model if unit == "tokens" else None
    brings_own_data = config.model.target is not None and config.data.target is not None
    has_own_loss = config.model.loss is not None
    log = StepLog(
        folder,
        trainer.num_steps,
        rank=trainer.rank,
        every=every,
        unit=unit,
        samples=config.data.global_batch if brings_own_data or has_own_loss else None,
        is_cross_entropy=unit == "tokens" and not has_own_loss,
        flops_per_token=model and model.flops_per_token(),
        predicted_s=_predicted_seconds(trainer) if trainer.rank == 0 else None,
        predicted_bubble=plan.timeline.bubble if has_pipeline else None,
        verbose=config.log.verbose,
        goes_on=checkpoint.on_error == "continue",
    )
    callbacks: list[Callback] = []
    if train.straggler_every:
        callbacks.append(StragglerCheck(trainer, train.straggler_every))
    if has_pipeline:
        callbacks.append(StepProfiler(trainer, every))
    if train.profile.range:
        callbacks.append(StepTrace(trainer, train.profile.range, state.step + 1))
    callbacks += [RankTimes(trainer, folder, every, state.step + 1), SaveEvents()]
    callbacks += [DeadExperts(10 * every), NonFiniteCheck(skips=train.on_nonfinite == "skip")]
    if (blend := blend_of(trainer.data)) is not None:
        callbacks.append(SourceShares(blend, trainer.seed))
    if train.early_stop.metric is not None:
        callbacks.append(EarlyStop(train.early_stop))
    else:
        state.best = None  # of an earlier start; its checkpoint would stay for ever
    if train.check_replicas_every:
        goes_on = train.on_replicas_differ == "continue"
        callbacks.append(ReplicaCheck(trainer, train.check_replicas_every, goes_on=goes_on))
    callbacks += map(own_callback, config.log.callbacks)
    return Loop(
        trainer,
        state,
        folder,
        log,
        stop,
        watch,
        call_timeout_s=train.step_timeout_s,
        eval_every=train.eval_every,
        save_every=checkpoint.save_every,
        save_every_min=checkpoint.save_every_min,
        local_every=checkpoint.local_every if local is not None else 0,
        save_last=checkpoint.export is not None,
        saver=RunSaver(
            trainer,
            folder,
            keep=retention_of(config),
            mode=checkpoint.async_mode,
            goes_on=checkpoint.on_error == "continue",
            local=local,
        ),
        callbacks=[*callbacks, *more],
    )


def _predicted_seconds(trainer: Trainer) -> float | None:
    """Return the predicted seconds of a step, from `log.profile` or the GPU's data sheet, or
    None.
    """
    plan, device, path = trainer.plan, trainer.device, trainer.plan.config.log.profile
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    if path is not None:
        try:
            return measured_step_seconds(plan, Path(path), None, name)
        except ConfigError as error:  # a number to compare with is no reason to end a run
            print_line(f"note: no step time is predicted: {error}")
            return None
    if device.type != "cuda":
        return None
    return known_step_seconds(plan, name)


def retention_of(config: RunConfig) -> Retention:
    """Return the rule for which checkpoints the run keeps."""
    section = config.checkpoint
    return Retention(section.keep_last, section.keep_every, section.best_fact)


def make_local_copies(plan: Plan, folder: Path) -> LocalCopies | None:
    """Return the local copies of the run with this folder, or None; all ranks make them
    together.
    """
    where = plan.config.checkpoint.local_dir
    return None if where is None else LocalCopies(where, folder / CHECKPOINTS, plan.config.run.name)


def _stage(
    plan: Plan, device: torch.device, sequence: SequenceAttention, tensor: Group | None = None
) -> tuple[TrainStages, dict[str, Layout], LossFn]:
    """Return this rank's stages with initial weights, layouts by local name, and the last stage's
    loss.

    tensor: ranks that share layers; None: those of the run.
    """
    config = plan.config
    index = plan.topology.dense.index(tpc.rank, "pipe")  # a teacher's own, where it has one
    stage, layouts, loss = make_stages(plan, index, device, sequence, tensor)
    if plan.model is None:
        seed_rank(config.run.seed, plan.topology.dense, tpc.rank)
    elif (folder := config.model.initial_folder) is not None:
        with fail_together(tpc.get_group("global"), f"reading {folder}"):
            load_weights = resolve(plan.model.weights_loader)
            for module in stage.children():
                load_weights(module, folder)
        lora = config.model.lora
        drawn = collect_initials(stage) if lora.target and lora.adapter is None else {}
        drawn = {n: x for n, x in drawn.items() if is_adapter(layouts[n].name)}
        initialize(stage, layouts, plan.topology, tpc.rank, config.run.seed, drawn)
        return stage, layouts, loss
    initialize(stage, layouts, plan.topology, tpc.rank, config.run.seed)
    return stage, layouts, loss


def make_stages(
    plan: Plan,
    index: int,
    device: torch.device,
    sequence: SequenceAttention,
    tensor: Group | None = None,
) -> tuple[TrainStages, dict[str, Layout], LossFn]:
    """Return the stages of pipe index `index` without initial values, layouts by local name, and
    the last stage's loss.
    """
    config, dtype = plan.config, getattr(torch, plan.numbers.weights.dtype)
    loss, whole_outputs = token_cross_entropy, None
    if plan.model is not None:
        group = tensor or tpc.get_group("tensor")
        stages = _named(plan, index, dtype, device, sequence, group)
        layouts = {s: module.layouts() for s, module in stages.items()}
        _tie(stages, layouts)
        any_stage = next(iter(stages.values()))
        loss, whole_outputs = any_stage.loss, any_stage.whole_logits
        by_name = {
            f"{s}.{n}": x for s, stage_layouts in layouts.items() for n, x in stage_layouts.items()
        }
    else:
        torch.manual_seed(config.run.seed)
        stages, by_name = own_stages(
            config.model.target,
            config.model.args,
            plan.schedule.placement,
            index,
            cut=partial(own_cut, plan),
        )
        for module in stages.values():
            module.to(device=device, dtype=dtype)
    stage = TrainStages(stages)
    named = {name for name, _ in stage.named_parameters()}
    layouts = {name: layout for name, layout in by_name.items() if name in named}
    if config.train.label_smoothing:
        loss = smoothed(loss, stage, config.train.label_smoothing)
    if config.model.loss is not None:
        loss = from_user(user_object(config.model.loss), whole_outputs)
    return stage, layouts, loss


def _named(
    plan: Plan,
    index: int,
    dtype: torch.dtype,
    device: torch.device,
    sequence: SequenceAttention,
    tensor: Group,
) -> dict[int, nn.Module]:
    """Return the stages of a pipe index for one of our models."""
    assert plan.model is not None
    make = resolve(plan.model.module)
    return {
        stage: make(
            plan.shape,
            pieces=plan.stages[stage],
            stage_of=plan.stage_of,
            group=tensor,
            dropout=plan.config.model.dropout,
            tp_comm_overlap=plan.config.parallel.tp_comm_overlap,
            sequence=sequence,
            dtype=dtype,
            device=device,
        )
        for stage in plan.schedule.stages_of(index)
    }


def _tie(stages: Mapping[int, nn.Module], layouts: Mapping[int, Mapping[str, Layout]]) -> None:
    """Make parameters with the same global name in two stages of a rank one parameter, that of the
    first stage.

    layouts: by stage and local name.
    """
    first: dict[str, nn.Parameter] = {}
    for stage, module in stages.items():
        for name, parameter in list(module.named_parameters()):
            shared = first.setdefault(layouts[stage][name].name, parameter)
            if shared is not parameter:
                path, _, key = name.rpartition(".")
                setattr(module.get_submodule(path), key, shared)


def own_cut(plan: Plan, model: nn.Module) -> tuple[range, ...] | None:
    """Return the children of each stage of a user's own chain; None if the chain is cut by
    parameter count.
    """
    partition, measured = plan.config.pipeline.partition, plan.pipeline.measured
    names = [name for name, _ in model.named_children()]
    if partition == "uniform":
        placement = plan.schedule.placement
        return split_by_cost([1.0] * len(names), len(placement), placement=placement)
    if partition != "time" or measured is None or plan.schedule.num_stages == 1:
        return None
    if names != list(measured.pieces):
        raise ScheduleError(
            f"pipeline.partition=time: {measured.source} has costs of {len(measured.pieces)} "
            f"pieces ({_some(measured.pieces)}), but {plan.config.model.target} returned a chain "
            f"of {len(names)} ({_some(names)}); measure this model, or write a line for each of "
            f"its children, in order"
        )
    return plan.pipeline.own_cut


def _some(names: Iterable[str]) -> str:
    first = list(islice(names, 4))
    return ", ".join(first[:3] + ["..."] * (len(first) > 3)) or "none"


def _data_parallel(
    stage: nn.Module,
    layouts: dict[str, Layout],
    inner: torch.optim.Optimizer | None,
    plan: Plan,
) -> NaiveDDP | ZeroOptimizer:
    """Return the wrapper that sums gradients over the ranks named by each layout; the step divides
    them.

    Replicas start with equal weights.
    """
    config, zero, zero_group = plan.config, plan.zero, plan.zero_group
    narrow = torch.bfloat16 if config.precision.reduce_dtype == "bf16" else None
    options = {"layouts": layouts, "reduce_op": "sum", "reduce_dtype": narrow}
    options["bucket_cap_mb"] = config.ddp.bucket_mb
    if zero and inner is not None:
        return ZeroOptimizer(inner, stage, stage=zero, zero_group=zero_group, **options)
    # keep_order: a run that is resumed would measure, and pack, other buckets, and so round
    # its sums differently; it has to go on bit for bit
    return NaiveDDP(stage, keep_order=True, **options)
