"""Training on the next-token distribution of a frozen teacher, together with the tokens of the
data.

Before each pass over the micro-batches the teacher runs its forwards on them by the same schedule,
like the reference of preference pairs. The last stage keeps its logits until the model's own
forward of the same micro-batch. A file of the teacher's most likely tokens (logits_file.py) can
replace the forwards.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.config.schema import DistillSection
from torchdistpackage.data.source import IGNORE
from torchdistpackage.ddp.zero.frozen import ShardedWeights
from torchdistpackage.layout.derive import even_share
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.losses import totals_on
from torchdistpackage.parallel.tensor.divergence import vocab_parallel_divergence
from torchdistpackage.parallel.tensor.embedding import vocab_range
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.plan.teacher import stages_agree
from torchdistpackage.topology.mesh import Mesh
from torchdistpackage.train.staged_model import (
    Microbatches,
    MicrobatchLoss,
    StagedModel,
    TrainStages,
)
from torchdistpackage.train.task import Run, TaskLoss


@dataclass(frozen=True)
class LogitsOf:
    """Computes a model's logits from the outputs of its last stage.

    group: ranks that share the vocabulary; None: each has all of it. rows_dim: dim of the outputs
    along which samples lie. whole: joins outputs to logits (B, S, V).
    """

    group: Group | None
    rows_dim: int
    whole: Callable[[Tensor], Tensor]

    @classmethod
    def last_stage(cls, stages: TrainStages) -> "LogitsOf":
        """Return the instance for one of our models; it is the same for all stages of a rank."""
        any_stage: Any = next(iter(stages.children()))
        return cls(any_stage.vocab_group, getattr(any_stage, "rows_dim", 0), any_stage.whole_logits)

    def own_columns(self, outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Return this rank's logits (B, S, V/n) from outputs that may include those of routers."""
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        return logits.movedim(self.rows_dim, 0)


@dataclass(frozen=True)
class _LogitsBlock:
    """The logits of some samples and columns of the vocabulary that a rank has; maybe none."""

    rows: range
    columns: range

    def within(self, other: "_LogitsBlock") -> tuple[slice, slice]:
        """Return what both have, as slices of the rows and columns of `other`."""
        slices: list[slice] = []
        for own, their in ((self.rows, other.rows), (self.columns, other.columns)):
            low, high = max(own.start, their.start), min(own.stop, their.stop)
            slices.append(slice(low - their.start, max(high, low) - their.start))
        return slices[0], slices[1]

    def num_shared(self, other: "_LogitsBlock") -> tuple[int, int]:
        """Return the numbers of rows and of columns that both have."""
        rows, columns = self.within(other)
        return rows.stop - rows.start, columns.stop - columns.start


_NONE = _LogitsBlock(range(0), range(0))


@dataclass(frozen=True)
class TeacherMembers:
    """The ranks that exchange samples and logits if a teacher has degrees of its own.

    A micro-batch of the teacher joins the rows of all data indices of the model in `group`, and the
    teacher's data indices there share them evenly.

    givers: for each data index, the index in the group of a rank with its inputs. own_rows: this
    rank's rows in the teacher. wanted, computed: by index in the group, the logits that the rank
    needs for the model, and those that it computes with the teacher. shape: the shape (B, S) of the
    inputs of a micro-batch. num: number of micro-batches. is_aligned: each rank has the same stage
    of model and teacher.
    """

    group: Group
    givers: Sequence[int]
    own_rows: range
    wanted: Sequence[_LogitsBlock]
    computed: Sequence[_LogitsBlock]
    shape: tuple[int, int]
    num: int
    is_aligned: bool

    @classmethod
    def of(
        cls, plan: Plan, teacher: Plan, group: Group, model: LogitsOf, teacher_logits: LogitsOf
    ) -> "TeacherMembers":
        """Return it for the plans of the model and its teacher."""
        meshes = plan.topology.dense, teacher.topology.dense
        ranks, (mesh, teacher_mesh) = primitives.ranks_of(group), meshes
        assert plan.shape is not None
        vocab, size = plan.shape.vocab, plan.samples_per_microbatch
        indices = sorted({mesh.index(x, "data") for x in ranks})
        replicas = sorted({teacher_mesh.index(x, "data") for x in ranks})
        share = size * len(indices) // len(replicas)
        first, last = plan.schedule.placement[0], plan.schedule.placement[-1]
        teacher_last = teacher.schedule.placement[-1]
        is_aligned = stages_agree(*meshes)

        def block(
            mesh: Mesh, rank: int, logits: LogitsOf, number: int, order: list[int]
        ) -> _LogitsBlock:
            at = order.index(mesh.index(rank, "data")) * number
            tensor = mesh.index(rank, "tensor")
            columns = range(vocab)
            if logits.group is not None:
                begin, num = even_share(vocab, mesh.axis_size("tensor"), tensor)
                columns = range(begin, begin + num)
            return _LogitsBlock(range(at, at + number), columns)

        wanted = [
            block(mesh, x, model, size, indices) if mesh.index(x, "pipe") == last else _NONE
            for x in ranks
        ]
        computed = [
            block(teacher_mesh, x, teacher_logits, share, replicas)
            # with whole rows on all tensor ranks the first of them sends its own
            if teacher_mesh.index(x, "pipe") == teacher_last
            and (teacher_logits.group is not None or teacher_mesh.index(x, "tensor") == 0)
            else _NONE
            for x in ranks
        ]
        stage = first if not is_aligned else mesh.index(ranks[0], "pipe")
        places = [(mesh.index(x, "data"), mesh.index(x, "pipe")) for x in ranks]
        at = replicas.index(teacher_mesh.index(ranks[group.rank()], "data")) * share
        return cls(
            group,
            [places.index((index, stage)) for index in indices],
            range(at, at + share),
            wanted,
            computed,
            (size, plan.shape.seq_len),
            plan.schedule.num_microbatches,
            is_aligned,
        )

    def gathered(self, rows: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
        """Return micro-batches of the teacher's rows on this rank, gathered from the model's rows.

        All ranks of the group call it.
        """
        if rows:
            own_inputs = torch.stack(list(rows))
        elif self.is_aligned:  # no rank of this stage has any
            return ()
        else:
            own_inputs = torch.zeros(self.num, *self.shape, dtype=torch.int64, device=device)
        every = primitives.all_gather(own_inputs.flatten(0, 1), self.group)
        by_rank = every.view(len(self.computed), self.num, *self.shape)[list(self.givers)]
        joined = by_rank.transpose(0, 1).flatten(1, 2)
        return list(joined[:, self.own_rows.start : self.own_rows.stop])

    def exchanged(self, logits: Tensor | None, like: Tensor) -> Tensor:
        """Return the teacher's logits (B, S, columns) for this rank's part of the model's.

        They are empty if this rank needs none. logits: those that it has computed; None: none.
        like: an empty tensor of their type.
        """
        own_computed, own_wanted = self.computed[self.group.rank()], self.wanted[self.group.rank()]
        sent, lengths, sizes = [like], list[int](), list[int]()
        length = self.shape[1]
        for wanted, computed in zip(self.wanted, self.computed, strict=True):
            rows, columns = wanted.within(own_computed)
            part = like if logits is None else logits[rows, :, columns].flatten()
            sent.append(part)
            lengths.append(len(part))
            num_rows, num_columns = own_wanted.num_shared(computed)
            sizes.append(num_rows * length * num_columns)
        received = primitives.all_to_all(torch.cat(sent), self.group, lengths, sizes)
        number, width = len(own_wanted.rows), len(own_wanted.columns)
        result = received.new_empty(number, length, width)
        for computed, part in zip(self.computed, received.split(sizes), strict=True):
            rows, columns = computed.within(own_wanted)
            shape = rows.stop - rows.start, length, columns.stop - columns.start
            result[rows, :, columns] = part.view(shape)
        return result


DivergenceOf = Callable[[Tensor, int], Tensor]
"""Maps (this rank's logits of a micro-batch (B, S, V/n), its number) to the divergence of each
token.
"""


class DistillLoss(TaskLoss):
    """The loss of a run with a teacher: kd_ratio x divergence + (1 - kd_ratio) x cross entropy.

    A validation measures only the cross entropy, so that it compares with runs without a teacher.
    """

    unit = "tokens"

    def __init__(self, device: torch.device, options: DistillSection, logits_of: LogitsOf):
        super().__init__(device)
        self._options, self._logits_of = options, logits_of

    def divergence_of(self, batch: Microbatches) -> DivergenceOf:
        """Return the divergence of these micro-batches from the teacher's distribution."""
        raise NotImplementedError

    def means(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """Return the terms of the loss; {} in a validation, which has one."""
        divergence, cross_entropy, num_tokens = sums[:3]
        if not num_tokens:
            return {}
        means = {"kd_loss": divergence / num_tokens}
        if self._options.kd_ratio < 1:
            means["ce_loss"] = cross_entropy / num_tokens
        return means

    def text(self, means: Mapping[str, float]) -> str:
        return "  ".join(f"{name} {value:.4f}" for name, value in means.items())

    def loss_of_batch(
        self, model: StagedModel, executor: Executor, run: Run, batch: Microbatches
    ) -> MicrobatchLoss:
        """Return the model's loss of these micro-batches relative to the teacher."""
        if not model.stage.training:
            return lambda outputs, targets, m: model.loss(outputs, targets)
        return partial(self._loss, model, self.divergence_of(batch))

    def _loss(
        self,
        model: StagedModel,
        divergence_of: DivergenceOf,
        outputs: Tensor,
        targets: Tensor,
        m: int,
    ) -> tuple[Tensor, Tensor]:
        """Return (sum of the tokens' losses, number of counted tokens)."""
        ratio, counts = self._options.kd_ratio, targets != IGNORE
        of_tokens = divergence_of(self._logits_of.own_columns(outputs), m)
        divergence, count = (of_tokens * counts).sum(), counts.sum()
        cross_entropy = torch.zeros_like(divergence)
        if ratio < 1:
            cross_entropy, _ = model.loss(outputs, targets)
        if model.tells_loss:
            self.add([divergence, cross_entropy, count])
        return ratio * divergence + (1 - ratio) * cross_entropy, count


class TeacherLoss(DistillLoss):
    """The loss with a running teacher.

    teacher: frozen, on the ranks of the model. executor: runs it, forward alone; that of the model
    would expect messages of the model's width. members: the ranks that exchange its samples and
    logits, if it has degrees of its own. shards: its weights, if its data ranks share them.
    """

    def __init__(
        self,
        teacher: StagedModel,
        executor: Executor,
        options: DistillSection,
        *,
        logits_of: LogitsOf,
        teacher_logits_of: LogitsOf,
        members: TeacherMembers | None = None,
        shards: ShardedWeights | None = None,
    ):
        super().__init__(teacher.device, options, logits_of)
        self.executors = (executor,)
        self._teacher, self._teacher_logits_of = teacher, teacher_logits_of
        self._members, self._shards = members, shards

    def divergence_of(self, batch: Microbatches) -> DivergenceOf:
        """Run the teacher on these microbatches; see `DistillLoss`."""
        members, device = self._members, self._teacher.device
        by_microbatch: dict[int, Tensor] = {}

        def keep(outputs: Tensor, targets: Tensor, m: int) -> tuple[Tensor, Tensor]:
            by_microbatch[m] = self._columns_of_model(outputs)
            return torch.zeros((), device=device), torch.zeros((), device=device)

        inputs, targets, positions = batch
        if members is not None:
            inputs = members.gathered(inputs, device)
            positions = None if positions is None else members.gathered(positions, device)
            # a rank need not have the last stage of both, and the loss here reads no target
            targets = [torch.zeros(0, device=device)] * members.num
        own_executor = self.executors[0]
        forward = self._teacher.forward_and_loss(
            own_executor, inputs, targets, totals_on(device), positions, loss=keep
        )
        with torch.no_grad():
            own_executor.run(forward)
        if members is not None and not members.is_aligned:
            # float32, as ranks without logits of the teacher do not know their type
            like = torch.zeros(0, dtype=_wide(self._teacher), device=device)
            for m in range(members.num):
                own_logits = by_microbatch.get(m)
                by_microbatch[m] = members.exchanged(
                    None if own_logits is None else own_logits.to(like), like
                )

        def divergence(logits: Tensor, m: int) -> Tensor:
            return vocab_parallel_divergence(
                logits,
                by_microbatch.pop(m),
                self._logits_of.group,
                beta=self._options.beta,
                temperature=self._options.temperature,
            )

        return divergence

    def _columns_of_model(self, outputs: Tensor) -> Tensor:
        """Return the teacher's logits of the columns that this rank of the model has, or those
        that are to be exchanged.
        """
        own_group, teacher = self._logits_of.group, self._teacher_logits_of
        if self._members is not None:
            logits = teacher.own_columns(outputs)
            if not self._members.is_aligned:
                return logits
            return self._members.exchanged(logits, logits.new_empty(0))
        if (own_group is None) == (teacher.group is None):
            return teacher.own_columns(outputs)
        logits = teacher.whole(outputs)
        if own_group is None:
            return logits
        first, number = vocab_range(logits.shape[-1], own_group)
        return logits[..., first : first + number].clone()  # the other columns are not needed


def _wide(model: StagedModel) -> torch.dtype:
    """Return the type in which ranks exchange logits: float64 of such weights, else float32."""
    dtypes = {p.dtype for p in model.stage.parameters()}
    return torch.float64 if torch.float64 in dtypes else torch.float32
