"""The predicted seconds of a plan's step on a device, and of the whole run. No torch.

The plan becomes the sizes and the layout that `predict` takes; the pipeline's order is the plan's
own. Cases that predict does not model are reported, not guessed.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from torchdistpackage.config.model_section import is_adapter
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.slurm import header, time_seconds
from torchdistpackage.errors import ConfigError
from torchdistpackage.models.gpt_layout import HALVES, GPTShape
from torchdistpackage.models.transformers_layout import TransformersShape, part_tables, parts
from torchdistpackage.models.transformers_numbers import piece_costs
from torchdistpackage.plan.context_plan import context_exchange
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.predict.collectives import Fabric
from torchdistpackage.predict.devices import Accelerator, find_device, named_device
from torchdistpackage.predict.kernels import priced_as
from torchdistpackage.predict.step import StepTime, step_time
from torchdistpackage.predict.workload import StepLayout, TransformerSizes
from torchdistpackage.schedule.actions import Schedule

_COMPUTES = {"highest": "float32", "high": "tfloat32", "medium": "bfloat16"}
"""Type in which a device multiplies float32 numbers, by `precision.matmul`."""
_WINDOWS = {"mistral": 4096, "gemma2": 4096}
"""Windows of families whose config.json may leave out sliding_window."""
_OTHER_FLOPS = 0.05
"""Largest fraction by which a model's matmuls may differ from those predicted for its sizes."""


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """Inputs for predicting the seconds of a plan's step. fabric: the links. schedule: of the pipe,
    or None.
    """

    sizes: TransformerSizes
    layout: StepLayout
    device: Accelerator
    fabric: Fabric
    schedule: Schedule | None

    def step(self) -> StepTime:
        """Return the predicted step."""
        return step_time(self.sizes, self.layout, self.device, self.schedule, self.fabric)


@dataclass(frozen=True, slots=True)
class RunTime:
    """A predicted step and the run of it.

    model_flops: operations of forward and backward for a token, as the log counts them.
    job_seconds: the job's time limit; None: it has none. unmeasured: sentences on the types of
    matmuls that the device's measurement lacks.
    """

    device: Accelerator
    prediction: StepPrediction
    step: StepTime
    step_tokens: int
    model_flops: float
    ranks: int
    steps: int
    job_seconds: float | None
    unmeasured: tuple[str, ...] = ()

    @property
    def run_seconds(self) -> float:
        """Seconds of all steps, without validations, checkpoints and the start."""
        return self.steps * self.step.total

    @property
    def gpu_hours(self) -> float:
        return self.run_seconds * self.ranks / 3600

    @property
    def utilization(self) -> float:
        """The model's operations over the peak of the devices in bfloat16 (MFU)."""
        flops = self.model_flops * self.step_tokens / self.step.total
        return flops / (self.ranks * self.device.peak("bfloat16"))

    @property
    def steps_of_job(self) -> int | None:
        """Return the steps that end within the job's time; None without a limit."""
        return None if self.job_seconds is None else int(self.job_seconds / self.step.total)


def device_of(config: RunConfig, name: str | None = None) -> Accelerator | None:
    """Return the device of this name, else the GPU type that the job requests; None if neither is
    known.

    Raises:
        ConfigError: no device has that name.
    """
    if name is not None:
        return find_device(name)
    options = header(config.launch.slurm) if config.launch.slurm else {}
    text = ",".join(options.get(x) or "" for x in ("gpus", "gpus-per-node", "gpus-per-task"))
    text += "," + (options.get("gres") or "").replace("gpu:", "")
    devices = (named_device(token) for token in re.findall(r"[A-Za-z][\w.-]*", text))
    return next((each for each in devices if each is not None), None)


def unpredicted(plan: Plan) -> str | None:
    """Return why the step of this plan is not predicted, or None."""
    shape = plan.shape
    if shape is None:
        return (
            "not known of a model of your own before it is built; measure one with a run of "
            "train.steps: 20"
        )
    if plan.ranks_per_gpu > 1:
        return f"not predicted where {plan.ranks_per_gpu} ranks share a GPU (launch.share_gpus)"
    if plan.config.precision.dtype == "float64":
        return "float64 is not predicted; set precision.dtype to bf16 or float32"
    if plan.config.data.is_preference:
        return "not predicted for pairs of answers, whose reference runs beside the model"
    if plan.config.data.is_embedding:
        return "not predicted for texts to compare, which go forward twice"
    if plan.teacher is not None:
        return "not predicted for a run whose teacher runs beside the model (train.distill)"
    if plan.config.train.recompute == "offload":
        return "copies of activations to the host are not predicted (train.recompute: offload)"
    if plan.config.data.head is not None:
        return "not predicted for a head in place of that for the next token"
    if plan.config.train.recompute == "auto":
        return "known once the run has chosen what is computed again (train.recompute: auto)"
    if isinstance(shape, GPTShape):
        moe = shape.moe
        if moe is not None and (moe.shared_hidden or shape.moe_every > 1 or shape.moe_first):
            return "not predicted for shared experts, or experts in some blocks alone"
        return None
    if not isinstance(shape, TransformersShape):
        return f"not predicted for a {type(shape).__name__}"
    return _unpredicted_transformer(shape)


def _unpredicted_transformer(shape: TransformersShape) -> str | None:
    """Return why the step of a model of transformers is not predicted, or None."""
    weights = parts(shape, "tensor")[1].parameters.values()
    has_experts = any(len(x.layout.shape) > 2 or x.share < 1 for x in weights)
    if shape.kind.shared_experts or has_experts:
        return "not predicted for mixtures of experts of transformers"
    settings = shape.given
    window = settings.get("sliding_window", _WINDOWS.get(shape.family)) or 0
    # a switch that Qwen's settings have, off by default
    is_on = settings.get("use_sliding_window", not shape.family.startswith("qwen"))
    if is_on and 0 < window < shape.seq_len:
        return (
            f"not predicted for attention to the last {window} of {shape.seq_len} tokens "
            f"(sliding_window)"
        )
    unadapted = replace(shape, lora=None) if shape.lora is not None else shape
    ratio = sum(piece_costs(unadapted)) / _sizes_of_transformer(shape).forward_flops(shape.seq_len)
    if abs(ratio - 1) > _OTHER_FLOPS:
        return (
            f"not predicted for {shape.class_name}, whose layers multiply {ratio:.2f} times what "
            f"a decoder of its sizes does"
        )
    return None


def known_step_seconds(plan: Plan, device_name: str) -> float | None:
    """Return the predicted seconds of a step on the device with this name, as its driver spells
    it; None where the device is not known or the step is not predicted."""
    device = named_device(device_name)
    if device is None or unpredicted(plan) is not None:
        return None
    return run_time(plan, device).step.total


def run_time(
    plan: Plan,
    device: Accelerator,
    ranks_per_node: int | None = None,
    fabric: Fabric | None = None,
    step: StepTime | None = None,
) -> RunTime:
    """Predict the step and the run of a plan for which `unpredicted` has no reason.

    fabric: measured links; None: those of the device. step: the prediction, where it is known.

    Raises:
        ConfigError: there is a reason, or a link has no bandwidth.
    """
    if (why := unpredicted(plan)) is not None:
        raise ConfigError(f"the time of a step is {why}")
    config, sizes = plan.config, sizes_of(plan)
    assert plan.model is not None
    layout = layout_of(plan, ranks_per_node or 0)
    limit = (header(config.launch.slurm) if config.launch.slurm else {}).get("time")
    prediction = StepPrediction(
        sizes,
        layout,
        device,
        fabric or Fabric.of(device, layout.node_size, layout.network_bytes_per_s),
        plan.schedule if layout.pipe > 1 else None,
    )
    return RunTime(
        device,
        prediction,
        step or prediction.step(),
        layout.step_tokens,
        plan.model.flops_per_token(),
        plan.world_size,
        config.train.steps,
        None if limit is None else time_seconds(limit),
        _unmeasured(device, layout),
    )


def _unmeasured(device: Accelerator, layout: StepLayout) -> tuple[str, ...]:
    dtypes = ("float8", layout.dtype) if layout.float8 else (layout.dtype,)
    pairs = ((dtype, priced_as(device, dtype)) for dtype in dtypes)
    return tuple(f"{x} was not measured; priced as {other}" for x, other in pairs if x != other)


def sizes_of(plan: Plan) -> TransformerSizes:
    """Return the sizes of the plan's model."""
    shape = plan.shape
    if isinstance(shape, GPTShape):
        moe = shape.moe
        return TransformerSizes(
            shape.layers,
            shape.dim,
            shape.heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.hidden if moe is None else moe.hidden,
            shape.vocab,
            gated=shape.mlp == "swiglu",
            norm=shape.norm,
            rotary=shape.position == "rotary",
            num_experts=0 if moe is None else moe.num_experts,
            top_k=1 if moe is None else moe.top_k,
            tied=shape.tied,
        )
    assert isinstance(shape, TransformersShape)
    return _sizes_of_transformer(shape)


def _sizes_of_transformer(shape: TransformersShape) -> TransformerSizes:
    """Return the sizes of a model of transformers; what `Sizes` lacks is read from the parameters
    of its first block."""
    z, block = shape.sizes, parts(shape, "tensor")[1]
    shapes = {name: x.layout.shape for name, x in block.parameters.items() if not is_adapter(name)}
    norms = [name for name, sizes in shapes.items() if len(sizes) == 1 and name.endswith(".weight")]
    has_bias = any(f"{name.removesuffix('weight')}bias" in shapes for name in norms)
    of_attention = tuple(f"{name}." for name in block.split.attention)
    of_stream = [name for name in norms if not name.startswith(of_attention)]
    plain = TransformerSizes(
        z.layers,
        z.dim,
        z.heads,
        z.kv_heads,
        z.head_dim,
        z.hidden,
        z.vocab,
        gated=False,
        norm="layer" if has_bias else "rms",
        norms=len(of_stream),
        qk_norm=len(norms) > len(of_stream),
        rotary=z.positions is None,
        tied=z.tied,
    )
    matrices = sum(prod(sizes) for sizes in shapes.values() if len(sizes) == 2)
    of_mlp = matrices - plain.attention_parameters
    # a gated MLP has three matmuls, another one two
    return replace(plain, gated=of_mlp > 2.5 * z.dim * z.hidden)


def layout_of(plan: Plan, ranks_per_node: int = 0) -> StepLayout:
    """Return how the plan divides and repeats its work."""
    config, parallel = plan.config, plan.config.parallel
    assert plan.shape is not None
    is_narrow = config.precision.dtype == "bf16"
    stages = plan.schedule.num_stages
    return StepLayout(
        plan.world_size,
        plan.shape.seq_len,
        plan.samples_per_microbatch,
        plan.schedule.num_microbatches,
        tensor=parallel.tensor,
        pipe=parallel.pipe,
        chunks=stages // parallel.pipe,
        context=parallel.context,
        context_exchange=context_exchange(
            plan, parallel.context, parallel.tensor, plan.samples_per_microbatch
        ),
        expert=parallel.expert,
        zero=plan.zero,
        shard=(plan.zero_group or 0) * parallel.context,
        sequence_parallel=parallel.sequence_parallel,
        tensor_overlap=parallel.tp_comm_overlap,
        recompute="blocks" if config.train.recompute == "blocks" else "none",
        float8=plan.has_float8,
        dtype="bfloat16" if is_narrow else _COMPUTES[config.precision.matmul],
        weight_bytes=plan.numbers.weights.num_bytes,
        reduce_bytes=plan.numbers.reduced.num_bytes,
        kernels="eager" if config.train.compile == "off" else "fused",
        loss="eager",
        attention="flash2" if is_narrow else "unfused",
        optimizer="muon" if config.optim.name == "muon" else "fused",
        muon_exchange=config.optim.muon_exchange,
        dropout=config.model.dropout > 0,
        lora=config.model.lora.r if config.model.lora.target else 0,
        lora_mlp=_adapts_mlp(plan),
        shards_frozen=False,
        rounds=plan.rounds,
        exchanges=plan.rounds if plan.zero >= 2 else 1,
        blocks=blocks_of(plan.pieces, plan.stages) if stages > 1 else (),
        node_size=ranks_per_node,
        order=plan.topology.dense.names,
        folds_context=False,
    )


def _adapts_mlp(plan: Plan) -> bool:
    """Return whether a layer outside of attention has an adapter."""
    if not isinstance(plan.shape, TransformersShape):
        return False
    attentions = {f"{name}." for block in part_tables(plan.shape) for name in block.attention}
    return any(is_adapter(name) and not name.startswith(tuple(attentions)) for name in plan.layouts)


def blocks_of(pieces: Sequence[str], cut: Iterable[range]) -> tuple[float, ...]:
    """Return the number of blocks of each stage of a cut; half a block counts 0.5."""
    names = ([pieces[i] for i in span] for span in cut)
    return tuple(
        sum(0.5 if x.endswith(HALVES) else 1.0 for x in stage if "." in x) for stage in names
    )
