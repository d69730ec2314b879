"""Gates on a decoder stage's blocks: they feed its first block, and catch its last block's output.

The model's own forward calls the blocks with what it computed from its inputs. The gate of a
stage's first block replaces that by the message of the previous stage or, with sequence
parallelism, by this rank's slice. All blocks of a stage have one class, and the gates are outside
a block's own call. So equal blocks share one graph of `torch.compile`, and activation
checkpointing, which calls a block again when other activations are stored here, does not repeat the
gates.
"""

from functools import cache
from inspect import signature
from typing import Any

from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.partition.side_inputs import (
    STATES,
    Message,
    SideInputs,
)


class BlockActivations:
    """The activations of a stage's call: the input of its first block, the output of its last.

    is_first, is_last: whether it is the model's first or last stage, where the model's own forward
        runs before or after the blocks.
    group: ranks that each have a slice of the sequence between blocks; None: no sequence
        parallelism.
    is_other: whether the gate has replaced the first block's input.
    copies_input: whether the model's forward changes its input in place.
    token_dim: dim of the sequence in activations, 2 where streams come first, (N, B, S, D).
    sides: what goes from stage to stage beside the activations.
    """

    def __init__(self, is_first: bool, is_last: bool) -> None:
        self.is_first, self.is_last = is_first, is_last
        self.group: Group | None = None
        self.enters: Tensor | None = None
        self.left: Any = None
        self.is_other = self.copies_input = False
        self.token_dim = 1
        self.sides: SideInputs | None = None

    @property
    def num_shares(self) -> int:
        """Number of ranks that share a sequence."""
        return 1 if self.group is None else self.group.size()

    def whole_like(self, x: Tensor) -> Tensor:
        """Return a tensor of the full sequence's shape, from which the model's forward takes
        shapes.

        It is x itself if x is (B, S, D), and zeros if x is a slice (B, S/n, D) or has several
        streams (B, S, N, D) or (N, B, S, D).
        """
        if self.token_dim == 2:
            x = x.new_zeros(()).expand(x.shape[1:])
        if self.num_shares == 1 and x.dim() == 3:
            return x.clone() if self.copies_input else x
        batch, length, *_, dim = x.shape
        return x.new_zeros(()).expand(batch, length * self.num_shares, dim)

    def enter(self, block_input: Tensor, name: str) -> Tensor:
        """Return the input of the first block, instead of the one that the model's forward gave it.

        name: class of the block, for the error.

        Raises:
            ScheduleError: the block is called outside of the stage's call.
        """
        if self.is_first:
            return (
                block_input
                if self.group is None
                else collectives.scatter(block_input, self.token_dim, self.group)
            )
        x = self.enters
        if x is None and self.is_other:
            raise ScheduleError(
                f"{name} is run again from outside of its own call, with an input that no stage "
                f"begins with; use a newer transformers, whose blocks checkpoint themselves, or "
                f"no activation checkpointing"
            )
        if x is None or block_input is x:
            return block_input
        self.is_other = True
        return x

    def leave(self, output: Any) -> Any:
        """Keep the last block's output; return what the model's forward continues with."""
        self.left = x = output[0] if isinstance(output, tuple | list) else output
        if self.group is None:
            return output
        whole = collectives.gather(x, self.token_dim, self.group) if self.is_last else None
        x = self.whole_like(x) if whole is None else whole
        return type(output)((x, *output[1:])) if isinstance(output, tuple | list) else x

    def take(self) -> Message:
        """Return the last block's output, with what goes beside it.

        Raises:
            ScheduleError: it is missing or not a tensor.
        """
        if not isinstance(self.left, Tensor):
            raise ScheduleError(
                "the longest list of modules in this model is not a row of blocks that hand on "
                "activations; cut it with flatten_model"
            )
        return self.left if self.sides is None else self.sides.hand_on(self.left)


def make_gated(block: nn.Module, activations: BlockActivations, takes: bool, leaves: bool) -> None:
    """Gate a block: it takes the stage's input (takes), or its output is kept (leaves)."""
    block.__class__ = _gated(type(block))
    block.__dict__["_gate"] = activations, takes, leaves


class _GatedBlock:
    """A block whose call passes through the gates of its stage."""

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
        states = kwargs.get(STATES)
        if takes and states is not None and activations.sides is not None:
            states.update(activations.sides.states)
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if leaves and states is not None and activations.sides is not None:
            activations.sides.states = dict(states)
        return activations.leave(output) if leaves else output

    def __reduce_ex__(self, protocol: object) -> tuple:
        return _new_gated, (type(self).__bases__[1],), vars(self)


@cache
def _gated(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the gated subclass of a block's class, one for each class."""
    return type(kind.__name__, (_GatedBlock, kind), {"__module__": kind.__module__})


def _new_gated(kind: type[nn.Module]) -> nn.Module:
    """Create an empty gated block, when unpickling."""
    return nn.Module.__new__(_gated(kind))
