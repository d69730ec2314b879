"""From a plan to objects: the only translator of configuration.

Everything below receives plain arguments; what they are is decided here, in the order in which
a run needs them: groups, my stage and its layouts, initial weights, reducer, optimizer, executors.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from torchdistpackage.checkpoint.parts import TopologyRank
from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import world
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.random import seed_rank
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.config.schema import OptimSection, RunConfig
from torchdistpackage.ddp.bucket_plan import bucket_sizes
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import DataError, LayoutError, ScheduleError
from torchdistpackage.harness.watchdog import HangWatchdog
from torchdistpackage.launch.entrypoint import EntryPoint
from torchdistpackage.layout.derive import BATCH_AXES, gradient_ranks
from torchdistpackage.layout.layout import Layout
from torchdistpackage.optim.lr import warmup_cosine
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.partition.cost_split import split_by_cost
from torchdistpackage.parallel.pipeline.partition.sequential import chunks_of
from torchdistpackage.parallel.tensor.init import initialize
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.generators.registry import evaluation
from torchdistpackage.train import corpus
from torchdistpackage.train.callbacks import ReplicaCheck, comparison
from torchdistpackage.train.data import DataSource, TokenDataset
from torchdistpackage.train.loop import Loop
from torchdistpackage.train.loss import LossFn, from_user, token_cross_entropy
from torchdistpackage.train.plan import Plan, weight_format
from torchdistpackage.train.profiler import StepProfiler
from torchdistpackage.train.step import Trainer, TrainStages
from torchdistpackage.train.stop import StopController
from torchdistpackage.train.train_state import TrainState
from torchdistpackage.train.update import Update, reduced_grads


def build(plan: Plan, rank: int, device: torch.device, data: DataSource | None = None) -> Trainer:
    """Everything that `rank` trains with. Needs the default process group; sets up `tpc`.

    data: overrides the data section, for those who bring their own source.

    Raises:
        TorchDistError: the plan does not fit the user's own model, loss or data.
    """
    config = plan.config
    recorder.checks = config.train.check_calls
    torch.set_float32_matmul_precision(config.precision.matmul)
    slow = max(config.launch.init_timeout_s, config.train.step_timeout_s)
    tpc.setup(plan.topology, rank, timeout_s=slow)
    seed_rank(config.run.seed, plan.topology.dense, rank)
    stage, layouts, loss = _stage(plan, device)
    _check_declared(stage, layouts)
    inner = _optimizer(stage, config.optim)
    reducer, optimizer = _sharing(stage, layouts, inner, config)
    pipe = tpc.get_group("pipe")

    def executor(schedule: Schedule) -> Executor:
        return Executor(schedule, pipe, device=device, timeout_s=slow)

    return Trainer(
        plan=plan,
        rank=rank,
        device=device,
        stage=stage,
        layouts=layouts,
        loss=loss,
        data=data if data is not None else build_data(plan),
        reducer=reducer,
        optimizer=optimizer,
        update=_update(plan, stage, layouts, inner, optimizer, device),
        executor=executor(plan.schedule),
        evaluator=executor(evaluation(plan.schedule, config.pipeline.microbatches)),
        autocast=torch.bfloat16 if config.precision.dtype == "bf16" else None,
        name=config.run.name,
        seed=config.run.seed,
        num_steps=config.train.steps,
        rounds=config.train.accumulate,
        # from stage 2 on there is no room for whole gradients beyond a round
        sums_each_round=config.parallel.zero >= 2,
        eval_batches=config.train.eval_batches,
    )


def make_loop(
    trainer: Trainer,
    state: TrainState,
    folder: Path,
    life: StopController | None = None,
    watch: HangWatchdog | None = None,
) -> Loop:
    """The loop of the run that `trainer` was built for; all ranks call it together."""
    plan = trainer.plan
    train, log, checkpoint = plan.config.train, plan.config.log, plan.config.checkpoint
    model, shape = plan.model, plan.shape
    return Loop(
        trainer,
        state,
        folder,
        life,
        watch,
        call_timeout_s=train.step_timeout_s,
        unit="tokens" if plan.config.model.loss is None else "samples",
        flops_per_token=model and shape and model.flops_per_token(shape),
        log_every=log.every,
        eval_every=train.eval_every,
        save_every=checkpoint.save_every,
        save_every_min=checkpoint.save_every_min,
        keep_last=checkpoint.keep_last,
        check_every=train.check_replicas_every,
        skips_nonfinite=train.on_nonfinite == "skip",
        compare=comparison(trainer, train.straggler_every) if train.straggler_every else None,
        check_replicas=ReplicaCheck(trainer) if train.check_replicas_every else None,
        profiler=StepProfiler(trainer, log.every) if plan.config.parallel.pipe > 1 else None,
    )


def build_data(plan: Plan) -> DataSource:
    """The data section as a source of batches."""
    section = plan.config.data
    if section.target is not None:
        source = user_object(section.target)(**section.args)
        if not isinstance(source, DataSource):
            raise DataError(
                f"data.target {section.target} returned a {type(source).__name__} without a "
                f"batch(...) method; see train.data.DataSource"
            )
        return source
    match section.name:
        case "python_stdlib":
            found = corpus.python_stdlib(section.val_fraction)
        case "text":
            found = corpus.text(section.path or "", section.val_fraction)
        case _:
            found = corpus.tokens(section.path or "", section.dtype, section.val_fraction)
    return TokenDataset(
        found.train,
        found.val,
        plan.config.model.vocab,
        section.seq_len,
        num_val=plan.config.train.eval_batches * section.global_batch,
    )


def user_object(path: str) -> Callable:
    """What `pkg.module:name` names."""
    return EntryPoint.of(path).resolve()


def _stage(plan: Plan, device: torch.device) -> tuple[TrainStages, dict[str, Layout], LossFn]:
    """My stages with their initial weights, layouts by local name, and the loss of the last."""
    config, mesh = plan.config, plan.topology.dense
    dtype = getattr(torch, weight_format(config.precision).dtype)
    loss: LossFn = token_cross_entropy
    if plan.model is not None:
        stages = _named(plan, dtype, device)
        layouts = {s: module.layouts() for s, module in stages.items()}
        _tie(stages, layouts)
        loss = next(iter(stages.values())).loss
        by_name = {f"{s}.{n}": x for s, held in layouts.items() for n, x in held.items()}
    else:
        torch.manual_seed(config.run.seed)
        whole = user_object(config.model.target)(**config.model.args)
        place = plan.schedule.placement
        stages, by_name = chunks_of(whole, place, tpc.get_pp_rank(), cut=own_cut(plan, whole))
        for module in stages.values():
            module.to(device=device, dtype=dtype)
        seed_rank(config.run.seed, mesh, tpc.rank)
    stage = TrainStages(stages)
    named = {name for name, _ in stage.named_parameters()}
    layouts = {name: layout for name, layout in by_name.items() if name in named}
    if config.model.loss is not None:
        loss = from_user(user_object(config.model.loss))
    initialize(stage, layouts, mesh, tpc.rank, config.run.seed)
    tpc.prepare(sums=layouts.values())
    _equalise(stage)
    return stage, layouts, loss


def _named(plan: Plan, dtype: torch.dtype, device: torch.device) -> dict[int, nn.Module]:
    """My stages of one of our models."""
    assert plan.model is not None
    make = plan.model.load()
    return {
        stage: make(
            plan.shape,
            pieces=plan.stages[stage],
            stage_of=plan.place_of,
            group=tpc.get_group("tensor"),
            dropout=plan.config.model.dropout,
            dtype=dtype,
            device=device,
        )
        for stage in plan.schedule.stages_of(tpc.get_pp_rank())
    }


def _tie(stages: Mapping[int, nn.Module], layouts: Mapping[int, Mapping[str, Layout]]) -> None:
    """Parameters of one global name in two stages of a rank become one, that of the first.

    layouts: by stage and local name.
    """
    first: dict[str, nn.Parameter] = {}
    for stage, module in stages.items():
        for name, parameter in list(module.named_parameters()):
            known = first.setdefault(layouts[stage][name].name, parameter)
            if known is not parameter:
                path, _, key = name.rpartition(".")
                setattr(module.get_submodule(path), key, known)


def own_cut(plan: Plan, whole: nn.Module) -> tuple[range, ...] | None:
    """For each stage of a user's own chain its children; None: as parameters have it."""
    partition, measured = plan.config.pipeline.partition, plan.pipeline.measured
    names = [name for name, _ in whole.named_children()]
    if partition == "uniform":
        place = plan.schedule.placement
        return split_by_cost([1.0] * len(names), len(place), placement=place)
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
    return ", ".join([*first[:3], *(["..."] if len(first) > 3 else [])]) or "none"


def _check_declared(stage: nn.Module, layouts: dict[str, Layout]) -> None:
    """A parameter of which nobody says how it is cut would be summed over nobody."""
    # their first word is the number of the stage
    names = (name for name, _ in stage.named_parameters() if name not in layouts)
    missing = [name.partition(".")[2] for name in names]
    if missing:
        raise LayoutError(
            f"{len(missing)} parameters have no layout: {', '.join(missing[:5])}; the module that "
            f"makes them declares in layouts() what each is split and replicated over"
        )


def _equalise(stage: nn.Module) -> None:
    """Whatever a user's build drew, replicas start alike; buffers too."""
    group = tpc.groups.along(tpc.topology.dense, BATCH_AXES)
    with torch.no_grad():
        for x in (*stage.parameters(), *stage.buffers()):
            primitives.broadcast(x.data, group)


def _sharing(
    stage: nn.Module,
    layouts: dict[str, Layout],
    inner: torch.optim.Optimizer | None,
    config: RunConfig,
) -> tuple[Reducer, torch.optim.Optimizer | None]:
    """What sums gradients, over what each layout says, and what updates; the step divides."""
    ranks = {
        name: gradient_ranks(layout, tpc.topology.view(layout.view), tpc.rank)
        for name, layout in layouts.items()
    }
    if config.parallel.zero and inner is not None:
        optimizer = ZeroOptimizer(
            inner,
            stage,
            stage=config.parallel.zero,
            layouts=layouts,
            reduce_op="sum",
        )
        return optimizer.reducer, optimizer
    shared = [
        ParamSpec(
            name, parameter, tpc.groups.of(ranks[name]), deferred=len(layouts[name].stages) > 1
        )
        for name, parameter in stage.named_parameters()
        if parameter.requires_grad
    ]
    # without BucketTuner: it would pack a resumed run by other measurements, and sums would differ
    sizes = bucket_sizes(queued=primitives.is_queued(world()))
    return Reducer(shared, cap_bytes=sizes.default_bytes), inner


def _optimizer(stage: nn.Module, section: OptimSection) -> torch.optim.AdamW | None:
    """AdamW; matrices decay, vectors do not. None for a stage without parameters."""
    trained = [p for p in stage.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        return None
    return torch.optim.AdamW(
        groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True
    )


def _update(
    plan: Plan,
    stage: nn.Module,
    layouts: dict[str, Layout],
    inner: torch.optim.Optimizer | None,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
) -> Update:
    section, train = plan.config.optim, plan.config.train
    ratio = partial(
        warmup_cosine,
        warmup_steps=section.warmup_steps,
        num_steps=train.steps,
        min_ratio=section.min_lr_ratio,
    )
    return Update(
        reduced_grads(stage, layouts, TopologyRank(plan.topology, tpc.rank), optimizer),
        optimizer,
        inner,
        device,
        learning_rate=lambda step: section.lr * ratio(step - 1),
        clip=section.clip,
        halts=train.on_nonfinite == "stop",
    )
