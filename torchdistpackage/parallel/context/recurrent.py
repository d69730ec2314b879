"""Recurrent layers of transformers whose sequences context ranks share.

transformers computes its recurrences and short convolutions by functions of their modules, which
take an initial state and return a final one. A layer with known functions runs its own forward on
this rank's tokens, with the functions of `FORMS` instead of transformers' own. Each calls the one
it stands for, once, over this rank's segments from zero states; outputs are linear in the state
before a segment, whose part is added when the states have crossed the ranks.
"""

import inspect
import threading
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.context.model import ContextSequence
from torchdistpackage.parallel.context.scan import (
    fold,
    num_segments,
    states_before,
    unfold,
    with_halo,
)

SEQUENCE = "_tdp_sequence"
"""Attribute of modules that have a sequence of which ranks hold parts."""
_RUNNING = threading.local()
"""The sequence whose part this thread's recurrent layer runs on."""
Arguments = dict[str, Any]
Original = Callable[..., Any]
Form = Callable[[ContextSequence, Original, Arguments], Any]


def _fused(sequence: ContextSequence, original: Original, arguments: Arguments) -> None:
    """Return None, upon which a layer runs its convolution and its scan one after the other."""


def _convolve(sequence: ContextSequence, original: Original, arguments: Arguments) -> Tensor:
    """Run a causal convolution along the last dim behind its halo."""
    x, width = arguments["hidden_states"], arguments["weight"].shape[-1] - 1
    segments = num_segments(sequence, x.shape[-1])
    out = original(**arguments | {"hidden_states": with_halo(x, width, sequence)})
    return unfold(out[..., width:], 2, segments)


def _scan_chunks(sequence: ContextSequence, original: Original, arguments: Arguments) -> Tensor:
    """Run the state space duality of Mamba 2: a decay for each head (arXiv:2405.21060)."""
    _refuse_states(arguments, "initial_states", "return_final_states")
    segments = num_segments(sequence, arguments["hidden_states"].shape[1])
    folded = {
        name: fold(arguments[name], 1, segments) for name in ("hidden_states", "dt", "B", "C")
    }
    out, state = original(**arguments | folded | {"return_final_states": True})
    dt = folded["dt"]
    if (bias := arguments.get("dt_bias")) is not None:
        dt = dt + bias.to(dt.dtype)
    dt = F.softplus(dt) if arguments.get("dt_softplus") else dt
    low, high = arguments.get("dt_limit") or (0.0, float("inf"))
    # as the function does it: in float32 from here
    decays = (dt.clamp(low, high).float() * arguments["A"].float()).cumsum(1)
    total = decays[:, -1].exp()[..., None, None]
    states_at_start = states_before(total, state.float(), torch.mul, sequence, segments)
    c = folded["C"].float()
    heads = states_at_start.unflatten(1, (c.shape[2], -1))  # those of a group read one C
    added = torch.einsum("blgn,bghpn->blghp", c, heads).flatten(2, 3) * decays.exp()[..., None]
    return unfold(out + added.to(out.dtype), 1, segments)


def _scan_channels(sequence: ContextSequence, original: Original, arguments: Arguments) -> Tensor:
    """Run the selective scan of Mamba: a decay for each number of a state (arXiv:2312.00752)."""
    _refuse_states(arguments, "initial_states", "return_last_state")
    segments = num_segments(sequence, arguments["hidden_states"].shape[2])
    folded = {
        name: fold(arguments[name], 2, segments) for name in ("hidden_states", "dt", "B", "C")
    }
    # the gate comes last, behind what is added
    changed = folded | {"z": None, "return_last_state": True}
    out, state = original(**arguments | changed)
    dt = folded["dt"]
    if (bias := arguments.get("delta_bias")) is not None:
        dt = dt + bias.to(dt.dtype)[..., None]
    dt = F.softplus(dt) if arguments.get("delta_softplus") else dt
    # in float32, as the kernel keeps its state
    sums, a = dt.float().cumsum(2), arguments["A"].float()
    total = (a * sums[:, :, -1:]).exp()
    states_at_start = states_before(total, state.float(), torch.mul, sequence, segments)
    # its exponentials are as many as states of all tokens: not kept for the backward
    added = checkpoint(_read_channels, folded["C"], a, sums, states_at_start, use_reentrant=False)
    out = unfold(out + added.to(out.dtype), 2, segments)
    return out if (z := arguments.get("z")) is None else out * F.silu(z)


def _read_channels(c: Tensor, a: Tensor, sums: Tensor, states_at_start: Tensor) -> Tensor:
    decays = (a[:, None] * sums[..., None]).exp()
    return torch.einsum("bnl,bdln,bdn->bdl", c.float(), decays, states_at_start)


def _apply_delta_rule(
    sequence: ContextSequence, original: Original, arguments: Arguments
) -> tuple[Tensor, None]:
    """Run a gated delta rule, whose state is multiplied by a matrix at each token.

    Values get as many columns more as a key has, of zeros, whose initial state is the identity.
    Their final state is the product of the matrices, and their outputs are what a query reads of
    the state before the segment.
    """
    _refuse_states(arguments, "initial_state", "output_final_state")
    names = ("query", "key", "value", "g", "beta")
    segments = num_segments(sequence, arguments["value"].shape[1])
    folded = {name: fold(arguments[name], 1, segments) for name in names}
    value, width = folded["value"], folded["key"].shape[-1]
    columns = value.shape[-1]
    initial = torch.eye(width, dtype=torch.float, device=value.device)
    initial = F.pad(initial, (columns, 0)).expand(*value.shape[:1], value.shape[2], -1, -1)
    folded["value"] = F.pad(value, (0, width))
    out, state = original(
        **arguments | folded | {"initial_state": initial.contiguous(), "output_final_state": True}
    )
    out, reads = out.split((columns, width), -1)
    state, total = state.split((columns, width), -1)
    states_at_start = states_before(total, state, torch.matmul, sequence, segments)
    added = torch.einsum("blhk,bhkv->blhv", reads.to(states_at_start.dtype), states_at_start)
    return unfold(out + added.to(out.dtype), 1, segments), None


def _refuse_states(arguments: Arguments, initial: str, final: str) -> None:
    if arguments.get(initial) is not None or arguments.get(final):
        raise LayoutError(
            f"a recurrent layer gets {initial} or must return its final state, as with a cache, "
            "but ranks share the sequence; set parallel.context to 1"
        )


FORMS: Mapping[frozenset[str], Form] = {
    frozenset({"hidden_states", "weight", "bias", "activation"}): _convolve,
    frozenset(
        {
            "hidden_states",
            "dt",
            "A",
            "B",
            "C",
            "chunk_size",
            "initial_states",
            "return_final_states",
        }
    ): _scan_chunks,
    frozenset({"hidden_states", "dt", "A", "B", "C", "z", "delta_bias", "return_last_state"}): (
        _scan_channels
    ),
    frozenset({"query", "key", "value", "g", "beta", "initial_state", "output_final_state"}): (
        _apply_delta_rule
    ),
    frozenset({"conv1d_weight", "conv1d_bias"}): _fused,
}
"""What stands for a function of transformers that takes these arguments."""
_OF_DECAYS = frozenset({"qkv_proj", "act_fn", "slope_rate", "query_decay", "key_decay", "norm"})
"""Names in the forward of an attention with decays."""
_OF_A_TOKEN = frozenset({"conv_state", "state"})
"""Arguments of functions for the next token alone, which stay as they are."""


def has_form(kind: type[nn.Module]) -> bool:
    """Return whether a class of modules calls functions of `FORMS`, or attends with decays."""
    return _decays(kind) or any(form is not _fused for form in _forms(kind).values())


def scan_over(module: nn.Module) -> None:
    """Let a recurrent layer, which has its sequence, run on this rank's part of it."""
    if not isinstance(module, _ScansSequence):
        module.__class__ = _scanning(type(module))


class _ScansSequence:
    """A layer that runs on this rank's tokens, from the states that cross the ranks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # until the call is over, also where a backward computes it again, in a thread of its own
        outer = getattr(_RUNNING, "sequence", None)
        _RUNNING.sequence = self.__dict__[SEQUENCE]
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            _RUNNING.sequence = outer

    def __reduce_ex__(self, protocol: object) -> tuple:
        return _new_scanning, (type(self).__bases__[1],), vars(self)


class _AttendsWithDecays(_ScansSequence):
    """Lightning attention (arXiv:2405.17381), as MiniMax has it: each head's state shrinks by a
    number for each token. Its forward has the recurrence inside, so what is added joins it before
    the norm, from the same queries, keys and values.
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self
        sequence: ContextSequence = _RUNNING.sequence
        segments = num_segments(sequence, hidden_states.shape[1])
        projected: list[Tensor] = []

        def keep(module: nn.Module, given: Any, output: Tensor) -> None:
            projected.append(output)

        def join(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
            return (given[0] + _of_states_before(layer, projected[0], sequence, segments),)

        hooks = (
            layer.qkv_proj.register_forward_hook(keep),
            layer.norm.register_forward_pre_hook(join),
        )
        try:
            forward: Any = super().forward  # type: ignore[misc]
            out, *more = forward(fold(hidden_states, 1, segments), *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        return unfold(out, 1, segments), *more


def _of_states_before(
    layer: Any, projected: Tensor, sequence: ContextSequence, segments: int
) -> Tensor:
    """Return what queries read of the states before the segments (B, S, channels of all heads)."""
    heads = layer.act_fn(projected).unflatten(-1, (layer.num_attention_heads, -1))
    query, key, value = heads.chunk(3, -1)
    slope, length = layer.slope_rate[:, 0], projected.shape[1]  # (heads, 1)
    token = torch.arange(1, length + 1, device=projected.device)[:, None, None]
    state = torch.einsum("blhk,blhv->bhkv", key * (slope * (token - length)).exp(), value)
    decay = (-slope * length).exp()[..., None].expand(len(projected), -1, -1, -1)
    states_at_start = states_before(decay.to(state.dtype), state, torch.mul, sequence, segments)
    return torch.einsum("blhk,bhkv->blhv", query * (-slope * token).exp(), states_at_start).flatten(
        2
    )


def _decays(kind: type[nn.Module]) -> bool:
    forward = _methods(kind).get("forward")
    return forward is not None and set(forward.__code__.co_names) >= _OF_DECAYS


@cache
def _scanning(kind: type[nn.Module]) -> type[nn.Module]:
    if _decays(kind):
        return type(kind.__name__, (_AttendsWithDecays, kind), {"__module__": kind.__module__})
    forms = _forms(kind)
    methods: dict[str, Any] = {"__module__": kind.__module__}
    for name, function in _methods(kind).items():
        used = {x: function.__globals__[x] for x in function.__code__.co_names if x in forms}
        if used:
            # a function of its own, as transformers' globals are those of other threads' models too
            standing = {x: _Standing(forms[x], original) for x, original in used.items()}
            methods[name] = FunctionType(
                function.__code__,
                function.__globals__ | standing,
                function.__name__,
                function.__defaults__,
                function.__closure__,
            )
            methods[name].__kwdefaults__ = function.__kwdefaults__
    return type(kind.__name__, (_ScansSequence, kind), methods)


def _new_scanning(kind: type[nn.Module]) -> nn.Module:
    """Create an empty layer that scans, when unpickling."""
    return nn.Module.__new__(_scanning(kind))


class _Standing:
    """A form in place of a function of transformers."""

    def __init__(self, form: Form, original: Original):
        self._form, self._original = form, original
        self._signature = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments: Arguments = {}
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            kind = self._signature.parameters[name].kind
            arguments |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        return self._form(_RUNNING.sequence, self._original, arguments)


@cache
def _forms(kind: type[nn.Module]) -> dict[str, Form]:
    """Return what stands for the functions that the methods of a class call, by their names."""
    forms: dict[str, Form] = {}
    for function in _methods(kind).values():
        for name in function.__code__.co_names:
            form = _form_of(function.__globals__.get(name))
            if form is not None:
                forms[name] = form
    return forms


def _methods(kind: type[nn.Module]) -> dict[str, FunctionType]:
    """Return the functions of a class of modules, without their decorators."""
    methods: dict[str, FunctionType] = {}
    for each in reversed(kind.__mro__):
        if issubclass(each, nn.Module) and each is not nn.Module:
            functions = {name: inspect.unwrap(x) for name, x in vars(each).items() if callable(x)}
            methods |= {n: x for n, x in functions.items() if isinstance(x, FunctionType)}
    return methods


def _form_of(original: object) -> Form | None:
    if not callable(original) or isinstance(original, type):
        return None
    try:
        takes = frozenset(inspect.signature(original).parameters)
    except (ValueError, TypeError):  # a function that is not written in Python
        return None
    if takes & _OF_A_TOKEN:
        return None
    return next((form for names, form in FORMS.items() if names <= takes), None)
