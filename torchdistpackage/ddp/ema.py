"""Moving averages of a model's parameters, each kept by one of the ranks that hold the model.

An average has one owner, so the shards of all ranks together form a plain state dict. Parameters
are dealt out by size (layout/partition.py). Cutting within parameters would balance a model with
one huge parameter better, but then no shard could be read without the others.

Averages are kept in at least float32, because bf16 would round away a ten-thousandth of a
difference. Buffers are not averaged: the group's first rank, whose buffers its replicas copy, keeps
copies.

Every rank knows who owns what, so the first rank can collect all averages tensor by tensor, and no
rank needs memory for more than a few averages of others.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.attendance import expect_all
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.objects import broadcast_tensors
from torchdistpackage.comm.p2p import send, start_receive
from torchdistpackage.comm.primitives import Group, Work
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.ddp.param_spec import refuse_cut
from torchdistpackage.ddp.wrapper_state import ModuleWatch, aliases, unwrap_model
from torchdistpackage.errors import CheckpointError, LayoutError
from torchdistpackage.layout.partition import greedy_partition

Slots = list[tuple[str, Tensor, dict[str, Tensor | None], str]]
"""Rows (name, this rank's average or copy, the dict of its submodule, its key there). The dict is
kept instead of the tensor, because tensors may be replaced."""

RECEIVES_AHEAD = 4
"""Number of averages that the first rank receives at a time."""


@dataclass(frozen=True, slots=True)
class AverageSpec:
    """An average that global rank `owner` keeps.

    device: the device of this rank's copy of the parameter.
    """

    owner: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class ShardedEMA:
    """Exponential moving averages of `model`: each of n ranks keeps 1/n of them in float32.

    It starts from the current parameters and buffers. All ranks of the group construct it, and must
    hold equal parameters whenever they call `update`.

    model: plain, or wrapped in NaiveDDP, torch's DDP or torch.compile, here and later. Names are
        always those of the plain module.
    group: ranks that hold the same model; default tpc's data group, or all ranks.

    Raises:
        LayoutError: layers split parameters over ranks of the group.
    """

    def __init__(self, model: nn.Module, group: Group | None = None):
        self._group = resolve_group(group, "data")
        ranks = primitives.ranks_of(self._group)
        self._rank = ranks[self._group.rank()]
        self._is_first = self._rank == ranks[0]
        module = unwrap_model(model)
        named = dict(module.named_parameters())
        refuse_cut(named.items(), ranks, "ShardedEMA")
        dtypes = [_kept_as(p.dtype) for p in named.values()]
        sizes = [p.numel() * d.itemsize for p, d in zip(named.values(), dtypes, strict=True)]
        shares = greedy_partition(sizes, len(ranks))
        owner = {i: rank for rank, share in zip(ranks, shares, strict=True) for i in share}
        self._owned = {
            name: AverageSpec(owner[i], p.shape, dtypes[i], p.device)
            for i, (name, p) in enumerate(named.items())
        }
        self._averages = {
            # a copy even for an equal dtype: the average must not share the parameter's memory
            name: named[name].detach().to(average.dtype, copy=True)
            for name, average in self._owned.items()
            if average.owner == self._rank
        }
        saved = module.state_dict(keep_vars=True).keys()
        buffers = {name: b for name, b in module.named_buffers() if name in saved}
        self._buffer_names = tuple(buffers)
        self._buffers: dict[str, Tensor] = {}
        if self._is_first:
            self._buffers = {name: b.detach().clone() for name, b in buffers.items()}
        self._aliases = {alias: name for alias, name in aliases(module).items() if alias in saved}
        self._known: nn.Module | None = None
        self._module_watch: ModuleWatch | None = None
        self._slots: Slots = []
        self._buffer_slots: Slots = []

    # -- training ----------------------------------------------------------------------

    @torch.no_grad()
    def update(self, model: nn.Module, decay: float = 0.9999, only_trainable: bool = True) -> None:
        """Set each average kept here to decay * average + (1 - decay) * parameter.

        It does not communicate. Integer parameters are copied.

        only_trainable: leave the averages of frozen parameters alone.

        Raises:
            LayoutError: a parameter is missing, new, or has another shape, for example because a
                sharded optimizer has moved its elements.
        """
        if model is not self._known or self._module_watch.has_changed():
            self._look_up(model)
        by_kind: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
        for name, average, holder, key in self._slots:
            parameter = holder[key]
            if parameter is None or parameter.shape != average.shape:
                raise _unlike(name, average.shape, parameter)
            if parameter.requires_grad or not only_trainable:
                kind = parameter.dtype, parameter.device
                averages, parameters = by_kind.setdefault(kind, ([], []))
                averages.append(average)
                # reading a parameter that ZeRO is gathering waits for it, or raises, before any
                # average has changed
                parameters.append(parameter.detach())
        for averages, parameters in by_kind.values():
            _move(averages, parameters, decay)
        if self._buffers:
            current = [holder[key] for _, _, holder, key in self._buffer_slots]
            torch._foreach_copy_(list(self._buffers.values()), current)

    def _look_up(self, model: nn.Module) -> None:
        """Find the averaged parameters and the buffers in this model, as it is now."""
        module = unwrap_model(model)
        slots = _find(self._averages, module, "_parameters")
        buffer_slots = _find(self._buffers, module, "_buffers")
        for name, parameter in module.named_parameters():
            if name not in self._owned:
                raise LayoutError(
                    f"{name} of shape {tuple(parameter.shape)} was not in the model when its "
                    f"averages began; make a ShardedEMA of the model as it is now"
                )
        self._slots, self._buffer_slots = slots, buffer_slots
        self._known, self._module_watch = model, ModuleWatch(module)

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averages as parameters inside the block, in the model's own dtypes.

        All ranks of the group enter together. A copy of the parameters is kept meanwhile, which
        restores them bit for bit, without communication, even if the block raises.

        Raises:
            LayoutError: a parameter is missing or has another shape.
        """
        named = dict(unwrap_model(model).named_parameters())
        for name, average in self._owned.items():
            if name not in named or named[name].shape != average.shape:
                raise _unlike(name, average.shape, named.get(name))
        saved = {name: named[name].detach().clone() for name in self._owned}
        try:
            with torch.no_grad():
                for name, average in self._averages.items():
                    named[name].copy_(average)
                for rank in primitives.ranks_of(self._group):
                    theirs = [
                        named[n] for n, average in self._owned.items() if average.owner == rank
                    ]
                    broadcast_tensors(theirs, self._group, rank)
            yield
        finally:
            with torch.no_grad():
                for name, parameter in saved.items():
                    named[name].copy_(parameter)

    # -- saving and resuming -----------------------------------------------------------

    def state_dict_shard(self) -> dict[str, Tensor]:
        """Return the averages kept here, and on the group's first rank the buffers, by name.

        The tensors are not copies.
        """
        return {**self._averages, **self._buffers}

    def state_dict_cpu(self) -> dict[str, Tensor]:
        """Return all averages and buffers, in host memory, on the group's first rank.

        The plain module can load the result. All ranks of the group call it together; the others
        get an empty dict. Tensors are sent one by one.

        Raises:
            CommError: other ranks did not call it in time.
        """
        expect_all("ShardedEMA.state_dict_cpu()", self._group)
        if not self._is_first:
            for x in self._averages.values():
                if x.numel():
                    send(x, self._group_for(x.device), primitives.ranks_of(self._group)[0])
            return {}
        full = {name: x.to("cpu", copy=True) for name, x in self.state_dict_shard().items()}
        full |= {name: x.cpu() for name, x in self._receive_others()}
        full |= {alias: full[name] for alias, name in self._aliases.items()}
        return {name: full[name] for name in (*self._owned, *self._buffer_names, *self._aliases)}

    def _receive_others(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the averages that other ranks own, on the first rank, in the order of
        their sends.
        """
        others = [(name, spec) for name, spec in self._owned.items() if spec.owner != self._rank]
        others.sort(key=lambda pair: pair[1].owner)
        receiving: list[tuple[str, Work]] = []
        for name, spec in others:
            # a few receives ahead hide the latency, and more would take memory for all parameters
            # at once
            if len(receiving) == RECEIVES_AHEAD:
                arrived, pending = receiving.pop(0)
                yield arrived, pending.wait()
            x = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
            through = self._group_for(spec.device)
            receiving.append(
                (name, start_receive(x, through, spec.owner) if x.numel() else Work(x))
            )
        for name, pending in receiving:
            # the caller writes or copies it next
            yield name, pending.wait()

    def _group_for(self, device: torch.device) -> Group:
        """Return the group over which tensors of this device travel."""
        return on_cpu(self._group) if device.type == "cpu" else self._group

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from saved averages. It does not communicate.

        state: the result of `state_dict_shard` on this rank, for the same number of ranks; or, on
            every rank, a full state: the result of `state_dict_cpu`, or a plain model's state dict.

        Raises:
            CheckpointError: names or shapes differ from those kept here. Nothing is changed then.
        """
        own_state = self.state_dict_shard()
        all_names = {*self._owned, *self._buffer_names, *self._aliases}
        missing = [name for name in own_state if name not in state]
        unknown = [name for name in state if name not in all_names]
        if missing or unknown:
            raise CheckpointError(
                f"averages of rank {self._rank}: {len(missing)} of the {len(own_state)} kept "
                f"here are "
                f"missing{_first_of(missing)}, and {len(unknown)} of the {len(state)} given belong "
                f"to another model{_first_of(unknown)}; give the shard of this rank out of "
                f"{self._group.size()}, or a whole state on every rank"
            )
        for name, x in own_state.items():
            if state[name].shape != x.shape:
                raise CheckpointError(
                    f"{name} was saved in shape {tuple(state[name].shape)} and is kept in "
                    f"{tuple(x.shape)}; load the averages of this model"
                )
        for name, x in own_state.items():
            x.copy_(state[name])

    def verify_with_gt(self, gt_ema: nn.Module | Mapping[str, Tensor]) -> None:
        """Compare each average with that of a model or dict that was averaged in one process.

        All ranks of the group call it together, each with that model.

        Raises:
            AssertionError: some differ in any bit. All ranks raise it, with names and owners.
        """
        if isinstance(gt_ema, nn.Module):
            gt_ema = dict(unwrap_model(gt_ema).named_parameters())
        own_differences: list[str] = []
        for name, average in self._averages.items():
            truth = gt_ema[name].detach().to(average) if name in gt_ema else None
            if truth is None:
                own_differences.append(f"{name} is not there to compare with")
            elif not torch.equal(truth, average):
                difference = (truth - average).abs().max().item()
                own_differences.append(
                    f"{name} on rank {self._rank} differs by up to {difference:g}"
                )
        differences = [
            line
            for lines in primitives.gather_objects(own_differences, self._group)
            for line in lines
        ]
        if differences:
            raise AssertionError(
                f"{len(differences)} of {len(self._owned)} averages differ: "
                f"{'; '.join(differences[:10])}"
            )


def _kept_as(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an average: at least float32 for small steps; integers unchanged."""
    averaged = dtype.is_floating_point or dtype.is_complex
    return torch.promote_types(dtype, torch.float32) if averaged else dtype


def _move(averages: list[Tensor], parameters: list[Tensor], decay: float) -> None:
    """Move the averages towards the parameters."""
    if not averages[0].is_floating_point() and not averages[0].is_complex():
        torch._foreach_copy_(averages, parameters)
        return
    # not lerp: this equals `average.mul_(decay).add_(parameter, alpha=...)` bit for bit
    torch._foreach_mul_(averages, decay)
    torch._foreach_add_(averages, parameters, alpha=1 - decay)


def _find(averages: Mapping[str, Tensor], module: nn.Module, kind: str) -> Slots:
    """Return where the module holds each tensor now. kind: `_parameters` or `_buffers`."""
    inside = dict(module.named_modules(remove_duplicate=False))
    slots: Slots = []
    for name, x in averages.items():
        path, _, key = name.rpartition(".")
        holder = vars(inside[path])[kind] if path in inside else {}
        if key not in holder:
            raise _unlike(name, x.shape, None)
        slots.append((name, x, holder, key))
    return slots


def _unlike(name: str, shape: Sequence[int], tensor: Tensor | None) -> LayoutError:
    """Return the error for an average whose parameter is missing or has another shape."""
    if tensor is None:
        return LayoutError(
            f"the averages hold {name}, which this model lacks; give the model that they were made "
            "from, wrapped or not"
        )
    why = "give the model that it was made from"
    if not tensor.numel():
        why = "its elements are elsewhere: call finish() of the optimizer that shards it first"
    return LayoutError(
        f"{name} has shape {tuple(tensor.shape)} and its average {tuple(shape)}; {why}"
    )


def _first_of(names: Sequence[str]) -> str:
    """Return the first names in parentheses, for messages."""
    return f" ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else ""
