"""Parameters are gathered before a module reads them: in stage 3, where they are freed between
uses, and in every stage before a part that torch.compile made one function.

In stage 3 freed buckets come back in one order, that of the forward, and in a backward its reverse,
so that ranks agree whatever parts of the module each of them runs; a bucket that a rank has no use
for is fetched all the same. A read of an ungathered parameter moves this rank along that order, and
`PREFETCH` more than asked for are then on their way.

Nothing of ours is compiled: a compiled module reads its parameters without asking their class, and
would take hooks into its graph, so both are dealt with before it runs and after.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchdistpackage.comm.nested import map_tensors
from torchdistpackage.comm.primitives import ranks_of
from torchdistpackage.ddp.grad_hooks import Removable, on_backward_start
from torchdistpackage.ddp.weak_hook import WeakHook
from torchdistpackage.ddp.zero.param_buffer import ParamBuffer, wait_gathered
from torchdistpackage.errors import CommError, LayoutError

PREFETCH = 2
"""Buckets under way beyond the one that is read: one that travels and one that is next."""

Before = Callable[[nn.Module, tuple], object]
After = Callable[[nn.Module, tuple, object], object]


class WholeParams:
    """Parameters that are never freed, as those of stages 1 and 2: there is nothing to do."""

    @property
    def has_freed(self) -> bool:
        """Whether parameters are in pieces, which only all ranks together can bring."""
        return False

    def on_read(self, parameters: ParamBuffer) -> None:
        """An ungathered parameter is read."""

    def release(self, parameters: ParamBuffer) -> None:
        """A backward, or what comes after it, has all gradients of these."""

    def fetch_all(self) -> None:
        """Gather all that is freed; all ranks call it."""

    def stepped(self) -> None:
        """The parameters have new values."""


class ParamCoordinator(WholeParams):
    """Frees and fetches the buckets of `module`; `order` is that of its forward.

    keeps: parameters stay from forward to backward; else each is freed after the forward of the
    modules that own it, and fetched again.
    """

    def __init__(self, module: nn.Module, order: Sequence[ParamBuffer], keeps: bool):
        self._order, self._keep_until_backward = list(order), keeps
        self._indices = range(len(order))
        self._index_of = {id(parameters): index for index, parameters in enumerate(order)}
        self._is_back = False
        self._next = 0  # in the order of the direction
        self._in_forward = False
        self._task = -1  # the graph task of the backward that runs
        self._owned = _owned_buckets(module, order)
        self._owners = [
            {m for m, indices in self._owned.items() if i in indices} for i in self._indices
        ]
        self._waiting = [set(owners) for owners in self._owners]  # have not run in this forward
        self._running: list[nn.Module] = []
        self._pinned: set[int] = set()  # read while none of their owners ran
        called = _called(module)
        self.handles: list[Removable] = [
            each.register_forward_pre_hook(WeakHook(self._enter), prepend=True) for each in called
        ]
        for owner in () if keeps else self._owned:
            self.handles += around(owner, self._owner_enters, self._owner_exits)
        for each in called:
            self.handles.append(each.register_forward_hook(WeakHook(self._exit), always_call=True))
        for parameters in order:
            parameters.free()

    def on_read(self, parameters: ParamBuffer) -> None:
        """An ungathered parameter is read.

        Raises:
            CommError: it is freed, and where it is read not all ranks do so.
        """
        if not self._in_forward and torch._C._current_graph_task_id() == -1:
            if parameters.is_free:
                layout = parameters.layout
                raise CommError(
                    f"{', '.join(m.name for m in layout.members[:3])}, ... are in pieces on ranks "
                    f"{ranks_of(layout.group)} outside of forward and backward (stage 3); call the "
                    f"optimizer's finish() on all of them before you read one"
                )
            return
        index = self._index_of[id(parameters)]
        # no exit of an owner would tell when it may be freed
        if self._owners[index].isdisjoint(self._running):
            self._pinned.add(index)
        self._fetch_until(index)
        parameters.fetch()  # freed since the order came by

    @property
    def has_freed(self) -> bool:
        return any(parameters.is_free for parameters in self._order)

    def fetch_all(self) -> None:
        """All ranks call it: everything is whole until it is used or stepped."""
        for parameters in self._order:
            parameters.fetch()
        for parameters in self._order:
            parameters.arrive()

    def stepped(self) -> None:
        """The numbers are new: free the old ones, and send for the first of the next forward."""
        for parameters in self._order:
            parameters.changed()
            parameters.free()
        self._turn(is_back=False)
        for parameters in self._order[:PREFETCH]:
            parameters.fetch()

    def release(self, parameters: ParamBuffer) -> None:
        """A backward, or what comes after it, has all gradients of these."""
        if self._is_back and not self._keep_until_backward:
            self._fetch_until(self._index_of[id(parameters)], ahead=0)
        parameters.free()

    # -- the order ---------------------------------------------------------------------

    def _turn(self, is_back: bool) -> None:
        self._is_back, self._next = is_back, 0

    def _fetch_until(self, index: int, ahead: int = PREFETCH) -> None:
        """Fetch all up to `place` in this direction, and some beyond."""
        indices = self._indices[::-1] if self._is_back else self._indices
        end = indices.index(index) + 1 + ahead
        for i in indices[self._next : end]:
            self._order[i].fetch()
        self._next = max(self._next, min(end, len(indices)))

    # -- forward -----------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: object) -> None:
        self._in_forward = True
        self._turn(is_back=False)
        self._running.clear()
        self._waiting = [set(owners) for owners in self._owners]

    def _exit(self, module: nn.Module, args: object, outputs: object) -> object:
        self._in_forward = False
        self._fetch_until(len(self._order) - 1, ahead=0)
        if not torch.is_grad_enabled():
            for parameters in self._order:
                parameters.free()
            return outputs
        if not self._keep_until_backward and torch._C._current_graph_task_id() == -1:
            # the backward begins with the last
            for index in self._indices[:-1]:
                if index not in self._pinned:
                    self._order[index].free()
        return on_backward_start(outputs, self._backward_begins)

    def _owner_enters(self, module: nn.Module, args: object) -> None:
        self._running.append(module)

    def _owner_exits(self, module: nn.Module, args: object, outputs: object) -> object:
        self._running.remove(module)
        indices = self._owned[module]
        if torch._C._current_graph_task_id() == -1:
            for index in indices:
                self._waiting[index].discard(module)
                if not self._waiting[index] and index not in self._pinned:
                    self._order[index].free()
        return map_tensors(outputs, partial(self._hooked, indices))

    # -- backward ----------------------------------------------------------------------

    def _hooked(self, indices: Sequence[int], output: Tensor) -> Tensor:
        # a leaf, as a parameter that is returned, has no backward here, and lives on
        if output.requires_grad and not output.is_leaf:
            output.register_hook(partial(self._backward_needs, indices))
        return output

    def _backward_begins(self, grad: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        self._turn(is_back=True)
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        self._have(self._indices if self._keep_until_backward else sorted(self._pinned))

    def _backward_needs(self, indices: Sequence[int], grad: Tensor) -> None:
        self._have(indices)

    def _have(self, indices: Sequence[int]) -> None:
        """Parameters that autograd is about to read, which no class shows."""
        for index in reversed(indices):
            if self._order[index].is_free:
                self._fetch_until(index)
                self._order[index].fetch()
            # autograd reads the saved tensor itself, past every hook that could wait for a gather
            self._order[index].arrive()

    def _backward_ends(self) -> None:
        self._task = -1
        if not self._keep_until_backward:
            for parameters in reversed(self._order):
                self.release(parameters)


def _called(module: nn.Module) -> list[nn.Module]:
    """The modules that a user calls: `module`, or those in it where it is a list."""
    if type(module).forward is not nn.Module.forward:
        return [module]
    return [found for child in module.children() for found in _called(child)]


def _owned_buckets(module: nn.Module, order: Sequence[ParamBuffer]) -> dict[nn.Module, list[int]]:
    """For each submodule with parameters of its own, which buckets these are in; of a compiled one
    all are its own."""
    index_of = {
        id(spec.parameter): index
        for index, parameters in enumerate(order)
        for spec in parameters.layout.members
    }
    owned: dict[nn.Module, list[int]] = {}
    for m in eager_parts(module):
        own = m.parameters(recurse=is_compiled(m))
        indices = {index_of[id(p)] for p in own if id(p) in index_of}
        if indices:
            owned[m] = sorted(indices)
    return owned


# -- around modules, compiled ones too -----------------------------------------------------


class ForwardHooks:
    """Calls what `module.compile()` made, with hooks around it that are not compiled.

    It is not copied with the module, as torch has it.
    """

    def __init__(self, module: nn.Module):
        assert module._compiled_call_impl is not None
        self._module, self._call = module, module._compiled_call_impl
        self._before: dict[int, Before] = OrderedDict()
        self._after: dict[int, After] = OrderedDict()

    def __call__(self, *args, **kwargs):
        for before in self._before.values():
            before(self._module, args)
        outputs = self._call(*args, **kwargs)
        for after in self._after.values():
            changed = after(self._module, args, outputs)
            outputs = outputs if changed is None else changed
        return outputs

    def add(self, before: Before, after: After | None) -> list[RemovableHandle]:
        handles = [RemovableHandle(self._before)]
        self._before[handles[0].id] = before
        if after is not None:
            handles.append(RemovableHandle(self._after))
            self._after[handles[1].id] = after
        return handles


def gather_ahead(module: nn.Module, may_follow: bool) -> list[Removable]:
    """Before a compiled part of `module` runs, its parameters come.

    may_follow: whether parts may be compiled later on.
    """
    eager: list[nn.Module] = []
    handles: list[Removable] = []
    for m in eager_parts(module):
        if is_compiled(m):
            handles += around(m, wait_all_gathered)
        else:
            eager.append(m)
    look = WeakHook(partial(_look, eager, may_follow))
    return [*handles, module.register_forward_pre_hook(look, prepend=True)]


def around(module: nn.Module, before: Before, after: After | None = None) -> list[RemovableHandle]:
    """Calls, eagerly, `before(module, args)` and `after(module, args, outputs)`, which returns the
    outputs or None, whenever the module runs."""
    before, after = WeakHook(before), None if after is None else WeakHook(after)
    if module._compiled_call_impl is None:
        handles = [module.register_forward_pre_hook(before)]
        return handles if after is None else [*handles, module.register_forward_hook(after)]
    if not isinstance(module._compiled_call_impl, ForwardHooks):
        module._compiled_call_impl = ForwardHooks(module)
    return module._compiled_call_impl.add(before, after)


def is_compiled(module: nn.Module) -> bool:
    """By `module.compile()`, or it is what `torch.compile(module)` returned."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def eager_parts(module: nn.Module) -> Iterator[nn.Module]:
    """It and its submodules as eager code calls them; of a compiled one no parts."""
    seen: set[nn.Module] = set()
    left = [module]
    while left:
        m = left.pop()
        if m not in seen:
            seen.add(m)
            yield m
            if not is_compiled(m):
                left.extend(reversed(list(m.children())))


def may_overlap(module: nn.Module | None, stage: int) -> bool:
    """Whether parameters may travel while it runs: scripted parts do not ask for them.

    Raises LayoutError in stage 3, where they would have to.
    """
    scripted = [
        name
        for name, m in (() if module is None else module.named_modules())
        if isinstance(m, torch.jit.ScriptModule) and next(m.parameters(), None) is not None
    ]
    if scripted and stage == 3:
        raise LayoutError(
            f"stage 3 frees parameters, and {len(scripted)} modules made by torch.jit read theirs "
            f"without asking: {', '.join(scripted[:3])}; use stage 1 or 2, or torch.compile"
        )
    return not scripted


def wait_all_gathered(module: nn.Module, args: tuple) -> None:
    """All parameters of the module are here afterwards."""
    for parameter in module.parameters():
        wait_gathered(parameter)


def _look(eager: list[nn.Module], may_follow: bool, module: nn.Module, args: tuple) -> None:
    """One of these may have been compiled since the last forward."""
    for m in eager:
        call = m._compiled_call_impl
        if call is not None and type(call) is not ForwardHooks:
            if not may_follow:
                raise LayoutError(
                    f"a {type(m).__name__} was compiled after the optimizer had put hooks on its "
                    f"{sum(1 for _ in m.modules())} modules, to free and fetch their parameters; "
                    f"compile before the optimizer is wrapped"
                )
            around(m, wait_all_gathered)
