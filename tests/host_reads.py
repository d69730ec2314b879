"""Host reads of tensor values in a piece of work, counted by the line of the package that asked.

On a GPU each of them stops the host until the device has caught up. Here "device" tensors live on
the CPU, so what is counted is whatever would wait if they did not: operations whose result the host
needs to go on (`item`, `tolist`, `nonzero`, a mask as an index, ...), copies to "cpu" by name, and
tensors made from numbers with `device=`, which a device waits for as well.

Not counted: what torch's own process groups and the asynchronous double read, what the files in
`HOST` read, all of which is in host memory by design, and copies between two devices that are
both the CPU here (`x.to(self.device)`), of which nobody can tell which way they would go.
"""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

PACKAGE = str(Path(__file__).parent.parent / "torchdistpackage") + "/"

HOST = (
    "comm/debug_checks.py",
    "comm/tensor_channel.py",
    "comm/tensor_meta.py",
    "comm/objects.py",
    "comm/moments.py:OnHost",
    "comm/random.py:differ",
    "parallel/pipeline/agreement.py",
    "parallel/tensor/embedding.py:check_ids",
    "data/corpus.py",
    "data/source.py",
    "train/step_stats.py:PendingStep",
)
"""Files of the package, or functions in them, that read host memory: of a companion group for it,
of a file, of a generator or a batch that is there, or of a copy that left the device before the
work that its host is not to wait for."""

_TRANSPORT = ("/torch/distributed/", "/torchdistpackage/harness/late/")

_READS = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "argwhere",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
# read memory without an operation, so that only the call is seen
_CALLS = {"__array__", "cpu", "numpy", "tolist"}
_MADE = {"as_tensor", "asarray", "new_tensor", "tensor"}


class HostReads:
    """`with HostReads() as reads: step()`; then `reads.found` is {"train/step.py:169 tolist": 1}.

    Counts in the thread that enters it, and in the backwards that this thread starts. A read in a
    function outside of the package, such as a test's loss, counts by its own file and line. host:
    see `HOST`; reads there do not count.
    """

    def __init__(self, host: tuple[str, ...] = HOST):
        self.found: Counter[str] = Counter()
        self._host, self._muted = host, False
        self._modes = (_Calls(self), _Operations(self))
        self._run_backward = torch.autograd._engine_run_backward

    def __enter__(self) -> "HostReads":
        torch.autograd._engine_run_backward = self._backward
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        torch.autograd._engine_run_backward = self._run_backward

    def _backward(self, *args, **kwargs):
        """`backward` is a call itself, inside which torch leaves out the mode that sees calls."""
        with self._modes[0]:
            return self._run_backward(*args, **kwargs)

    def within(self, what: str, func, args, kwargs):
        """Call `func`, counted once: what it calls does not count again."""
        if self._muted:
            return func(*args, **kwargs)
        where = self._where()
        if where is not None:
            self.found[f"{where} {what}"] += 1
        self._muted = True
        try:
            return func(*args, **kwargs)
        finally:
            self._muted = False

    def _where(self) -> str | None:
        """File and line that asked: the package's, if any of it is on the stack; None: no count."""
        frame, asked = sys._getframe(2), None
        while frame is not None:
            name, line = frame.f_code.co_filename, frame.f_lineno
            if any(part in name for part in _TRANSPORT):
                return None
            if name.startswith(PACKAGE):
                inside = name.removeprefix(PACKAGE)
                function = frame.f_code.co_qualname.partition(".")[0]
                is_host = inside in self._host or f"{inside}:{function}" in self._host
                return None if is_host else f"{inside}:{line}"
            if asked is None and name != __file__ and "/torch/" not in name:
                asked = f"{name}:{line}"
            frame = frame.f_back
        return asked or "?"


class _Operations(TorchDispatchMode):
    def __init__(self, reads: HostReads):
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in _READS or _takes_a_mask(name, args) or _counts_repeats(name, func, kwargs):
            return self._reads.within(name.removeprefix("_local_"), func, args, kwargs)
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    def __init__(self, reads: HostReads):
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        made = name in _MADE and _is_device(kwargs.get("device"))
        if name in _CALLS or made or (name == "to" and _blocks(args, kwargs)):
            return self._reads.within(name, func, args, kwargs)
        return func(*args, **kwargs)


def _takes_a_mask(name: str, args: tuple) -> bool:
    """Whether the host must know how many elements a mask means; to set all to one it need not."""
    if name not in ("index", "index_put", "index_put_"):
        return False
    if name != "index" and args[2].numel() == 1:
        return False
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def _counts_repeats(name: str, func, kwargs: dict) -> bool:
    is_counted = name == "repeat_interleave" and func._overloadname == "Tensor"
    return is_counted and kwargs.get("output_size") is None


def _is_device(device: object) -> bool:
    """Whether it may be another than the host: not by default, and not the CPU by name."""
    return device is not None and device != "cpu"


def _blocks(args: tuple, kwargs: dict) -> bool:
    """Whether a call of `to` names the CPU, in words, and waits for what is copied there."""
    named = [x for x in (*args[1:2], kwargs.get("device")) if isinstance(x, str)]
    return "cpu" in named and not kwargs.get("non_blocking")
