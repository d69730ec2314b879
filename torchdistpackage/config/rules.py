"""Rules about several keys; each message names the values and the nearest valid ones."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchdistpackage.config.data_section import DataSection
from torchdistpackage.config.schema import EarlyStopSection, ModelSection, RunConfig
from torchdistpackage.config.slurm import header
from torchdistpackage.config.types import MAX_RANKS
from torchdistpackage.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule about several keys.

    fields: the keys it reads, the one to change first. message: takes the run and the number of
        ranks (None if not known), and returns what is wrong or None.
    """

    fields: tuple[str, ...]
    message: Callable[[RunConfig, int | None], str | None]


def rule(*fields: str) -> Callable[[Callable[[RunConfig, int | None], str | None]], Rule]:
    """Make a `Rule` of the decorated function."""
    return lambda message: Rule(fields, message)


def divisors(number: int, near: int) -> str:
    """Return the divisors of `number` next to `near`, such as "2 or 4"."""
    near = min(near, number)
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    every = {*small, *(number // d for d in small)}
    below = max(d for d in every if d <= near)
    above = min((d for d in every if near < d <= 64 * near), default=below)
    return f"{below}" if above == below else f"{below} or {above}"


def multiples(number: int, near: int) -> str:
    """Return the multiples of `number` next to `near`, such as "96 or 104"."""
    below = near // number * number
    return f"{below} or {below + number}" if below else f"{number}"


DEGREES = ("parallel.data", "parallel.pipe", "parallel.context", "parallel.tensor")
_NUM_BYTES = 256


@rule("parallel.order", *DEGREES)
def _order_names_axes(c: RunConfig, world_size: int | None) -> str | None:
    p = c.parallel
    degrees = {"data": p.data, "pipe": p.pipe, "context": p.context, "tensor": p.tensor}
    left_out = [f"{a}={n}" for a, n in degrees.items() if a not in p.order and n not in (1, "auto")]
    if not left_out:
        return None
    return (
        f"parallel.order=[{', '.join(p.order)}] leaves out {', '.join(left_out)}; an axis left out "
        f"has size 1: add it to the order or set it to 1"
    )


@rule(*DEGREES)
def _world_is_no_slip(c: RunConfig, world_size: int | None) -> str | None:
    p = c.parallel
    world = world_size or p.model_size * (1 if p.data == "auto" else p.data)
    if max(world, p.model_size) <= MAX_RANKS:
        return None
    return (
        f"a world of {max(world, p.model_size):,} ranks is more than the {MAX_RANKS:,} that a run "
        f"may have; use smaller degrees"
    )


@rule(*DEGREES, "parallel.order", "launch.elastic.nodes")
def _degrees_fill_world(c: RunConfig, world_size: int | None) -> str | None:
    if world_size is None or c.launch.elastic.nodes is not None:
        return None
    try:
        c.parallel.resolve(world_size)
    except ConfigError as error:
        return str(error).removeprefix("parallel: ")
    return None


@rule("launch.elastic.nodes", "launch.slurm", "launch.local.procs")
def _elastic_is_of_a_job(c: RunConfig, world_size: int | None) -> str | None:
    span = c.launch.elastic.nodes
    # if a launcher sets the number of ranks, the degrees are planned for it without Slurm
    if span is None or c.launch.slurm or c.launch.local.procs or world_size:
        return None
    return (
        f"launch.elastic.nodes=[{span[0]}, {span[1]}] is for Slurm jobs and has no effect without "
        f"options in launch.slurm; add one, such as launch.slurm: {{ntasks-per-node: 8}}, or "
        f"remove elastic"
    )


@rule("launch.spares", "launch.slurm", "launch.requeue.in_job_restarts", "launch.elastic.nodes")
def _spares_are_used(c: RunConfig, world_size: int | None) -> str | None:
    spares, options = c.launch.spares, header(c.launch.slurm)
    if not spares or world_size:
        return None
    if not c.launch.slurm:
        return (
            f"launch.spares={spares} is for Slurm jobs and has no effect without options in "
            f"launch.slurm; add one, such as launch.slurm: {{nodes: 2}}, or remove spares"
        )
    if not c.launch.requeue.in_job_restarts:
        return (
            f"launch.spares={spares} has no effect with launch.requeue.in_job_restarts=0; set "
            f"in_job_restarts to {spares} or more"
        )
    nodes = options.get("nodes") or "1"
    if c.launch.elastic.nodes is None and not nodes.isdecimal():
        return (
            f"launch.spares={spares} needs one number of nodes for the ranks, but launch.slurm has "
            f"nodes={nodes}; write one number, or use launch.elastic.nodes"
        )
    return None


@rule("launch.local.procs", *DEGREES, "parallel.order", "launch.elastic.nodes")
def _degrees_fill_procs(c: RunConfig, world_size: int | None) -> str | None:
    procs, p = c.launch.local.procs, c.parallel
    if procs is None or world_size is not None or c.launch.elastic.nodes is not None:
        return None
    with contextlib.suppress(ConfigError):
        p.resolve(procs)
        return None
    degrees = f"data={p.data} x pipe={p.pipe} x context={p.context} x tensor={p.tensor}"
    if p.data == "auto" and "data" in p.order:
        needed, fix = f"a multiple of {p.model_size} processes", f"--procs {p.model_size}"
    else:
        num = p.model_size * (1 if p.data == "auto" else p.data)
        needed, fix = f"{num} process{'es' * (num > 1)}", f"--procs {num}"
    more = "" if procs % p.model_size else f", or set parallel.data to {procs // p.model_size}"
    return (
        f"{degrees} needs {needed} but launch.local.procs is {procs}; pass {fix} or remove procs "
        f"from the file{more}"
    )


@rule("data.seq_len", "parallel.context")
def _sequence_over_context(c: RunConfig, world_size: int | None) -> str | None:
    seq_len, context = c.data.seq_len, c.parallel.context
    if context == 1 or seq_len % (2 * context) == 0:
        return None
    return (
        f"data.seq_len={seq_len} cannot be cut into the {2 * context} equal chunks of "
        f"parallel.context={context} ranks; set seq_len to {multiples(2 * context, seq_len)}, or "
        f"context to 1"
    )


@rule("parallel.cp_comm_type", "parallel.context")
def _context_is_exchanged(c: RunConfig, world_size: int | None) -> str | None:
    comm_type, context = c.parallel.cp_comm_type, c.parallel.context
    if comm_type == "auto" or context > 1:
        return None
    return (
        f"parallel.cp_comm_type={comm_type} has no effect with parallel.context=1; set context to "
        "2 or more, or remove cp_comm_type"
    )


@rule("data.seq_len", "parallel.tensor", "parallel.context", "parallel.sequence_parallel")
def _sequence_over_tensor(c: RunConfig, world_size: int | None) -> str | None:
    seq_len, tensor = c.data.seq_len, c.parallel.tensor * c.parallel.context
    if not c.parallel.sequence_parallel or seq_len % tensor == 0:
        return None
    if c.parallel.context > 1:
        return (
            f"data.seq_len={seq_len} cannot be split over parallel.context={c.parallel.context} x "
            f"parallel.tensor={c.parallel.tensor} ranks, as parallel.sequence_parallel asks; set "
            f"seq_len to {multiples(2 * tensor, seq_len)}, or sequence_parallel to false"
        )
    return (
        f"data.seq_len={seq_len} cannot be split over parallel.tensor={tensor} ranks, as "
        f"parallel.sequence_parallel asks; set seq_len to {multiples(tensor, seq_len)}, or "
        f"sequence_parallel to false"
    )


@rule("parallel.tp_comm_overlap", "parallel.sequence_parallel")
def _overlap_of_a_sequence(c: RunConfig, world_size: int | None) -> str | None:
    if not c.parallel.tp_comm_overlap or c.parallel.sequence_parallel:
        return None
    return (
        "parallel.tp_comm_overlap hides the gathers and scatters of sequence parallelism, which is "
        "off; set parallel.sequence_parallel to true, or tp_comm_overlap to false"
    )


@rule("model.vocab", "data.name", "data.sources", "data.field", "model.name", "data.tokenizer")
def _vocab_holds_bytes(c: RunConfig, world_size: int | None) -> str | None:
    if c.model.name is None or not c.data.has_bytes or c.model.vocab >= _NUM_BYTES:
        return None
    of = "data.sources" if c.data.sources else f"data.name={c.data.name}"
    return (
        f"model.vocab={c.model.vocab} is too small for {of}, whose tokens are "
        f"bytes; set vocab to {_NUM_BYTES} or more"
    )


@rule("precision.weights", "precision.dtype", "parallel.zero")
def _narrow_weights_have_copies(c: RunConfig, world_size: int | None) -> str | None:
    if c.precision.weights != "bf16":
        return None
    if c.precision.dtype != "bf16":
        return (
            f"precision.weights=bf16 with precision.dtype={c.precision.dtype}; set dtype to bf16, "
            f"or weights to float32"
        )
    if c.parallel.zero:
        return None
    return (
        "precision.weights=bf16 needs the float32 copy of each weight that only ZeRO keeps, or "
        "small updates are lost; set parallel.zero to 1, 2 or 3, or precision.weights to float32"
    )


@rule("parallel.zero_group", "parallel.zero", "parallel.data", "parallel.expert")
def _zero_group_cuts_data(c: RunConfig, world_size: int | None) -> str | None:
    number, data, expert = c.parallel.zero_group, c.parallel.data, c.parallel.expert
    if number is None:
        return None
    if not c.parallel.zero:
        return (
            f"parallel.zero_group={number} shards nothing with parallel.zero=0; set zero to 1, 2 "
            f"or 3, or remove zero_group"
        )
    if number == "node" or data == "auto":
        return None
    if data % number:
        return (
            f"parallel.zero_group={number} does not divide parallel.data={data}; set it to "
            f"{divisors(data, number)}"
        )
    if number * c.parallel.context == 1 < data:
        return (
            f"parallel.zero_group=1 gives each of {data} data ranks all of what parallel.zero="
            f"{c.parallel.zero} shards; set it to {divisors(data, 2)}, or zero to 0"
        )
    if number % expert and expert % number:
        return (
            f"parallel.zero_group={number} is neither a multiple nor a divisor of "
            f"parallel.expert={expert}, so the shards of an expert would differ in size; set it to "
            f"a multiple of {expert} that divides parallel.data={data}"
        )
    return None


@rule("precision.reduce_dtype", "precision.dtype")
def _narrow_sums_are_not_of_float64(c: RunConfig, world_size: int | None) -> str | None:
    if c.precision.reduce_dtype != "bf16" or c.precision.dtype != "float64":
        return None
    return (
        "precision.reduce_dtype=bf16 would round the gradients of precision.dtype=float64 to 8 "
        "bits; set reduce_dtype to float32, which keeps all of them, or dtype to float32 or bf16"
    )


@rule("precision.fp8", "precision.dtype", "parallel.tp_comm_overlap")
def _float8_is_of_bf16(c: RunConfig, world_size: int | None) -> str | None:
    if c.precision.fp8 == "off":
        return None
    if c.precision.dtype != "bf16":
        return (
            f"precision.fp8={c.precision.fp8} needs precision.dtype=bf16, but it is "
            f"{c.precision.dtype}; set dtype to bf16, or fp8 to off"
        )
    if not c.parallel.tp_comm_overlap:
        return None
    return (
        f"precision.fp8={c.precision.fp8} does not work with parallel.tp_comm_overlap=true, which "
        f"cuts sequences into chunks; set fp8 to off, or tp_comm_overlap to false"
    )


@rule("data.global_batch", "parallel.data", "train.accumulate")
def _batch_over_data(c: RunConfig, world_size: int | None) -> str | None:
    batch, data, rounds = c.data.global_batch, c.parallel.data, c.train.accumulate
    if data == "auto" or batch % (data * rounds) == 0:
        return None
    return (
        f"data.global_batch={batch} is not a multiple of parallel.data={data} x "
        f"train.accumulate={rounds} = {data * rounds}; set global_batch to "
        f"{multiples(data * rounds, batch)}"
    )


@rule("pipeline.microbatches", "data.global_batch", "parallel.data", "train.accumulate")
def _microbatches_are_equal(c: RunConfig, world_size: int | None) -> str | None:
    batch, data, rounds = c.data.global_batch, c.parallel.data, c.train.accumulate
    pieces = c.pipeline.microbatches
    if data == "auto" or batch % (data * rounds):
        return None
    samples = batch // (data * rounds)
    if samples % pieces == 0:
        return None
    return (
        f"pipeline.microbatches={pieces} cannot cut {samples} samples into equal pieces, which is "
        f"what a data rank has in one round (data.global_batch={batch} / (parallel.data={data} x "
        f"train.accumulate={rounds})); set microbatches to {divisors(samples, pieces)}, or "
        f"global_batch to {multiples(data * rounds * pieces, batch)}"
    )


@rule("train.recompute", "train.memory_gb")
def _auto_recompute_has_a_limit(c: RunConfig, world_size: int | None) -> str | None:
    if c.train.recompute != "auto" or c.train.memory_gb is not None:
        return None
    return (
        "train.recompute=auto needs train.memory_gb, the memory of a rank for weights, gradients, "
        "optimizer state and activations; set memory_gb, to 16 for example, or recompute to blocks"
    )


@rule("train.profile.steps", "train.steps", "train.epochs")
def _profiled_steps_come(c: RunConfig, world_size: int | None) -> str | None:
    last, steps = c.train.profile.range.stop - 1, c.train.steps
    if last <= steps or c.train.epochs is not None:
        return None
    return (
        f"train.profile.steps={c.train.profile.steps} ends after train.steps={steps}; choose steps "
        f"up to {steps}"
    )


@rule("train.epochs", "data.target")
def _epochs_are_of_our_data(c: RunConfig, world_size: int | None) -> str | None:
    if c.train.epochs is None or c.data.target is None:
        return None
    return (
        f"train.epochs={c.train.epochs:g} needs the number of samples, which is not known for "
        f"data.target={c.data.target}; set train.steps instead (data.global_batch samples each)"
    )


def named_once(section: ModelSection | DataSection, where: str) -> str | None:
    name, target = section.name, section.target
    if name is not None and target is not None:
        return f"{where}.name={name} and {where}.target={target} exclude each other; remove one"
    if name is None and target is None:
        return f"neither {where}.name nor {where}.target is set; set one of them"
    if section.args and target is None:
        keys = ", ".join(section.args)
        return f"{where}.args ({keys}) has no effect without {where}.target; remove it"
    return None


@rule("checkpoint.export", "model.target")
def _export_has_what_it_writes(c: RunConfig, world_size: int | None) -> str | None:
    saved = c.checkpoint
    if saved.export is None:
        return None
    if c.model.target is not None:
        return (
            f"checkpoint.export={saved.export} is not possible for model.target={c.model.target}, "
            f"whose weights have no names in transformers; set export to null"
        )
    return None


@rule("checkpoint.local_dir", "checkpoint.local_every", "run.dir", "run.name")
def _local_copies_have_a_place(c: RunConfig, world_size: int | None) -> str | None:
    saved = c.checkpoint
    if (saved.local_dir is None) != (not saved.local_every):
        return (
            f"checkpoint.local_dir={saved.local_dir or 'null'} and checkpoint.local_every="
            f"{saved.local_every} need each other; set both (a folder on each node, and the steps "
            f"between copies in it) or neither"
        )
    run = (Path(c.run.dir) / c.run.name).absolute()
    if saved.local_dir is not None and Path(saved.local_dir).is_relative_to(run):
        return (
            f"checkpoint.local_dir={saved.local_dir} is in the run folder {run}, which all nodes "
            f"share; name a folder on the node's own disk, or one in /dev/shm"
        )
    return None


@rule("checkpoint.keep_best", "data.eval")
def _the_best_is_known(c: RunConfig, world_size: int | None) -> str | None:
    best, names = c.checkpoint.keep_best, ("val_loss", *c.data.eval)
    if best is None or best in names:
        return None
    return (
        f"checkpoint.keep_best={best} is not a loss that the run measures; name one of "
        f"{', '.join(names)}, or add it to data.eval"
    )


@rule("checkpoint.keep_best", "train.eval_every", "checkpoint.save_every")
def _the_best_is_measured(c: RunConfig, world_size: int | None) -> str | None:
    saved, every = c.checkpoint, c.train.eval_every
    if saved.keep_best is None or (every and (saved.save_every_min or not saved.save_every)):
        return None
    if not every:
        return (
            f"checkpoint.keep_best={saved.keep_best} needs validations at saves, but "
            f"train.eval_every is 0; set it to {saved.save_every or 'some number of steps'}, or "
            f"keep_best to null"
        )
    if saved.save_every % every and every % saved.save_every:
        return (
            f"checkpoint.keep_best={saved.keep_best} needs validations at saves, but "
            f"train.eval_every={every} and save_every={saved.save_every} meet only every "
            f"{math.lcm(every, saved.save_every)} steps; make one a multiple of the other"
        )
    return None


@rule(*(f"train.early_stop.{key}" for key in EarlyStopSection.model_fields), "data.eval")
def _the_stop_has_a_value(c: RunConfig, world_size: int | None) -> str | None:
    stop, names = c.train.early_stop, ("val_loss", *c.data.eval)
    if stop.metric is None:
        plain = RunConfig().train.early_stop
        keys = ("patience", "min_delta", "mode")
        changed = [key for key in keys if getattr(stop, key) != getattr(plain, key)]
        return (
            f"train.early_stop.{' and '.join(changed)} has no effect without "
            f"train.early_stop.metric; set it, such as metric: val_loss"
            if changed
            else None
        )
    if stop.metric in names or stop.metric.startswith("eval_"):
        return None
    return (
        f"train.early_stop.metric={stop.metric} is not a value that the run measures; name one of "
        f"{', '.join(names)}, or eval_NAME of another value in metrics.jsonl"
    )


@rule("train.label_smoothing", "model.loss", "data.name", "data.target")
def _smoothed_labels_are_tokens(c: RunConfig, world_size: int | None) -> str | None:
    smoothing, spec = c.train.label_smoothing, c.data.spec
    if not smoothing:
        return None
    if c.model.loss is not None:
        why = f"the loss is that of model.loss={c.model.loss}"
    elif spec is not None and spec.task:
        why = f"data.name={c.data.name} has a loss of its own"
    else:
        return None
    return (
        f"train.label_smoothing={smoothing:g} is for the cross entropy of tokens, but {why}; set "
        f"it to 0"
    )


@rule("train.neftune_noise_alpha", "data.name", "pipeline.microbatches", "train.accumulate")
def _both_passes_draw_the_same(c: RunConfig, world_size: int | None) -> str | None:
    parts = c.pipeline.microbatches * c.train.accumulate
    if c.train.neftune_noise_alpha is None or not c.data.is_embedding or parts == 1:
        return None
    return (
        f"train.neftune_noise_alpha={c.train.neftune_noise_alpha:g} is drawn anew in the second "
        f"forward of {parts} microbatches, so data.name=embedding would take gradients at other "
        f"vectors than those that it compares; set the key to null, or "
        f"pipeline.microbatches and train.accumulate to 1"
    )


@rule("train.neftune_noise_alpha", "model.target")
def _noise_has_an_embedding(c: RunConfig, world_size: int | None) -> str | None:
    alpha, target = c.train.neftune_noise_alpha, c.model.target
    if alpha is None or target is None:
        return None
    return (
        f"train.neftune_noise_alpha={alpha:g} changes the vectors of tokens, which are not known "
        f"in model.target={target}; add the noise in its forward, and set the key to null"
    )


@rule("train.early_stop.metric", "train.eval_every")
def _the_stop_is_measured(c: RunConfig, world_size: int | None) -> str | None:
    if c.train.early_stop.metric is None or c.train.eval_every:
        return None
    return (
        f"train.early_stop.metric={c.train.early_stop.metric} needs validations before the last "
        f"step, but train.eval_every is 0; set it to some number of steps"
    )


RULES = tuple(x for x in tuple(globals().values()) if isinstance(x, Rule))
"""The rules of this file, in its order."""
