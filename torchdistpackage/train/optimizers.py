"""The optimizer of a stage, by its name in the YAML; matrices decay, vectors do not."""

from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.config.optim_section import OptimSection


def make_optimizer(
    stage: nn.Module, section: OptimSection, vocab: int
) -> torch.optim.Optimizer | None:
    """None for a stage without parameters that train. vocab: rows of matrices that are not Muon's.

    fused, where torch has it: its kernels leave out a step by `found_inf`, on the device.
    """
    named = [(name, p) for name, p in stage.named_parameters() if p.requires_grad]
    # the biases of all experts are one matrix
    vectors = [p for name, p in named if p.dim() <= 1 or name.endswith("_bias")]
    matrices = [p for name, p in named if p.dim() > 1 and not name.endswith("_bias")]
    decay = section.weight_decay
    adamw = {"lr": section.lr, "betas": section.betas, "eps": section.eps, "fused": True}
    if section.name == "muon":
        turned = [p for p in matrices if p.dim() == 2 and vocab not in p.shape]
        others = [p for p in matrices if p.dim() != 2 or vocab in p.shape]
        rest = _groups((others, decay), (vectors, 0.0))
        return MuonWithAdamW(turned, rest, section, adamw) if named else None
    groups = _groups((matrices, decay), (vectors, 0.0))
    if not groups:
        return None
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum, fused=True)
    return torch.optim.AdamW(groups, **adamw)


def _groups(*kinds: tuple[list[nn.Parameter], float]) -> list[dict[str, Any]]:
    return [{"params": params, "weight_decay": decay} for params, decay in kinds if params]


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon for matrices (Jordan et al., 2024), AdamW for all else, as one optimizer.

    Muon's updates have the size of AdamW's (Liu et al., arXiv:2502.16982), so both follow one
    learning rate. matrices: 2-D. others: param groups.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[dict[str, Any]],
        section: OptimSection,
        adamw: dict[str, Any],
    ):
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(
                matrices,
                lr=section.lr,
                weight_decay=section.weight_decay,
                momentum=section.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
            self._parts.append(muon)
        if others:
            self._parts.append(torch.optim.AdamW(others, **adamw))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        # what is set in a group, or loaded into the state, the parts have to see
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Muon's kernels know no `found_inf`: it is read, which waits for the device."""
        assert closure is None
        if self.found_inf is not None and bool(self.found_inf):
            return
        for part in self._parts:
            part.step()
