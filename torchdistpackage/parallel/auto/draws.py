"""Dropout in shards: equal masks where shards hold the same tensor, different masks where each
holds a slice.

Each random operation of a forward takes one number from a stream that is equal on all shards, and
runs on generators seeded with it. So the streams stay together whatever shapes the shards have. The
stream of ranks is torch's default generator, which activation checkpointing replays; threads, which
share that generator, have one stream each, seeded for each forward.

Where values are split (`Config.split_modules`) the seed is mixed with the number of the shard: in a
dropout layer for all it is given, in any other module for tensors of four dims and more, as
attention scores are.
"""

import re
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from torchdistpackage.comm import collectives
from torchdistpackage.comm.nested import map_tensors
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.random import seed_from, seeded
from torchdistpackage.layout.table import SplitTable
from torchdistpackage.parallel.tensor.weight_reads import whole

RANDOM = frozenset(
    (
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.rrelu,
        F.gumbel_softmax,
        F.multi_head_attention_forward,
        F.scaled_dot_product_attention,
        torch.dropout,
        torch.alpha_dropout,
        torch.feature_dropout,
        torch.feature_alpha_dropout,
        torch.bernoulli,
        torch.lstm,
        torch.gru,
        torch.rnn_tanh,
        torch.rnn_relu,
    )
)
_LOCK = threading.Lock()
"""Lock held over the default generators while an operation runs with its own seed."""

_current: ContextVar["ShardDraws | None"] = ContextVar("tdp_shard_draws", default=None)
_active: list[None] = []
"""One item for each `ShardDraws` of any thread.

A compiler can see that it is empty, and therefore that a block's hooks do nothing; it cannot read a
context variable."""


class ShardDraws(TorchFunctionMode):
    """The random operations of one shard in one forward. next_seed: the stream that all shards have
    in common.
    """

    def __init__(self, rank: int, next_seed: Callable[[], int]):
        super().__init__()
        self.rank, self.next_seed = rank, next_seed
        self.regions: list[bool | None] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in RANDOM or not args or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        # joined before the lock, under which no shard may wait for another
        args, kwargs = map_tensors(args, whole), map_tensors(kwargs, whole)
        seed = self.next_seed()
        if self._is_split(args[0]):
            seed = seed_from(seed, self.rank)
        # shards may be threads of one process, and share its default generators
        with _LOCK, seeded(seed, args[0].device):
            return func(*args, **kwargs)

    def _is_split(self, x: Tensor) -> bool:
        if self.regions and self.regions[-1] is None:
            return False
        return any(everything or x.dim() >= 4 for everything in self.regions)

    def __enter__(self) -> "ShardDraws":
        self._token = _current.set(self)
        _active.append(None)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        _current.reset(self._token)
        _active.pop()
        return super().__exit__(*error)


def draws_as(blocks: Iterable[nn.Module], rank: int) -> None:
    """Make blocks draw as shard `rank` even outside of a `ShardDraws`, as checkpointing calls them
    in the backward."""
    for block in blocks:
        block.__class__ = _drawing(type(block))
        block.__dict__["_draws_as"] = rank


class _DrawingBlock:
    _draws_as: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward  # type: ignore[misc]
        if _current.get() is not None:
            return forward(*args, **kwargs)
        with ShardDraws(self._draws_as, default_draw):
            return forward(*args, **kwargs)


@cache
def _drawing(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_DrawingBlock, kind), {"__module__": kind.__module__})


def default_draw() -> int:
    """Return one number of torch's default generator."""
    return int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))


def stream(seed: int) -> Callable[[], int]:
    """Return a stream of random numbers with its own generator."""
    source = torch.Generator().manual_seed(seed)
    return lambda: int(torch.randint(2**62, (), dtype=torch.int64, generator=source))


def mark_split(module: nn.Module, everything: bool = False) -> None:
    """Note that `module` works on split values; everything: whatever their number of dims."""
    _mark(module, everything or isinstance(module, _DropoutNd))


def mark_alike(module: nn.Module) -> None:
    """Mark a `module` that works on equal tensors inside one that does not."""
    _mark(module, None)


def draw_apart(model: nn.Module, table: SplitTable, sequence_blocks: str = "") -> None:
    """Make dropout differ between ranks wherever each has a slice.

    That is in attention heads, in inputs of row layers with adapters, between a column and a row
    layer, and everywhere in the blocks at the path `sequence_blocks`, between which each rank has
    its slice of the sequence."""
    blocks = re.compile(rf"{re.escape(sequence_blocks)}\.\d+")
    for name, module in model.named_modules():
        adapted = table.layers.get(name.rpartition(".lora_dropout.")[0])
        is_row = adapted is not None and adapted.kind == "row"
        if name in table.attention or name in table.dropouts or is_row:
            mark_split(module)
        elif adapted is not None:
            mark_alike(module)
        elif sequence_blocks and blocks.fullmatch(name):
            mark_split(module, everything=True)


def _mark(module: nn.Module, everything: bool | None) -> None:
    module.register_forward_pre_hook(_ENTERS[everything])
    handle = module.register_forward_hook(_leave, always_call=True)
    # A compiler guards on the id of such a hook, which torch counts over all modules: blocks share
    # a graph only if the ids of their hooks are alike.
    marked_id = -len(module._forward_hooks_always_called)
    for ids in (module._forward_hooks, module._forward_hooks_always_called):
        ids[marked_id] = ids.pop(handle.id)


def _enter(everything: bool | None) -> None:
    if _active and (draws := _current.get()) is not None:
        draws.regions.append(everything)


def _enter_alike(module: nn.Module, args: Any) -> None:
    _enter(None)


def _enter_all(module: nn.Module, args: Any) -> None:
    _enter(True)


def _enter_split(module: nn.Module, args: Any) -> None:
    _enter(False)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    if _active and (draws := _current.get()) is not None and draws.regions:
        draws.regions.pop()


_ENTERS = {None: _enter_alike, True: _enter_all, False: _enter_split}
"""Hooks by the state they enter; they are module functions so that a split model can be pickled."""


def draw_in_recomputation(shard: nn.Module, rank: int) -> None:
    """Make checkpointed blocks of a rank's shard draw the same numbers when they are recomputed.

    They are recomputed in the backward, when the forward's `ShardDraws` has ended. Call it before
    each forward, because checkpointing may be turned on at any time.
    """
    for part in shard.modules():
        checkpoint = part.__dict__.get("_gradient_checkpointing_func")
        if checkpoint is not None and not isinstance(checkpoint, DrawingCheckpoint):
            part.__dict__["_gradient_checkpointing_func"] = DrawingCheckpoint(checkpoint, rank)


class DrawingCheckpoint:
    """A checkpointing function whose blocks draw as `rank`, in the forward and in the
    recomputation.
    """

    def __init__(self, checkpoint: Callable[..., Any], rank: int):
        self.checkpoint, self.rank = checkpoint, rank

    def __call__(self, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def drawing(*inputs: Any, **named: Any) -> Any:
            if _current.get() is not None:
                return block(*inputs, **named)
            with ShardDraws(self.rank, default_draw):
                return block(*inputs, **named)

        return self.checkpoint(drawing, *args, **kwargs)


def may_draw(module: nn.Module, is_known: bool) -> bool:
    """Return whether training forwards may draw. is_known: its dropout rates are attributes of its
    modules.
    """
    rates = (
        value
        for part in module.modules()
        for name, value in vars(part).items()
        if ("drop" in name or name == "p") and isinstance(value, float)
    )
    return not is_known or any(rate > 0 for rate in rates)


def use_draws_of_first(group: Group) -> None:
    """Set all ranks' random generators to the state of the first rank's."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    packed: Any = collectives.broadcast_object([s.numpy().tobytes() for s in states], group)
    first = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in packed]
    torch.set_rng_state(first[0])
    for state in first[1:]:
        torch.cuda.set_rng_state(state)
