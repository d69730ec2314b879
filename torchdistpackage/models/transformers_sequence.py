"""Sequence parallelism between the blocks of transformers' models: each rank has its part."""

from typing import Any

from torch import nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group


def split_between(blocks: nn.Module, here: range, all_blocks: range, group: Group) -> None:
    """Let the first of all blocks take this rank's part of the sequence, and join behind the last.

    here: those of this stage.
    """
    modules = list(blocks.children())

    def take_part(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        part = collectives.scatter(x, 1, group)
        return ((part, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": part})

    def join(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (join(module, args, output[0]), *output[1:])
        return collectives.gather(output, 1, group)

    if here.start == all_blocks.start:
        modules[0].register_forward_pre_hook(take_part, with_kwargs=True)
    if here.stop == all_blocks.stop:
        modules[-1].register_forward_hook(join)
