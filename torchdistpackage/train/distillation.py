"""Training on the next-token distribution of a frozen teacher, beside the tokens of the data.

Before each pass over the microbatches the teacher runs its forwards on them by the same schedule,
as the reference of preference pairs does. The last stage keeps its logits until the model's own
forward of the same microbatch. A file of the teacher's most likely tokens (logits_file.py) takes
the place of the forwards.
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
from torchdistpackage.layout.derive import even_share
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.losses import totals_on
from torchdistpackage.parallel.tensor.divergence import vocab_parallel_divergence
from torchdistpackage.parallel.tensor.embedding import vocab_range
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.train.staged_model import (
    Microbatches,
    MicrobatchLoss,
    StagedModel,
    TrainStages,
)
from torchdistpackage.train.task import Run, TaskLoss


@dataclass(frozen=True)
class LogitsOf:
    """The logits of a model, from the outputs of its last stage.

    group: ranks that share the vocabulary; None: each has all of it. rows_dim: the dim of outputs
    along which samples lie. whole: joins outputs to logits (B, S, V).
    """

    group: Group | None
    rows_dim: int
    whole: Callable[[Tensor], Tensor]

    @classmethod
    def last_stage(cls, stages: TrainStages) -> "LogitsOf":
        """Return it for one of our models; all stages of a rank say the same."""
        any_stage: Any = next(iter(stages.children()))
        return cls(any_stage.vocab_group, getattr(any_stage, "rows_dim", 0), any_stage.whole_logits)

    def own_columns(self, outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Return this rank's logits (B, S, V/n), of outputs that may have those of routers too."""
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        return logits.movedim(self.rows_dim, 0)


@dataclass(frozen=True)
class TeacherMembers:
    """The tensor ranks of a teacher, which are several data ranks of the model: they compute the
    teacher on the samples of all of them.

    places: (data index, tensor index) in the model of each rank of `group`. tensor: size of the
    model's tensor axis. vocab: number of ids.
    """

    group: Group
    places: Sequence[tuple[int, int]]
    tensor: int
    vocab: int

    @classmethod
    def of(cls, plan: Plan, group: Group) -> "TeacherMembers":
        """Return it for the plan of the model."""
        mesh = plan.topology.dense
        ranks = primitives.ranks_of(group)
        places = [(mesh.index(x, "data"), mesh.index(x, "tensor")) for x in ranks]
        assert plan.shape is not None
        return cls(group, places, mesh.axis_size("tensor"), plan.shape.vocab)

    @property
    def data_indices(self) -> list[int]:
        """The data indices of the model whose samples the teacher computes together, in order."""
        return sorted({index for index, _ in self.places})

    def gathered(self, rows: Sequence[Tensor] | None) -> Sequence[Tensor] | None:
        """Return microbatches with the rows (c B, ...) of all `data_indices`, of those that each
        rank has (B, ...); on all ranks of the group.
        """
        if not rows:
            return rows
        every = primitives.all_gather(torch.cat(list(rows)), self.group)
        by_rank = every.view(len(self.places), len(rows), *rows[0].shape)
        firsts = [[index for index, _ in self.places].index(x) for x in self.data_indices]
        return list(by_rank[firsts].transpose(0, 1).flatten(1, 2))

    def own_columns(self, logits: Tensor, model: LogitsOf, teacher: LogitsOf) -> Tensor:
        """Return the logits (B, S, columns of this rank in the model) of this rank's samples, of
        those (c B, S, columns of this rank in the teacher) of all samples.
        """
        indices, (own_index, own_tensor) = self.data_indices, self.places[self.group.rank()]
        by_index = dict(zip(indices, logits.chunk(len(indices)), strict=True))
        first, last = self._columns(own_tensor, model)
        if teacher.group is None:
            return by_index[own_index][..., first:last].clone()
        # each rank gets the columns that it has in the model, from all that have some of them
        spans = [self._columns_of_teacher(x) for x in range(len(self.places))]
        begin, end = spans[self.group.rank()]
        sent: list[Tensor] = []
        for index, tensor in self.places:
            low, high = self._columns(tensor, model)
            low, high = max(low, begin), min(high, end)
            sent.append(by_index[index][..., low - begin : max(high, low) - begin].flatten())
        rows = by_index[own_index].shape[:-1]
        widths = [max(min(b, last) - max(a, first), 0) for a, b in spans]
        sizes = [width * rows.numel() for width in widths]
        lengths = [len(x) for x in sent]
        received = primitives.all_to_all(torch.cat(sent), self.group, lengths, sizes)
        parts = zip(received.split(sizes), widths, strict=True)
        return torch.cat([x.view(*rows, width) for x, width in parts], -1)

    def _columns(self, index: int, model: LogitsOf) -> tuple[int, int]:
        """Return the first and the end of the columns at this tensor index of the model."""
        if model.group is None:
            return 0, self.vocab
        first, number = even_share(self.vocab, self.tensor, index)
        return first, first + number

    def _columns_of_teacher(self, index: int) -> tuple[int, int]:
        first, number = even_share(self.vocab, len(self.places), index)
        return first, first + number


DivergenceOf = Callable[[Tensor, int], Tensor]
"""(this rank's logits of a microbatch (B, S, V/n), its number) -> the divergence of each token."""


class DistillLoss(TaskLoss):
    """The loss of a run with a teacher: kd_ratio x divergence + (1 - kd_ratio) x cross entropy.

    A validation measures the cross entropy alone, so that it compares with runs without a teacher.
    """

    unit = "tokens"

    def __init__(self, device: torch.device, options: DistillSection, logits_of: LogitsOf):
        super().__init__(device)
        self._options, self._logits_of = options, logits_of

    def divergence_of(self, batch: Microbatches) -> DivergenceOf:
        """Return the divergence of these microbatches from what the teacher says of them."""
        raise NotImplementedError

    def means(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """Return the parts of the loss; {} in a validation, which has one."""
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
        """Return the model's loss of these microbatches beside the teacher."""
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
        """Return (sum of the tokens' losses, number of tokens that count)."""
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
    """The loss beside a teacher that runs.

    teacher: frozen, on the ranks of the model. executor: runs it, forward alone; that of the model
    would expect messages of the model's width. members: its tensor ranks, if they are several data
    ranks of the model.
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
    ):
        super().__init__(teacher.device, options, logits_of)
        self.executors = (executor,)
        self._teacher, self._teacher_logits_of = teacher, teacher_logits_of
        self._members = members

    def divergence_of(self, batch: Microbatches) -> DivergenceOf:
        """Run the teacher on these microbatches; see `DistillLoss`."""
        teacher_logits: dict[int, Tensor] = {}

        def keep(outputs: Tensor, targets: Tensor, m: int) -> tuple[Tensor, Tensor]:
            teacher_logits[m] = self._columns_of_model(outputs)
            return torch.zeros((), device=targets.device), torch.zeros((), device=targets.device)

        inputs, targets, positions = batch
        if self._members is not None:
            inputs = self._members.gathered(inputs) or ()
            positions = self._members.gathered(positions)
        own_executor = self.executors[0]
        forward = self._teacher.forward_and_loss(
            own_executor, inputs, targets, totals_on(self._teacher.device), positions, loss=keep
        )
        own_executor.run(forward)

        def divergence(logits: Tensor, m: int) -> Tensor:
            return vocab_parallel_divergence(
                logits,
                teacher_logits.pop(m),
                self._logits_of.group,
                beta=self._options.beta,
                temperature=self._options.temperature,
            )

        return divergence

    def _columns_of_model(self, outputs: Tensor) -> Tensor:
        """Return the teacher's logits of the columns that this rank of the model has."""
        own_group, teacher = self._logits_of.group, self._teacher_logits_of
        if self._members is not None:
            return self._members.own_columns(teacher.own_columns(outputs), self._logits_of, teacher)
        if (own_group is None) == (teacher.group is None):
            return teacher.own_columns(outputs)
        logits = teacher.whole(outputs)
        if own_group is None:
            return logits
        first, number = vocab_range(logits.shape[-1], own_group)
        return logits[..., first : first + number].clone()  # the other columns are not needed
