"""Every rank's calls in one training step, from the plan alone. No torch.

One rule: this is the order of train/step.py, the executor and the reducer written down as data;
a test holds the two together, call by call. Not in it: what a rank does before its first step and
beside its steps (groups, initial weights, checkpoints).
"""

from collections.abc import Hashable, Iterator, Sequence
from functools import cache

from torchdistpackage.ddp.buckets import Bucket, Entry
from torchdistpackage.ddp.buckets import plan as plan_buckets
from torchdistpackage.harness.lint.order import Call
from torchdistpackage.harness.lint.programs import (
    Collective,
    Messages,
    Op,
    Part,
    Program,
    Wait,
    check,
)
from torchdistpackage.harness.lint.report import Report
from torchdistpackage.layout.derive import gradient_axes, gradient_ranks, num_elements
from torchdistpackage.layout.layout import Layout
from torchdistpackage.schedule.actions import Action, Batch, Kind
from torchdistpackage.train.plan import BUCKET_BYTES, Plan
from torchdistpackage.train.products import Activations, gather, loss_calls, piece_calls, reduction

WIDTHS = {"float64": ("float64", 8), "float32": ("float32", 4), "bf16": ("float32", 4)}
"""Of a weight and its gradient, by precision: dtype and bytes."""
HEADER = (("elements", 1024), ("dtype", "uint8"))
STATISTICS = 6
"""Numbers of a step that all ranks add up."""


def static_report(plan: Plan, *, first: bool = True) -> Report:
    """Check one step of every rank of the plan, without running any.

    first: the first step, in which each message is announced by a header; later ones go without.
    """
    programs = StepPrograms(plan, first)
    ranks = range(plan.world_size)
    return check([programs.of(rank) for rank in ranks], plan.topology, programs.unknown)


class StepPrograms:
    """Programs of one plan, with what ranks share worked out once."""

    def __init__(self, plan: Plan, first: bool = True):
        self._plan, self._first = plan, first
        self._mesh = plan.topology.dense
        config = plan.config
        self._dtype, self._bytes = WIDTHS[config.precision.dtype]
        self._flow = Activations(
            config.data.seq_len,
            plan.samples_per_microbatch,
            self._mesh.axis_size("tensor"),
            config.parallel.sequence_parallel,
            config.precision.dtype if config.precision.dtype != "bf16" else "as autocast has it",
        )
        self._ranks: dict[Hashable, tuple[int, ...]] = {}
        self._by_role: dict[tuple[int, int], tuple[tuple[Op, ...], list[tuple[str, Layout]]]] = {}

    @property
    def unknown(self) -> tuple[str, ...]:
        """What the plan cannot say about this run, in words."""
        if self._plan.shape is not None:
            return ()
        target = self._plan.config.model.target
        return (
            f"calls inside {target}, shapes of its messages and the gradients that it reduces; "
            f"only its build can tell (--run looks)",
        )

    def of(self, rank: int) -> Program:
        """The program of one rank."""
        coord = self._mesh.coord(rank)
        role = coord.get("pipe", 0), coord.get("tensor", 0)
        if role not in self._by_role:
            self._by_role[role] = self._role(*role, rank)
        ops, shared = self._by_role[role]
        groups: dict[str, tuple[Sequence[int], str]] = {
            "tensor": (self._mesh.group(rank, ("tensor",)), ""),
            "pipe": (self._mesh.group(rank, ("pipe",)), ""),
            "model": (self._mesh.group(rank, self._plan.topology.model_axes), ""),
            "world": (range(self._mesh.size), ""),
        }
        for name, layout in shared:
            groups[name] = self._gradient_ranks(layout, rank), ""
        return Program(ops, groups)

    def _role(
        self, stage: int, tensor: int, rank: int
    ) -> tuple[tuple[Op, ...], list[tuple[str, Layout]]]:
        """(operations, the groups that gradients are summed over) of ranks in one place."""
        buckets = self._buckets(stage, rank)
        ops: list[Op] = []
        if self._mesh.axis_size(*self._plan.topology.model_axes) > 1:
            ops.append(Collective("model", (gather((1,), "int64"),), label="check of the batch"))
        rounds = self._plan.config.train.accumulate
        early = [bucket for bucket in buckets if len(bucket[1].stages) == 1]
        for index in range(rounds):
            ops += self._round(stage, early if index == rounds - 1 else [], index == 0)
        # see ddp/shared.py
        ops += [_reduction(*bucket) for bucket in buckets if bucket not in early]
        ops.append(Wait())
        if self._mesh.size > 1:
            wide = reduction("all_reduce", (STATISTICS,), "float64")
            ops.append(Collective("world", (wide,), label="numbers of the step"))
        return tuple(ops), [(name, layout) for name, layout, _ in buckets]

    def _round(
        self, stage: int, buckets: list[tuple[str, Layout, Call]], headers: bool
    ) -> Iterator[Op]:
        """One pass over the microbatches; the buckets leave when the last backward ends."""
        program = self._plan.schedule.programs[stage]
        last = [s for s in program if isinstance(s, Action) and s.kind is Kind.B][-1:]
        for step in program:
            if isinstance(step, Batch) or step.kind.is_message:
                actions = step.actions if isinstance(step, Batch) else (step,)
                yield from self._messages(actions, str(step), headers and self._first)
                continue
            calls = self._stage_calls(stage)[step.kind is Kind.B]
            if calls:
                yield Collective("tensor", calls, label=str(step))
            if step in last:
                yield from (_reduction(*bucket) for bucket in buckets)

    def _messages(self, actions: Sequence[Action], label: str, headers: bool) -> Iterator[Op]:
        if headers:
            # all that are to be sent go together, each that is received is waited for
            ahead = [Part(Call("send", HEADER), a.peer) for a in actions if a.kind is Kind.SEND_F]
            if ahead:
                yield Messages("pipe", tuple(ahead), f"header of {label}")
            for a in actions:
                if a.kind is Kind.RECV_F:
                    part = Part(Call("receive", HEADER), a.peer)
                    yield Messages("pipe", (part,), f"header of {label}")
        facts = ()
        if self._plan.shape is not None:
            elements = self._flow.elements(self._plan.shape.dim)
            facts = (("elements", elements), ("dtype", self._flow.dtype))
        words = ("receive", "send")
        parts = tuple(Part(Call(words[a.kind.is_send], facts), a.peer) for a in actions)
        yield Messages("pipe", parts, label)

    @cache  # noqa: B019  lives as long as the plan is looked at
    def _stage_calls(self, stage: int) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
        """Tensor-parallel calls of the stage's forward and backward, loss included."""
        if self._plan.shape is None:
            return (), ()
        forward: list[Call] = []
        backward: list[Call] = []
        for index in self._plan.stages[stage]:
            layouts = [layout for _, layout in self._parameters(index)]
            there, back = piece_calls(layouts, self._flow, takes_ids=index == 0)
            forward += there
            backward[:0] = back
        if stage == len(self._plan.stages) - 1:
            forward += loss_calls(self._flow)
        return tuple(forward), tuple(backward)

    def _parameters(self, piece: int) -> list[tuple[str, Layout]]:
        """Of one piece, by local name, in the order in which its module registers them."""
        plan = self._plan
        prefix = f"{plan.pieces[piece]}."
        found = [(n, layout) for n, layout in plan.layouts.items() if n.startswith(prefix)]
        is_tied_head = piece == len(plan.pieces) - 1 and plan.shape is not None and plan.shape.tied
        if is_tied_head:
            tied = plan.layouts[f"{plan.pieces[0]}.weight"]
            found.append((f"{prefix}weight", tied))
        # what a module holds itself comes before what its parts hold
        return sorted(found, key=lambda item: item[0].removeprefix(prefix).count(".") > 0)

    def _buckets(self, stage: int, rank: int) -> list[tuple[str, Layout, Call]]:
        """Gradients of the stage that travel together: (group, one of them, call)."""
        if self._plan.shape is None:
            return []
        held: dict[str, Layout] = {}
        for index in self._plan.stages[stage]:
            held |= {
                layout.name: layout
                for _, layout in self._parameters(index)
                if layout.name not in held
            }
        layouts = list(held.values())
        view = self._plan.topology.view
        keys = [gradient_ranks(x, view(x.view), rank) for x in layouts]
        entries = [
            Entry(i, num_elements(x, view(x.view), rank), self._bytes, keys[i])
            for i, x in enumerate(layouts)
        ]
        return [
            (f"gradients {bucket.key}", layouts[bucket.members[0]], self._sum(bucket))
            for bucket in plan_buckets(entries, BUCKET_BYTES)
            if len(keys[bucket.members[0]]) > 1
        ]

    def _sum(self, bucket: Bucket) -> Call:
        return reduction("all_reduce", (bucket.num_elements,), self._dtype)

    def _gradient_ranks(self, layout: Layout, rank: int) -> tuple[int, ...]:
        """One tuple for all ranks in it."""
        mesh = self._plan.topology.view(layout.view)
        axes, stages = gradient_axes(layout, mesh), tuple(layout.stages)
        coord = mesh.coord(rank)
        inside = {*axes, "pipe"} if len(stages) > 1 else {*axes}
        key = (layout.view, axes, stages, *(i for a, i in coord.items() if a not in inside))
        if key not in self._ranks:
            self._ranks[key] = gradient_ranks(layout, mesh, rank)
        return self._ranks[key]


def _reduction(name: str, _: Layout, call: Call) -> Collective:
    return Collective(name, (call,), blocks=False, label="gradients")
