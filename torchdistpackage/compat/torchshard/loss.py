"""torchshard.nn's loss: cross entropy as a module."""

import torch
from torch import Tensor, nn

from torchdistpackage.compat.torchshard import functional
from torchdistpackage.compat.torchshard.marks import SplitTensor


class ParallelCrossEntropyLoss(nn.Module):
    """`torch.nn.CrossEntropyLoss`, also for logits that are split by class."""

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ):
        super().__init__()
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = functional.reduction_of(size_average, reduce, reduction)
        self.label_smoothing = label_smoothing

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling() and isinstance(input, SplitTensor):
            return _without_graph(self, input, target)  # a compiled graph would lose the mark
        return self.loss(input, target)

    def loss(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.parallel_cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


@torch._disable_dynamo
def _without_graph(loss: ParallelCrossEntropyLoss, input: Tensor, target: Tensor) -> Tensor:
    return loss.loss(input, target)
