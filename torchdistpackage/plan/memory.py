"""Bytes of weights, gradients and optimizer state on one rank, from layouts only. No torch."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchdistpackage.config.optimizers import ParameterPart
from torchdistpackage.config.schema import PrecisionSection, RunConfig
from torchdistpackage.errors import ConfigError
from torchdistpackage.layout.derive import (
    Creation,
    gradient_ranks,
    local_shape,
    num_elements,
    sharding_ranks,
)
from torchdistpackage.layout.exchanges import EXCHANGES
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.partition import greedy_partition
from torchdistpackage.topology.mesh import Topology


@dataclass(frozen=True, slots=True)
class DTypeSizes:
    """A number type: torch's name, and the bytes of one number."""

    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class NumberFormats:
    """The number types of a run. gradients: type of summed gradients, of AdamW's two means, and of
    the wide copy that narrow weights have. reduced: type of gradients on their way to other ranks.
    """

    weights: DTypeSizes
    gradients: DTypeSizes
    activations: DTypeSizes
    reduced: DTypeSizes


def number_formats(precision: PrecisionSection) -> NumberFormats:
    """Return the number types of a precision section; weights are narrow only if it says so."""
    wide = DTypeSizes("float64", 8) if precision.dtype == "float64" else DTypeSizes("float32", 4)
    narrow = DTypeSizes("bfloat16", 2) if precision.dtype == "bf16" else wide
    weights = narrow if precision.weights == "bf16" else wide
    reduced = DTypeSizes("bfloat16", 2) if precision.reduce_dtype == "bf16" else wide
    return NumberFormats(weights, wide, narrow, reduced)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Estimated bytes on one rank. optimizer: two means, and the wide copy of narrow weights.
    communicators: NCCL's memory outside of torch; 0 without GPUs.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    communicators_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the training state only."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """Return all bytes except those of activations."""
        return self.state_bytes + self.communicators_bytes


def memory(
    config: RunConfig,
    topology: Topology,
    layouts: Iterable[Layout],
    rank: int,
    packed: Mapping[str, int] | None = None,
    own_parts: Mapping[str, int] | None = None,
    is_trained: Callable[[str], bool] | None = None,
) -> MemoryEstimate:
    """Estimate the bytes of a rank that holds these parameters. packed: those held in 4 or 8 bits,
    by name the dim of their inputs. own_parts: number of elements of each parameter that ZeRO
    leaves to the rank, if known; the rank holds all of the others. is_trained: of a parameter's
    name; None: as the model section says.

    ZeRO stage 1 leaves to each rank that shares a parameter its part of the optimizer's state (or
    all of it for some parameters, of an optimizer that needs them whole), stage 2 of the gradient
    too, stage 3 of the weight too. Gradients of several microbatches add up full before they are
    summed, besides that part. Buckets in flight do not count, except the narrow copies of
    `precision.reduce_dtype` without ZeRO, which all live until the backward ends. What is not
    trained every rank has whole, and nothing besides; so too the reference of preference pairs.
    """
    formats = number_formats(config.precision)
    weight, wide = formats.weights, formats.gradients
    zero, has_copy = config.parallel.zero, weight != wide
    adds_up = zero < 2 or config.pipeline.microbatches > 1
    inputs, packing = packed or {}, config.model.lora.packing
    weights = gradients = optimizer = 0
    layouts = list(layouts)
    is_trained = is_trained or config.model.is_trained
    parts: Mapping[str, int] = {} if own_parts is None else own_parts
    if own_parts is None and zero:
        parts = _parts(config, topology, layouts, rank, is_trained)
    for layout in layouts:
        mesh = topology.view(layout.view)
        count = num_elements(layout, mesh, rank)
        if not is_trained(layout.name):
            if packing is None or layout.name not in inputs:
                weights += count * weight.num_bytes
            else:
                rows = local_shape(layout, mesh, rank)[1 - inputs[layout.name]]
                weights += packing.num_bytes(count, rows, math.prod(layout.shape))
            continue
        weights += count * weight.num_bytes * config.has_reference_copy
        part = parts.get(layout.name, count)
        # what the optimizer updates is a part apart then, so a wide one is not a copy
        is_freed = zero == 3 and len(layout.stages) <= 1
        weights += (part * (not has_copy) if is_freed else count) * weight.num_bytes
        gradients += (count * adds_up + part * (zero >= 2)) * wide.num_bytes
        if not zero and formats.reduced != wide and len(gradient_ranks(layout, mesh, rank)) > 1:
            gradients += count * formats.reduced.num_bytes
        stepped = part if zero >= 1 else count
        optimizer += stepped * wide.num_bytes * (has_copy + (config.optim.ema_decay is not None))
        shape = tuple(layout.shape)
        state = ParameterPart(shape, layout.is_table, layout.is_matrix, stepped)
        optimizer += config.optim.spec.state_bytes(state, wide.num_bytes)
    return MemoryEstimate(weights, gradients, optimizer)


def least_save_bytes(
    config: RunConfig, layouts: Iterable[Layout], is_trained: Callable[[str], bool]
) -> int:
    """Return the bytes of a checkpoint, without headers and what is not trained. is_trained: of a
    parameter's name, as a plan has it."""
    formats = number_formats(config.precision)
    weight, wide = formats.weights, formats.gradients
    num_bytes = 0
    for layout in layouts:
        if not is_trained(layout.name):
            continue
        count = math.prod(layout.shape)
        shape = tuple(layout.shape)
        state = ParameterPart(shape, layout.is_table, layout.is_matrix, count)
        num_bytes += count * (weight.num_bytes + wide.num_bytes * (weight != wide))
        num_bytes += config.optim.spec.state_bytes(state, wide.num_bytes)
    return num_bytes


def with_frozen(
    estimate: MemoryEstimate,
    config: RunConfig,
    topology: Topology,
    layouts: Iterable[Layout],
    rank: int,
    num_shards: int = 1,
) -> MemoryEstimate:
    """Return the estimate plus the weights of a frozen model, which a rank holds in full."""
    width = number_formats(config.precision).weights.num_bytes
    numbers = (num_elements(x, topology.view(x.view), rank) for x in layouts)
    num_bytes = -(-width * sum(numbers) // num_shards)
    return replace(estimate, weights_bytes=estimate.weights_bytes + num_bytes)


def _parts(
    config: RunConfig,
    topology: Topology,
    layouts: Sequence[Layout],
    rank: int,
    is_trained: Callable[[str], bool],
) -> dict[str, int]:
    """Return how many elements of each trained parameter ZeRO leaves to this rank, by name."""
    sharing: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    full_sizes = {layout.name: math.prod(layout.shape) for layout in layouts}
    num_data = config.parallel.zero_group
    assert num_data != "node", "a plan has filled it in"
    for layout in layouts:
        if is_trained(layout.name):
            mesh = topology.view(layout.view)
            summed = gradient_ranks(layout, mesh, rank)
            ranks, _ = sharding_ranks(summed, topology.dense, rank, num_data)
            sharing.setdefault(ranks, []).append((layout.name, num_elements(layout, mesh, rank)))
    parts: dict[str, int] = {}
    for ranks, members in sharing.items():
        if not config.optim.spec.needs_whole:
            parts |= {name: -(-count // len(ranks)) for name, count in members}
            continue
        # as `whole_owners` of ddp/zero/bucket.py deals them out
        shares = greedy_partition([full_sizes[name] for name, _ in members], len(ranks))
        own_units = set(shares[ranks.index(rank)])
        parts |= {name: count * (i in own_units) for i, (name, count) in enumerate(members)}
    return parts


COMMUNICATOR_BYTES = 600 << 20
"""Device memory of one communicator: 544 to 688 MB each on A100 (NVIDIA/nccl#964)."""
PEER_BYTES = 64 << 20
"""Device memory for each rank that a rank exchanges messages with: a guess, without a source."""


@dataclass(frozen=True, slots=True)
class Communicators:
    """The connections that NCCL makes for one rank.

    number: groups of several ranks that connect at the start. peers: ranks that messages go to.
    """

    number: int
    peers: int

    @property
    def device_bytes(self) -> int:
        """Return their estimated device memory; NCCL publishes no formula."""
        return self.number * COMMUNICATOR_BYTES + self.peers * PEER_BYTES


def communicators(
    groups: Iterable[Creation], rank: int, topology: Topology, comm_type: str
) -> Communicators:
    """Count the connections that NCCL makes for the groups of a rank, as layout/derive.py lists
    them. comm_type: parallel.cp_comm_type, `auto` counted as the ring that it may choose.
    """
    groups = [x for x in groups if len(x.ranks) > 1]
    ring = [(x.ranks, x.ranks.index(rank)) for x in groups if x.neighbours]
    peers = len({ranks[at + 1 - len(ranks)] for ranks, at in ring})
    peers += len({ranks[at - 1] for ranks, at in ring})
    context = topology.dense.axis_size("context")
    exchange = EXCHANGES.get(comm_type)
    if exchange is None or exchange.exchange.endswith(":Ring"):
        peers += 2 * (context - 1)  # hops of a ring go straight to their targets
    peers += 2 * (topology.expert.axis_size("expert") - 1)  # NCCL's all-to-all is messages
    # a2a+p2p makes two more in its first forward
    in_blocks = 2 * (exchange is not None and exchange.swap == "blocks" and context > 1)
    return Communicators(sum(x.connects for x in groups) + in_blocks, peers)


def activation_budget_gb(config: RunConfig, state: MemoryEstimate, rank: str) -> float:
    """Return the GB that `train.memory_gb` leaves for activations on a rank with this state.

    Raises:
        ConfigError: nothing.
    """
    limit_gb, total_gb = config.train.memory_gb or 0.0, state.total_bytes / 1e9
    if limit_gb > total_gb:
        return limit_gb - total_gb
    beside = ""
    if state.communicators_bytes:
        beside = f", and {state.communicators_bytes / 1e9:.3g} GB of NCCL's communicators"
    raise ConfigError(
        f"{rank} holds {state.state_bytes / 1e9:.4g} GB of weights, gradients and optimizer state"
        f"{beside}, which leaves nothing of train.memory_gb={limit_gb:g} for activations; allow "
        f"more, split the model further, or set parallel.zero"
    )
