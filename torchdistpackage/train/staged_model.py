"""The stages of one rank and their loss, as used by training, validation and generation."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from torchdistpackage.comm.tensor_meta import Message
from torchdistpackage.data.source import DataBatch
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.parallel.pipeline.executor import Executor, Forward
from torchdistpackage.parallel.pipeline.losses import Losses
from torchdistpackage.parallel.pipeline.microbatches import cut_tensor
from torchdistpackage.parallel.tensor.attention import SequenceAttention
from torchdistpackage.plan.run_plan import Plan

LossFn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(outputs of the last stage, targets) -> (sum of losses, number of summed losses)."""
MicrobatchLoss = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""A loss that also gets the number of the microbatch."""


class Microbatches(NamedTuple):
    """The micro-batches of one pass on the rank's device; empty for inputs that only other ranks
    have.

    position_ids: on every rank, of full sequences; None if the data has none.
    """

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    position_ids: Sequence[Tensor] | None


class CompiledCall(Protocol):
    """A compiled block. refused: why it could not be compiled. is_on: False to run it eagerly.

    around: called with a function that calls the block, and with its arguments, outside the graph;
    None: nothing is called.
    """

    name: str
    kind: str
    refused: str
    is_on: bool
    around: Callable[..., Any] | None


class TrainStages(nn.ModuleDict):
    """The stages of one rank as one module: what optimizers, hooks and checkpoints see.

    Called with a stage and its input, it runs that stage. Each stage is named by its number, so
    that two of them may hold parts of one block; names that outlive a run are those of the layouts.
    """

    def __init__(self, stages: Mapping[int, nn.Module]):
        super().__init__({str(stage): module for stage, module in stages.items()})
        self._of = dict(stages)
        self.compiled: list[CompiledCall] = []
        """Blocks that are called as one graph, see compiled.py."""

    def forward(self, stage: int, x: Message, **given: Tensor) -> Message:
        return self._of[stage](x, **given)

    def trained(self) -> dict[int, list[nn.Parameter]]:
        """Return, by stage, the parameters that get a gradient; one shared by two stages is in
        both.
        """
        return {s: [p for p in m.parameters() if p.requires_grad] for s, m in self._of.items()}


@dataclass
class StagedModel:
    """The stages, layouts and loss of this rank. `stage` holds all stages of the rank, and
    `layouts` uses local names.

    autocast: the type that forwards run in, if not that of the weights. sequence: of each sequence,
    what this rank has.
    """

    plan: Plan
    rank: int
    device: torch.device
    stage: TrainStages
    layouts: dict[str, Layout]
    loss: LossFn
    autocast: torch.dtype | None
    sequence: SequenceAttention

    def __post_init__(self) -> None:
        coord, placement = self.plan.topology.dense.coord(self.rank), self.plan.schedule.placement
        self.has_first = coord["pipe"] == placement[0]
        self.has_last = coord["pipe"] == placement[-1]
        # of the ranks that compute one loss, one reports it
        self.tells_loss = self.has_last and coord["tensor"] == 0
        weight = next(self.stage.parameters(), None)
        self._dtype = None if weight is None else weight.dtype
        self._sizes = [self.plan.samples_per_microbatch] * self.plan.schedule.num_microbatches

    def saved(self) -> dict[str, tuple[Tensor, Layout]]:
        """Return the checkpointed tensors by local name; weights that LoRA freezes come from
        model.hf instead.
        """
        tensors: dict[str, tuple[Tensor, Layout]] = {
            name: (p, self.layouts[name]) for name, p in self.stage.named_parameters()
        }
        for stage, module in self.stage.named_children():
            if callable(list_buffers := getattr(module, "buffer_layouts", None)):
                buffers: dict[str, Layout] = list_buffers()
                tensors |= {f"{stage}.{n}": (module.get_buffer(n), x) for n, x in buffers.items()}
        return {
            name: list_buffers
            for name, list_buffers in tensors.items()
            if self.plan.is_trained(list_buffers[1].name)
        }

    def forward(self, stage: int, x: Message, position_ids: Tensor | None = None) -> Message:
        """Run one of this rank's stages, in the precision of the run. position_ids: see
        `DataBatch`.
        """
        kwargs = {} if position_ids is None else {"position_ids": position_ids}
        with self.precision():
            return self.stage(stage, x, **kwargs)

    def forward_and_loss(
        self,
        executor: Executor,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        totals: Tensor,
        position_ids: Sequence[Tensor] | None = None,
        loss: MicrobatchLoss | None = None,
    ) -> Forward:
        """Return the forward of micro-batches; its last stage returns the sum of their losses.

        inputs, targets: of each microbatch `own_part`, where the first and the last stage are.
        totals: (loss sum, count) of all of them are added to it if this rank reports them.
        position_ids: of each microbatch, on every rank, of whole sequences. loss: in place of that
        of the model.
        """
        # ranks that compute the same loss add it up where nobody reads it
        losses = Losses(
            [1] * executor.schedule.num_microbatches,
            counted=True,
            totals=totals if self.tells_loss else None,
        )

        def forward(stage: int, m: int, received: Message) -> Message:
            x = inputs[m] if executor.is_first_stage(stage) else received
            output = self.forward(stage, x, None if position_ids is None else position_ids[m])
            if not executor.is_last_stage(stage):
                return output
            with self.precision():
                if loss is None:
                    value = self.loss(output, targets[m])
                else:
                    value = loss(output, targets[m], m)
            return losses.put(m, value)

        return forward

    def microbatches(
        self, batch: DataBatch, take_slice: Callable[[Tensor], Tensor] | None = None
    ) -> Microbatches:
        """Cut a batch into the micro-batch inputs that this rank's stages need.

        take_slice: returns this rank's slice of inputs or targets; default: they are slices
            already.
        """
        take_slice, positions = take_slice or self.to_device, batch.position_ids
        return Microbatches(
            cut_tensor(take_slice(batch.inputs), self._sizes) if self.has_first else (),
            cut_tensor(take_slice(batch.targets), self._sizes) if self.has_last else (),
            None if positions is None else cut_tensor(self.to_device(positions), self._sizes),
        )

    def own_part(self, x: Tensor) -> Tensor:
        """Return this rank's slice of ids or targets (B, S, ...), on its device."""
        return self.to_device(self.sequence.part(x))

    def to_device(self, x: Tensor) -> Tensor:
        """Return a tensor on this rank's device; values that are not ids get the weights'
        precision.
        """
        x = x.to(self.device, non_blocking=True)
        return x if self._dtype is None or not x.is_floating_point() else x.to(self._dtype)

    def precision(self) -> AbstractContextManager[object]:
        """Return the context manager in which forwards run."""
        dtype = self.autocast
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)


def check_declared(stage: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """Refuse a parameter with a gradient but no layout, because its gradient would not be summed
    over ranks.
    """
    # the first word of a name is the number of the stage
    names = (name for name, _ in stage.named_parameters() if name not in layouts)
    if missing := [name.partition(".")[2] for name in names]:
        raise LayoutError(
            f"{len(missing)} parameters have no layout: {', '.join(missing[:5])}; the module that "
            f"makes them declares in layouts() what each is split and replicated over"
        )
