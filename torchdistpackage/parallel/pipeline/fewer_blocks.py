"""A transformers model with fewer of its blocks: what a stage of a pipeline runs
(partition/hf_decoder.py).

One rule: the family's own forward runs, and nothing of it is written anew. Activations enter where
the first block is called and leave where the last one returns, whatever was made of them before.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.errors import ScheduleError


class BlockNeighbours:
    """What is called before the blocks and what behind them: names of modules beside their list,
    and beside what holds it. As registered, until a run has shown it."""

    def __init__(self, base: nn.Module, path: str):
        self.before: set[str] = set()
        self.behind: set[str] = set()
        self._modules: dict[str, nn.Module] = {}
        self._first = base.get_submodule(path)[0]
        steps = path.split(".")
        for depth, step in enumerate(steps):
            above = ".".join(steps[:depth])
            names = list(base.get_submodule(above)._modules)
            for i, name in enumerate(names):
                child = base.get_submodule(above)._modules[name]
                if name != step and child is not None:
                    full = ".".join([*steps[:depth], name])
                    self._modules[full] = child
                    (self.before if i < names.index(step) else self.behind).add(full)

    @contextmanager
    def seen(self) -> Iterator[None]:
        """A forward of the model inside shows which are called when; the others stay everywhere."""
        before: set[str] = set()
        behind: set[str] = set()
        now = [before]

        def note(name: str) -> None:
            now[0].add(name)

        handles = [
            module.register_forward_pre_hook(lambda *_, name=name: note(name))
            for name, module in self._modules.items()
        ]
        handles.append(self._first.register_forward_pre_hook(lambda *_: now.__setitem__(0, behind)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.before, self.behind = before - behind, behind - before


class BlockActivations:
    """Of the call of a stage that runs: what enters its first block, what left its last one.

    is_other: whether that first block would have been given something else.
    """

    def __init__(self) -> None:
        self.enters: Tensor | None = None
        self.left: Any = None
        self.is_other = False

    def take(self) -> Tensor:
        """What left.

        Raises:
            ScheduleError: the model did not call its block, or it returned something else.
        """
        if not isinstance(self.left, Tensor):
            raise ScheduleError(
                "the longest list of modules in this model is not a row of blocks that hand on "
                "activations; cut it with flatten_model"
            )
        return self.left


class _BoundaryBlock:
    """A block at an end of its stage.

    Outside of the block's own call, which checkpointing repeats when other activations are here.
    """

    _gate: tuple[BlockActivations, bool, bool]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        passage, takes, leaves = self._gate
        if takes:
            given = args[0] if args else kwargs["hidden_states"]
            x = passage.enters
            if x is None and passage.is_other:
                raise ScheduleError(
                    f"{type(self).__name__} is run again from outside of its own call, with what a "
                    f"stage does not begin with; use a newer transformers, whose blocks "
                    f"checkpoint themselves, or no activation checkpointing"
                )
            if x is not None and given is not x:
                passage.is_other = True
                if args:
                    args = (x, *args[1:])
                else:
                    kwargs["hidden_states"] = x
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if leaves:
            passage.left = output[0] if isinstance(output, tuple) else output
        return output

    def __reduce_ex__(self, protocol: object) -> tuple:
        return _new_boundary, (type(self).__bases__[1],), vars(self)


class _SkippedModule(nn.Module):
    """In place of what another stage runs before the blocks: an embedding that adds nothing, or
    something that changes nothing."""

    def forward(self, x: Tensor | None = None, *_: object, **__: object) -> Tensor:
        is_activation = x is not None and x.is_floating_point() and x.dim() > 2
        return x if is_activation else torch.zeros((), device=None if x is None else x.device)


def cut_blocks(
    base: nn.Module,
    path: Sequence[str],
    blocks: range,
    ends: tuple[bool, bool],
    around: BlockNeighbours,
    passage: BlockActivations,
    above: str = "",
) -> nn.Module:
    """`base` with some of its blocks, which keep their names, and without what others run."""
    short, step = copy(base), path[0]
    short._modules = dict(base._modules)
    short.config = copy(base.config)
    short.config.num_hidden_layers = len(blocks)
    if "layer_types" in vars(base.config):  # in others it is computed
        short.config.layer_types = [base.config.layer_types[i] for i in blocks]
    inner = base._modules[step]
    if len(path) > 1:
        name = f"{above}{step}."
        short._modules[step] = cut_blocks(inner, path[1:], blocks, ends, around, passage, name)
    else:
        kept = nn.ModuleList()
        for i in blocks:
            kept.add_module(str(i), inner[i])
        for i in {blocks[0], blocks[-1]}:
            takes, leaves = i == blocks[0] and not ends[0], i == blocks[-1]
            kept._modules[str(i)] = _with_boundary(inner[i], (passage, takes, leaves))
        short._modules[step] = kept
    is_first, is_last = ends
    for child, module in base._modules.items():
        if f"{above}{child}" in around.behind and not is_last:
            short._modules[child] = nn.Identity()
        elif f"{above}{child}" in around.before and not is_first and _is_own(module):
            short._modules[child] = _SkippedModule()
    return short


@cache
def _boundary_of(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_BoundaryBlock, kind), {"__module__": kind.__module__})


def _new_boundary(kind: type[nn.Module]) -> nn.Module:
    made = _boundary_of(kind)
    return made.__new__(made)


def _with_boundary(block: nn.Module, gate: tuple[BlockActivations, bool, bool]) -> nn.Module:
    made = copy(block)
    made.__class__ = _boundary_of(type(block))
    made._gate = gate
    return made


def _is_own(module: nn.Module) -> bool:
    """Whether one stage alone is to run it; tables of positions are made on each."""
    return isinstance(module, nn.Dropout) or any(True for _ in module.parameters())


def path_to_blocks(base: nn.Module) -> str:
    """Where the longest list of modules is, of those that are in no other."""
    lists: dict[str, int] = {}
    for name, module in base.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{n}.") for n in lists):
            lists[name] = len(module)
    if not any(lists.values()):
        raise ScheduleError(
            f"{type(base).__name__} has no list of blocks; its children are "
            f"{', '.join(n for n, _ in base.named_children())}; cut it with flatten_model"
        )
    return max(lists, key=lambda name: lists[name])
