"""Context parallelism for transformers models: attention through its `AttentionInterface`, and
modules that mix tokens in another way.

Attention is in one of two ways. `parts`: by this package, which exchanges keys and values as it
computes. `keys`: by the class's own function, for this rank's queries and the keys of all ranks,
under the rows of transformers' own mask; so scores with caps, sinks or chunks are right too.
Recurrent layers run on this rank's part, and their states cross the ranks (recurrent.py). A module
that is gathered gets the whole sequence, of some of the samples where the ranks can share these,
and hands on this rank's part; recurrences of no known form are run so.

transformers hands a mask with four dims to every layer unchanged. So with `parts` document ids
travel as a mask (B, 1, 1, S): the document of each position of the full sequence.
"""

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.nested import leaves_of, map_leaves
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.context.model import ContextSequence
from torchdistpackage.parallel.context.parts import by_position
from torchdistpackage.parallel.context.recurrent import SEQUENCE, scan_over
from torchdistpackage.parallel.context.visibility import Documents

PARTS = "tdp_context"
"""Name of our own attention in transformers, which makes no masks for a name without a mask
function.
"""
KEYS = {"sdpa": "tdp_context_sdpa", "eager": "tdp_context_eager"}
"""Names of a class's own attention over all ranks' keys, by what runs it."""
ATTENDS = "_tdp_attends"
"""Attribute of modules that have called one of these functions."""
_DOCUMENTS = "_tdp_documents"
_IS_WHOLE, _SWAPS = "_tdp_is_whole", "_tdp_swaps"
_FORWARD = threading.local()
"""The sequence and the documents of the forward that this thread runs, for its masks."""


def attend_over(
    model: nn.Module,
    sequence: ContextSequence,
    attends: str = "parts",
    gathered: Collection[str] = (),
    swaps: bool = True,
    scanned: Collection[str] = (),
) -> None:
    """Let every attention of `model` see the full sequence, of which it gets this rank's part.

    attends: `parts` or `keys`. gathered: names of classes of modules that get the whole sequence.
    swaps: of some samples, where the ranks can share these evenly. scanned: names of classes of
    recurrent layers, whose states cross the ranks.
    The model must call transformers' attention functions, get its inputs from `inputs_of`, and run
    in `attending`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PARTS, _attend)
    for own, name in KEYS.items():
        AttentionInterface.register(name, partial(_attend_to_keys, own))
        AttentionMaskInterface.register(name, partial(_mask_rows, own))
    for module in model.modules():
        if (config := getattr(module, "config", None)) is not None:
            own = config._attn_implementation
            if own != PARTS and own not in KEYS.values():
                config._attn_implementation = PARTS if attends == "parts" else _keys_name(own)
        module.__dict__[SEQUENCE] = sequence
    for module in list(model.modules()):
        if type(module).__name__ in gathered and not module.__dict__.get(_IS_WHOLE):
            for inner in module.modules():
                inner.__dict__[_IS_WHOLE] = True
                _attend_as_before(inner)
            module.__class__ = _seeing_sequence(type(module))
            module.__dict__[_SWAPS] = swaps
        elif type(module).__name__ in scanned:
            scan_over(module)


def _attend_as_before(module: nn.Module) -> None:
    """Let a module that is given all queries and keys have its own attention, by its own name.

    Sparse attention, as DeepSeek V3.2's, masks what its indexer leaves out under these names alone.
    """
    config: Any = getattr(module, "config", None)
    for own, name in KEYS.items():
        if config is not None and config._attn_implementation == name:
            module.config = deepcopy(config)  # others read theirs
            module.config._attn_implementation = own


def _keys_name(own: str | None) -> str:
    return KEYS["sdpa" if own == "sdpa" else "eager"]


@contextmanager
def attending(sequence: ContextSequence | None, position_ids: Tensor | None) -> Iterator[None]:
    """Let a forward inside make its masks for this rank's part of `sequence`.

    position_ids (B, S): positions of the full sequence, from 0 in each document.
    """
    outer = getattr(_FORWARD, "now", None)
    _FORWARD.now = sequence, position_ids
    try:
        yield
    finally:
        _FORWARD.now = outer


def inputs_of(
    sequence: ContextSequence,
    attends: str,
    num: int,
    batch: int,
    position_ids: Tensor | None,
    device: torch.device,
) -> tuple[Tensor | None, Tensor]:
    """Return (attention mask, position_ids) for this rank's `num` tokens of `batch` samples.

    position_ids (B, S): positions of the full sequence, from 0 in each document.
    """
    tokens = sequence.tokens(num, position_ids, device)
    assert tokens.positions is not None
    positions = tokens.positions if tokens.mask is not None else tokens.positions[None]
    if attends == "keys":
        # without a mask transformers would take a jump of positions for a border of documents
        mask = torch.ones(batch, tokens.seq_len, dtype=torch.long, device=device)
        # a row for each sample, as an indexer of keys may index positions by sample
        return mask, positions.expand(batch, -1)
    if tokens.mask is None:
        return None, positions
    mask = tokens.mask.ids[:, None, None, :]
    setattr(mask, _DOCUMENTS, tokens.mask)
    return mask, positions


# -- our own attention ---------------------------------------------------------------------------


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend from q (B, H, S, D) to k and v (B, h, S, D) of this rank; return (B, S, H, D)."""
    module.__dict__[ATTENDS] = True
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if others.get(name) is not None:
            raise LayoutError(
                f"{type(module).__name__} asks for {name}, which attention over parts of a "
                "sequence does not have; set parallel.context to 1"
            )
    documents = None
    if attention_mask is not None:
        documents = getattr(attention_mask, _DOCUMENTS, None)
        if documents is None:  # activation checkpointing passes a copy, without the attribute
            documents = Documents(attention_mask[:, 0, 0])
            setattr(attention_mask, _DOCUMENTS, documents)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    sequence: ContextSequence = getattr(module, SEQUENCE)
    width = value.shape[-1]
    if (missing := query.shape[-1] - width) > 0:  # as of multi-head latent attention
        value = F.pad(value, (0, missing))
    out = sequence(
        query, key, value, is_causal, dropout, None, documents,
        scale=scaling, window=sliding_window,
    )  # fmt: skip
    return out[..., :width].transpose(1, 2).contiguous(), None


# -- a class's own attention over all keys -------------------------------------------------------


def _attend_to_keys(
    own: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> Any:
    """Attend by the class's own function to the keys and values of all ranks."""
    module.__dict__[ATTENDS] = True
    sequence: ContextSequence = getattr(module, SEQUENCE)
    if not getattr(module, _IS_WHOLE, False):
        key, value = (_all_parts(sequence, x, 2) for x in (key, value))
    return _own_function(own, module)(module, query, key, value, attention_mask, **others)


def _own_function(own: str, module: nn.Module) -> Callable[..., Any]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if own == "sdpa":
        return sdpa_attention_forward
    for kind in type(module).__mro__:
        defined = vars(sys.modules.get(kind.__module__, sys)).get("eager_attention_forward")
        if defined is not None:
            return defined
    raise LayoutError(
        f"{type(module).__name__} has no attention function of its own to run over the keys of "
        f"all ranks; set parallel.context to 1"
    )


def _mask_rows(own: str, **arguments: Any) -> Tensor | None:
    """Return the rows of transformers' mask that belong to this rank's queries (B, 1, S/n, S)."""
    from transformers import masking_utils

    make = masking_utils.sdpa_mask if own == "sdpa" else masking_utils.eager_mask
    sequence, position_ids = _FORWARD.now
    order = sequence.order(arguments["q_length"])
    arguments |= {"kv_length": order.seq_len, "kv_offset": 0, "allow_is_causal_skip": False}
    arguments["allow_is_bidirectional_skip"] = False
    if position_ids is not None:
        ids = (position_ids == 0).cumsum(1)
        in_document = masking_utils.remap_positions_for_packed_sequence(
            arguments["mask_function"], position_ids
        )
        apart = masking_utils.packed_sequence_mask_function(ids)
        arguments["mask_function"] = masking_utils.and_masks(in_document, apart)
    rows = [
        make(**{**arguments, "q_length": len(each), "q_offset": each.start})
        for each in order.parts[sequence.group.rank()]
    ]
    return torch.cat(rows, 2)


# -- modules that see the whole sequence ---------------------------------------------------------


class _SeesSequence:
    """A module that runs over the whole sequence: of its share of the samples where the ranks can
    share these evenly, else of all samples on every rank.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sequence: ContextSequence = self.__dict__[SEQUENCE]
        tensors = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor) and x.dim() >= 2]
        sizes = [x for x in (*args, *kwargs.values()) if _is_shape(x)]
        hidden = (x.shape for x in tensors if x.dim() == 3 and x.is_floating_point())
        samples, num, *_ = next(hidden, tensors[0].shape if tensors else sizes[0])
        size = sequence.group.size()
        swaps = self.__dict__[_SWAPS] and samples % size == 0 and not sizes
        total = num * size

        def enter(x: Any) -> Any:
            if _is_shape(x):
                return type(x)((x[0], total, *x[2:]))
            if makes_positions(type(self).__name__) and _counts(x, num):
                rows = x.shape[:-1]
                if swaps and rows and rows[0] == samples:
                    rows = (samples // size, *rows[1:])
                return torch.arange(total, device=x.device).expand(*rows, total)
            dim = _sequence_dim(x, num, total)
            if swaps and x.dim() >= 2 and x.shape[0] == samples and dim != 0:
                if dim is None:  # equal on all ranks, as a mask of padding
                    return x.chunk(size)[sequence.group.rank()]
                x = collectives.all_to_all(x.contiguous(), 0, dim, sequence.group)
                return by_position(x, dim, sequence.order(num))
            return x if dim is None else _all_parts(sequence, x, dim)

        def leave(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.dim() < 2:
                return x
            dim = next((i for i in (1, 0) if x.shape[i] == total), None)
            if dim is None:
                return x
            if swaps and dim == 1 and x.shape[0] == samples // size:
                x = torch.cat([x.narrow(1, r.start, len(r)) for r in _by_rank(sequence, num)], 1)
                return collectives.all_to_all(x, 1, 0, sequence.group)
            ranges = sequence.order(num).parts[sequence.group.rank()]
            return torch.cat([x.narrow(dim, r.start, len(r)) for r in ranges], dim)

        args, kwargs = map_leaves(enter, (args, kwargs), _is_entered)
        return map_leaves(leave, super().__call__(*args, **kwargs), _is_tensor)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: object) -> tuple:
        return _new_seeing, (type(self).__bases__[1],), vars(self)


def _is_tensor(x: object) -> bool:
    return isinstance(x, Tensor)


def _is_entered(x: object) -> bool:
    """A tensor, or the sizes of one: classes make positions of either."""
    return isinstance(x, Tensor) or _is_shape(x)


def _is_shape(x: object) -> bool:
    return isinstance(x, tuple) and len(x) in (2, 3) and all(type(n) is int for n in x)


def makes_positions(kind: str) -> bool:
    """Return whether a class of modules, by its name, may be given a count of tokens as positions.

    To others such a count is as good as any other token ids.
    """
    return "osition" in kind or "otary" in kind


def _counts(x: Tensor, num: int) -> bool:
    """Return whether each row of `x` counts this rank's tokens from 0, as positions that a class
    makes.
    """
    if x.is_floating_point() or not x.dim() or x.shape[-1] != num:
        return False
    return bool((x == torch.arange(num, device=x.device)).all())


def _by_rank(sequence: ContextSequence, num: int) -> list[range]:
    return [each for part in sequence.order(num).parts for each in part]


def _sequence_dim(x: Tensor, num: int, total: int) -> int | None:
    """Return the dim of `x` along which a rank has its part of the sequence; None: it has none."""
    if x.dim() == 4 and x.shape[2:] == (num, total):  # the rows of a mask
        return 2
    if x.dim() >= 2 and x.shape[1] == num:
        return 1
    return 0 if x.dim() in (1, 2) and x.shape[0] == num else None


def _all_parts(sequence: ContextSequence, x: Tensor, dim: int) -> Tensor:
    """Join all ranks' parts of `x` along `dim`, in the order of positions."""
    gathered = collectives.all_gather(x.contiguous(), dim, sequence.group)
    return by_position(gathered, dim, sequence.order(x.shape[dim]))


@cache
def _seeing_sequence(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_SeesSequence, kind), {"__module__": kind.__module__})


def _new_seeing(kind: type[nn.Module]) -> nn.Module:
    """Create an empty gathered module, when unpickling."""
    return nn.Module.__new__(_seeing_sequence(kind))
