"""Gathers before a module reads its parameters: in stage 3, and before compiled submodules.

Stage 3 frees parameters between uses. Freed buckets are fetched in one order, that of the forward,
and in a backward in its reverse. So ranks agree whatever submodules each of them runs; a rank also
fetches buckets that it does not use. A read of an ungathered parameter moves the rank along this
order, and `PREFETCH` further buckets are fetched ahead.

Compiled code contains none of this: a compiled module reads its parameters without looking at their
class, and would trace hooks into its graph. So its parameters are gathered before it runs, and
handled after.
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
"""Number of buckets fetched ahead of the one being read: one in flight and the next."""

Before = Callable[[nn.Module, tuple], object]
After = Callable[[nn.Module, tuple, object], object]


class WholeParams:
    """The coordinator of stages 1 and 2, which never free parameters; it does nothing."""

    @property
    def has_freed(self) -> bool:
        """True if some parameters are freed, so that all ranks must gather them together."""
        return False

    def on_read(self, parameters: ParamBuffer) -> None:
        """Handle a read of an ungathered parameter."""

    def release(self, parameters: ParamBuffer) -> None:
        """Free a bucket, once a backward has all its gradients."""

    def fetch_all(self) -> None:
        """Gather all freed buckets; all ranks call it."""

    def stepped(self) -> None:
        """Handle new values of the parameters after a step."""


class ParamCoordinator(WholeParams):
    """The coordinator of stage 3, which frees and fetches the buckets of `module`.

    order: the buckets in the order of the forward.
    keeps: keep parameters from forward to backward. Otherwise a bucket is freed after the forward
        of the modules that own it, and fetched again.
    """

    def __init__(self, module: nn.Module, order: Sequence[ParamBuffer], keeps: bool):
        self._order, self._keep_until_backward = list(order), keeps
        self._indices = range(len(order))
        self._index_of = {id(parameters): index for index, parameters in enumerate(order)}
        self._is_back = False
        self._next = 0  # position in the order of the current direction
        self._in_forward = False
        self._task = -1  # graph task of the running backward
        self._owned = _owned_buckets(module, order)
        self._owners = [
            {m for m, indices in self._owned.items() if i in indices} for i in self._indices
        ]
        # owners of each bucket that have not run in this forward
        self._waiting = [set(owners) for owners in self._owners]
        self._running: list[nn.Module] = []
        # buckets read while none of their owners ran, whose last use is therefore not known
        self._pinned: set[int] = set()
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
        """Fetch the buckets up to the one that is read.

        Raises:
            CommError: the parameter is freed and read outside of forward and backward, where other
                ranks may not read it.
        """
        if not self._in_forward and torch._C._current_graph_task_id() == -1:
            if parameters.is_free:
                layout = parameters.layout
                raise CommError(
                    f"{', '.join(m.name for m in layout.members[:3])}, ... are sharded over ranks "
                    f"{ranks_of(layout.group)} outside of forward and backward (ZeRO stage 3); "
                    "call the optimizer's finish() on all of these ranks before you read one"
                )
            return
        index = self._index_of[id(parameters)]
        # if no owner runs, no exit hook will tell when the bucket may be freed
        if self._owners[index].isdisjoint(self._running):
            self._pinned.add(index)
        self._fetch_until(index)
        parameters.fetch()  # it may have been freed again after its turn in the order

    @property
    def has_freed(self) -> bool:
        return any(parameters.is_free for parameters in self._order)

    def fetch_all(self) -> None:
        """Gather all buckets, which stay gathered until their next use or step; all ranks
        call it.
        """
        for parameters in self._order:
            parameters.fetch()
        for parameters in self._order:
            parameters.arrive()

    def stepped(self) -> None:
        """Free the old values after a step, and fetch the first buckets of the next forward."""
        for parameters in self._order:
            parameters.changed()
            parameters.free()
        self._turn(is_back=False)
        for parameters in self._order[:PREFETCH]:
            parameters.fetch()

    def release(self, parameters: ParamBuffer) -> None:
        """Free a bucket, once a backward has all its gradients."""
        if self._is_back and not self._keep_until_backward:
            self._fetch_until(self._index_of[id(parameters)], ahead=0)
        parameters.free()

    # -- the order ---------------------------------------------------------------------

    def _turn(self, is_back: bool) -> None:
        """Start over, in the order of the forward or in its reverse."""
        self._is_back, self._next = is_back, 0

    def _fetch_until(self, index: int, ahead: int = PREFETCH) -> None:
        """Fetch all buckets up to `index` in this direction, and `ahead` more."""
        indices = self._indices[::-1] if self._is_back else self._indices
        end = indices.index(index) + 1 + ahead
        for i in indices[self._next : end]:
            self._order[i].fetch()
        self._next = max(self._next, min(end, len(indices)))

    # -- forward -----------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: object) -> None:
        """Start the order of a forward."""
        self._in_forward = True
        self._turn(is_back=False)
        self._running.clear()
        self._waiting = [set(owners) for owners in self._owners]

    def _exit(self, module: nn.Module, args: object, outputs: object) -> object:
        """End a forward: fetch the rest of the order, and free what the backward does not read
        first.
        """
        self._in_forward = False
        self._fetch_until(len(self._order) - 1, ahead=0)
        if not torch.is_grad_enabled():
            for parameters in self._order:
                parameters.free()
            return outputs
        if not self._keep_until_backward and torch._C._current_graph_task_id() == -1:
            # keep the last bucket, which the backward reads first
            for index in self._indices[:-1]:
                if index not in self._pinned:
                    self._order[index].free()
        return on_backward_start(outputs, self._backward_begins)

    def _owner_enters(self, module: nn.Module, args: object) -> None:
        self._running.append(module)

    def _owner_exits(self, module: nn.Module, args: object, outputs: object) -> object:
        """Free a module's buckets after its forward, and hook its outputs."""
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
        # a leaf, such as a returned parameter, has no backward here and would keep its hooks
        """Let the backward fetch these buckets when it reaches the output."""
        if output.requires_grad and not output.is_leaf:
            output.register_hook(partial(self._backward_needs, indices))
        return output

    def _backward_begins(self, grad: Tensor) -> None:
        """Start the reverse order in the first hook of a backward."""
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
        """Fetch and await buckets that autograd is about to read without asking their class."""
        for index in reversed(indices):
            if self._order[index].is_free:
                self._fetch_until(index)
                self._order[index].fetch()
            # wait here: autograd reads the saved tensor directly, and no hook could wait for it
            self._order[index].arrive()

    def _backward_ends(self) -> None:
        self._task = -1
        if not self._keep_until_backward:
            for parameters in reversed(self._order):
                self.release(parameters)


def _called(module: nn.Module) -> list[nn.Module]:
    """Return the modules that a user calls: `module`, or its children if it has no forward."""
    if type(module).forward is not nn.Module.forward:
        return [module]
    return [called for child in module.children() for called in _called(child)]


def _owned_buckets(module: nn.Module, order: Sequence[ParamBuffer]) -> dict[nn.Module, list[int]]:
    """Return the buckets of each submodule's own parameters; a compiled submodule owns all
    its own.
    """
    index_of = {
        id(spec.parameter): index
        for index, parameters in enumerate(order)
        for spec in parameters.layout.members
    }
    owned: dict[nn.Module, list[int]] = {}
    for m in eager_parts(module):
        own_parameters = m.parameters(recurse=is_compiled(m))
        indices = {index_of[id(p)] for p in own_parameters if id(p) in index_of}
        if indices:
            owned[m] = sorted(indices)
    return owned


# -- around modules, compiled ones too -----------------------------------------------------


class ForwardHooks:
    """A compiled call of a module with hooks around it that are not compiled.

    Like torch's compiled call, it is not copied with the module.
    """

    def __init__(self, module: nn.Module):
        assert module._compiled_call_impl is not None
        self._module, self._call = module, module._compiled_call_impl
        self._before: dict[int, Before] = OrderedDict()
        self._after: dict[int, After] = OrderedDict()

    def __call__(self, *args, **kwargs):
        for pre_hook in self._before.values():
            pre_hook(self._module, args)
        outputs = self._call(*args, **kwargs)
        for post_hook in self._after.values():
            changed = post_hook(self._module, args, outputs)
            outputs = outputs if changed is None else changed
        return outputs

    def add(self, pre_hook: Before, post_hook: After | None) -> list[RemovableHandle]:
        """Add hooks, and return the handles that remove them."""
        handles = [RemovableHandle(self._before)]
        self._before[handles[0].id] = pre_hook
        if post_hook is not None:
            handles.append(RemovableHandle(self._after))
            self._after[handles[1].id] = post_hook
        return handles


def gather_ahead(module: nn.Module, may_follow: bool) -> list[Removable]:
    """Hook `module` so that parameters are gathered before a compiled submodule runs.

    may_follow: allow submodules to be compiled later.
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


def around(
    module: nn.Module, pre_hook: Before, post_hook: After | None = None
) -> list[RemovableHandle]:
    """Call `pre_hook(module, args)` and `post_hook(module, args, outputs)` whenever the module
    runs.

    Both run eagerly, also around a compiled module. `post_hook` returns new outputs or None.
    """
    pre_hook, post_hook = WeakHook(pre_hook), None if post_hook is None else WeakHook(post_hook)
    if module._compiled_call_impl is None:
        handles = [module.register_forward_pre_hook(pre_hook)]
        return handles if post_hook is None else [*handles, module.register_forward_hook(post_hook)]
    if not isinstance(module._compiled_call_impl, ForwardHooks):
        module._compiled_call_impl = ForwardHooks(module)
    return module._compiled_call_impl.add(pre_hook, post_hook)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled, by `module.compile()` or `torch.compile(module)`."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def eager_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and its submodules, without those inside compiled ones."""
    seen: set[nn.Module] = set()
    pending = [module]
    while pending:
        m = pending.pop()
        if m not in seen:
            seen.add(m)
            yield m
            if not is_compiled(m):
                pending.extend(reversed(list(m.children())))


def may_overlap(module: nn.Module | None, stage: int) -> bool:
    """Return whether gathers may overlap the forward: scripted modules read without waiting.

    Raises:
        LayoutError: stage 3 with scripted modules, whose parameters would be absent.
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
    """Wait until all parameters of the module are gathered."""
    for parameter in module.parameters():
        wait_gathered(parameter)


def _look(eager: list[nn.Module], may_follow: bool, module: nn.Module, args: tuple) -> None:
    """Hook submodules that were compiled since the last forward, or refuse them."""
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
