"""What the blocks of a small copy are given and give, and why stages cannot stand between them.

A stage runs its blocks once, in their order, and is given the activations of the block before its
first one and nothing else. The calls of the blocks in one forward of the whole copy show which
module of a class has it otherwise.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.comm.nested import leaves_of


@dataclass(frozen=True)
class _BlockCall:
    """One call of a block. output: its activations; more: what it returned beside them."""

    index: int
    given: dict[str, list[Tensor]]
    output: Tensor | None
    more: list[Tensor]


class BlockCalls:
    """The calls of a model's blocks, in their order.

    made: memory of what other modules with parameters returned -> path of the module.
    """

    def __init__(self, model: nn.Module, path: str):
        self.path, self.calls, self.made = path, list[_BlockCall](), dict[int, str]()
        self._model, self.blocks = model, list(model.get_submodule(path).children())
        self._kept: list[Tensor] = []

    @contextmanager
    def seen(self) -> Iterator[None]:
        """A forward inside is recorded."""
        handles = [
            block.register_forward_hook(partial(self._note, index), with_kwargs=True)
            for index, block in enumerate(self.blocks)
        ]
        handles += [
            module.register_forward_hook(partial(self._note_made, path))
            for path, module in self._model.named_modules()
            if not path.startswith(f"{self.path}.") and module._parameters
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note_made(self, path: str, module: Any, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self._kept.append(output)  # so that no other tensor has its memory
            self.made[output.untyped_storage().data_ptr()] = path

    def _note(self, index: int, block: Any, args: Any, kwargs: Any, output: Any) -> None:
        names = list(signature(block.forward).parameters)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = {name: _tensors(value) for name, value in given.items()}
        kept = {name: found for name, found in tensors.items() if found}
        first, *more = output if isinstance(output, tuple | list) else (output,)
        first = first if isinstance(first, Tensor) else None
        self.calls.append(_BlockCall(index, kept, first, _tensors(more)))

    def name(self, index: int) -> str:
        """Path and class of a block."""
        return f"{self.path}.{index} ({type(self.blocks[index]).__name__})"


def unstaged_because(model: nn.Module, path: str, calls: BlockCalls, ids: Tensor) -> str | None:
    """Return which module keeps the blocks at `path` from standing on several stages, and by what;
    None if the calls show none.

    ids: those of the recorded forward.
    """
    num, order = len(calls.blocks), [call.index for call in calls.calls]
    base = path.rpartition(".")[0]
    owner = f"{base} ({type(model.get_submodule(base)).__name__})" if base else type(model).__name__
    if order != list(range(num)):
        uncalled = [i for i in range(num) if i not in order]
        if uncalled:
            return f"{calls.name(uncalled[0])} is not called in a forward of {owner} on token ids"
        return (
            f"{owner} runs its {num} blocks {len(order)} times in a forward, and a stage runs each "
            f"of its own once"
        )
    returned = dict[int, str]()
    for before, call in zip(calls.calls, calls.calls[1:], strict=False):
        name, (first, *more) = calls.name(call.index), call.given.items()
        if before.output is None:
            return f"{calls.name(before.index)} returns no activations, which stages hand on"
        returned |= {id(x): calls.name(before.index) for x in before.more}
        if not _is_same(first[1][0], before.output):
            return (
                f"{name} is not given what the block before it returns, as {owner} computes "
                f"something in between"
            )
        for key, found in more:
            for x in found:
                if not x.is_floating_point() and x.shape == ids.shape and torch.equal(x, ids):
                    return f"{name} is given the token ids ({key}), which the first stage alone has"
                made = returned.get(id(x))
                if made is None and x.requires_grad and not _is_same(x, before.output):
                    made = _made_of(x, model, path)
                if made is None and (other := calls.made.get(x.untyped_storage().data_ptr())):
                    made = f"{other} ({type(model.get_submodule(other)).__name__})"
                if made is not None:
                    return f"{name} is given {key} beside the activations, made by {made}"
    return None


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in leaves_of(value) if isinstance(x, Tensor)]


def _is_same(x: Tensor, other: Tensor) -> bool:
    return x is other or (x.shape == other.shape and torch.equal(x, other))


def _made_of(x: Tensor, model: nn.Module, path: str) -> str:
    """The module outside of the blocks whose parameters make `x`, else the blocks before."""
    names = {id(p): name for name, p in model.named_parameters()}
    found, seen, left = set[str](), set[Any](), [x.grad_fn]
    if x.grad_fn is None and id(x) in names:
        found.add(names[id(x)])
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None and id(variable) in names:
            found.add(names[id(variable)])
        left.extend(following for following, _ in node.next_functions)
    inside = [name for name in found if name.startswith(f"{path}.")]
    if inside or not found:
        return "earlier blocks"
    modules = sorted({name.rpartition(".")[0] for name in found})[:2]
    return " and ".join(f"{x} ({type(model.get_submodule(x)).__name__})" for x in modules)
