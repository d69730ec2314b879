"""Every rank's calls in one training step, from the plan alone. No torch.

One rule: this is the order of train/step.py, the executor and the reducer written down as data;
a test holds the two together, call by call. Not in it: what a rank does before its first step and
beside its steps (initial weights, checkpoints); its groups are made ahead.
"""

from collections.abc import Iterator, Sequence
from functools import cache

from torchdistpackage.harness.lint.matcher import OpSignature
from torchdistpackage.harness.lint.programs import (
    CallProgram,
    Collective,
    Messages,
    Op,
    ProgramMessage,
    WaitAll,
    check,
    made_first,
)
from torchdistpackage.harness.lint.report import LintReport
from torchdistpackage.layout.layout import Layout
from torchdistpackage.schedule.actions import Action, ActionKind, Batch
from torchdistpackage.train.gradient_calls import GradientCalls, Sum, parameters
from torchdistpackage.train.plan import Plan
from torchdistpackage.train.products import Activations, gather, loss_calls, piece_calls, reduction

HEADER = (("elements", 1024), ("dtype", "uint8"))
MOST_MADE = 256
"""Ranks up to which their groups are made first: lists of ranks grow with the square of the world,
and the rule of their order (layout/groups.py) does not depend on its size."""
STATISTICS = 6
"""Numbers of a step that all ranks add up."""


def static_report(plan: Plan, *, first: bool = True) -> LintReport:
    """Check one step of every rank of the plan, behind the making of its groups, without running
    any.

    first: each message is announced by a header, as in the first step; later ones go without. The
    real first step also places messages along one order of all ranks (parallel/pipeline/program.py)
    and lets no gradient leave early; what it calls towards each peer is the same.
    """
    programs = StepPrograms(plan, first)
    ranks = range(plan.world_size)
    ops = [programs.of(rank) for rank in ranks]
    if len(ops) <= MOST_MADE:
        ops = made_first(ops, [plan.creations(rank) for rank in ranks])
    return check(ops, plan.topology, programs.unknown)


class StepPrograms:
    """Programs of one plan, with what ranks share worked out once."""

    def __init__(self, plan: Plan, first: bool = True):
        self._plan, self._first = plan, first
        self._mesh = plan.topology.dense
        config = plan.config
        self._gradients = GradientCalls(plan)
        self._flow = Activations(
            config.data.seq_len,
            plan.samples_per_microbatch,
            self._mesh.axis_size("tensor"),
            config.parallel.sequence_parallel,
            config.precision.dtype if config.precision.dtype != "bf16" else "as autocast has it",
        )
        self._by_role: dict[tuple[int, int], tuple[tuple[Op, ...], list[tuple[str, Layout]]]] = {}

    @property
    def unknown(self) -> tuple[str, ...]:
        """What the plan cannot say about this run, in words."""
        unknown: list[str] = []
        if self._plan.shape is None:
            target = self._plan.config.model.target
            unknown.append(
                f"calls inside {target}, shapes of its messages and the gradients that it reduces; "
                f"only its build can tell (--run looks)"
            )
        if self._plan.config.parallel.zero == 3:
            unknown.append(
                "gathers of parameters, which parallel.zero=3 makes where they are read (--run "
                "looks)"
            )
        return tuple(unknown)

    def of(self, rank: int) -> CallProgram:
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
            groups[name] = self._gradients.ranks(layout, rank), ""
        return CallProgram(ops, groups)

    def _role(
        self, place: int, tensor: int, rank: int
    ) -> tuple[tuple[Op, ...], list[tuple[str, Layout]]]:
        """(operations, the groups that gradients are summed over) of ranks in one place."""
        sums = self._gradients.sums(place, rank)
        early, late = ([x for x in sums if x.is_late == is_late] for is_late in (False, True))
        ops: list[Op] = []
        if self._mesh.axis_size(*self._plan.topology.model_axes) > 1:
            ops.append(Collective("model", (gather((1,), "int64"),), label="check of the batch"))
        rounds = self._plan.config.train.accumulate
        for index in range(rounds):
            # see Trainer.accumulate
            due = index == rounds - 1 or self._plan.config.parallel.zero >= 2
            ops += self._round(place, early if due else [], index == 0)
            if due:
                # see ddp/param_spec.py
                ops += self._gradients.reductions(late)
                ops.append(WaitAll())
        if self._mesh.size > 1:
            wide = reduction("all_reduce", (STATISTICS,), "float64")
            ops.append(Collective("world", (wide,), label="numbers of the step"))
        ops += self._gradients.gathers(sums)
        return tuple(ops), [(x.group, x.layout) for x in sums]

    def _round(self, place: int, sums: Sequence[Sum], headers: bool) -> Iterator[Op]:
        """One pass over the microbatches; the buckets leave when the last backward ends."""
        program = self._plan.schedule.programs[place]
        last = [
            s for s in program if isinstance(s, Action) and s.kind in (ActionKind.B, ActionKind.W)
        ][-1:]
        for step in program:
            if isinstance(step, Batch) or step.kind.is_message:
                actions = step.actions if isinstance(step, Batch) else (step,)
                yield from self._messages(actions, str(step), headers and self._first)
                continue
            calls = self._stage_calls(step.stage)[step.kind.gives_gradient]
            if calls and step.kind is not ActionKind.W:
                yield Collective("tensor", calls, label=str(step))
            if step in last:
                yield from self._gradients.reductions(sums)

    def _messages(self, actions: Sequence[Action], label: str, headers: bool) -> Iterator[Op]:
        place = self._plan.schedule.placement
        for kind in (ActionKind.SEND_F, ActionKind.RECV_F) if headers else ():
            # all that go are sent before one that comes is waited for
            for a in actions:
                if a.kind is kind:
                    word, ends = (
                        ("send", (a.stage, a.peer))
                        if a.kind.is_send
                        else ("receive", (a.peer, a.stage))
                    )
                    part = ProgramMessage(OpSignature(word, HEADER), place[a.peer])
                    road = place[ends[0]], place[ends[1]]
                    yield Messages("pipe", (part,), f"header of {label}", channel=road)
        facts = ()
        if self._plan.shape is not None:
            elements = self._flow.elements(self._plan.shape.dim)
            facts = (("elements", elements), ("dtype", self._flow.dtype))
        words = ("receive", "send")
        parts = tuple(
            ProgramMessage(OpSignature(words[a.kind.is_send], facts), place[a.peer])
            for a in actions
        )
        yield Messages("pipe", parts, label)

    @cache  # noqa: B019  lives as long as the plan is looked at
    def _stage_calls(self, stage: int) -> tuple[tuple[OpSignature, ...], tuple[OpSignature, ...]]:
        """Tensor-parallel calls of the stage's forward and backward, loss included."""
        if self._plan.shape is None:
            return (), ()
        forward: list[OpSignature] = []
        backward: list[OpSignature] = []
        for index in self._plan.stages[stage]:
            layouts = [layout for _, layout in parameters(self._plan, index)]
            there, back = piece_calls(layouts, self._flow, takes_ids=index == 0)
            forward += there
            backward[:0] = back
        if stage == len(self._plan.stages) - 1:
            forward += loss_calls(self._flow)
        return tuple(forward), tuple(backward)
