"""The run as a value: sections and keys of the YAML file, in its order, each with its default.

A key is one line here (kind, default, description); help, JSON schema, error texts
and the resolved file follow from it. Rules that join keys stand in rules.py.
"""

from typing import Any, Self

from pydantic import Field, PrivateAttr

from torchdistpackage.config import types as k
from torchdistpackage.config.data_section import DataSection
from torchdistpackage.config.errors import KeyLocations, Problem, SourceLocation
from torchdistpackage.config.model_section import ModelSection
from torchdistpackage.config.node_types import NodePathOrNull, NodeSpanOrNull
from torchdistpackage.config.optim_section import OptimSection
from torchdistpackage.config.types import Section, default
from torchdistpackage.config.yaml_loader import keys_of, write
from torchdistpackage.errors import ConfigError
from torchdistpackage.topology.mesh import DEFAULT_ORDER

VAL_LOSS = "val_loss"
"""A fact of a checkpoint: its validation loss; of a set of data.eval val_loss/NAME."""


class RunSection(Section):
    """Who this run is and where its outputs go."""

    name: k.FolderName = Field(default="run", description="Name of the run and of its folder.")
    dir: k.Path = Field(default="runs", description="Folder that holds the run folders.")
    seed: k.Seed = Field(default=1234, description="Seed of weights, data order and dropout.")


class ParallelSection(Section):
    """Degrees: how many ranks lie along each axis of the mesh."""

    order: k.Order = Field(
        default=DEFAULT_ORDER, description="Axes, outermost first; those left out have size 1."
    )
    data: k.Degree = Field(default="auto", description="Model replicas; auto: as many as fit.")
    pipe: k.Count = Field(default=1, le=1024, description="Ranks that share the layers, in stages.")
    context: k.Count = Field(default=1, le=1024, description="Ranks that share one sequence.")
    cp_comm_type: k.CpCommType = Field(
        default="auto",
        description="How context ranks exchange: a ring, a gather, heads for sequence, or both.",
    )
    tensor: k.Count = Field(default=1, le=1024, description="Ranks that share each weight matrix.")
    expert: k.Count = Field(default=1, le=1024, description="Ranks that share the experts.")
    sequence_parallel: bool = Field(
        default=False, description="Split norms and residuals along the sequence."
    )
    tp_comm_overlap: bool = Field(
        default=False,
        description="Overlap gathers and scatters of the sequence with the products.",
    )
    zero: k.ZeroStage = Field(
        default=0,
        description="ZeRO stage: 1 splits optimizer state, 2 gradients too, 3 weights too.",
    )

    @property
    def model_size(self) -> int:
        """Ranks that hold one replica of the model."""
        return self.pipe * self.context * self.tensor

    def axes(self) -> tuple[tuple[str, int], ...]:
        """(name, size) of all four axes, outermost first.

        Raises:
            ConfigError: data is still auto.
        """
        if self.data == "auto":
            raise ConfigError("parallel: data is auto; call resolve(world_size) before axes()")
        names = (*self.order, *(axis for axis in DEFAULT_ORDER if axis not in self.order))
        return tuple((name, getattr(self, name)) for name in names)

    def resolve(self, world_size: int) -> Self:
        """Fill in data from the number of ranks, or say why it cannot be done.

        Raises:
            ConfigError: the degrees do not use exactly `world_size` ranks.
        """
        model, data = self.model_size, self.data
        if data == "auto":
            data = max(world_size // model, 1) if "data" in self.order else 1
        if data * model == world_size:
            return self.model_copy(update={"data": data})
        if self.data == "auto" and "data" in self.order:
            advice = f"ask for a multiple of {model}"
        else:
            advice = f"ask for {data * model} rank{'s' * (data * model > 1)}"
            if world_size % model == 0:
                advice += f" or set data to {world_size // model}"
        raise ConfigError(
            f"parallel: data={self.data} x pipe={self.pipe} x context={self.context} x "
            f"tensor={self.tensor} must use all {world_size} ranks but uses {data * model}; "
            f"{model} {'rank holds' if model == 1 else 'ranks hold'} one model replica, so {advice}"
        )


class PipelineSection(Section):
    """Where the model is split into stages, and their schedule."""

    schedule: k.ScheduleName = Field(
        default="1f1b", description="Pipeline schedule; auto: found from costs; custom: from file."
    )
    microbatches: k.Count = Field(
        default=4, le=1 << 15, description="Number of microbatches in a round."
    )
    chunks: k.ChunksOrNull = Field(
        default=None, description="Stages on each pipe rank; null: as the schedule has it."
    )
    file: k.PathOrNull = Field(
        default=None, description="CSV of a custom schedule, in torch's format."
    )
    costs: k.PathOrNull = Field(
        default=None, description="YAML of measured seconds, such as a run's costs.yaml."
    )
    partition: k.Partition = Field(
        default="cost",
        description="What stages share evenly: computation, parameters, number of pieces, or time.",
    )


class PrecisionSection(Section):
    """Number formats."""

    dtype: k.Dtype = Field(
        default="float32", description="Type of activations, and of weights unless it is bf16."
    )
    weights: k.Float32OrBf16 = Field(
        default="float32", description="Type of weights if dtype is bf16; bf16 needs ZeRO."
    )
    reduce_dtype: k.Float32OrBf16 = Field(
        default="float32",
        description="Type in which gradients travel; each rank adds up its own in float32.",
    )
    matmul: k.Matmul = Field(
        default="highest",
        description="How exact products of float32 are; `high` is TF32 on a GPU.",
    )
    fp8: k.Float8 = Field(
        default="off", description="Float8 products of linear layers, scaled by rows; needs bf16."
    )


class ProfileSection(Section):
    """Steps of which every rank records what it does, for one trace in the run folder."""

    steps: k.StepRangeOrNull = Field(
        default=None, description="First and last step, such as 10..12; null is off."
    )

    @property
    def range(self) -> range:
        """The steps; empty if off."""
        first, _, last = (self.steps or "1..0").partition("..")
        return range(int(first), int(last) + 1)


class DpoSection(Section):
    """The loss on preference pairs (Rafailov et al., arXiv:2305.18290)."""

    beta: k.Positive = Field(
        default=0.1, description="How strongly the model is held to its reference; trl's beta."
    )
    label_smoothing: k.BelowHalf = Field(
        default=0.0, description="Part of the pairs that are taken to be labelled wrongly."
    )


class TrainSection(Section):
    """Length of the run and what happens on the way."""

    steps: k.Steps = Field(default=400, description="Optimizer steps.")
    epochs: k.PositiveOrNull = Field(
        default=None,
        description="Passes over the training data, from which steps then follow; null: steps.",
    )
    accumulate: k.Count = Field(
        default=1, le=1 << 16, description="Rounds of gradient accumulation."
    )
    eval_every: k.StepsOrZero = Field(
        default=100, description="Steps between validations; 0: only at the end."
    )
    eval_batches: k.Count = Field(
        default=8, le=1 << 20, description="Global batches in one validation."
    )
    step_timeout_s: k.Seconds = Field(
        default=120.0, description="Seconds after which a step counts as hung."
    )
    check_calls: bool = Field(default=False, description="Compare calls between ranks; slow.")
    on_nonfinite: k.OnNonfinite = Field(
        default="stop",
        description="What to do when a loss or gradient is NaN or infinite on any rank.",
    )
    check_replicas_every: k.StepsOrZero = Field(
        default=0, description="Steps between comparisons of replicas bit by bit; 0 is off."
    )
    straggler_every: k.StepsOrZero = Field(
        default=10, description="Steps between searches for a slow rank; 0 is off."
    )
    dpo: DpoSection = default(DpoSection)
    recompute: k.Recompute = Field(
        default="none",
        description="Activations recomputed in the backward; auto: as memory_gb requires.",
    )
    compile: k.Compile = Field(
        default="off",
        description="torch.compile of each block; auto: what cannot be compiled stays as it is.",
    )
    compile_backend: k.CompileBackend = Field(
        default="inductor", description="What compiles; the others show where a difference begins."
    )
    memory_gb: k.GigabytesOrNull = Field(
        default=None, description="GB (1e9 bytes) a rank has for recompute=auto, weights included."
    )
    profile: ProfileSection = default(ProfileSection)
    generate_tokens: k.CountOrZero = Field(
        default=200, le=1 << 17, description="Tokens written at the end; 0 is off."
    )


class CheckpointSection(Section):
    """When the state is saved and how much of it is kept."""

    save_every: k.StepsOrZero = Field(default=200, description="Steps between saves; 0 is off.")
    save_every_min: k.MinutesOrNull = Field(
        default=None, description="Minutes between saves; null is off."
    )
    keep_last: k.Count = Field(
        default=2, le=1 << 20, description="Checkpoints kept; older ones are deleted."
    )
    keep_every: k.StepsOrZero = Field(
        default=0, description="Checkpoints of multiples of so many steps are kept too; 0 is off."
    )
    keep_best: k.KeepBest = Field(
        default=None,
        description="The one with the lowest validation loss, or loss of this set, is kept too.",
    )
    local_dir: NodePathOrNull = Field(
        default=None,
        description="A folder that each node has for itself, such as one in /dev/shm, for copies "
        "of its state and the next node's; $NAME is expanded on the node.",
    )
    local_every: k.StepsOrZero = Field(
        default=0, description="Steps between two copies in local_dir; 0 is off."
    )
    async_mode: k.AsyncMode = Field(
        default="auto",
        description="async: copy the state and write it while training goes on; auto: where host "
        "memory has room for the copy.",
    )
    on_error: k.OnSaveError = Field(
        default="stop", description="What to do when a checkpoint cannot be written."
    )
    export: k.ExportFormat = Field(
        default=None,
        description="hf: the last checkpoint also becomes a folder hf/ that transformers loads, or "
        "with model.lora peft.",
    )

    @property
    def best_fact(self) -> str | None:
        """The fact of a checkpoint whose least value `keep_best` names."""
        best = self.keep_best
        return best if best in (None, VAL_LOSS) else f"{VAL_LOSS}/{best}"


class LocalSection(Section):
    """Processes on this machine."""

    procs: k.ProcsOrNull = Field(
        default=None, description="Processes to start; null: the product of the degrees."
    )


class RequeueSection(Section):
    """How a job stops before its time limit, and is requeued."""

    mode: k.RequeueMode = Field(
        default="requeue",
        description="requeue: this job; chain: submit a dependent job; never: do not restart.",
    )
    max_requeues: k.CountOrZero = Field(
        default=20, le=1 << 20, description="Maximum number of requeues; then the run stops."
    )
    in_job_restarts: k.Restarts = Field(
        default=0, description="Maximum number of restarts of the ranks within a job."
    )
    signals: k.Signals = Field(
        default=("USR1", "USR2", "TERM", "HUP"),
        description="Signals on which all ranks save and exit.",
    )
    margin_s: k.SecondsOrZero = Field(
        default=30.0, description="Seconds to keep between the last save and the job's end."
    )


class ElasticSection(Section):
    """A job that goes on with more or fewer nodes."""

    nodes: NodeSpanOrNull = Field(
        default=None,
        description="Fewest and most nodes of the job; the degrees are planned anew for those that "
        "it gets, with the same batches, samples and learning rates. null: as launch.slurm says.",
    )


class LaunchSection(Section):
    """How the processes are started."""

    local: LocalSection = default(LocalSection)
    slurm: k.SlurmOptions = Field(default_factory=dict, description="Options of the Slurm job.")
    requeue: RequeueSection = default(RequeueSection)
    elastic: ElasticSection = default(ElasticSection)
    init_timeout_s: k.Seconds = Field(
        default=60.0, description="Seconds to wait for all ranks at the start."
    )


class LogSection(Section):
    """What is reported."""

    every: k.Steps = Field(default=10, description="Steps between lines of the log.")
    verbose: bool = Field(
        default=False, description="Show with each line what the pipeline waited for."
    )
    plot: bool = Field(default=True, description="Draw the loss curve.")
    report: bool = Field(
        default=False, description="Write report.html at the end; needs the extra report."
    )
    to: k.TrackerNames = Field(
        default=(), description="Services that get the rows too; each needs the extra of its name."
    )


class RunConfig(Section):
    """One training run, everything the YAML file says."""

    run: RunSection = default(RunSection)
    parallel: ParallelSection = default(ParallelSection)
    pipeline: PipelineSection = default(PipelineSection)
    model: ModelSection = default(ModelSection)
    data: DataSection = default(DataSection)
    optim: OptimSection = default(OptimSection)
    precision: PrecisionSection = default(PrecisionSection)
    train: TrainSection = default(TrainSection)
    checkpoint: CheckpointSection = default(CheckpointSection)
    launch: LaunchSection = default(LaunchSection)
    log: LogSection = default(LogSection)
    _locations: KeyLocations = PrivateAttr(default_factory=KeyLocations)

    @property
    def has_reference_copy(self) -> bool:
        """Whether ranks hold the model a second time, frozen: without adapters that can be switched
        off the reference of preference pairs is such a copy."""
        return self.data.is_preference and self.model.lora.target is None

    def resolve(self, world_size: int) -> Self:
        """The same run with `parallel.data` filled in for `world_size` ranks.

        Raises:
            ConfigError: the degrees do not use exactly `world_size` ranks.
        """
        return self.model_copy(update={"parallel": self.parallel.resolve(world_size)})

    def written_at(self, locations: KeyLocations) -> Self:
        """The same run, whose problems have these locations."""
        copy = self.model_copy()
        copy._locations = locations
        return copy

    def problem(self, key: str, text: str) -> Problem:
        """What is wrong with the value of a dotted key, where it was written."""
        return Problem(*self._locations.of(keys_of(key)), key, text)

    def location(self, key: str) -> SourceLocation | None:
        """Where the value of a dotted key was written; None: nowhere, it is the default."""
        path = tuple(key.split("."))
        around = (path[:end] for end in range(len(path), 1, -1))
        return next(
            (self._locations.by_path[p] for p in around if p in self._locations.by_path), None
        )

    def to_yaml(self) -> str:
        """Every key with its value, sections in order; loads back to an equal object."""
        return write(self.model_dump(mode="python"))

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON schema of the YAML file, with descriptions, so that editors complete it."""
        dialect = "https://json-schema.org/draft/2020-12/schema"
        return {"$schema": dialect, **cls.model_json_schema()}
