"""Make the optimizer of a stage from its row in config/optimizers.py.

Matrices have weight decay; vectors and norms have none.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.config.optim_section import OptimSection
from torchdistpackage.errors import ConfigError
from torchdistpackage.launch.entrypoint import user_object
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import mark_parameter
from torchdistpackage.lazy import resolve
from torchdistpackage.optim.muon import Muon
from torchdistpackage.train.decay import decaying
from torchdistpackage.train.update import LR_SCALE

Groups = list[dict[str, Any]]


def make_optimizer(
    stage: nn.Module,
    section: OptimSection,
    tables: Collection[str],
    global_names: Mapping[str, str] | None = None,
    layouts: Mapping[str, Layout] | None = None,
) -> torch.optim.Optimizer | None:
    """Return the optimizer of a stage; None for a stage without trained parameters.

    tables: names of embeddings and heads, which muon and adamw8bit leave to AdamW: a row of an
    embedding has gradients with its token alone, and transformers' Trainer gives it no 8 bits
    either. global_names: of parameters by their names in `stage`, which optim.groups matches.
    layouts: by the same names; muon learns from them which matrices are fused, stacked or split.
    """
    global_names = {} if global_names is None else global_names
    layouts = {} if layouts is None else layouts
    named = [(name, p) for name, p in stage.named_parameters() if p.requires_grad]
    is_table = {id(p): name in tables for name, p in named}
    shrinks = decaying(stage)
    vectors = [p for name, p in named if name not in shrinks]
    matrices = [p for name, p in named if name in shrinks]
    settings = {id(p): _settings(section, global_names.get(name, name)) for name, p in named}

    def _groups(decaying: list[nn.Parameter], others: list[nn.Parameter] | None = None) -> Groups:
        by: dict[tuple[float, float], list[nn.Parameter]] = {}
        for p in decaying:
            by.setdefault(settings[id(p)], []).append(p)
        for p in others or []:
            by.setdefault((settings[id(p)][0], 0.0), []).append(p)
        return [
            {"params": params, "weight_decay": decay, **_rate(section.lr, lr)}
            for (lr, decay), params in by.items()
        ]

    groups = _groups(matrices, vectors)
    if not groups:
        return None
    spec = section.spec
    make = resolve(spec.make)
    if spec.takes == "all":
        optimizer = make(groups, section)
        return optimizer if spec.leaves_out else JointOptimizer(optimizer)
    inner = [p for p in matrices if not is_table[id(p)]]
    outer = [p for p in matrices if is_table[id(p)]]
    if spec.takes == "blocks":
        muon_groups, other_groups = _groups(inner, vectors), _groups(outer)
    else:
        by_parameter = {id(p): layouts[name] for name, p in named if name in layouts}
        flat = [p for p in inner if not _is_matrix(p, by_parameter.get(id(p)))]
        unassigned = set(map(id, flat))
        muon_groups = _groups([p for p in inner if id(p) not in unassigned])
        other_groups = _groups([*outer, *flat], vectors)
    parts = ((make, muon_groups), (adamw, other_groups))
    return JointOptimizer(*(make(groups, section) for make, groups in parts if groups))


def _is_matrix(p: nn.Parameter, layout: Layout | None) -> bool:
    """Return whether muon updates a parameter: a matrix, or the matrices of several experts.

    It marks the parameter with its layout, which tells Muon its parts.
    """
    if layout is None:
        return p.dim() == 2
    if layout.is_matrix:
        mark_parameter(p, layout, None, 0)
    return layout.is_matrix


def _settings(section: OptimSection, name: str) -> tuple[float, float]:
    """Return the learning rate and weight decay of a decaying parameter, by its global name."""
    index = section.group_of(name)
    if index is None:
        return section.lr, section.weight_decay
    group = section.groups[index]
    return (
        section.lr if group.lr is None else group.lr,
        section.weight_decay if group.weight_decay is None else group.weight_decay,
    )


def _rate(base: float, lr: float) -> dict[str, float]:
    """Return a group's extra options if its learning rate differs from the run's."""
    return {} if lr == base else {"lr": lr, LR_SCALE: lr / base}


def adamw(groups: Groups, section: OptimSection) -> torch.optim.Optimizer:
    """Return torch's fused AdamW, whose kernels read `found_inf` on the device and skip the step
    accordingly.
    """
    return torch.optim.AdamW(
        groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True
    )


def adamw8bit(groups: Groups, section: OptimSection) -> torch.optim.Optimizer:
    """Return AdamW with state in 8 bits (Dettmers et al., arXiv:2110.02861). bitsandbytes, of the
    extra `int8`, is imported here.
    """
    from bitsandbytes.optim import AdamW8bit

    class AdamW8bitOfOne(AdamW8bit):
        """AdamW in 8 bits whose state omits, between steps, the tables shared by all parameters, so
        that no checkpoint has them.
        """

        @torch.no_grad()
        def update_step(self, group: Any, p: Any, gindex: int, pindex: int) -> None:
            tables = {"qmap1": self.name2qmap["dynamic"], "qmap2": self.name2qmap["udynamic"]}
            state = self.state[p]
            state.update({key: table.to(p.device) for key, table in tables.items()})
            super().update_step(group, p, gindex, pindex)
            for key in tables:
                del state[key]

    return AdamW8bitOfOne(groups, lr=section.lr, betas=section.betas, eps=section.eps)


def sgd(groups: Groups, section: OptimSection) -> torch.optim.Optimizer:
    """Return torch's fused SGD."""
    return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum, fused=True)


def adafactor(groups: Groups, section: OptimSection) -> torch.optim.Optimizer:
    """Return torch's Adafactor, whose relative step `lr` bounds."""
    return torch.optim.Adafactor(groups, lr=section.lr)


def muon(groups: Groups, section: OptimSection) -> torch.optim.Optimizer:
    """Return Muon. With `moonlight` its updates have the size of AdamW's, so that both follow one
    learning rate.
    """
    return Muon(
        groups,
        section.lr,
        momentum=section.momentum,
        scale=section.muon_scale,
        exchange=section.muon_exchange,
    )


def from_user(groups: Groups, section: OptimSection) -> torch.optim.Optimizer:
    """Return the optimizer that `optim.target` makes.

    Raises:
        ConfigError: it returned something else.
    """
    assert section.target is not None
    optimizer: object = user_object(section.target)(groups, lr=section.lr, **section.args)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optim.target {section.target} returned a {type(optimizer).__name__}; return a "
            "torch.optim.Optimizer of the parameter groups that it is given"
        )
    return optimizer


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, which skips a step by `found_inf`.

    The inner optimizers see whatever is set in a group or loaded into the state.
    """

    found_inf: Tensor | None = None

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    @property
    def takes_split(self) -> bool:
        """True if each inner optimizer updates parameters that ranks split as one process would."""
        return all(
            getattr(part, "takes_split", type(part) is torch.optim.AdamW) for part in self.parts
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step all inner optimizers.

        Their kernels do not read `found_inf`, so the host reads it, which waits for the device.
        """
        assert closure is None
        if self.found_inf is not None and bool(self.found_inf):
            return
        for part in self.parts:
            part.step()
