"""The blocks of a stage of a decoder, and what goes into the first of them and out of the last.

A family's own forward calls the blocks, with what it has made of its inputs. The first block of a
stage takes in place of that what the stage before sent, and with sequence parallelism this rank's
part. All blocks of a stage are of one class, those in the middle too, and all this is outside of a
block's own call: so blocks that are alike share what `torch.compile` makes of one, and activation
checkpointing, which calls a block again when other activations are here, repeats none of it.
"""

from functools import cache
from inspect import signature
from typing import Any

from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import ScheduleError


class BlockActivations:
    """Of a stage's call: what enters its first block, what left its last one.

    is_first, is_last: of all stages. There the model's own forward comes before, and goes on.
    group: of ranks that have a part each of the sequence between blocks; None: they have it whole.
    is_other: whether the first block would have been given something else.
    copies_input: whether the family's forward changes in place what it is given.
    """

    def __init__(self, is_first: bool, is_last: bool) -> None:
        self.is_first, self.is_last = is_first, is_last
        self.group: Group | None = None
        self.enters: Tensor | None = None
        self.left: Any = None
        self.is_other = self.copies_input = False

    @property
    def num_shares(self) -> int:
        """Ranks that have a part each of a sequence."""
        return 1 if self.group is None else self.group.size()

    def whole_like(self, x: Tensor) -> Tensor:
        """x (B, S/n, D), or zeros for all positions where x is a part, or of several streams
        (B, S, N, D): a family's forward takes its shapes from embedded tokens."""
        if self.num_shares == 1 and x.dim() == 3:
            return x.clone() if self.copies_input else x
        batch, length, *_, dim = x.shape
        return x.new_zeros(()).expand(batch, length * self.num_shares, dim)

    def enter(self, given: Tensor, name: str) -> Tensor:
        """What the first block gets, in place of what the family's forward gave it.

        Raises:
            ScheduleError: it is called outside of the stage's call. name: its class.
        """
        if self.is_first:
            return given if self.group is None else collectives.scatter(given, 1, self.group)
        x = self.enters
        if x is None and self.is_other:
            raise ScheduleError(
                f"{name} is run again from outside of its own call, with an input that no stage "
                f"begins with; use a newer transformers, whose blocks checkpoint themselves, or "
                f"no activation checkpointing"
            )
        if x is None or given is x:
            return given
        self.is_other = True
        return x

    def leave(self, output: Any) -> Any:
        """Keep what the last block returns; what the family's forward is to go on with."""
        self.left = x = output[0] if isinstance(output, tuple | list) else output
        if self.group is None:
            return output
        x = collectives.gather(x, 1, self.group) if self.is_last else self.whole_like(x)
        return type(output)((x, *output[1:])) if isinstance(output, tuple | list) else x

    def take(self) -> Tensor:
        """The outputs; raises ScheduleError if the block was not called, or returned no tensor."""
        if not isinstance(self.left, Tensor):
            raise ScheduleError(
                "the longest list of modules in this model is not a row of blocks that hand on "
                "activations; cut it with flatten_model"
            )
        return self.left


def make_gated(block: nn.Module, activations: BlockActivations, takes: bool, leaves: bool) -> None:
    """Let a block have what enters its stage (takes), and keep what leaves it (leaves)."""
    block.__class__ = _gated(type(block))
    block.__dict__["_gate"] = activations, takes, leaves


class _GatedBlock:
    _gate: tuple[BlockActivations, bool, bool]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        activations, takes, leaves = self._gate
        if takes and args:
            args = (activations.enter(args[0], type(self).__name__), *args[1:])
        elif takes:
            name = "hidden_states"
            if name not in kwargs:
                name = next(iter(signature(self.forward).parameters))  # type: ignore[attr-defined]
            kwargs[name] = activations.enter(kwargs[name], type(self).__name__)
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return activations.leave(output) if leaves else output

    def __reduce_ex__(self, protocol: object) -> tuple:
        return _new_gated, (type(self).__bases__[1],), vars(self)


@cache
def _gated(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_GatedBlock, kind), {"__module__": kind.__module__})


def _new_gated(kind: type[nn.Module]) -> nn.Module:
    return nn.Module.__new__(_gated(kind))
