"""Predict the most bytes that a rank holds in a step, by kind. No torch.

A rank's program is walked action by action. A forward keeps what its layers state beside their
layouts (`LayerNumbers.kept`), the backward of the same micro-batch frees it, and while one runs its
temporary tensors come on top. The worst moment counts. What lies in buckets follows from the
buckets that plan/traffic.py lays out, so weights, gradients and optimizer state are exact.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchdistpackage.layout.exchanges import EXCHANGES
from torchdistpackage.models.gpt_layout import HALVES
from torchdistpackage.parallel.tensor.numbers import LayerNumbers
from torchdistpackage.plan.context_plan import attention_of_rank
from torchdistpackage.plan.memory import MemoryEstimate, memory
from torchdistpackage.plan.run_plan import Plan, rank_memory
from torchdistpackage.plan.traffic import microbatch, planned_buckets
from torchdistpackage.predict.calls import ITEM_BYTES, Microbatch
from torchdistpackage.predict.kernels import Matmul
from torchdistpackage.schedule.actions import Action, ActionKind, flatten
from torchdistpackage.schedule.engine import most_live

LOSS = frozenset({"logits", "softmax of the loss", "targets"})
"""Kinds of kept bytes that count as logits and loss."""
FRAGMENTED = 0.02
"""Extra fraction of a step's temporary memory that the caching allocator holds: a guess, without a
source."""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Predicted bytes of one rank at its worst moment, by kind.

    buckets: padding and flags of flat gradients and weights, buckets of gradients on their way, and
    parameters that ZeRO 3 has gathered. activations: what backwards wait for. loss: logits and what
    their loss keeps. temporary: tensors of the layer that runs at that moment. messages: buffers of
    messages between stages. communicators: of NCCL. allocator: what a GPU's allocator holds
    besides. kept: activations and loss that forwards leave for their backwards, the most between
    two actions. is_exact: every layer states what it keeps.
    """

    weights: float
    gradients: float
    optimizer: float
    buckets: float
    activations: float
    loss: float
    temporary: float
    messages: float
    communicators: float
    allocator: float
    kept: float
    is_exact: bool

    def by_kind(self) -> dict[str, float]:
        """Return the bytes of each kind that occurs."""
        kinds = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "buckets and gathered parameters": self.buckets,
            "activations": self.activations,
            "logits and loss": self.loss,
            "temporary tensors": self.temporary,
            "messages between stages": self.messages,
            "NCCL's communicators": self.communicators,
            "allocator": self.allocator,
        }
        return {kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes}

    @property
    def total(self) -> float:
        return sum(self.by_kind().values())


def peak_memory(
    plan: Plan,
    rank: int,
    *,
    on_gpu: bool | None = None,
    flat: tuple[MemoryEstimate, float] | None = None,
) -> PeakMemory:
    """Return the peak of `rank` in a step of a plan with a model.

    on_gpu: with NCCL's communicators and a GPU's allocator; None: if the job requests GPUs. flat:
    its `flat_memory`, if known, because micro-batches do not change it.
    """
    on_gpu = plan.has_gpus if on_gpu is None else on_gpu
    pipe_index = plan.topology.dense.coord(rank)["pipe"]
    communicators = rank_memory(plan, rank, (), on_gpu=on_gpu).communicators_bytes
    state, buckets = flat or flat_memory(plan, rank)
    of = microbatch(plan, rank)
    absent = set[str]() if plan.traced else _absent(plan, on_gpu)
    stages = {
        s: _traced_bytes(plan, s, of)
        if plan.traced
        else _stage_bytes(plan, plan.stages[s], of, on_gpu, absent)
        for s in plan.schedule.stages_of(pipe_index)
    }
    peak, between_steps = _worst(flatten(plan.schedule.programs[pipe_index]), stages)
    peaks, _ = most_live(flatten(plan.schedule.programs[pipe_index]))
    message = _message_bytes(plan, pipe_index, of, peaks)
    inputs = _input_bytes(plan, stages, of)
    moving = peak.activations + inputs + peak.loss + peak.temporary + message + buckets
    return PeakMemory(
        state.weights_bytes,
        state.gradients_bytes,
        state.optimizer_bytes,
        buckets,
        peak.activations + inputs,
        peak.loss,
        peak.temporary,
        message,
        communicators,
        FRAGMENTED * moving if on_gpu else 0,
        between_steps.total + inputs,
        all(stage.is_exact for stage in stages.values()),
    )


# -- weights, gradients and optimizer state ------------------------------------------------------


def flat_memory(plan: Plan, rank: int) -> tuple[MemoryEstimate, float]:
    """Return the bytes of weights, gradients and optimizer state, and the additional bytes of
    buckets.
    """
    pipe_index, formats = plan.topology.dense.coord(rank)["pipe"], plan.numbers
    layouts = [x for x in plan.layouts.values() if not x.stages or pipe_index in x.stages]
    weight, wide = formats.weights.num_bytes, formats.gradients.num_bytes
    parts: dict[str, int] = {}
    padding = 0
    under_way: list[int] = []
    for bucket in planned_buckets(plan, rank):
        parts |= bucket.parts()
        num_elements = sum(size for _, size in bucket.members)
        is_whole = plan.zero < 2 or plan.config.pipeline.microbatches > 1
        if is_whole:
            padding += (bucket.end - num_elements) * wide
        else:
            under_way.append(bucket.end * wide)
        if not plan.zero:
            continue
        padding += bucket.end * weight - (not bucket.is_freed) * num_elements * weight
        # the sum of gradients, and a copy that the optimizer steps, are apart from the buffers and
        # as long as the slice
        copies = (plan.zero >= 2) + (bucket.is_freed or formats.weights != formats.gradients)
        padding += copies * (bucket.part - sum(bucket.parts().values())) * wide
    state = memory(
        plan.config, plan.topology, layouts, rank, plan.packed, parts, is_trained=plan.is_trained
    )
    return state, padding + sum(sorted(under_way)[-UNDER_WAY:])


UNDER_WAY = 3
"""Full buckets at a time if gradients are freed: two in flight (ddp/zero/grad_buffer.py), and one
that fills."""


# -- activations ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Moment:
    """Bytes that one micro-batch of a stage, or all of a rank, hold at a moment."""

    activations: float = 0
    loss: float = 0
    temporary: float = 0

    def __add__(self, other: "_Moment") -> "_Moment":
        return _Moment(
            self.activations + other.activations,
            self.loss + other.loss,
            self.temporary + other.temporary,
        )

    def __neg__(self) -> "_Moment":
        return self.times(-1)

    def times(self, number: int) -> "_Moment":
        """Return the bytes times `number`."""
        return _Moment(number * self.activations, number * self.loss, number * self.temporary)

    @property
    def total(self) -> float:
        return self.activations + self.loss + self.temporary


@dataclass(frozen=True, slots=True)
class _StageBytes:
    """Bytes that one micro-batch of a stage takes.

    kept: from its forward to its backward. deferred: from an I to its W, where the backward is
    split. forward, backward: at the worst moment of each, kept bytes included. latest: of the last
    block, where blocks wait in host memory. It stays on the device until the next forward, and
    comes back early, in the backward of what went forward after it.
    """

    kept: _Moment
    deferred: _Moment
    forward: _Moment
    backward: _Moment
    is_exact: bool
    latest: _Moment = _Moment()


def _worst(actions: Iterable[Action], stages: dict[int, _StageBytes]) -> tuple[_Moment, _Moment]:
    """Return the worst moment of a program, and the worst one between two of its actions."""
    bytes_of = {
        stage: (x.kept.total, x.deferred.total, x.forward.total, x.backward.total - x.kept.total)
        for stage, x in stages.items()
    }
    waiting, deferred = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    latest: tuple[int, int] | None = None
    came_before: dict[tuple[int, int], tuple[int, int] | None] = {}
    early = set[tuple[int, int]]()
    live = 0.0
    worst, kept = _Moment(), _Moment()
    most = most_kept = 0.0

    def held() -> _Moment:
        moment = _Moment()
        for stage, x in stages.items():
            moment += x.kept.times(waiting[stage]) + x.deferred.times(deferred[stage])
        return moment

    offloads, nothing = any(x.latest.total for x in stages.values()), _Moment()

    def on_device() -> _Moment:
        """Return the bytes of blocks that are not on the host: of the latest forward, and early."""
        if not offloads:
            return nothing
        blocks = early if latest is None else {*early, latest}
        return sum((stages[of_stage].latest for of_stage, _ in blocks), nothing)

    for stage, kind, m in actions:
        if stage not in stages or kind.is_message:
            continue
        of, this = stages[stage], (stage, m)
        activations, own_deferred, forward, besides = bytes_of[stage]
        if kind is ActionKind.F:
            if live + forward > most:
                most, worst = live + forward, held() + of.forward
            live += activations
            waiting[stage] += 1
            came_before[this], latest = latest, this
        elif kind.gives_gradient:
            early.discard(this)
            latest = None if latest == this else latest
            last = on_device()
            if live + besides + last.total > most:
                most = live + besides + last.total
                worst = held() + -of.kept + of.backward + last
            live -= activations
            waiting[stage] -= 1
            before = came_before.pop(this)
            if before in came_before:
                early.add(before)
            if kind is ActionKind.I:
                live += own_deferred
                deferred[stage] += 1
        else:
            live -= own_deferred
            deferred[stage] -= 1
        if live + (last := on_device()).total > most_kept:
            most_kept, kept = live + last.total, held() + last
    return worst, kept


def _total(moment: _Moment) -> float:
    return moment.total


def _stage_bytes(
    plan: Plan, layers: Sequence[int], of: Microbatch, on_gpu: bool, absent: Collection[str]
) -> _StageBytes:
    """Return the bytes of a stage's micro-batch from its layers' own numbers. absent: kinds of
    bytes that none of them keeps."""
    assert plan.model is not None and plan.shape is not None
    numbers = [_without(absent, x) for x in plan.model.layer_numbers(layers, of)]
    # a block that is computed again keeps all of it while its backward runs
    again = numbers
    if of.recomputed:
        unrecomputed = plan.model.layer_numbers(layers, replace(of, recomputed=False))
        again = [_without(absent, x) for x in unrecomputed]
    if plan.config.train.recompute == "offload":
        return _offloaded_bytes(plan, layers, numbers, of, on_gpu)
    stream, waiting = _stream_bytes(plan, of), 0.0
    experts = _experts_of_rank(plan, of)
    total, forward, freed = _Moment(), _Moment(), _Moment()
    for layer in numbers:
        total += _kept(layer, of)
        now = total + _Moment(temporary=_forward_temporary(layer, of, on_gpu))
        forward = max(forward, now, key=_total)
    backward = total
    for unit in reversed(_units(numbers)):
        inside = _Moment()
        for i in unit:
            freed += -_kept(numbers[i], of)
            inside += _kept(again[i], of)
        for i in reversed(unit):
            temporary = stream + waiting + _temporary(again[i], of, experts, on_gpu)
            now = total + freed + inside + _Moment(temporary=temporary)
            backward = max(backward, now, key=_total)
            inside += -_kept(again[i], of)
        waiting += _tied_bytes(plan, layers, numbers[unit[0]], of)
    return _StageBytes(
        total,
        _Moment(sum(_deferred(layer, of) for layer in numbers)),
        forward,
        backward,
        all(layer.is_exact for layer in numbers),
    )


def _offloaded_bytes(
    plan: Plan,
    layers: Sequence[int],
    numbers: Sequence[LayerNumbers],
    of: Microbatch,
    on_gpu: bool,
) -> _StageBytes:
    """Return the bytes of a stage's micro-batch whose blocks wait in host memory, but for those of
    two blocks: the one that runs, and the one whose copies are on their way."""
    stream = _stream_bytes(plan, of)
    experts = _experts_of_rank(plan, of)
    # the input of the first block stays: that of the stage before, whose gradient is sent back, or
    # that of the embedding, which looks like a cast of its weight
    outside = _Moment(stream)
    forward, before = _Moment(), _Moment()
    units = _units(numbers)
    for unit in units:
        inside = _Moment()
        for i in unit:
            inside += _kept(numbers[i], of)
            temporary = _forward_temporary(numbers[i], of, on_gpu)
            now = outside + before + inside + _Moment(temporary=temporary)
            forward = max(forward, now, key=_total)
        if _is_block(numbers[unit[0]]):
            before = inside
        else:
            outside += inside
    latest, freed, backward, waiting = before, _Moment(), outside + before, 0.0
    for at, unit in reversed([*enumerate(units)]):
        inside = _Moment()
        for i in unit:
            inside += _kept(numbers[i], of)
        is_block = _is_block(numbers[unit[0]])
        held = inside if is_block else latest
        if is_block and at and _is_block(numbers[units[at - 1][0]]):
            for i in units[at - 1]:
                held += _kept(numbers[i], of)
        for i in reversed(unit):
            temporary = stream + waiting + _temporary(numbers[i], of, experts, on_gpu)
            now = outside + freed + held + _Moment(temporary=temporary)
            backward = max(backward, now, key=_total)
            if is_block:
                held += -_kept(numbers[i], of)
            else:
                freed += -_kept(numbers[i], of)
        waiting += _tied_bytes(plan, layers, numbers[unit[0]], of)
    return _StageBytes(
        outside,
        _Moment(sum(_deferred(layer, of) for layer in numbers)),
        forward,
        backward,
        all(layer.is_exact for layer in numbers),
        latest,
    )


def _is_block(layer: LayerNumbers) -> bool:
    """Return whether a layer is a block or half of one, and no end of the model."""
    return "." in layer.layer


def _experts_of_rank(plan: Plan, of: Microbatch) -> int:
    """Return the number of experts on a rank; 1 without experts."""
    moe = getattr(plan.shape, "moe", None)
    return 1 if moe is None else -(-moe.num_experts // of.expert)


def _tied_bytes(plan: Plan, layers: Sequence[int], layer: LayerNumbers, of: Microbatch) -> float:
    """Return the bytes of the gradient of a tied head, which waits for that of the embedding."""
    if "logits" not in layer.kept or not getattr(plan.shape, "tied", False) or 0 not in layers:
        return 0.0
    return _weight_bytes(layer.matmuls[-1], of)


def _traced_bytes(plan: Plan, stage: int, of: Microbatch) -> _StageBytes:
    """Return the bytes of a stage's micro-batch, from its run on fake tensors."""
    traced = plan.traced[stage].at(of.rows)
    moment = _Moment(traced.kept, traced.loss)
    layers = () if plan.model is None else plan.model.layer_numbers(plan.stages[stage], of)
    return _StageBytes(
        moment,
        _Moment(min(sum(_deferred(layer, of) for layer in layers), moment.total)),
        replace(moment, temporary=traced.forward - moment.total),
        replace(moment, temporary=traced.backward - moment.total),
        not any("expert" in x.split_axes for x in plan.layouts.values()),
    )


@dataclass(frozen=True, slots=True)
class LeastBytes:
    """Bytes that some pieces take at least of a micro-batch: from its forward to its backward, from
    the first half of a split backward to the second, and besides while the backward runs."""

    kept: float = 0.0
    deferred: float = 0.0
    besides: float = 0.0


def least_bytes(
    plan: Plan, groups: Iterable[Sequence[int]], *, expert: int, on_gpu: bool
) -> list[LeastBytes]:
    """Return the bytes of each group of pieces of a plan, independent of its stages and layouts.

    expert: ranks that share the experts; the plan has one."""
    one, absent = replace(microbatch(plan, 0), expert=expert), _absent(plan, on_gpu)
    stages = [_stage_bytes(plan, pieces, one, on_gpu, absent) for pieces in groups]
    return [
        LeastBytes(x.kept.total, x.deferred.total, x.backward.total - x.kept.total) for x in stages
    ]


def _units(layers: Sequence[LayerNumbers]) -> list[list[int]]:
    """Return the layers of each block together, because they are recomputed together."""
    units: dict[str, list[int]] = {}
    for i, layer in enumerate(layers):
        name = layer.layer.rpartition(".")[0] if layer.layer.endswith(HALVES) else layer.layer
        units.setdefault(name, []).append(i)
    return [*units.values()]


# -- one layer -----------------------------------------------------------------------------------


def _absent(plan: Plan, on_gpu: bool) -> set[str]:
    """Return what no layer keeps on this device, or with heads that context ranks exchange, which
    are joined with their queries and keys."""
    absent = {"scores", "norm in steps"} if on_gpu else set[str]()
    is_split = plan.topology.dense.axis_size("context") > 1
    if is_split and EXCHANGES[attention_of_rank(plan)[0]].swap != "none":
        absent.add("turned queries and keys")
    return absent


def _without(absent: Collection[str], layer: LayerNumbers) -> LayerNumbers:
    if not any(kind in layer.kept for kind in absent):
        return layer
    kept_bytes = {key: num_bytes for key, num_bytes in layer.kept.items() if key not in absent}
    return replace(layer, kept=kept_bytes)


def _kept(layer: LayerNumbers, batch: Microbatch) -> _Moment:
    """Return what a layer keeps, including the targets of the loss, which are saved outside
    autograd.
    """
    loss = sum(num_bytes for kind, num_bytes in layer.kept.items() if kind in LOSS)
    targets = batch.rows * TARGET_BYTES if "logits" in layer.kept else 0
    return _Moment(layer.kept_bytes - loss, loss + targets)


TARGET_BYTES = 13
"""Bytes for each token: its column, whether it is here, and its factor
(parallel/tensor/loss_terms.py).
"""


def _temporary(layer: LayerNumbers, batch: Microbatch, experts: int, on_gpu: bool) -> float:
    """Return the temporary bytes of a layer's backward, besides the gradient of its output.

    The last matmul of an attention or an MLP has the gradients of its input and its weight at a
    time, while all that the layer keeps is there. experts: on this rank, whose weights' gradients
    come together.
    """
    kept_bytes, matmuls = layer.kept, layer.matmuls
    if "logits" in kept_bytes:
        logits = kept_bytes["logits"]
        narrow = batch.products != batch.losses
        loss = logits + narrow * _loss_block(logits, batch, on_gpu)
        return max(loss, _weight_bytes(matmuls[-1], batch))
    if not matmuls:
        return 0.0
    item = ITEM_BYTES[batch.products]
    if _attends(layer):
        weights = _of_weights(layer)
        inputs = weights[-1].m * weights[-1].k * item
        gradients = sum(x.m * x.n for x in weights[:-1]) * item
        return max(inputs + _weight_bytes(weights[-1], batch), gradients)
    experts = experts if "hidden of experts" in kept_bytes else 1
    hidden = sum(kept_bytes.get(x, 0) for x in ("hidden", "hidden of experts"))
    is_gated = "activated gate" in kept_bytes or "activated gate of experts" in kept_bytes
    return hidden + max(experts * _weight_bytes(matmuls[-1], batch), is_gated * hidden)


def _forward_temporary(layer: LayerNumbers, batch: Microbatch, on_gpu: bool) -> float:
    """Return the temporary bytes of a layer's forward that matter: those of the loss."""
    if "logits" not in layer.kept:
        return 0.0
    narrow = batch.products != batch.losses
    return (1 + narrow) * _loss_block(layer.kept["logits"], batch, on_gpu)


def _loss_block(logits: float, batch: Microbatch, on_gpu: bool) -> float:
    """Return the bytes of the logits that the loss processes at once, in its own type."""
    at_once = 1 << 28 if on_gpu else 1 << 20  # BLOCK_BYTES, CACHED_BYTES of loss_terms.py
    return min(logits, at_once) / ITEM_BYTES[batch.products] * ITEM_BYTES[batch.losses]


def _of_weights(layer: LayerNumbers) -> tuple[Matmul, ...]:
    """Return the matmuls with weights; the last two of an attention are those of its scores."""
    return layer.matmuls[:-2] if _attends(layer) else layer.matmuls


def _attends(layer: LayerNumbers) -> bool:
    return not layer.kept.keys().isdisjoint(("softmax", "scores"))


def _weight_bytes(matmul: Matmul, batch: Microbatch) -> float:
    """Return the bytes of a weight's gradient in the form that a backward makes."""
    return matmul.n * matmul.k * ITEM_BYTES[batch.products]


def _deferred(layer: LayerNumbers, batch: Microbatch) -> float:
    """Return what the gradients of a layer's weights wait for: inputs and output gradients."""
    item = ITEM_BYTES[batch.products]
    inputs = sum(layer.kept.get(x, 0) for x in ("input", "joined heads", "hidden"))
    return inputs + sum(x.m * x.n for x in _of_weights(layer)) * item


def _stream_bytes(plan: Plan, batch: Microbatch) -> float:
    """Return the bytes passed from block to block."""
    if plan.traced:
        return max(stage.at(batch.rows).stream for stage in plan.traced.values())
    assert plan.shape is not None
    parts = batch.tensor if plan.shape.sequence_parallel else 1
    return batch.rows // parts * plan.shape.dim * ITEM_BYTES[batch.stream]


def _message_bytes(
    plan: Plan, pipe_index: int, batch: Microbatch, peaks: Mapping[int, int]
) -> float:
    """Return the bytes of messages that are posted or in flight.

    Each micro-batch that waits for its gradient has an outgoing output and an incoming gradient;
    the input has another pair. peaks: for each stage the most micro-batches that it holds at once.
    """
    last = plan.schedule.num_stages - 1
    stream = _stream_bytes(plan, batch)
    pairs = 0
    for stage in plan.schedule.stages_of(pipe_index) if last else ():
        pairs += (min(peaks[stage], 2) if stage < last else 0) + (stage > 0)
    return 2 * pairs * stream


def _input_bytes(plan: Plan, stages: Collection[int], batch: Microbatch) -> float:
    """Return the bytes of ids and targets of all micro-batches of a pass."""
    number, last = plan.schedule.num_microbatches, plan.schedule.num_stages - 1
    sides = (0 in stages) + (last in stages)
    return sides * number * batch.rows * ITEM_BYTES["int64"]
