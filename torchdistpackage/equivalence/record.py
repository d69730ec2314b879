"""Records of a few steps of a model on one rank, for comparison with the same steps elsewhere.

In the first step every module's inputs and outputs are kept, on the way forward and for all calls
of it, as a microbatch is a call. Nothing of the model is changed, but that dropout is off: what it
draws is looked at apart, since one process and many ranks draw differently for good reasons.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchdistpackage.comm.nested import leaves_of
from torchdistpackage.equivalence.placed import Placed
from torchdistpackage.errors import TorchDistError

DATA, LOSS = "data", "loss"
"""Names for what a rank is fed and for its loss, beside those of modules."""
_FEWEST_DROPPED = 8
"""Elements that equal masks have dropped, or they may be equal by chance."""


@dataclass(slots=True)
class ModuleCalls:
    """The inputs and outputs of a module in the first step, each joined over its calls, and their
    gradients.

    A list is empty if some call has none.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    input_grads: list[Tensor] = field(default_factory=list[Tensor])
    output_grads: list[Tensor] = field(default_factory=list[Tensor])


@dataclass(frozen=True, slots=True)
class ResumeGap:
    """A difference of a resumed run from the same run without a stop.

    kind: a key of `CAUSES`. what: the name of a tensor, or what differs. when: as `after stop 2`.
    excess: the difference, over the largest number; None: it is missing, or is not a number.
    """

    kind: str
    what: str
    when: str
    excess: float | None


@dataclass(slots=True)
class ParityRecord:
    """The record of one rank of one layout.

    coord: its coordinates. modules: by name, in the order in which their first calls ended.
    losses, norms: of each step. grads: of the first step, after the sum over ranks.
    updated, weights: the weights after the first step, and after the last.
    masks: of each dropout, the elements that a call kept. repeated: dropouts of which two calls, as
    of two micro-batches, kept the same elements. error: of the rank that ended the steps.
    results: the whole model's outputs, if they are known apart from its modules.
    states, loaded: optimizer states by `NAME#KEY` after the last step; weights and states once the
    save of one process is loaded.
    placed_grads: gradients of ZeRO's shards in the first step, in place of grads.
    placed_update, placed: weights and optimizer states after the first step, and the last one.
    placed_loaded, placed_after: the same once the save of one process is loaded, and a step later.
    resume_gaps: what differs after a stop and start.
    casts: modules that round numbers to 16 or 8 bits, with the type. singles: the first module that
    goes on in float32, as norms of transformers do; empty: none does.
    targets: of the first step's micro-batches, as the loss gets them.
    moved: parameters that change before the update of the first step.
    rates: the learning rate of each step.
    scale: what the update of the first step multiplies mean gradients by; None: not known.
    early: gradients of the first step before the last of its accumulated rounds.
    error_detail: its traceback, or where all ranks hung.
    """

    coord: Mapping[str, int]
    inputs: list[Tensor] = field(default_factory=list[Tensor])
    modules: dict[str, ModuleCalls] = field(default_factory=dict[str, ModuleCalls])
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    initial: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    grads: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    updated: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    weights: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    masks: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    repeated: list[str] = field(default_factory=list[str])
    results: list[Tensor] = field(default_factory=list[Tensor])
    states: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    loaded: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    placed_grads: Placed = field(default_factory=dict)
    placed_update: Placed = field(default_factory=dict)
    placed: Placed = field(default_factory=dict)
    placed_loaded: Placed = field(default_factory=dict)
    placed_after: Placed = field(default_factory=dict)
    resume_gaps: list[ResumeGap] = field(default_factory=list[ResumeGap])
    casts: dict[str, str] = field(default_factory=dict[str, str])
    singles: list[str] = field(default_factory=list[str])
    targets: list[Tensor] = field(default_factory=list[Tensor])
    moved: list[str] = field(default_factory=list[str])
    rates: list[float] = field(default_factory=list[float])
    scale: float | None = None
    early: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    error: str = ""
    error_detail: str = ""

    def of_first_step(self) -> "ParityRecord":
        """Return the record without what later steps have left."""
        return replace(
            self,
            losses=self.losses[:1],
            norms=self.norms[:1],
            rates=self.rates[:1],
            weights={},
            buffers={},
            states={},
            placed={},
        )


def copies(named: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return detached copies by name."""
    # the step changes the originals in place
    return {name: x.detach().clone() for name, x in named}


@contextmanager
def recording(
    modules: Mapping[str, nn.Module],
    record: ParityRecord,
    is_recorded: Callable[[], bool] = lambda: True,
    *,
    first_call: bool = False,
) -> Iterator[None]:
    """Record all calls of `modules` while `own()` is true.

    first_call: of each the first call alone, without the gradients of what it got and gave. Stages
        share modules, as rotary tables are, and each calls them once more.
    """
    calls: dict[str, list[tuple[list[Tensor], ...]]] = {}
    hooks = []

    def note(name: str):
        def hook(module: nn.Module, args: object, kwargs: object, output: object) -> None:
            if torch.compiler.is_compiling():
                return  # no part of the graph
            # a shallow copy, as a stage has of the base, has the hooks of its original
            # a forward that the backward runs again is not a call of its own
            again = torch._C._current_graph_task_id() != -1
            if again or (first_call and name in calls):
                return
            if is_recorded() and module is modules[name]:
                both = (args, kwargs), output
                values = [_kept(x) for x in both]
                values += [[] if first_call else _grads_to_come(x) for x in both]
                calls.setdefault(name, []).append(tuple(values))

        return hook

    for name, module in modules.items():
        hooks.append(module.register_forward_hook(note(name), with_kwargs=True, always_call=False))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name, recorded in calls.items():
            record.modules[name] = ModuleCalls(
                *(_joined([x[k] for x in recorded]) for k in range(4))
            )


def _kept(value: object) -> list[Tensor]:
    """Return detached copies of the tensors in a value."""
    return [x.detach().clone() for x in leaves_of(value) if isinstance(x, Tensor)]


def _grads_to_come(value: object) -> list[Tensor]:
    """Return a list that the backward fills with the gradients of the tensors in a value, in
    order.
    """
    gradients: list[Tensor] = []
    tensors = [x for x in leaves_of(value) if isinstance(x, Tensor) and x.requires_grad]
    by_index: dict[int, Tensor] = {}

    def keep(index: int, grad: Tensor) -> None:
        # autograd may add into this memory after the hook
        by_index[index] = grad.detach().clone()
        gradients[:] = (
            [by_index[i] for i in sorted(by_index)] if len(by_index) == len(tensors) else []
        )

    for index, x in enumerate(tensors):
        x.register_hook(partial(keep, index))
    return gradients


def _joined(calls: list[list[Tensor]]) -> list[Tensor]:
    """Return the k-th tensors of all calls, joined along the first dim if possible."""
    if len({len(call) for call in calls}) != 1:
        return []
    joined = []
    for parts in zip(*calls, strict=True):
        same_rows = len({(x.shape[1:], x.dtype) for x in parts}) == 1 and parts[0].dim() > 0
        # means of tensors without common rows, in float64 so that they can be compared exactly
        joined.append(
            torch.cat(parts) if same_rows else torch.stack([x.double().mean() for x in parts])
        )
    return joined


def record_results(
    modules: Mapping[str, nn.Module], call: Callable[[], Sequence[Tensor]]
) -> ParityRecord:
    """Run `call` and return its results, with the inputs and outputs of `modules`."""
    record = ParityRecord({})
    with recording(modules, record, first_call=True):
        results = call()
    record.results = [x.detach() for x in results]
    return record


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules in `model`, without itself, by name."""
    return {name: module for name, module in model.named_modules() if name}


@contextmanager
def told_where(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Turn an exception inside the block into one that names the running module and the line.

    Raises:
        TorchDistError: in place of any other exception.
    """
    running: list[str] = []

    def enter(name: str, *_: object) -> None:
        running.append(name)

    def leave(*_: object) -> None:
        running.pop()

    hooks = []
    for name, module in modules.items():
        hooks.append(module.register_forward_pre_hook(partial(enter, name)))
        hooks.append(module.register_forward_hook(leave))  # not called after an exception
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        user_frames = [x for x in frames if "site-packages" not in x.filename] or frames
        at = f" ({Path(user_frames[-1].filename).name}:{user_frames[-1].lineno})"
        where = f"{running[-1]}: " if running and running[-1] else ""
        message = str(error).strip().partition("\n")[0]
        raise TorchDistError(f"{where}{type(error).__name__}: {message}{at}") from error
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Set all dropout modules, and all rates whose name has `drop`, to 0 inside the block; leaf
    modules of other libraries that draw nevertheless, as a router that samples experts, compute as
    in evaluation.
    """
    saved: list[tuple[object, str, object]] = []
    hooks: list[RemovableHandle] = []
    for part in module.modules():
        rates = ("p",) if _is_dropout(part) else ()
        for holder in (part, getattr(part, "config", None)):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if isinstance(value, float) and value > 0 and (name in rates or "drop" in name):
                    # a configuration may be frozen
                    with suppress(AttributeError):
                        setattr(holder, name, 0.0)
                        saved.append((holder, name, value))
        if part.training and not any(part.children()) and not _is_ours(part):
            saved.append((part, "training", True))
            hooks.append(_in_eval_if_it_draws(part))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for part, name, value in saved:
            setattr(part, name, value)


def _is_ours(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in ("torch", "torchdistpackage")


def _in_eval_if_it_draws(module: nn.Module) -> RemovableHandle:
    """Try the module before its first call, and put it into evaluation if that draws."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return  # no part of the graph
        handle.remove()
        state, kept = torch.get_rng_state(), [x.clone() for x in module.buffers()]
        with torch.no_grad():  # of which a checkpoint sees nothing
            module.forward(*args, **kwargs)
            for buffer, value in zip(module.buffers(), kept, strict=True):
                buffer.copy_(value)
        if not torch.equal(state, torch.get_rng_state()):
            module.training = False
            torch.set_rng_state(state)

    handle = module.register_forward_pre_hook(before, with_kwargs=True)
    return handle


def _is_dropout(module: nn.Module) -> bool:
    """Return True for torch's dropout layers, and for others that are called so."""
    named = type(module).__name__.endswith("Dropout")
    return named or isinstance(module, nn.modules.dropout._DropoutNd)


def dropout_masks(
    module: nn.Module, call: Callable[[], object], repeated: list[str]
) -> dict[str, Tensor]:
    """Return which elements each dropout module kept in its first call in `call()`, by module
    name.

    repeated: gets the modules of which two calls have dropped the same elements, although
    micro-batches have other samples. Layers of other libraries may keep a mask on purpose.
    """
    masks: dict[str, Tensor] = {}
    hooks = []
    for name, part in module.named_modules():
        if _is_dropout(part) and float(getattr(part, "p", getattr(part, "drop_prob", 0.0))) > 0:
            plain = ".".join(x for x in name.split(".") if x != "module")
            earlier: list[Tensor] = []

            def hook(
                _: nn.Module,
                args: tuple[Tensor, ...],
                output: Tensor,
                name: str = plain,
                earlier: list[Tensor] = earlier,
                is_plain: bool = _is_ours(part),
            ) -> None:
                # a forward that the backward runs again must draw what it drew
                if torch._C._current_graph_task_id() != -1:
                    return
                mask = (output != 0) | (args[0] == 0)
                masks.setdefault(name, mask)
                # a forward without gradients is one that comes again, of the same samples
                if torch.is_grad_enabled() and int((~mask).sum()) >= _FEWEST_DROPPED:
                    if any(map(mask.equal, earlier)) and name not in repeated:
                        repeated.append(name)
                    if is_plain:
                        earlier.append(mask)

            hooks.append(part.register_forward_hook(hook))
    if hooks:
        call()
    for hook in hooks:
        hook.remove()
    return masks
