"""What a split module offers to saving, loading and the check of its first forward.

Two kinds of modules are split: a copy of the user's module whose layers were replaced
(`SplitModel`), and, in the wing, a wrapper around shards that a plan of rules made.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import LayoutError


class PartOfTensor(Protocol):
    """How a tensor of the unsplit module is shared out."""

    def __call__(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the part of `rank`."""
        ...

    def undo(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensor again from the parts of all ranks."""
        ...


class SplitRoot(nn.Module):
    """The outermost module of what was split.

    module_shards: the shards of this process. devices: where each is. `_group`: ranks that hold
    one shard each, None if this process holds all. `_original`: see `saving.Original`.
    """

    _group: Group | None
    _original: Any
    devices: tuple[torch.device, ...]
    preserve_shards_when_saving = True

    def set_preserve_shards_when_saving(self, value: bool) -> None:
        """With False `state_dict()` is that of the module that was split, see `saving`."""
        self.preserve_shards_when_saving = value

    def full_tensors(self) -> dict[str, Tensor]:
        """Return parameters that no shard holds by itself, whole, by their names in a shard."""
        return {}

    def begin_loading(self) -> None:
        """Prepare for `load_tensor_parallel`, which calls this first."""

    def place_delayed(self) -> None:
        """Bring shards to their devices, if that was to wait for the first forward."""

    def shard_prefix(self, at: int) -> str:
        """Return what stands before names of shard `at` in those of this module."""
        raise NotImplementedError

    def mark_cut(self, name: str, parameter: nn.Parameter) -> None:
        """Note on a parameter, by its name here, how it is cut."""
        raise NotImplementedError

    def call_shards(
        self, modules: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the shards of this process, or a part of them; all ranks do."""
        raise NotImplementedError


def check_is_unsplit(module: object) -> None:
    """Raise LayoutError if `module` is no module, or a part of it is split already."""
    if not isinstance(module, nn.Module):
        raise LayoutError(f"a {type(module).__name__} was given; pass a torch.nn.Module")
    for name, part in module.named_modules():
        if isinstance(part, SplitRoot):
            raise LayoutError(
                f"{name or 'the module'} is a {type(part).__name__} of {len(part.module_shards)} "
                f"shards in this process, split already; pass the module as it was before"
            )
