"""Tensors that go from stage to stage beside the activations.

Gemma 3n and Gemma 4 make an input for each block of the token ids, which the first stage alone has,
and let late blocks read keys and values of earlier ones. A message between stages of such a model
is a tuple: the activations, the inputs of the blocks to come, and for each kind of layer the keys
and values that blocks to come read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn

STATES = "shared_kv_states"
"""Argument of a block: kind of layer -> (keys, values)."""
Message = Tensor | tuple[Tensor, ...]


def first_of(message: Message) -> Tensor:
    """Return the activations of a message, or the token ids."""
    return message[0] if isinstance(message, tuple) else message


class SideInputs:
    """What a stage gets beside the activations, and hands on.

    num_blocks: of the stage. has_inputs: each block has an input of its own. enters, leaves: kinds
    of layers whose keys and values cross the cut before the stage, and the one behind it.
    """

    def __init__(
        self, num_blocks: int, has_inputs: bool, enters: Sequence[str], leaves: Sequence[str]
    ):
        self.num_blocks, self.has_inputs = num_blocks, has_inputs
        self.enters, self.leaves = tuple(enters), tuple(leaves)
        self.inputs: Tensor | None = None
        """(B, S, blocks, D) of this stage's blocks and all that follow."""
        self.states: dict[str, tuple[Tensor, Tensor]] = {}

    def take(self, message: Message) -> Tensor:
        """Return the activations of a message, and keep the others."""
        x, *others = message if isinstance(message, tuple) else (message,)
        if self.has_inputs:
            self.inputs, *others = others
        pairs = zip(others[::2], others[1::2], strict=True)
        self.states = dict(zip(self.enters, pairs, strict=True))
        return x

    def hand_on(self, x: Tensor) -> Message:
        """Return the message for the next stage with the activations `x`."""
        if not (self.has_inputs or self.leaves):
            return x
        inputs = () if self.inputs is None else (self.inputs[:, :, self.num_blocks :],)
        states = (tensor for kind in self.leaves for tensor in self.states[kind])
        return (x, *inputs, *states)

    def clear(self) -> None:
        """Release what the call of the stage has kept."""
        self.inputs, self.states = None, {}


def side_inputs(base: nn.Module, blocks: nn.Module, part: range) -> SideInputs | None:
    """Return what goes beside the activations of the stage with the blocks `part` of `blocks`.

    base: the module that runs them.
    """
    rows = list(blocks.children())
    cuts = (_crossing(rows, part.start), _crossing(rows, part.stop))
    has_inputs = _has_inputs(base)
    if not has_inputs and not any(cuts):
        return None
    return SideInputs(len(part), has_inputs, *cuts)


def _has_inputs(base: nn.Module) -> bool:
    """Return whether a base makes an input for each block, as Gemma 3n and Gemma 4 do."""
    width = getattr(getattr(base, "config", None), "hidden_size_per_layer_input", 0)
    return bool(width) and hasattr(base, "project_per_layer_inputs")


def _crossing(blocks: Sequence[nn.Module], cut: int) -> list[str]:
    """Return the kinds of layers whose earlier keys and values blocks from `cut` on read."""
    layers: list[Any] = [getattr(block, "self_attn", None) for block in blocks]
    stored = {x.layer_type for x in layers[:cut] if getattr(x, "store_full_length_kv", False)}
    read = {x.layer_type for x in layers[cut:] if getattr(x, "is_kv_shared_layer", False)}
    return sorted(stored & read)


def carry(short: nn.Module, config: Any, sides: SideInputs) -> None:
    """Let the base of a stage take its blocks' inputs from `sides`, or put them there.

    short: the base with the stage's blocks alone. config: of the whole base.
    """
    short.__class__ = _carrying(type(short))
    short.__dict__["_sides"] = sides, config


class _Carrying:
    """A base whose inputs for each block come from the stage before it, or go to the next."""

    _sides: tuple[SideInputs, Any]

    @contextmanager
    def _of_all_blocks(self) -> Iterator[None]:
        own, (_, self.config) = self.config, self._sides  # type: ignore[has-type]
        try:
            yield
        finally:
            self.config = own

    def get_per_layer_inputs(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._of_all_blocks():
            return super().get_per_layer_inputs(*args, **kwargs)  # type: ignore[misc]

    def project_per_layer_inputs(self, *args: Any, **kwargs: Any) -> Tensor:
        sides, _ = self._sides
        if sides.inputs is None:
            with self._of_all_blocks():
                made: Tensor = super().project_per_layer_inputs(*args, **kwargs)  # type: ignore[misc]
            sides.inputs = made
        return sides.inputs

    def __reduce_ex__(self, protocol: object) -> tuple:
        return _new_carrying, (type(self).__bases__[1],), vars(self)


@cache
def _carrying(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_Carrying, kind), {"__module__": kind.__module__})


def _new_carrying(kind: type[nn.Module]) -> nn.Module:
    """Create an empty base, when unpickling."""
    return nn.Module.__new__(_carrying(kind))
