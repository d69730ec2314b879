"""Time and retained activation memory of every module, level by level.

A forward time is the time of the module's call. A backward time is the sum over the autograd nodes
that the call made. It finds them by their sequence numbers, so that no module needs a backward
hook, which in-place operations refuse. Memory is what the module keeps for its backward: on the CPU
the storages that autograd saved, on CUDA the growth of `memory_allocated` without outputs that
replace inputs.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchdistpackage.tools.activations import SavedStorages, SavedTensorRun, sizes_of
from torchdistpackage.tools.nested import as_module, tensors_in
from torchdistpackage.tools.printing import emit
from torchdistpackage.tools.undisturbed import undisturbed

Infos = dict[str, dict[str, Any]]
"""Module name, `root` for the model -> `fwd_time` (ms), `fwd_mem` (MB, 1e6 bytes), after a backward
`bwd_time` (ms); `freed_mem` (MB): what checkpointing the module alone would give back;
`num_calls` in the last forward; `has_state`: its forward changes buffers, as BatchNorm's does."""

_NEW: Any = {}
"""Default that stands for a new dict, so that two profiles never mix."""
_handles: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
"""The hooks of each model that is profiled."""


@dataclass(eq=False)
class _Call:
    """A call of a module. seq: autograd's sequence number at its start and end."""

    name: str
    module: nn.Module
    infos: Infos
    began_s: float
    allocated: int
    seq: tuple[int, int]
    buffers: int
    inputs: dict[int, int]
    saved: SavedStorages = field(default_factory=SavedStorages)
    ended: bool = False
    fwd_ms: float = 0.0
    grown: int = 0
    changed: bool = False


class _ProfileRun:
    """A profile of one outermost forward, with the calls inside it."""

    def __init__(self, module: nn.Module, args: object):
        tensors = (*(x for _, x in tensors_in(args)), *module.parameters())
        self.device = next((x.device for x in tensors if x.is_cuda), None)
        self.saved = SavedTensorRun(module)
        self.open: list[_Call] = []
        self.calls: list[_Call] = []

    def now_s(self) -> float:
        """Return the time, after the device has finished its work."""
        if self.device is not None:
            # kernels are asynchronous: without it only their launch would be measured
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def allocated(self) -> int:
        """Return the bytes allocated on the device, 0 on the CPU."""
        return 0 if self.device is None else torch.cuda.memory_allocated(self.device)

    def begin(self, name: str, module: nn.Module, infos: Infos, inputs: object) -> None:
        """Start a call inside the run."""
        if not self.open:
            self.saved.begin()
        seq = torch.autograd._get_sequence_nr()
        buffers = sum(x._version for x in module.buffers() if not x.is_inference())
        began_s, allocated = self.now_s(), self.allocated()
        call = _Call(name, module, infos, began_s, allocated, (seq, seq), buffers, sizes_of(inputs))
        self.saved.take_inputs(call.saved, inputs)
        self.open.append(call)
        self.calls.append(call)
        self.saved.open.append(call.saved)

    def end(self, output: object) -> None:
        """End the innermost call; the last one ends the run."""
        call = self.open.pop()
        self.saved.close(call.module)
        call.fwd_ms = (self.now_s() - call.began_s) * 1e3
        call.seq = call.seq[0], torch.autograd._get_sequence_nr()
        version = sum(x._version for x in call.module.buffers() if not x.is_inference())
        call.changed = version != call.buffers
        outputs = sizes_of(output)
        call.grown = self.allocated() - call.allocated
        if outputs.keys() - call.inputs.keys():
            call.grown -= sum(outputs.values()) - sum(call.inputs.values())
        call.ended = True
        if not self.open:
            self._finish(output)

    def abandon(self) -> None:
        """Drop a run that an exception ended before its hooks were called."""
        if self.open:
            self.open.clear()
            self.saved.end()

    def _finish(self, output: object) -> None:
        """Add the calls of this run to their entries."""
        self.saved.end()
        self.calls = [call for call in self.calls if call.ended]
        fresh: dict[int, set[str]] = {}
        for call in self.calls:
            names = fresh.setdefault(id(call.infos), set())
            if call.name not in names:  # the first call of this forward
                names.add(call.name)
                call.infos[call.name] = {"fwd_time": 0.0, "fwd_mem": 0.0, "freed_mem": 0.0}
                call.infos[call.name] |= {"num_calls": 0, "has_state": False}
            entry, saved = call.infos[call.name], call.saved
            kept_bytes = self.saved.kept_bytes(saved) if self.device is None else call.grown
            entry["fwd_time"] += call.fwd_ms
            entry["fwd_mem"] += kept_bytes / 1e6
            entry["freed_mem"] += self.saved.freed_bytes(saved) / 1e6
            entry["num_calls"] += 1
            entry["has_state"] |= call.changed
        self._time_backward(output)
        self.calls.clear()

    def _time_backward(self, output: object) -> None:
        """Time each autograd node of this run for the calls that created it."""
        spans = [(call.seq, call.infos[call.name]) for call in self.calls]
        first = min(begin for (begin, _), _ in spans)
        todo = [x.grad_fn for _, x in tensors_in(output) if x.grad_fn is not None]
        seen = set(todo)
        while todo:
            node = todo.pop()
            # gradients of parameters are accumulated by nodes that outlive the run
            if node.name().endswith("AccumulateGrad") or node._sequence_nr() < first:
                continue
            number = node._sequence_nr()
            self._time_node(node, [e for (b, n), e in spans if b <= number < n])
            more = {n for n, _ in node.next_functions if n is not None} - seen
            seen |= more
            todo += more

    def _time_node(self, node: Any, entries: list[dict[str, Any]]) -> None:
        """Add the time of one autograd node to these entries."""
        began_s = 0.0

        def before(_: object) -> None:
            nonlocal began_s
            began_s = self.now_s()

        def after(*_: object) -> None:
            taken_ms = (self.now_s() - began_s) * 1e3
            for entry in entries:
                entry["bwd_time"] = entry.get("bwd_time", 0.0) + taken_ms

        node.register_prehook(before)
        node.register_hook(after)


_thread = threading.local()
"""run: the `_ProfileRun` under way in this thread, if any."""


def fwd_pre_hook_wrapper(module_name: str = "root", infos: Infos = _NEW) -> Callable[..., None]:
    """Return the hook before a forward; register it together with `fwd_hook_wrapper`'s."""
    infos = {} if infos is _NEW else infos

    def begin_fwd_profile(module: nn.Module, *args: object) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint recomputes this forward: its time belongs to the backward
        run: _ProfileRun | None = getattr(_thread, "run", None)
        if run is not None and run.open and run.open[0].module is module:
            run.abandon()
        if run is None or not run.open:
            run = _thread.run = _ProfileRun(module, args)
        run.begin(module_name, module, infos, args)

    return begin_fwd_profile


def fwd_hook_wrapper(module_name: str = "root", infos: Infos = _NEW) -> Callable[..., None]:
    """Return the hook after a forward; it completes the entry `module_name` of `infos`."""

    def end_fwd_profile(module: nn.Module, *args: object) -> None:
        run: _ProfileRun | None = getattr(_thread, "run", None)
        if torch._C._current_graph_task_id() != -1 or run is None:
            return
        if all(call.module is not module for call in run.open):
            return
        while run.open and run.open[-1].module is not module:
            run.end(None)  # its own hook never came: an exception was caught outside it
        if run.open:
            run.end(args[-1])
        if not run.open:
            _thread.run = None

    return end_fwd_profile


def register_profile_hooks(model: nn.Module, infos: Infos = _NEW) -> Infos:
    """Profile every later forward and backward of `model`; return the dict to be filled.

    infos: filled in place and returned; default: a new dict. Its entries are of the last forward.
    The hooks cost about 20 microseconds a module and 3 an autograd node, which times include; on
    CUDA every module waits for the device. Call `remove_profile_hooks(model)` to end it; to
    register again ends it too.

    Raises:
        TypeError: `model` is not a module.
    """
    remove_profile_hooks(as_module(model, "register_profile_hooks"))
    infos = {} if infos is _NEW else infos
    handles = _handles[model] = []
    for name, module in model.named_modules():
        pre, post = (w(name or "root", infos) for w in (fwd_pre_hook_wrapper, fwd_hook_wrapper))
        handles += (
            module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True),
            module.register_forward_hook(post, with_kwargs=True, always_call=True),
        )
    return infos


def remove_profile_hooks(model: nn.Module) -> None:
    """Remove the hooks of `register_profile_hooks(model)`, if any."""
    for handle in _handles.pop(model, ()):
        handle.remove()


def get_model_profile(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] = _NEW,
    sort: bool = True,
    topn: int = 20,
    max_depth: int = 5,
    min_mem: float = 50,
    *,
    repeats: int = 1,
    show: bool = True,
) -> Infos:
    """Profile one call `model(*args, **kwargs)` after a warm-up, and print the report.

    It runs the backward of the sum of all outputs. Afterwards it restores the gradients, buffers,
    random states and hooks of the model.

    sort, topn, max_depth, min_mem: as in `report_prof`. repeats: number of calls to measure; it
        reports their shortest times. show: False prints nothing.

    Raises:
        TypeError: `model` is not a module, or `args` is not a tuple.
        ValueError: fewer than one call.
    """
    as_module(model, "get_model_profile")
    if isinstance(args, Tensor) or not isinstance(args, (tuple, list)):
        kind = type(args).__name__
        raise TypeError(f"get_model_profile: args is a {kind}; pass a tuple, as in (x,)")
    if repeats < 1:
        raise ValueError(f"get_model_profile: {repeats} repeats; measure 1 call or more")
    infos: Infos = {}
    try:
        with undisturbed(model):
            _differentiated(model, args, kwargs)
            for _ in range(repeats):
                latest = register_profile_hooks(model)
                _differentiated(model, args, kwargs)
                take_shorter(infos, latest)
    finally:
        remove_profile_hooks(model)
    if show:
        report_prof(infos, sort=sort, topn=topn, max_depth=max_depth, min_mem=min_mem)
    return infos


def _differentiated(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run a forward and a backward, and discard the gradients."""
    output = model(*args, **kwargs)
    roots = [x for _, x in tensors_in(output) if x.requires_grad]
    inputs = (x for _, x in tensors_in((args, kwargs)))
    leaves = [x for x in (*model.parameters(), *inputs) if x.requires_grad]
    if roots and leaves:
        unit_grads = [torch.ones_like(x) for x in roots]
        torch.autograd.grad(roots, leaves, unit_grads, allow_unused=True)


def take_shorter(infos: Infos, others: Infos) -> None:
    """Replace the times in `infos` by shorter ones of `others`; add entries that `infos` lacks."""
    for name, entry in others.items():
        best = infos.setdefault(name, entry)
        for key in ("fwd_time", "bwd_time"):
            with suppress(KeyError):
                best[key] = min(best[key], entry[key])


def report_prof(
    infos: Mapping[str, Mapping[str, Any]],
    topn: int = 20,
    max_depth: int = 5,
    min_mem: float = 50,
    sort: bool = True,
) -> None:
    """Print memory and times of the modules, level by level; `root` is level 0.

    sort: True: first those that keep most MB for each ms of forward, at most `topn` a level (all if
        it is negative), without modules under `min_mem` MB. False: all, in the order in which they
        end. max_depth: the last level to print.
    """
    levels: dict[int, list[str]] = {}
    for name in infos:
        levels.setdefault(get_level(name), []).append(name)
    for level, names in sorted(levels.items()):
        if level > max_depth:
            break
        emit(f"\nlevel: {level}")
        if sort:
            names = [name for name in names if infos[name]["fwd_mem"] >= min_mem]
            names.sort(key=lambda name: _mb_a_ms(infos[name]), reverse=True)
            names = names if topn < 0 else names[:topn]
        for name in names:
            entry = infos[name]
            forward_ms, backward_ms = entry["fwd_time"], entry.get("bwd_time")
            line = f"{name}: MEM: {round(entry['fwd_mem'])} MB; Time: {round(forward_ms, 4)} ms"
            emit(line + (f"; Backward: {round(backward_ms, 4)} ms" if backward_ms else ""))


sort_mem_time_ratio = report_prof


def get_level(name: str) -> int:
    """Return the depth of a module, 0 for `root`; a number in a name is not a level of its own."""
    if name == "root":
        return 0
    _, *rest = name.split(".")
    return 1 + sum(not part.isdigit() for part in rest)


def _mb_a_ms(entry: Mapping[str, Any]) -> float:
    """Return the megabytes per millisecond of forward time."""
    return entry["fwd_mem"] / max(entry["fwd_time"], 1e-9)
