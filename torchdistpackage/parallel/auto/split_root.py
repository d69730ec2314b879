"""The interface of a split module to saving, loading and the check of its first forward.

Two kinds of modules are split: a copy of the user's module whose layers were replaced
(`SplitModel`), and, in the wing, a wrapper around shards that a plan of rules made.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import LayoutError


class PartOfTensor(Protocol):
    """The split of a tensor of the unsplit module."""

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
        """Choose whether `state_dict()` returns shards; with False it returns the original
        module's, see `saving`.
        """
        self.preserve_shards_when_saving = value

    def full_tensors(self) -> dict[str, Tensor]:
        """Return, in full, the parameters that no single shard holds, by their names in a shard."""
        return {}

    def begin_loading(self) -> None:
        """Prepare for `load_tensor_parallel`, which calls this first."""

    def place_delayed(self) -> None:
        """Move shards to their devices, if that was delayed until the first forward."""

    def shard_prefix(self, at: int) -> str:
        """Return the prefix of shard `at`'s names in this module."""
        raise NotImplementedError

    def mark_cut(self, name: str, parameter: nn.Parameter) -> None:
        """Record on a parameter, by its name here, how it is split."""
        raise NotImplementedError

    def call_shards(
        self, modules: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call all or some shards of this process; all ranks do."""
        raise NotImplementedError


def check_is_unsplit(module: object) -> None:
    """Raise LayoutError if `module` is not a module or has a split submodule."""
    if not isinstance(module, nn.Module):
        raise LayoutError(f"a {type(module).__name__} was given; pass a torch.nn.Module")
    for name, part in module.named_modules():
        if isinstance(part, SplitRoot):
            raise LayoutError(
                f"{name or 'the module'} is a {type(part).__name__} of {len(part.module_shards)} "
                f"shards in this process, split already; pass the module as it was before"
            )


class TakesNoAdapters(nn.Module):
    """Base class of split modules whose shards would each get separate adapters, which is
    refused.
    """

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        if (adapters := _being_put_into()) is not None:
            check_is_alone(self, adapters)
        return super().named_modules(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "peft_config":  # by which peft marks a model that it has put adapters into
            check_is_alone(self, value)
        super().__setattr__(name, value)


_PEFT_TUNERS = "peft.tuners.tuners_utils"


def _being_put_into() -> dict[str, Any] | None:
    """Return the adapters that peft is about to put into a model's layers, whose modules it lists
    before it replaces the first.

    It calls nothing else of the model before that, and a later refusal would leave layers replaced
    and parameters frozen. torch lists the modules of a model around this one.
    """
    if _PEFT_TUNERS not in sys.modules:
        return None
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "torch.nn.modules.module":
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != _PEFT_TUNERS:
        return None
    if frame.f_code.co_name != "inject_adapter":
        return None
    return dict(frame.f_locals["self"].peft_config)


def check_is_alone(module: Any, adapters: dict[str, Any]) -> None:
    """Raise LayoutError if a module that got `adapters` has several shards."""
    inner = getattr(module, "wrapped_model", module)
    if len(inner.module_shards) > 1 or inner._group is not None:
        kinds = {adapter: config.peft_type.value for adapter, config in adapters.items()}
        raise LayoutError(
            f"adapters {kinds} were put into the layers of {type(module).__name__}, which is "
            "split, so each shard has different ones; call get_peft_model on the unsplit model, "
            "then tensor_parallel"
        )
