"""The sections and keys of the YAML file, in its order, each with its default.

A key is defined in one place: a field with its type, default and description. Help, JSON schema,
error messages and resolved.yaml follow from it. Rules about several keys are in rules.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, PrivateAttr

from torchdistpackage.config import types as k
from torchdistpackage.config.data_section import DataSection, SourceSection
from torchdistpackage.config.embedding_section import EmbeddingSection
from torchdistpackage.config.errors import KeyLocations, Problem, SourceLocation
from torchdistpackage.config.model_section import ModelSection
from torchdistpackage.config.node_types import NodePathOrNull, NodeSpanOrNull
from torchdistpackage.config.optim_section import OptimSection, ParamGroupSection
from torchdistpackage.config.preference_losses import PREFERENCE_LOSSES, PreferenceLossSpec
from torchdistpackage.config.types import Section, default
from torchdistpackage.config.yaml_loader import keys_of, write
from torchdistpackage.errors import ConfigError
from torchdistpackage.layout.exchanges import EXCHANGES
from torchdistpackage.topology.mesh import DEFAULT_ORDER

ITEMS: Mapping[str, type[Section]] = {
    "data.sources": SourceSection,
    "optim.groups": ParamGroupSection,
}
"""Keys that hold a list of sections -> the class of its entries."""
VAL_LOSS = "val_loss"
"""Name under which a checkpoint records its validation loss; a set of data.eval adds /NAME."""


class RunSection(Section):
    """Name of the run, its random seed, and where its outputs go."""

    name: k.FolderName = Field(
        default="run",
        description="Name of the run and of its folder in run.dir. If that folder already has a "
        "checkpoint, the run resumes from it.",
    )
    dir: k.Path = Field(
        default="runs",
        description="Folder in which each run gets a folder of its own for checkpoints, logs and "
        "metrics.",
    )
    seed: k.Seed = Field(
        default=1234,
        description="Seed of the initial weights, the order of the data and dropout. Change it to "
        "repeat a run with other random numbers.",
    )

    @property
    def folder(self) -> Path:
        """The run folder: `dir` / `name`."""
        return Path(self.dir) / self.name


class ParallelSection(Section):
    """Parallel degrees: how many ranks share the data, the model and each sequence."""

    order: k.Order = Field(
        default=DEFAULT_ORDER,
        description="Order of the axes, outermost first. Ranks along the last axis have "
        "consecutive numbers and usually share a node; an axis left out has size 1.",
    )
    data: k.Degree = Field(
        default="auto",
        description="Number of model replicas, which share each global batch; auto: the number of "
        "ranks divided by pipe x context x tensor.",
    )
    pipe: k.Count = Field(
        default=1,
        le=1024,
        description="Number of ranks over which the layers are split into pipeline stages. Raise "
        "it when the model does not fit in the memory of fewer ranks.",
    )
    context: k.Count = Field(
        default=1,
        le=1024,
        description="Number of ranks that share each sequence (context parallelism). Raise it "
        "when the activations of one sequence do not fit on one rank.",
    )
    cp_comm_type: k.CpCommType = Field(
        default="auto",
        description="How context ranks exchange keys and values: "
        f"{', '.join(f'{x.name} {x.does}' for x in EXCHANGES.values())}. auto takes the one with "
        "the least estimated time.",
    )
    tensor: k.Count = Field(
        default=1,
        le=1024,
        description="Number of ranks over which each weight matrix is split (tensor parallelism). "
        "Keep these ranks on one node, because they communicate in every layer.",
    )
    expert: k.Count = Field(
        default=1,
        le=1024,
        description="Number of data ranks that divide the experts of each mixture among them; "
        "must divide parallel.data. Raise it when all experts do not fit on one rank.",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Split norms and residuals along the sequence over the tensor ranks too. It "
        "saves activation memory when parallel.tensor is 2 or more.",
    )
    tp_comm_overlap: bool = Field(
        default=False,
        description="Gather and scatter the sequence in chunks while the matmuls compute, to hide "
        "communication. Needs sequence_parallel: true.",
    )
    high_priority: k.GroupAxes = Field(
        default=("tensor", "context", "expert"),
        description="Axes whose NCCL kernels go before others on the GPU, so that they start while "
        "a matmul still runs. Remove an axis if its communication slows computation down.",
    )
    max_ctas: k.CtasOfAxis = Field(
        default_factory=dict,
        description="Most thread blocks (CTAs) that an NCCL kernel of an axis uses, such as {data: "
        "16}; each occupies a multiprocessor of the GPU. An axis left out has NCCL's choice.",
    )
    zero: k.ZeroStage = Field(
        default=0,
        description="ZeRO stage: which training state is sharded over ranks that otherwise hold "
        "the same. 0: none, 1: optimizer state, 2: also gradients, 3: also weights. Raise it to "
        "save memory.",
    )
    zero_group: k.ZeroGroup = Field(
        default=None,
        description="Number of neighbouring data ranks that share one set of shards; other such "
        "groups hold replicas, as in HSDP. node: the data ranks of a node, so that only sums of "
        "shards cross nodes. null: all data ranks share one set.",
    )

    @property
    def model_size(self) -> int:
        """Return the number of ranks that hold one replica of the model."""
        return self.pipe * self.context * self.tensor

    def axes(self) -> tuple[tuple[str, int], ...]:
        """Return (name, size) of all four axes, outermost first.

        Raises:
            ConfigError: data is still auto.
        """
        if self.data == "auto":
            raise ConfigError("parallel: data is auto; call resolve(world_size) before axes()")
        names = (*self.order, *(axis for axis in DEFAULT_ORDER if axis not in self.order))
        return tuple((name, getattr(self, name)) for name in names)

    def resolve(self, world_size: int) -> Self:
        """Return a copy with `data` computed from the number of ranks.

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
    """Pipeline stages of the model, and the order in which they work."""

    schedule: k.ScheduleName = Field(
        default="1f1b",
        description="Order in which each pipe rank runs the forwards and backwards of "
        "microbatches. auto searches for the shortest order by costs; custom reads the order from "
        "pipeline.file.",
    )
    microbatches: k.Count = Field(
        default=4,
        le=1 << 15,
        description="Number of equal parts into which a data rank cuts its samples of one "
        "accumulation round. More microbatches make the pipeline bubble smaller.",
    )
    chunks: k.ChunksOrNull = Field(
        default=None,
        description="Number of stages on each pipe rank, for schedules that can have several; "
        "null: the schedule's default.",
    )
    file: k.PathOrNull = Field(
        default=None,
        description="CSV file with the order for schedule: custom, in the format of "
        "torch.distributed.pipelining: one row for each pipe rank.",
    )
    costs: k.PathOrNull = Field(
        default=None,
        description="YAML file with measured seconds of stages or pieces, such as the costs.yaml "
        "that a pipeline run writes; null: costs are estimated from the model's operations.",
    )
    partition: k.Partition = Field(
        default="cost",
        description="What the stages share evenly: cost (estimated computation), parameters, "
        "uniform (number of pieces) or time (the seconds in pipeline.costs).",
    )


class PrecisionSection(Section):
    """Number formats of weights, activations and gradients."""

    dtype: k.Dtype = Field(
        default="float32",
        description="Type in which the model computes. Weights have the same type, except with "
        "bf16, where precision.weights decides. bfloat16 is another spelling of bf16.",
    )
    weights: k.Float32OrBf16 = Field(
        default="float32",
        description="Type of the weights when dtype is bf16. bf16 halves their memory and needs "
        "parallel.zero, whose optimizer keeps float32 master copies.",
    )
    reduce_dtype: k.Float32OrBf16 = Field(
        default="float32",
        description="Type in which gradients are sent between ranks. bf16 halves the bytes but "
        "rounds what is sent; each rank still accumulates its own gradients in float32.",
    )
    matmul: k.Matmul = Field(
        default="highest",
        description="Precision of float32 matmuls, as in torch.set_float32_matmul_precision: "
        "highest is float32, high allows TF32 on a GPU, medium allows bf16. Lower it for speed.",
    )
    fp8: k.Float8 = Field(
        default="off",
        description="linear: compute the matmuls of attention and MLP layers in float8, with one "
        "scale for each row. Needs dtype: bf16, and a GPU of compute capability 8.9 to be fast.",
    )


class ProfileSection(Section):
    """The steps to trace on all ranks, into one file of the run folder."""

    steps: k.StepRangeOrNull = Field(
        default=None,
        description="First and last step to trace, such as 10..12, at most 100 steps. Every rank "
        "records what it does in them, and the run writes one trace.json. null is off.",
    )

    @property
    def range(self) -> range:
        """Return the steps to trace; empty if off."""
        first, _, last = (self.steps or "1..0").partition("..")
        return range(int(first), int(last) + 1)


class DpoSection(Section):
    """The loss for preference pairs, as in DPO (Rafailov et al., arXiv:2305.18290)."""

    loss: k.PreferenceLoss = Field(
        default="sigmoid",
        description="Loss of a pair. sigmoid is DPO's, sigmoid_norm the same with the mean over "
        "the tokens of an answer, hinge and ipo are others with a reference model; simpo and orpo "
        "need no reference. kto is for labelled answers (data.name: unpaired_preference).",
    )
    beta: k.Positive = Field(
        default=0.1,
        description="Strength of the pull towards the reference model (trl's beta). Raise it to "
        "keep the trained model closer to the reference.",
    )
    label_smoothing: k.BelowHalf = Field(
        default=0.0,
        description="Assumed share of pairs whose chosen and rejected answers are swapped. Raise "
        "it for noisy labels. For loss: sigmoid, sigmoid_norm and simpo.",
    )
    gamma: k.NotNegative = Field(
        default=0.5,
        description="Margin by which simpo wants the chosen answer to be ahead (trl's "
        "simpo_gamma).",
    )
    reference: k.PathOrNull = Field(
        default=None,
        description="File of the reference's log-probabilities, which tdp reference has written. "
        "The run then holds no reference. null: the reference runs beside the model.",
    )
    desirable_weight: k.NotNegative = Field(
        default=1.0,
        description="Factor of kto's loss of good answers. Raise it where these are few.",
    )
    undesirable_weight: k.NotNegative = Field(
        default=1.0,
        description="Factor of kto's loss of bad answers. Raise it where these are few.",
    )

    @property
    def spec(self) -> PreferenceLossSpec:
        """Return the row of the loss."""
        return PREFERENCE_LOSSES[self.loss]


class EarlyStopSection(Section):
    """Options that end a run before train.steps when a validated value stops improving."""

    metric: k.MetricName = Field(
        default=None,
        description="Value that has to improve: val_loss, the name of a set in data.eval, or a "
        "value of validations in metrics.jsonl, such as eval_rewards/accuracies; null is off.",
    )
    patience: k.Count = Field(
        default=3,
        le=k.MAX_STEPS,
        description="Number of validations in a row without an improvement after which the run "
        "ends (transformers' early_stopping_patience).",
    )
    min_delta: k.NotNegative = Field(
        default=0.0,
        description="Improvement over the best value before that has to be exceeded to count "
        "(transformers' early_stopping_threshold).",
    )
    mode: k.BestMode = Field(
        default="auto",
        description="Whether smaller values are better (min) or larger ones (max); auto is min for "
        "losses and errors (loss, mse, mae), and max for all else.",
    )

    @property
    def is_greater_better(self) -> bool:
        """Return whether larger values of the metric are better."""
        metric = self.metric or ""
        falls = not metric.startswith("eval_") or metric.endswith(("loss", "_mse", "_mae"))
        return not falls if self.mode == "auto" else self.mode == "max"


class DistillSection(Section):
    """Distillation from a teacher, as in GKD (Agarwal et al., arXiv:2306.13649)."""

    teacher: k.PathOrNull = Field(
        default=None,
        description="Folder of a transformers model whose next-token distribution the model "
        "learns, with the same tokenizer and vocabulary. null: no distillation, without logits.",
    )
    logits: k.PathOrNull = Field(
        default=None,
        description="File of the teacher's most likely tokens, which tdp reference has written. "
        "The run then holds no teacher. null: the teacher runs beside the model.",
    )
    teacher_tensor: k.TensorOrNull = Field(
        default=None,
        description="Number of tensor-parallel ranks of the teacher: a multiple of parallel.tensor "
        "over the same ranks, so that data ranks share a large teacher. null: parallel.tensor.",
    )
    teacher_pipe: k.TensorOrNull = Field(
        default=None,
        description="Number of pipeline stages of the teacher, on the same ranks: more of them "
        "than parallel.pipe for a teacher that does not fit, or fewer. null: parallel.pipe.",
    )
    teacher_zero: k.TeacherZero = Field(
        default=0,
        description="3: the teacher's data ranks each keep a shard of its weights and gather those "
        "of a block while it runs. Set it if the teacher does not fit. 0: each has all of them.",
    )
    beta: k.Fraction = Field(
        default=0.0,
        description="Divergence to minimize (trl's beta). 0: forward KL(teacher || student); 1: "
        "reverse KL(student || teacher); between: the generalized Jensen-Shannon divergence.",
    )
    temperature: k.Positive = Field(
        default=1.0,
        description="The logits of both models are divided by it before the softmax. Raise it to "
        "learn more from the tokens that the teacher thinks unlikely.",
    )
    kd_ratio: k.Fraction = Field(
        default=0.5,
        description="Weight of the divergence in the loss; 1 - kd_ratio is that of the cross "
        "entropy with the tokens of the data.",
    )

    @property
    def is_on(self) -> bool:
        """Return whether the run learns from a teacher."""
        return self.teacher is not None or self.logits is not None

    @property
    def has_own_degrees(self) -> bool:
        """Return whether the teacher has other tensor ranks or stages than the model."""
        return self.teacher_tensor is not None or self.teacher_pipe is not None

    @property
    def runs_teacher(self) -> bool:
        """Return whether the teacher runs beside the model."""
        return self.teacher is not None and self.logits is None


class TrainSection(Section):
    """Length of the run, and the actions during it."""

    steps: k.Steps = Field(default=400, description="Number of optimizer steps in the run.")
    epochs: k.PositiveOrNull = Field(
        default=None,
        description="Number of passes over the training data; the run then computes train.steps "
        "from it. null: train.steps decides.",
    )
    accumulate: k.Count = Field(
        default=1,
        le=1 << 16,
        description="Number of gradient accumulation rounds in a step. Raise it when a rank's "
        "samples of one step do not fit in memory at once.",
    )
    eval_every: k.StepsOrZero = Field(
        default=100,
        description="Number of steps between validations; 0: validate only after the last step.",
    )
    eval_batches: k.Count = Field(
        default=8,
        le=1 << 20,
        description="Number of batches of data.global_batch samples in one validation.",
    )
    eval_ema: bool = Field(
        default=False,
        description="Validate the averages of optim.ema_decay instead of the weights.",
    )
    step_timeout_s: k.Seconds = Field(
        default=120.0,
        description="Seconds after which a step counts as hung, and the run ends with a report on "
        "the rank that caused it. Set it well above the time of the slowest step.",
    )
    deterministic: bool = Field(
        default=False,
        description="Have NCCL, cuBLAS and torch add in one order, so that a run repeated on the "
        "same GPUs gives the same bits more often. Costs speed.",
    )
    check_calls: bool = Field(
        default=False,
        description="Compare every communication call between ranks before making it, and end the "
        "run at the first that differs. It is slow; switch it on to find the cause of a hang.",
    )
    on_nonfinite: k.OnNonfinite = Field(
        default="stop",
        description="What happens when a loss or gradient is NaN or infinite on any rank: stop "
        "ends the run, skip leaves out the update of that step and goes on.",
    )
    check_replicas_every: k.StepsOrZero = Field(
        default=1000,
        description="Number of steps between checks that ranks hold the same bits of what they "
        "hold alike: weights, optimizer states, random states of tensor ranks; 0 is off. Check "
        "more often to look for faulty hardware or code that is not deterministic.",
    )
    on_replicas_differ: k.OnReplicasDiffer = Field(
        default="stop",
        description="What happens when such a check finds a difference: stop ends the run, "
        "continue logs it and goes on. Both keep the values of the ranks in the run folder.",
    )
    straggler_every: k.StepsOrZero = Field(
        default=10,
        description="Number of steps between searches for a rank that slows down the others, "
        "which the log then names; 0 is off.",
    )
    label_smoothing: k.BelowOne = Field(
        default=0.0,
        description="Share of each target's probability that is spread over all tokens in "
        "training (transformers' label_smoothing_factor). Validations take targets as they are.",
    )
    neftune_noise_alpha: k.PositiveOrNull = Field(
        default=None,
        description="Noise on the vectors of tokens in training, as in NEFTune (arXiv:2310.05914): "
        "uniform up to this / sqrt(data.seq_len x channels). 5 to 15 is usual; null is off.",
    )
    dpo: DpoSection = default(DpoSection)
    early_stop: EarlyStopSection = default(EarlyStopSection)
    distill: DistillSection = default(DistillSection)
    embedding: EmbeddingSection = default(EmbeddingSection)
    recompute: k.Recompute = Field(
        default="none",
        description="Which activations the backward recomputes instead of keeping them: none, "
        "blocks (those of every block), or auto (as few as make a rank fit in train.memory_gb). "
        "With offload it recomputes nothing, and those of every block wait in host memory. "
        "It saves memory of the device and costs time.",
    )
    compile: k.Compile = Field(
        default="off",
        description="Compile the model's blocks with torch.compile. blocks ends the run when a "
        "block cannot be compiled; auto runs such a block uncompiled.",
    )
    compile_backend: k.CompileBackend = Field(
        default="inductor",
        description="Backend of torch.compile. aot_eager and eager generate no kernels; use them "
        "to find where a numerical difference begins.",
    )
    memory_gb: k.GigabytesOrNull = Field(
        default=None,
        description="Memory of a rank in GB (1e9 bytes) for weights, gradients, optimizer state, "
        "activations and, on GPUs, NCCL's communicators together. train.recompute: auto needs it.",
    )
    profile: ProfileSection = default(ProfileSection)
    generate_tokens: k.CountOrZero = Field(
        default=200,
        le=1 << 17,
        description="Number of tokens of sample text to write after the last step; 0 is off. Only "
        "a model whose tokens are bytes writes text.",
    )


class CheckpointSection(Section):
    """Saves of the training state, and the checkpoints that are kept."""

    save_every: k.StepsOrZero = Field(
        default=200,
        description="Number of steps between checkpoints; 0 is off. A crash loses at most the "
        "steps since the last checkpoint.",
    )
    save_every_min: k.MinutesOrNull = Field(
        default=None,
        description="Minutes between checkpoints, in addition to save_every; null is off.",
    )
    keep_last: k.Count = Field(
        default=2,
        le=1 << 20,
        description="Number of newest checkpoints to keep; older ones are deleted.",
    )
    keep_every: k.StepsOrZero = Field(
        default=0,
        description="Also keep checkpoints whose step is a multiple of this number; 0 is off.",
    )
    keep_best: k.KeepBest = Field(
        default=None,
        description="Also keep the checkpoint with the lowest validation loss: val_loss, or the "
        "name of a set in data.eval; null is off.",
    )
    local_dir: NodePathOrNull = Field(
        default=None,
        description="Folder that each node has for itself, such as one in /dev/shm. There a node "
        "keeps copies of its own state and of the next node's, so that a lost node costs few "
        "steps. $NAME is a variable of the node.",
    )
    local_every: k.StepsOrZero = Field(
        default=0,
        description="Number of steps between copies in local_dir; 0 is off. Set it together with "
        "local_dir, and below save_every.",
    )
    async_mode: k.AsyncMode = Field(
        default="auto",
        description="When checkpoints are written: async copies the state and writes the copy "
        "while training goes on; disabled writes between steps; auto is async if host memory has "
        "room for the copy.",
    )
    on_error: k.OnSaveError = Field(
        default="stop",
        description="What happens when a checkpoint cannot be written: stop ends the run, "
        "continue logs the error and goes on training.",
    )
    export: k.ExportFormat = Field(
        default=None,
        description="hf: after the last step also write the weights to the folder hf/ of the run, "
        "which transformers can load (with model.lora, peft). null is off.",
    )

    @property
    def best_fact(self) -> str | None:
        """Return the name of the recorded loss whose lowest value `keep_best` keeps."""
        best = self.keep_best
        return best if best in (None, VAL_LOSS) else f"{VAL_LOSS}/{best}"


class LocalSection(Section):
    """Processes on this machine."""

    procs: k.ProcsOrNull = Field(
        default=None,
        description="Number of processes to start on this machine; null: as many as the degrees "
        "of parallel need.",
    )


class RequeueSection(Section):
    """How a Slurm job saves before it is stopped, and how it is requeued."""

    mode: k.RequeueMode = Field(
        default="requeue",
        description="What happens after the job was stopped, for example by its time limit: "
        "requeue puts the same job back in the queue, chain submits a new job that depends on it, "
        "never does neither.",
    )
    max_requeues: k.CountOrZero = Field(
        default=20,
        le=1 << 20,
        description="Largest number of requeues; then the job stops with exit code 75.",
    )
    in_job_restarts: k.Restarts = Field(
        default=0,
        description="Largest number of times that one job starts its ranks again after a failure, "
        "which saves the wait in the queue.",
    )
    signals: k.Signals = Field(
        default=("USR1", "USR2", "TERM", "HUP"),
        description="Signals that make all ranks save a checkpoint after the same step and exit.",
    )
    margin_s: k.SecondsOrZero = Field(
        default=30.0,
        description="Seconds to keep free between the last save and the job's time limit. Raise "
        "it if saves sometimes take much longer than usual.",
    )


class ElasticSection(Section):
    """A Slurm job that can run on more or fewer nodes."""

    nodes: NodeSpanOrNull = Field(
        default=None,
        description="Fewest and most nodes of the job, such as [1, 4]. The degrees are planned "
        "anew for the number of nodes that the job gets, with the same batches, samples and "
        "learning rates. null: as launch.slurm says.",
    )


class LaunchSection(Section):
    """The processes of the run: where and how they start."""

    local: LocalSection = default(LocalSection)
    slurm: k.SlurmOptions = Field(
        default_factory=dict,
        description="Options of sbatch by their own names, such as nodes, ntasks-per-node, time "
        "and partition, and a few of this package (docs/slurm.md).",
    )
    site: k.PathOrNull = Field(
        default=None,
        description="File of tdp site about the Slurm site: options that launch.slurm leaves out "
        "come from there, and what the site cannot give is refused before the job waits "
        "(docs/sites.md).",
    )
    requeue: RequeueSection = default(RequeueSection)
    elastic: ElasticSection = default(ElasticSection)
    spares: k.Spares = Field(
        default=0,
        description="Number of nodes that the job asks for beyond those of its ranks. When a node "
        "is lost, the ranks are started again in the same job with a spare in its place; needs "
        "launch.requeue.in_job_restarts.",
    )
    node_check: k.NodeCheck = Field(
        default="off",
        description="fast: measure each node for about 5 s before the first step, and leave out "
        "nodes that are slower than the others or compute wrong results (docs/jobs.md). Worth it "
        "for jobs of many nodes and hours.",
    )
    init_timeout_s: k.Seconds = Field(
        default=60.0,
        description="Seconds to wait at the start for all ranks to join. Raise it for large jobs "
        "or slow file systems.",
    )
    same_versions: bool = Field(
        default=True,
        description="Refuse to start if the ranks' versions of this package, torch, NCCL or "
        "Python differ. Set it to false to allow that.",
    )
    share_gpus: bool = Field(
        default=False,
        description="Where a node has fewer GPUs than ranks, run several ranks on one GPU over "
        "NCCL, which must be 2.30 or later; otherwise such a run uses the CPU. For development "
        "and tests: times mean nothing (docs/gpu.md).",
    )


class LogSection(Section):
    """The lines, files and services to which the run logs."""

    every: k.Steps = Field(default=10, description="Number of steps between lines of the log.")
    verbose: bool = Field(
        default=False,
        description="With a pipeline, add a second line to each log line that says where the "
        "bubble came from: unequal stages, waiting for messages, or the host.",
    )
    plot: bool = Field(
        default=True, description="Draw the loss curve to loss.png in the run folder."
    )
    report: bool = Field(
        default=False,
        description="Write report.html to the run folder at the end. Needs "
        'pip install "torchdistpackage[report]".',
    )
    profile: k.PathOrNull = Field(
        default=None,
        description="Cluster profile that tdp comm bench --profile wrote; the step time that it "
        "predicts stands beside the measured one. Default: the data sheet of the GPU, where it is "
        "known.",
    )
    to: k.TrackerNames = Field(
        default=(),
        description="Services that receive the rows of metrics.jsonl too. Each needs the extra of "
        "its name, such as "
        'pip install "torchdistpackage[wandb]".',
    )
    callbacks: k.ImportPaths = Field(
        default=(),
        description="Import paths of your own callbacks, such as [mine:Extra]. Each is called "
        "without arguments on every rank and returns a torchdistpackage.Callback, which can add "
        "values to the log (docs/own_code.md).",
    )


class DdpSection(Section):
    """Summation of gradients over data-parallel ranks."""

    bucket_mb: k.MiB | None = Field(
        default=None,
        description="Size in MiB of the buckets in which gradients are summed, with ZeRO too. "
        "Default: 4 with gloo; with NCCL 32, and 1 for each rank that shares them where these are "
        "more, up to 512. Lower it if gathered buckets take too much memory.",
    )


class RunConfig(Section):
    """One training run: all settings of the YAML file."""

    run: RunSection = default(RunSection)
    parallel: ParallelSection = default(ParallelSection)
    pipeline: PipelineSection = default(PipelineSection)
    model: ModelSection = default(ModelSection)
    data: DataSection = default(DataSection)
    ddp: DdpSection = default(DdpSection)
    optim: OptimSection = default(OptimSection)
    precision: PrecisionSection = default(PrecisionSection)
    train: TrainSection = default(TrainSection)
    checkpoint: CheckpointSection = default(CheckpointSection)
    launch: LaunchSection = default(LaunchSection)
    log: LogSection = default(LogSection)
    _locations: KeyLocations = PrivateAttr(default_factory=KeyLocations)

    @property
    def has_reference(self) -> bool:
        """Return whether a frozen reference runs a forward before each pass, as for preference
        pairs.
        """
        dpo = self.train.dpo
        return self.data.is_preference and dpo.spec.has_reference and dpo.reference is None

    @property
    def has_reference_copy(self) -> bool:
        """Return whether ranks hold a second, frozen copy of the model.

        It is the reference of preference pairs; with LoRA the model with its adapters switched off
        serves instead.
        """
        return self.has_reference and self.model.lora.target is None

    def resolve(self, world_size: int) -> Self:
        """Return the same run with `parallel.data` computed for `world_size` ranks.

        Raises:
            ConfigError: the degrees do not use exactly `world_size` ranks.
        """
        return self.model_copy(update={"parallel": self.parallel.resolve(world_size)})

    def written_at(self, locations: KeyLocations) -> Self:
        """Return the same run with these locations in its problem reports."""
        copy = self.model_copy()
        copy._locations = locations
        return copy

    def problem(self, key: str, text: str) -> Problem:
        """Return a problem of a dotted key, at the place where the key was written."""
        return Problem(*self._locations.of(keys_of(key)), key, text)

    def location(self, key: str) -> SourceLocation | None:
        """Return where a dotted key was written, or None if it has its default."""
        path = tuple(key.split("."))
        around = (path[:end] for end in range(len(path), 1, -1))
        return next(
            (self._locations.by_path[p] for p in around if p in self._locations.by_path), None
        )

    def to_yaml(self) -> str:
        """Return YAML with every key, sections in order; it loads back to an equal object."""
        return write(self.model_dump(mode="python"))

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON schema of the YAML file, which editors use to complete and check keys."""
        dialect = "https://json-schema.org/draft/2020-12/schema"
        return {"$schema": dialect, **cls.model_json_schema()}
