"""Everything about a run that can be decided before a process starts. No torch.

`tdp plan` prints this value and `build` turns it into objects; neither decides anything again.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torchdistpackage.config.all_problems import WHOLE_FILE
from torchdistpackage.config.check import violations
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.job_geometry import GPUS, job_geometry, ranks_per_gpu
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.slurm import header
from torchdistpackage.ddp.bucket_plan import MIB, bucket_sizes
from torchdistpackage.errors import ConfigError, LayoutError
from torchdistpackage.layout.derive import (
    BATCH_AXES,
    Creation,
    creations,
    data_ranks_of_node,
    num_elements,
)
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.model_spec import ModelShape, ModelSpec
from torchdistpackage.models.refusals import refuse_model
from torchdistpackage.models.registry import spec_of
from torchdistpackage.plan.logged_values import ASKED
from torchdistpackage.plan.memory import (
    MemoryEstimate,
    NumberFormats,
    activation_budget_gb,
    communicators,
    memory,
    number_formats,
    with_frozen,
)
from torchdistpackage.plan.stage_partition import ModelUnits, Stages
from torchdistpackage.plan.stage_partition import stages as find_stages
from torchdistpackage.plan.teacher import sharing_groups, teacher_config
from torchdistpackage.plan.traced_stage import TracedStage
from torchdistpackage.plan.user_code import user_targets
from torchdistpackage.schedule.actions import ActionKind, Program, Schedule, flatten
from torchdistpackage.schedule.engine import Timeline
from torchdistpackage.topology.mesh import Topology, describe, topology

BUCKET_BYTES = bucket_sizes(queued=False).default_bytes
"""Bytes of gradients that travel together on paper, as over gloo. Over NCCL the run has fewer and
larger buckets in the same order, but a plan does not know the transport."""

VOTE_ROOM = 8 + len(ASKED)
"""Numbers that a step keeps for votes (train/votes.py): its message has one length, which
plan/traffic.py counts, and room for two more flags than there are. More make it longer."""
PLAN_KEYS = (
    *("model", "parallel", "pipeline", "precision", "checkpoint.export"),
    *("data.name", "data.seq_len", "data.global_batch", "data.document_masks"),
    *("data.class_weights", "optim.name", "optim.target", "optim.groups", "optim.ema_decay"),
    *("train.accumulate", "train.recompute", "train.memory_gb", "train.compile"),
    *("train.distill", "train.dpo", "train.embedding"),
    *("launch.slurm", "launch.elastic", "launch.local.procs"),
)
"""Keys and sections that `make_plan` reads, besides the rules that it repeats."""


def plan_keys(config: RunConfig) -> Sequence[str]:
    """Return the keys and sections that the plan of a run depends on.

    Rules of all sections decide the degrees of an elastic run, and the data the steps of epochs.
    """
    is_elastic = config.launch.elastic.nodes is not None
    return WHOLE_FILE if is_elastic or config.train.epochs is not None else PLAN_KEYS


TASK_ROOM = 8
"""Numbers that a step keeps for what a task sums over its samples (train/task.py)."""


@dataclass(frozen=True)
class Plan:
    """One run on one world.

    config: with `parallel.data` filled in.
    model: None for a user's own, whose pieces are known once it is built.
    pieces: names a pipeline may be cut between. pipeline: stages, their order and its prediction.
    layouts: by global parameter name.
    teacher: of a model that this one is distilled from, on the same ranks.
    traced: by number, what stages hold whose layers do not state it.
    """

    config: RunConfig
    topology: Topology
    model: ModelSpec | None
    pieces: tuple[str, ...]
    pipeline: Stages
    layouts: dict[str, Layout]
    teacher: "Plan | None" = None
    traced: Mapping[int, TracedStage] = field(default_factory=dict[int, TracedStage])

    @property
    def cp_comm_type(self) -> str:
        """How context ranks exchange their slices of a sequence, or auto."""
        return self.config.parallel.cp_comm_type

    @property
    def has_float8(self) -> bool:
        """True if linear layers multiply in float8."""
        return self.config.precision.fp8 != "off"

    @property
    def shape(self) -> ModelShape | None:
        """The shape of the model; None for a user's own."""
        return None if self.model is None else self.model.shape

    @property
    def schedule(self) -> Schedule:
        return self.pipeline.schedule

    @property
    def timeline(self) -> Timeline:
        """The schedule on paper."""
        return self.pipeline.timeline

    @property
    def stages(self) -> tuple[range, ...]:
        """The pieces of each stage; () for a user's own model."""
        return self.pipeline.cut

    def pieces_on(self, index: int) -> tuple[int, ...]:
        """Return all pieces of the stages of pipe index `index`, in order."""
        return tuple(i for s in self.schedule.stages_of(index) for i in self.stages[s])

    @property
    def stage_of(self) -> tuple[int, ...]:
        """The pipe index that holds each piece."""
        placement = self.schedule.placement
        return tuple(placement[s] for s, span in enumerate(self.stages) for _ in span)

    def creations(self, rank: int) -> tuple[Creation, ...]:
        """Return the groups that a rank makes before its first step, in order; only those of the
        axes for a user's own model.
        """
        pipe_index = self.topology.dense.coord(rank)["pipe"]
        kinds = self._kinds_of_layouts.get(pipe_index, ())
        planned = creations(self.topology, rank, sums=kinds, num_data=self.zero_group)
        if self.teacher is None:
            return planned
        mesh, options = self.teacher.topology.dense, self.config.train.distill
        more = [Creation(tuple(mesh.group(rank, ("tensor",))), axes=("tensor",))]
        if options.teacher_pipe is not None:
            ranks = tuple(mesh.group(rank, ("pipe",)))
            more.append(Creation(ranks, neighbours=True, axes=("pipe",)))
        if options.teacher_zero:
            more.append(Creation(tuple(mesh.group(rank, BATCH_AXES)), axes=("data",)))
        if mesh != self.topology.dense:
            more.append(Creation(sharing_groups(self.topology.dense, mesh)[rank]))
        members = {each.ranks for each in planned}
        distinct = {x.ranks: x for x in reversed(more) if x.ranks not in members}
        return (*planned, *reversed(distinct.values()))

    @cached_property
    def _kinds_of_layouts(self) -> dict[int, list[Layout]]:
        """One layout of each kind that makes different groups, by pipe index."""
        by_place: dict[int, dict[object, Layout]] = {}
        for x in self.layouts.values():
            for pipe_index in x.stages:
                key = x.view, x.split, x.unreduced, x.stages, x.heads
                by_place.setdefault(pipe_index, {}).setdefault(key, x)
        return {pipe_index: list(kinds.values()) for pipe_index, kinds in by_place.items()}

    @property
    def bucket_bytes(self) -> int:
        """The size of a gradient bucket in the plan: ddp.bucket_mb, or gloo's default."""
        given_mb = self.config.ddp.bucket_mb
        return BUCKET_BYTES if given_mb is None else int(given_mb * MIB)

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def has_gpus(self) -> bool:
        """True if the job requests GPUs from Slurm; elsewhere the ranks find out when they
        start.
        """
        options = header(self.config.launch.slurm)
        return any(name in options for name in GPUS if name != "gres") or "gpu" in (
            options.get("gres") or ""
        )

    @property
    def ranks_per_gpu(self) -> int:
        """The most ranks on one GPU of the job; elsewhere the ranks find out when they start."""
        return ranks_per_gpu(self.config)

    @property
    def rounds(self) -> int:
        """Gradient accumulation: passes over the micro-batches in a step."""
        return self.config.train.accumulate

    @property
    def zero(self) -> int:
        """The stage of ZeRO; 0: none."""
        return self.config.parallel.zero

    @property
    def zero_group(self) -> int | None:
        """Number of neighbouring data ranks over which ZeRO shards; None: all of them."""
        number = self.config.parallel.zero_group
        assert number != "node", "make_plan has filled it in"
        return number

    @property
    def numbers(self) -> NumberFormats:
        return number_formats(self.config.precision)

    def is_trained(self, parameter: str) -> bool:
        """Return whether the parameter with this global name gets gradients; a checkpoint holds
        those that do.
        """
        # embeddings leave out the output layer, whose own weights are frozen
        has_no_head = self.config.data.is_embedding and self.model is not None
        if has_no_head and parameter.startswith(f"{self.model.output_layer}."):
            return False
        return self.config.model.is_trained(parameter)

    @property
    def packed(self) -> Mapping[str, int]:
        """Parameters that ranks hold in 4 or 8 bits: by global name the dim of their inputs."""
        return {} if self.model is None else self.model.packed()

    @property
    def user_code(self) -> dict[str, tuple[str, Mapping[str, object]]]:
        """Import path and keyword arguments of the user's own code, by key."""
        return user_targets(self.config)

    def changed(self, change: Callable[[RunConfig], RunConfig]) -> "Plan":
        """Return the plan of a changed run, on as many ranks as its degrees multiply to.

        Raises:
            ConfigError: the changed run breaks a rule.
        """
        config = change(self.config)
        return make_plan(config, num_ranks(config))

    @property
    def samples_per_microbatch(self) -> int:
        """Rows of one data rank in one micro-batch; a pair of answers has two."""
        c = self.config
        assert isinstance(c.parallel.data, int)
        rounds = c.parallel.data * self.rounds * c.pipeline.microbatches
        return c.data.global_batch // rounds * c.data.rows_per_sample


def make_plan(
    config: RunConfig,
    world_size: int,
    source: str = "the configuration",
    *,
    ranks_per_node: int | None = None,
    messages: bool = True,
    bad: Collection[str] = (),
) -> Plan:
    """Resolve `config`, read from `source`, for `world_size` ranks.

    ranks_per_node: None: as launch.slurm has it, else all ranks are on one node. messages: the
    schedule has them; without, which is faster, the plan is for predictions alone. bad: keys that
    are wrong and reported already; rules that read them are skipped.

    Raises:
        ConfigError: lists every rule that is broken, with names and values.
    """
    if problems := violations(config, world_size, bad):
        raise ConfigErrors(f"{source} on {world_size} ranks", problems)
    config = config.resolve(world_size)
    parallel = config.parallel
    world = topology(parallel.axes(), world_size, expert=parallel.expert)
    if parallel.zero_group == "node":
        config = _shard_in_nodes(config, world, source, ranks_per_node)
    if (model := spec_of(config)) is None:
        plan = Plan(config, world, None, (), find_stages(config, None), {})
        _refuse_compiled_halves(plan, source)
        return plan
    refuse_model(model, config, source)
    pieces = ModelUnits.of(model)
    stages = find_stages(config, pieces, messages=messages)
    plan = Plan(config, world, model, pieces.names, stages, {})
    teacher = None
    if config.train.distill.runs_teacher:
        teacher = _teacher_plan(plan, world_size, source, ranks_per_node)
    plan = replace(plan, layouts=model.layouts(plan.stage_of), teacher=teacher)
    names = [name for name in plan.layouts if plan.is_trained(name)]
    if unmatched := config.optim.unmatched_groups(names):
        raise ConfigErrors(source, [config.problem(*x) for x in unmatched.items()])
    _refuse_compiled_halves(plan, source)
    for load in stage_loads(plan) if config.train.recompute == "auto" else ():
        activation_budget_gb(config, load.memory, f"{source}: the rank at pipe {load.index}")
    return plan


def _teacher_plan(student: Plan, world_size: int, source: str, ranks_per_node: int | None) -> Plan:
    """Return the plan of the teacher on the ranks of the student.

    Raises:
        ConfigError: the teacher does not fit these ranks, or has another vocabulary.
    """
    config = student.config
    key, folder = "train.distill.teacher", config.train.distill.teacher
    try:
        own_config = teacher_config(config)
        plan = make_plan(own_config, world_size, source, ranks_per_node=ranks_per_node)
    except ConfigErrors as error:
        texts = [f"{folder}: {problem.text}" for problem in error.problems]
    except (ConfigError, LayoutError) as error:
        texts = [str(error)]
    else:
        assert plan.shape is not None and student.shape is not None
        number, own_number, texts = plan.shape.vocab, student.shape.vocab, list[str]()
        if number != own_number:
            texts.append(
                f"{folder} has a vocabulary of {number} ids, but the model has {own_number}; "
                f"name a teacher whose logits are of the same ids"
            )
        if not texts:
            return plan
    raise ConfigErrors(source, [config.problem(key, text) for text in texts])


def _shard_in_nodes(
    config: RunConfig, world: Topology, source: str, ranks_per_node: int | None
) -> RunConfig:
    """Replace parallel.zero_group=node by the corresponding number of data ranks."""
    if ranks_per_node is None and config.launch.slurm:
        shape, _ = job_geometry(config)
        ranks_per_node = None if shape is None else shape.tasks_per_node
    ranks_per_node = ranks_per_node or world.world_size
    number, parallel = data_ranks_of_node(world, ranks_per_node), config.parallel
    assert isinstance(parallel.data, int)
    if number == 0 or number * parallel.context == 1 < parallel.data:
        text = (
            f"parallel.zero_group=node shards nothing: no two of the {parallel.data} data ranks "
            f"that would share a shard are on one node of {ranks_per_node} ranks, with "
            f"{describe(world.dense.axes)}, outermost first; set zero_group to a number of data "
            f"ranks, or remove it"
        )
        raise ConfigErrors(source, [config.problem("parallel.zero_group", text)])
    filled = parallel.model_copy(update={"zero_group": number})
    return config.model_copy(update={"parallel": filled})


def _refuse_compiled_halves(plan: Plan, source: str) -> None:
    config, programs = plan.config, plan.schedule.programs
    if config.train.compile == "off":
        return
    if splits_backward(programs):
        text = (
            f"train.compile={config.train.compile} with pipeline.schedule="
            f"{config.pipeline.schedule}, which computes the gradients of weights apart from those "
            f"of inputs; the backward of a compiled block is one. Set schedule to 1f1b or "
            f"interleaved, or compile to off"
        )
        raise ConfigErrors(source, [config.problem("train.compile", text)])


def splits_backward(programs: Iterable[Program]) -> bool:
    """Return whether ranks compute the gradients of weights separately from those of inputs."""
    return any(a.kind is ActionKind.W for program in programs for a in flatten(program))


def local_procs(config: RunConfig) -> int:
    """Return the number of processes to start on one machine: launch.local.procs, or the product of
    the degrees.
    """
    return config.launch.local.procs or num_ranks(config)


def num_ranks(config: RunConfig) -> int:
    """Return the product of the degrees; `auto` counts as 1."""
    data = config.parallel.data
    return config.parallel.model_size * (1 if data == "auto" else data)


def too_long(plan: Plan) -> str | None:
    """Return a warning if sequences are longer than the model's positions are made for, or None.
    Rotary positions go on, so no run fails.
    """
    shape, model = plan.shape, plan.config.model
    if shape is None or shape.seq_len <= (longest := shape.longest_seq_len):
        return None
    named = model.hf or model.weights or "the model"
    return (
        f"data.seq_len={shape.seq_len}, but the positions of {named} are made for {longest} tokens "
        f"(max_position_embeddings, scaled by rope_scaling where that is set); set seq_len to "
        f"{longest} or less, or rope_scaling in config.json"
    )


def own_model_warnings(plan: Plan) -> list[str]:
    """Return warnings for a user's own model on tensor and context ranks, because a plan knows none
    of its layers.
    """
    config, warnings = plan.config, list[str]()
    if plan.model is not None:
        return warnings
    if (tensor := config.parallel.tensor) > 1:
        warnings.append(
            f"parallel.tensor={tensor} splits only what {config.model.target} says: layers of "
            f"plain torch are copied to all {tensor} ranks, with all their weights and work; "
            f"return tensor_parallel(model) from it, or use layers of torchdistpackage.parallel "
            f"(docs/own_code.md). The log of a run says whether anything was split"
        )
    if config.parallel.context > 1:
        warnings.append(attends_to_parts(plan))
    return warnings


def attends_to_parts(plan: Plan) -> str:
    """Return the warning for a user's own model whose input is split over context ranks."""
    size, target = plan.config.parallel.context, plan.config.model.target
    return (
        f"parallel.context={size} gives {target} one of {size} parts of each sequence: attention "
        f"of plain torch sees this part alone, and positions count from its start; return "
        f"context_parallel(model) from it, or call context_attention, with positions of "
        f"sequence_positions (docs/context_parallel.md)"
    )


@dataclass(frozen=True)
class StageLoad:
    """The parameters, memory and work of one rank at a pipe index, over all its stages.

    stages: with each its pieces. num_parameters: in its shard; num_trained: of these, those that
    have gradients. share: of the model's computation.
    """

    index: int
    stages: dict[int, tuple[str, ...]]
    num_parameters: int
    num_trained: int
    memory: MemoryEstimate
    share: float


def rank_memory(
    plan: Plan, rank: int, layouts: Iterable[Layout], *, on_gpu: bool
) -> MemoryEstimate:
    """Return the memory of a rank with these parameters, with NCCL's communicators on a GPU."""
    estimate = memory(
        plan.config, plan.topology, layouts, rank, plan.packed, is_trained=plan.is_trained
    )
    if plan.teacher is not None:
        mesh, every = plan.teacher.topology.dense, plan.teacher.layouts.values()
        frozen = [x for x in every if not x.stages or mesh.index(rank, "pipe") in x.stages]
        shards = mesh.axis_size(*BATCH_AXES) if plan.config.train.distill.teacher_zero else 1
        estimate = with_frozen(
            estimate, plan.teacher.config, plan.teacher.topology, frozen, rank, num_shards=shards
        )
    if not on_gpu:
        return estimate
    connected = communicators(
        plan.creations(rank), rank, plan.topology, plan.config.parallel.cp_comm_type
    )
    return replace(estimate, communicators_bytes=connected.device_bytes)


def stage_loads(plan: Plan) -> tuple[StageLoad, ...]:
    """Return the load of the first rank at each pipe index; () for a user's own model."""
    if plan.model is None:
        return ()
    costs = plan.model.piece_costs()
    mesh = plan.topology.dense
    view = plan.topology.view
    loads: list[StageLoad] = []
    for index in range(len(plan.schedule.programs)):
        rank = mesh.rank({"pipe": index})
        layouts = [x for x in plan.layouts.values() if not x.stages or index in x.stages]
        counts = {x.name: num_elements(x, view(x.view), rank) for x in layouts}
        trained = sum(n for x, n in counts.items() if plan.is_trained(x))
        share = sum(costs[i] for i in plan.pieces_on(index)) / (sum(costs) or 1)
        names = {
            s: tuple(plan.pieces[i] for i in plan.stages[s]) for s in plan.schedule.stages_of(index)
        }
        held_bytes = rank_memory(plan, rank, layouts, on_gpu=plan.has_gpus)
        loads.append(StageLoad(index, names, sum(counts.values()), trained, held_bytes, share))
    return tuple(loads)


def num_parameters(plan: Plan) -> int:
    """Return the number of parameters of the full model, each counted once; 0 for a user's own."""
    return sum(math.prod(layout.shape) for layout in plan.layouts.values())


def num_trained(plan: Plan) -> int:
    """Return the number of the full model's parameters that are trained."""
    return sum(math.prod(x.shape) for x in plan.layouts.values() if plan.is_trained(x.name))
