"""The stages of one rank as one module: what optimizers, hooks and checkpoints see.

One rule: a stage stands under its own number, so that two of them on a rank may hold parts of one
block; the names that outlive a run are the global ones of the layouts.
"""

from collections.abc import Mapping

from torch import nn

from torchdistpackage.comm.messages import Message
from torchdistpackage.layout.layout import Layout


class TrainStages(nn.ModuleDict):
    """By stage its module. Called with a stage and its input it runs that stage, so that hooks on
    this module see every forward of the rank."""

    def __init__(self, stages: Mapping[int, nn.Module]):
        super().__init__({str(stage): module for stage, module in stages.items()})
        self._of = dict(stages)

    def forward(self, stage: int, x: Message) -> Message:
        return self._of[stage](x)

    def trained(self) -> dict[int, list[nn.Parameter]]:
        """By stage the parameters that get a gradient; one that two stages share is in both."""
        return {s: [p for p in m.parameters() if p.requires_grad] for s, m in self._of.items()}


def tie(stages: Mapping[int, nn.Module], layouts: Mapping[int, Mapping[str, Layout]]) -> None:
    """Parameters of one global name in two stages of a rank become one, that of the first.

    layouts: by stage and local name.
    """
    first: dict[str, nn.Parameter] = {}
    for stage, module in stages.items():
        for name, parameter in list(module.named_parameters()):
            known = first.setdefault(layouts[stage][name].name, parameter)
            if known is not parameter:
                path, _, key = name.rpartition(".")
                setattr(module.get_submodule(path), key, known)
