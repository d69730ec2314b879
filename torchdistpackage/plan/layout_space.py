"""The layouts that a search considers. No torch.

Decisions are made one by one: degrees, division of the batch, order of ranks, recomputation,
schedule and stage of ZeRO.

Each generator takes a choice and yields it with one more decision made, so a search can stop at any
of them; `all_layouts` is all of them together. What is left out is left out here, and nowhere else:
the page docs/which_layout.md says it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

from torchdistpackage.config.check import failed_rules
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.schedule.generators import GENERATORS, MAX_CELLS, TWO_CHUNKS

CHUNKS = {"interleaved": (2, 3, 4, 6, 8)}
"""Tried numbers of stages on a rank; other schedules with several stages have two."""
SCHEDULES = tuple(name for name in GENERATORS if name != "forward")


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The keys that a search sets; all others are those of the file. chunks: 1 if a rank has one
    stage. order: of the axes; () is the file's."""

    tensor: int = 1
    pipe: int = 1
    context: int = 1
    expert: int = 1
    order: tuple[str, ...] = ()
    sequence_parallel: bool = False
    recompute: str = "none"
    accumulate: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    zero: int = 0

    def keys(self, world_size: int) -> dict[str, dict[str, object]]:
        """Return the values of the keys by section."""
        data = world_size // (self.tensor * self.pipe * self.context)
        pipeline: dict[str, object] = {
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "chunks": self.chunks if self.chunks > 1 else None,
            # an even cut into several stages a rank takes a second to find
            "partition": "uniform" if self.chunks > 1 else "cost",
            "costs": None,
            "file": None,
        }
        parallel: dict[str, object] = {
            "data": data,
            "pipe": self.pipe,
            "context": self.context,
            "tensor": self.tensor,
            "expert": self.expert,
            "sequence_parallel": self.sequence_parallel,
            "zero": self.zero,
            "zero_group": None,
            "cp_comm_type": "auto",
            "tp_comm_overlap": False,
        }
        return {
            "parallel": {"order": self.order, **parallel} if self.order else parallel,
            "pipeline": pipeline,
            "train": {"accumulate": self.accumulate, "recompute": self.recompute},
        }

    @classmethod
    def overrides(cls) -> list[str]:
        """Return overrides that clear a search's keys, because their values in the file may not
        fit."""
        keys = cls(zero=1).keys(1)
        keys["parallel"]["data"] = "auto"
        keys["launch"] = {"elastic.nodes": None}
        return [
            f"{section}.{key}={json.dumps(value)}"
            for section, values in keys.items()
            for key, value in values.items()
        ]

    def of(self, run: RunConfig, world_size: int) -> RunConfig:
        """Return the run with these keys."""
        update: dict[str, object] = {}
        for section, values in self.keys(world_size).items():
            update[section] = getattr(run, section).model_copy(update=values)
        return run.model_copy(update=update)

    @property
    def complexity(self) -> int:
        """Return the number of keys that differ from pure data parallelism."""
        plain = LayoutChoice(accumulate=self.accumulate, microbatches=self.microbatches)
        return sum(getattr(self, x) != getattr(plain, x) for x in LayoutChoice.__dataclass_fields__)


# -- degrees and micro-batches -------------------------------------------------------------------

_TRIED = {
    "parallel.tensor",
    "parallel.pipe",
    "parallel.context",
    "parallel.data",
    "parallel.expert",
    "parallel.sequence_parallel",
    "parallel.zero",
    "pipeline.microbatches",
    "pipeline.schedule",
    "pipeline.chunks",
    "train.accumulate",
    "train.recompute",
}


def divisors(number: int, most: int) -> list[int]:
    """Return the divisors of a number up to `most`, ascending."""
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def degrees(run: RunConfig, world_size: int) -> Iterator[LayoutChoice]:
    """Yield the degrees that the rules allow, with one micro-batch."""
    for tensor in divisors(world_size, 1024):
        choice = LayoutChoice(tensor)
        if breaks_rules(choice.of(run, tensor), tensor, _TRIED - {"parallel.tensor"}):
            continue
        for pipe in divisors(world_size // tensor, 1024):
            for context in divisors(world_size // tensor // pipe, 1024):
                data = world_size // (tensor * pipe * context)
                if run.data.global_batch % data:
                    continue
                choice = LayoutChoice(tensor, pipe, context)
                # one micro-batch in an order of one stage a rank asks for the least
                unset = {"parallel.expert", "parallel.sequence_parallel", "parallel.zero"}
                if breaks_rules(choice.of(run, world_size), world_size, unset):
                    continue
                most = 1 if run.model.moe.num_experts is None else run.model.moe.num_experts
                for expert in divisors(data, most):
                    yield replace(choice, expert=expert)


def breaks_rules(config: RunConfig, world_size: int, undecided: set[str]) -> bool:
    """Return whether the run breaks a rule that reads none of the undecided keys."""
    return next(failed_rules(config, world_size, undecided), None) is not None


def micro_batches(samples: int) -> list[int]:
    """Return the tried sizes of micro-batches: powers of two, and all samples at once."""
    powers = [1 << n for n in range(samples.bit_length()) if samples % (1 << n) == 0]
    return powers if powers[-1] == samples else [*powers, samples]


def divided(run: RunConfig, world_size: int, choice: LayoutChoice) -> Iterator[LayoutChoice]:
    """Yield the same degrees with each division of the samples into rounds and micro-batches."""
    data = world_size // (choice.tensor * choice.pipe * choice.context)
    samples = run.data.global_batch // data
    for size in micro_batches(samples):
        number = samples // size
        if number * choice.pipe > MAX_CELLS[0]:
            continue
        yield replace(choice, microbatches=number)
        if choice.pipe == 1 and number > 1:
            yield replace(choice, accumulate=number)


# -- the order of ranks, and what blocks keep ----------------------------------------------------


def orders(
    run: RunConfig, world_size: int, node_size: int, choice: LayoutChoice
) -> Iterator[LayoutChoice]:
    """Yield the choice with each order of the axes that has tensor innermost and changes which
    ranks share a node; the file's order comes first.

    Links are either within a node or between nodes, so orders that leave equally many neighbours
    along each axis in a node take the same time.
    """
    sizes = {
        "data": world_size // (choice.tensor * choice.pipe * choice.context),
        "pipe": choice.pipe,
        "context": choice.context,
        "tensor": choice.tensor,
    }
    first_order = run.parallel.order
    tried = [first_order]
    if set(first_order) == set(sizes) and world_size > node_size:
        tried += [
            (*outer, "tensor") for outer in permutations(x for x in first_order if x != "tensor")
        ]
    seen: set[tuple[int, ...]] = set()
    for order in tried:
        stride, inside = 1, dict[str, int]()
        for axis in reversed(order):
            # a message along pipe stays in a node or does not
            most = 2 if axis == "pipe" and stride < node_size else max(node_size // stride, 1)
            inside[axis] = min(sizes[axis], most)
            stride *= sizes[axis]
        key = tuple(inside.get(axis, 1) for axis in sizes)
        if key not in seen:
            seen.add(key)
            yield choice if order is first_order else replace(choice, order=order)


def variants(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    """Yield the same with and without sequence parallelism and recomputation."""
    for along in (False, True) if choice.tensor > 1 else (False,):
        for recompute in ("none", "blocks"):
            yield replace(choice, sequence_parallel=along, recompute=recompute)


# -- schedules and ZeRO --------------------------------------------------------------------------


def is_published(schedule: str, pipe: int, microbatches: int) -> bool:
    """Return whether a schedule is published for these numbers; otherwise its generator gives the
    nearest legal order."""
    match schedule:
        case "interleaved" | "interleaved-zb":
            return microbatches % pipe == 0
        case "zb-v" | "dualpipe-v":
            return microbatches >= 2 * pipe
        case "zb-h2":
            return microbatches >= 2 * pipe - 1
        case _:
            return True


def scheduled(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    """Yield the choice with each pipe schedule that is published for its numbers."""
    if choice.pipe == 1:
        yield choice
        return
    for name in SCHEDULES:
        if not is_published(name, choice.pipe, choice.microbatches):
            continue
        for chunks in CHUNKS.get(name, (2,)) if name in TWO_CHUNKS else (1,):
            if chunks * choice.pipe * choice.microbatches <= MAX_CELLS[0]:
                yield replace(choice, schedule=name, chunks=chunks)


def zero_stages(run: RunConfig, world_size: int, choice: LayoutChoice) -> tuple[int, ...]:
    """Return the stages of ZeRO that are tried; a single rank shards nothing."""
    if world_size > choice.tensor * choice.pipe:
        return (0, 1, 2, 3)
    return (1,) if run.precision.weights == "bf16" else (0,)


def sharded(run: RunConfig, world_size: int, choice: LayoutChoice) -> Iterator[LayoutChoice]:
    """Yield the same with each stage of ZeRO."""
    for zero in zero_stages(run, world_size, choice):
        yield replace(choice, zero=zero)


def all_layouts(run: RunConfig, world_size: int, node_size: int) -> Iterator[LayoutChoice]:
    """Yield every layout that a search considers, valid or not."""
    for degree in degrees(run, world_size):
        for each in divided(run, world_size, degree):
            for ordered in orders(run, world_size, node_size, each):
                for variant in variants(ordered):
                    for order in scheduled(variant):
                        yield from sharded(run, world_size, order)
