"""What the communication of a step takes on a measured cluster, axis by axis. No torch.

One rule: bytes come from the plan and seconds from the cluster's profile, and where one of them
does not say, nothing is guessed. Times are of the messages alone, as if nothing ran beside them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torchdistpackage.harness.bench.profile import Profile
from torchdistpackage.harness.bench.rounds import NETWORK, NODE
from torchdistpackage.models.gpt_layout import EMBED, HEAD, GPTShape
from torchdistpackage.schedule.actions import Kind
from torchdistpackage.schedule.simulate import Timeline, simulate
from torchdistpackage.topology.placement import crossings
from torchdistpackage.train.plan import BUCKET_BYTES, WEIGHT_BYTES, Plan, stage_loads

ACTIVATION_BYTES = {"float64": 8, "float32": 4, "bf16": 2}
"""Bytes of an element of what travels between layers."""
_LINKS = {NODE: "inside a node", NETWORK: "between nodes"}


@dataclass(frozen=True, slots=True)
class Estimate:
    """One axis in one step. what: the calls, or why there is no estimate (then time_s is None)."""

    axis: str
    what: str
    time_s: float | None


@dataclass(frozen=True, slots=True)
class _Traffic:
    """`number` calls of `operation` of `num_bytes` each."""

    operation: str
    number: int
    num_bytes: float
    note: str


def estimates(plan: Plan, profile: Profile, ranks_per_node: int | None) -> tuple[Estimate, ...]:
    """For each axis longer than 1, in mesh order; without ranks_per_node there is one node."""
    links = links_of(plan, ranks_per_node)
    return tuple(_estimate(plan, profile, axis, link) for axis, link in links.items())


def links_of(plan: Plan, ranks_per_node: int | None) -> Mapping[str, str]:
    """NETWORK for an axis of which some group crosses nodes, else NODE."""
    found = crossings(plan.topology.dense, ranks_per_node or plan.world_size)
    return {x.axis: NETWORK if x.num_crossing else NODE for x in found}


def timeline_with_messages(
    plan: Plan, profile: Profile, ranks_per_node: int | None, forward_s: float
) -> Timeline | None:
    """The schedule in seconds, its messages as measured; None where they cannot be estimated.

    forward_s: of one microbatch on one stage. A backward takes twice as long.
    """
    link = links_of(plan, ranks_per_node).get("pipe")
    if link is None or plan.shape is None:
        return None
    time_s = profile.time_s("pipe", link, "p2p", 2, _activation_bytes(plan, plan.shape))
    if time_s is None:
        return None
    messages = {kind: time_s for kind in Kind if kind.is_message}
    return simulate(plan.schedule, {Kind.F: forward_s, Kind.B: 2 * forward_s, **messages})


def _estimate(plan: Plan, profile: Profile, axis: str, link: str) -> Estimate:
    if plan.shape is None:
        return Estimate(axis, "a model of your own: its bytes are known once it is built", None)
    traffic = _traffic(plan, plan.shape, axis)
    if isinstance(traffic, str):
        return Estimate(axis, traffic, None)
    size = 2 if traffic.operation == "p2p" else plan.topology.dense.axis_size(axis)
    once_s = profile.time_s(axis, link, traffic.operation, size, traffic.num_bytes)
    if once_s is None:
        why = f"the profile has no {traffic.operation} {_LINKS[link]}"
        return Estimate(axis, why, None)
    what = (
        f"{traffic.number} x {traffic.operation} of {traffic.num_bytes / 1e6:,.2f} MB "
        f"{_LINKS[link]}: {traffic.note}"
    )
    return Estimate(axis, what, traffic.number * once_s)


def _traffic(plan: Plan, shape: GPTShape, axis: str) -> _Traffic | str:
    """What one rank takes part in along `axis` in a step; a text says why nobody knows."""
    config = plan.config
    rounds = config.pipeline.microbatches * config.train.accumulate
    activation_bytes = _activation_bytes(plan, shape)
    if axis == "data":
        held = max(load.num_parameters for load in stage_loads(plan))
        num_bytes = held * WEIGHT_BYTES[config.precision.dtype]
        number = math.ceil(num_bytes / BUCKET_BYTES)
        return _Traffic("all_reduce", number, num_bytes / number, "gradients of the fullest stage")
    if axis == "pipe":
        note = "a microbatch's activations on, or gradients back"
        return _Traffic("p2p", 2 * rounds, activation_bytes, note)
    if axis == "tensor" and not shape.sequence_parallel:
        # Two products in a block, each summed once forward and once backward; the embedding is
        # summed forward only, the input of the head backward only.
        number = max(
            sum(1 if plan.pieces[i] in (EMBED, HEAD) else 4 for i in span) for span in plan.stages
        )
        return _Traffic("all_reduce", number * rounds, activation_bytes, "sums inside the layers")
    if axis == "tensor":
        return "under sequence parallelism gathers and scatters are not counted yet"
    return f"what travels along {axis} is not counted yet"


def _activation_bytes(plan: Plan, shape: GPTShape) -> int:
    """Of one microbatch between two layers, on one rank."""
    config = plan.config
    tokens = plan.samples_per_microbatch * config.data.seq_len // config.parallel.context
    if shape.sequence_parallel:
        tokens //= config.parallel.tensor
    return tokens * shape.dim * ACTIVATION_BYTES[config.precision.dtype]
