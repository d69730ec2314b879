"""The first forward of a split module, compared once with that of the module it was made from.

Rules cut layer by layer and do not know what a forward does with them. So before the first forward
the unsplit module and the shards are called with the same input, and a difference is an error that
names the first part whose output differs.

Copies are called, with buffers, attributes and inputs of their own, in evaluation, without autograd
and autocast, and the random state is put back: a comparison leaves no trace. It is in float32 or
wider. Where it could say something wrong it is given up, with a warning that says why: weights or
attributes were changed since the split, somebody else's hooks would be called, or rounding alone
changes the unsplit module's output as much, as where a router's scores are almost equal.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.nested import map_tensors
from torchdistpackage.comm.primitives import Group
from torchdistpackage.compat.tensor_parallel.engine.changed import changed_weight
from torchdistpackage.compat.tensor_parallel.engine.model import ParallelModule
from torchdistpackage.equivalence.compare import WHOLE_MODEL, ParityFinding, first_difference
from torchdistpackage.equivalence.match import elementwise, elementwise_within
from torchdistpackage.equivalence.record import ParityRecord, parts_of, recording
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto.reporting import LOG
from torchdistpackage.parallel.auto.traffic import size_bytes, uncounted

MOST_BYTES = 2**30
"""Largest weights of a module that is compared by default where shards are on other devices than a
CPU."""
EPS = torch.finfo(torch.float32).eps
TOLERANCE = EPS**0.5
"""Smallest difference that counts, as a share of an output's largest number.

It is half the digits of float32: sums in another order differ by some EPS, also in a module in
float64, of which some norms compute in float32.
"""
LIBRARIES = ("torch", "torchdistpackage", "transformers", "peft")
"""Libraries whose hooks a trial may call once more."""
NUM_TRIALS = 3


def why_not_compared(
    module: nn.Module, devices: Sequence[torch.device], by_rules: bool, is_requested: bool | None
) -> str | None:
    """Return why `tensor_parallel` does not compare; None: it does.

    is_requested: what its caller said.
    """
    if is_requested is False:
        return "verify=False"
    if is_requested is None and not by_rules:
        return "the plan is of a known family or the caller's own"
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        return "the unsplit module has no weights, it is on the meta device"
    num_bytes = sum(map(size_bytes, tensors))
    if is_requested is None and num_bytes > MOST_BYTES and any(d.type != "cpu" for d in devices):
        return (
            f"its {num_bytes:,} bytes of weights are more than {MOST_BYTES:,}; pass verify=True "
            f"where a device can hold all of them"
        )
    return None


def described(why_not: str | None) -> str:
    """Return the comparison in words."""
    if why_not is None:
        return f"compared with the unsplit module's, to {TOLERANCE:.0e} of its largest output"
    return f"not compared with the unsplit module's: {why_not}"


class FirstForward:
    """A hook before forwards of `split` that compares once, and then is gone.

    module: what was split. Until then it is kept.
    """

    def __init__(self, split: ParallelModule, module: nn.Module):
        self.unsplit = with_tensors(module, every_tensor, kept)
        self.attributes = attributes_of(split)
        split.register_forward_pre_hook(self, with_kwargs=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FirstForward":
        return self  # it holds nothing that a forward changes

    def __call__(self, split: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises LayoutError where outputs differ, on all ranks of a group."""
        if torch.compiler.is_compiling():
            return  # the first call outside of a compiled program compares
        split.place_delayed()
        with without_trace(split):
            result = BothForwards(self, split, args, kwargs).result()
        for key in [key for key, hook in split._forward_pre_hooks.items() if hook is self]:
            del split._forward_pre_hooks[key], split._forward_pre_hooks_with_kwargs[key]
        if isinstance(result, str):
            LOG.warning("the split was not compared with the unsplit module: %s", result)
        else:
            LOG.info("the split equals the unsplit module, within %.1e of its outputs", result)


class BothForwards:
    """Both modules called with copies of one input."""

    def __init__(
        self, check: FirstForward, split: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ):
        self.check, self.split, self.inputs = check, split, (args, kwargs)
        self.group: Group | None = split._group
        self.why: str | None = None
        self.device = split.devices[0] if split.devices else torch.device("cpu")
        self.casts: dict[torch.dtype, torch.dtype] = {}

    def result(self) -> float | str:
        """Return the largest difference, or why nothing was compared.

        Raises:
            LayoutError: it is more than rounding.
        """
        expected: list[Tensor] = []
        largest = rounding = 0.0
        with self.giving_up("a copy of it cannot be called"):
            self.why = self.why_not()
            if self.why is None:
                expected, twin = tensors_in(self.call_unsplit()), self.twin()
        if why := self.agreed(self.why):
            return why
        actual = tensors_in(self.call(twin))
        with self.giving_up("outputs cannot be compared"):
            self.why = why_incomparable(actual, expected)
            largest = largest_difference(actual, expected)
        if why := self.agreed(self.why):
            return why
        if not self.agreed(largest > TOLERANCE):
            return largest
        with self.giving_up("a copy of it cannot be called with noise"):
            rounding = max(self.response(expected) for _ in range(NUM_TRIALS))
        if TOLERANCE < largest <= 10 * rounding:
            self.why = (
                f"rounding alone changes the unsplit module's output by {rounding:.1e} of its "
                f"largest number, where the split differs by {largest:.1e}"
            )
        if why := self.agreed(self.why):
            return why
        culprit = self.culprit(largest)
        raise LayoutError(self.agreed(culprit if largest > TOLERANCE else None))

    @contextmanager
    def giving_up(self, activity: str) -> Iterator[None]:
        """An exception inside, which a forward in training may not have, is why not to compare."""
        try:
            yield
        except Exception as error:
            self.why = f"{activity}: {type(error).__name__}: {error}"

    def agreed(self, answer: Any) -> Any:
        """Return the first value in the group that is not empty; all ranks of the group call
        this.
        """
        if self.group is None:
            return answer
        answers = collectives.gather_objects(answer, self.group)
        return next((each for each in answers if each), None)

    def why_not(self) -> str | None:
        for name, part in self.check.unsplit.named_modules():
            for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values()):
                if home_of(hook) not in LIBRARIES:
                    return f"{name or 'the module'} has a hook, which would be called once more"
        if changed := next(differing(self.check.attributes, attributes_of(self.split)), None):
            return f"attributes or hooks of {changed} were changed since the split"
        if changed := changed_weight(self.split, self.check.unsplit, self.casts):
            return f"{changed} was changed since the split"
        return None

    def call_unsplit(self, prepare: Callable[[nn.Module], Any] | None = None) -> Any:
        move = partial(widened, device=self.device)
        twin = with_tensors(self.check.unsplit, every_tensor, lambda x: move(self.cast(x))).eval()
        if prepare is not None:
            prepare(twin)
        args, kwargs = with_tensors(self.inputs, tensors_in, move)
        return twin(*args, **kwargs)

    def cast(self, tensor: Tensor) -> Tensor:
        """Return the tensor in the dtype to which `Module.to` has moved the split."""
        dtype = self.casts.get(tensor.dtype, tensor.dtype)
        if dtype == tensor.dtype:
            return tensor
        moved = tensor.detach().to(dtype)
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(moved, requires_grad=False) if is_parameter else moved

    def twin(self) -> Any:
        return with_tensors(self.split, every_tensor, widened).eval()

    def call(self, twin: Any) -> Any:
        args, kwargs = with_tensors(self.inputs, tensors_in, widened)
        return twin.call_shards(list(twin.module_shards), args, kwargs)

    def response(self, expected: Sequence[Tensor]) -> float:
        """Return how much outputs change where every part's output is rounded a little
        differently.
        """

        def prepare(twin: nn.Module) -> None:
            for part in twin.modules():
                part.register_forward_hook(lambda part, args, output: map_tensors(output, rounded))

        return largest_difference(tensors_in(self.call_unsplit(prepare)), expected)

    def culprit(self, largest: float) -> str:
        """Name the first part whose output differs, and how."""
        expected, actual = ParityRecord({}), ParityRecord({})
        with ExitStack() as stack:
            output = self.call_unsplit(
                lambda twin: stack.enter_context(
                    recording(parts_of(twin), expected, first_call=True)
                )
            )
        twin = self.twin()
        with recording(shard_modules(twin.module_shards[0]), actual, first_call=True):
            outputs = tensors_in(self.call(twin))
        pairs = [(a, b) for a, b in zip(outputs, tensors_in(output), strict=True) if alike(a, b)]
        actual.results, expected.results = [a for a, _ in pairs], [b for _, b in pairs]
        finding = first_difference(expected, [actual], {}, elementwise_within(TOLERANCE))
        if finding is None or finding.module == WHOLE_MODEL:
            finding = ParityFinding(WHOLE_MODEL, "outputs", largest, 0, "")
            kind = type(self.check.unsplit)
        else:
            kind = type(self.check.unsplit.get_submodule(finding.module))
        return (
            f"the split does not compute what the {type(self.check.unsplit).__name__} does "
            f"({finding.brief}; it is a {kind.__name__}, and rounding may be {TOLERANCE:.0e}). "
            f"Leave it whole, by a tensor_parallel_config without rules for its layers, give all "
            f"ranks the same input, or pass verify=False to go on all the same"
        )


# -- copies --------------------------------------------------------------------------------


def with_tensors(
    value: Any, tensors: Callable[[Any], Any], change: Callable[[Tensor], Tensor]
) -> Any:
    """Return a deep copy of `value` in which `change` was applied to each of `tensors`."""
    return deepcopy(value, {id(tensor): change(tensor) for tensor in tensors(value)})


def kept(tensor: Tensor) -> Tensor:
    """Return a parameter itself, and a copy of anything else, as a forward may write to it."""
    return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


def every_tensor(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def tensors_in(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(value, note)
    return tensors


def widened(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return the tensor in float32 or wider. A parameter that needs no change is shared, anything
    else copied.
    """
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    is_parameter = isinstance(tensor, nn.Parameter)
    moved = tensor.detach().to(device or tensor.device, dtype, copy=not is_parameter)
    return nn.Parameter(moved, requires_grad=False) if is_parameter else moved


@contextmanager
def without_trace(split: Any) -> Iterator[None]:
    """Restore random states after the block, and switch off autocast and counters inside it, so
    that it leaves no trace.
    """
    kinds = {"cpu", *(device.type for device in split.devices)}
    states = [(random.getstate, random.setstate)]
    if (numpy := sys.modules.get("numpy")) is not None:
        states.append((numpy.random.get_state, numpy.random.set_state))
    values = [get() for get, _ in states]
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        for (_, restore), state in zip(states, values, strict=True):
            stack.callback(restore, state)
        # the fast path of torch's encoder, which shards do not take, returns other padding
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(torch.random.fork_rng([d for d in split.devices if d.type == "cuda"]))
        stack.enter_context(torch.no_grad())
        stack.enter_context(uncounted())
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


# -- what may have changed since the split -------------------------------------------------


def home_of(hook: Any) -> str:
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return str(named.__module__).partition(".")[0]


def attributes_of(split: ParallelModule) -> dict[str, Any]:
    """Return the plain attributes and the hooks of each part of the shards."""
    return {
        f"shard {at}'s {name or 'module'}": (
            {k: repr(v) for k, v in vars(part).items() if is_plain(v) and k != "training"},
            [*part._forward_hooks, *part._forward_pre_hooks],
        )
        for at, shard in enumerate(split.module_shards)
        for name, part in shard.named_modules()
    }


def is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def differing(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    yield from (name for name in {**first, **second} if first.get(name) != second.get(name))


# -- differences ---------------------------------------------------------------------------


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected number; infinite for
    shapes.
    """
    if actual.shape != expected.shape:
        return float("inf")
    if not alike(actual, expected):
        return 0.0
    if not expected.any():
        return actual.abs().nan_to_num(float("inf")).max().item() if actual.numel() else 0.0
    return elementwise(actual, expected) or 0.0


def why_incomparable(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    if len(actual) != len(expected):
        return f"the unsplit module returns {len(expected)} tensors, the split {len(actual)}"
    if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in expected):
        return "there is no floating-point number in the output"
    return None


def largest_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(map(difference, actual, expected), default=0.0)


def alike(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two outputs are comparable floats of one shape; integers jump where scores are
    close.
    """
    is_number = expected.is_floating_point() or expected.is_complex()
    return is_number and actual.shape == expected.shape


def rounded(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor * (1 + 4 * EPS * torch.randn_like(tensor))


def shard_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a shard by their names in the unsplit module; a layer with rules is what
    they make of it.
    """
    return {
        name.replace("tp_wrapped_module.", ""): part
        for name, part in root.named_modules()
        if name and not f".{name}".endswith(".tp_wrapped_module")
    }
