"""Find a function by name and file, call it in another process, and return its result.

The rank loads the file that the caller loaded, under the name that the caller knows it by. Only a
script run as `__main__` gets another name, because its `if __name__ == "__main__":` part must not
run again. Where a script has no such part, the place at which it starts its ranks may end its
loading in them: what was defined by then is what the caller had. A function typed in a notebook or
defined inside another has no name to be found by; it travels with the globals that it uses.

The supervisor hears of a result or an exception before the process ends, over the private channel,
so that no exit code has to be guessed at and no log parsed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import cast

from torchdistpackage.environment.failure import Failure, from_exception
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.ipc import Channel, pack, unpack
from torchdistpackage.launch.process import name_thread

MAIN_ALIAS = "__tdp_main__"
_CUT = "__tdp_cut__"
_loading: list[str] = []
"""Modules whose top level this process, a rank, is executing to find a function."""


class StopLoading(BaseException):
    """Ends a rank's loading of a script at the line where the caller started this rank."""


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """`qualname` in `module`, which was loaded from `file` (None: wherever import finds it)."""

    module: str
    qualname: str
    file: str | None = None
    is_main: bool = False

    @staticmethod
    def of(target: str | Callable[..., object]) -> EntryPoint:
        """Return a reference to "module:function", or to a function at the top level of a module.

        Raises:
            LaunchError: no other process could find it by name.
        """
        if isinstance(target, str):
            module, colon, qualname = target.partition(":")
            if not (module and colon and qualname):
                raise LaunchError(
                    f"target {target!r} is not of the form 'package.module:function'; write it so"
                )
            return EntryPoint(module, qualname)
        owner = getattr(target, "__self__", None)
        if not (owner is None or isinstance(owner, type | ModuleType)):
            raise LaunchError(
                f"{target!r} is bound to an object, which another process would not find; "
                "give the function, and the object as an argument of it"
            )
        module = getattr(target, "__module__", None)
        qualname = getattr(target, "__qualname__", None)
        if not module or not qualname or "<" in qualname:
            raise LaunchError(
                f"{target!r} cannot be run in another process: it has no name that could be "
                "looked up there; define it with `def` at the top level of a module"
            )
        loaded = sys.modules.get(module)
        file = getattr(loaded, "__file__", None)
        path = str(Path(file).resolve()) if file else None
        if module != "__main__":
            return EntryPoint(module, qualname, path)
        spec = getattr(loaded, "__spec__", None)
        if spec is not None:  # python -m package.module
            return EntryPoint(spec.name, qualname, path, is_main=True)
        if path is None or not Path(path).is_file():  # `python - < script.py` calls it <stdin>
            raise LaunchError(
                f"{qualname} was defined in an interactive session, or read from stdin, which "
                "other processes cannot load; put it in a file and import it from there"
            )
        return EntryPoint(MAIN_ALIAS, qualname, path, is_main=True)

    def __str__(self) -> str:
        return f"{self.file if self.is_main else self.module}:{self.qualname}"

    @property
    def aliases(self) -> dict[str, str]:
        """Names of modules on the rank -> their names in the caller, for results."""
        return {self.module: "__main__"} if self.is_main else {}

    def resolve(self) -> Callable[..., object]:
        """Return the function itself; its module is loaded first where needed.

        Raises:
            LaunchError: the module has no such function.
            Exception: whatever loading the module raises.
        """
        module = self._load()
        if self.is_main:  # objects that the caller pickled say they come from __main__
            sys.modules["__main__"] = module
        target: object = module
        for name in self.qualname.split("."):
            target = getattr(target, name, None)
        if not callable(target):
            advice = "check the spelling"
            if hasattr(module, _CUT):
                advice = (
                    "it was loaded up to the place where it first starts processes: define the "
                    'function above it, or put that place under `if __name__ == "__main__":`'
                )
            raise LaunchError(
                f"{self}: no function {self.qualname!r} in {module.__name__} "
                f"({getattr(module, '__file__', 'built in')}); {advice}"
            )
        return target

    def _load(self) -> ModuleType:
        loaded = sys.modules.get(self.module)
        if loaded is not None and self._same_file(getattr(loaded, "__file__", None)):
            return loaded
        _loading.append(self.module)
        try:
            if self.module == MAIN_ALIAS or not self._is_found_by_import():
                return self._execute(importlib.util.spec_from_file_location(self.module, self.file))
            if self.is_main:  # python -m
                return self._execute(importlib.util.find_spec(self.module))
            return importlib.import_module(self.module)
        except StopLoading as cut:
            raise LaunchError(
                f"{self}: {self.module} starts processes when it is imported; put that part into "
                "a function, and call it from the main script"
            ) from cut
        finally:
            _loading.pop()

    def _execute(self, spec: ModuleSpec | None) -> ModuleType:
        """Execute the file of `spec` up to the point where it starts processes."""
        if spec is None or spec.loader is None:
            raise LaunchError(
                f"{self}: {self.file} cannot be loaded as a Python module; name a .py file"
            )
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        try:
            spec.loader.exec_module(module)
        except StopLoading:
            setattr(module, _CUT, True)
        return module

    def _is_found_by_import(self) -> bool:
        if self.file is None:
            return True
        try:
            spec = importlib.util.find_spec(self.module)
        except (ImportError, ValueError):
            return False
        return spec is not None and self._same_file(spec.origin)

    def _same_file(self, file: str | None) -> bool:
        return self.file is None or (file is not None and str(Path(file).resolve()) == self.file)


def user_object(path: str) -> Callable[..., object]:
    """Return the object that `pkg.module:name` names."""
    return EntryPoint.of(path).resolve()


def main_is_loading() -> bool:
    """Return whether this process is a rank that is still importing the file of its function."""
    return bool(_loading)


@dataclass(frozen=True, slots=True)
class Result:
    """A returned value, pickled, because only the caller can import its classes by their names."""

    value: bytes


def pack_arguments(*args: object, **kwargs: object) -> bytes:
    """Pack arguments for `load_and_call`."""
    return pack((args, kwargs))


def load_and_call(reference: EntryPoint, args: bytes) -> object:
    """Load a function, call it with arguments from `pack_arguments`, and return its result."""
    function = reference.resolve()
    positional, named = cast(tuple[tuple[object, ...], dict[str, object]], unpack(args))
    return function(*positional, **named)


def run_catching(rank: int, function: Callable[..., object], *args: object) -> Result | Failure:
    """Call `function`, and return its result or its failure in a form that can be sent."""
    try:
        return Result(pack(function(*args)))
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return Result(pack(None))
        return from_exception(rank, error)


def run_rank(channel: Channel, reference: EntryPoint, args: bytes, rank: int) -> None:
    """Run a rank of `run_local`; this is the rank's entry point."""
    name_thread(f"tdp-rank-{rank}")
    outcome = run_catching(rank, load_and_call, reference, args)
    channel.send(outcome)
    if isinstance(outcome, Failure):
        if rank:  # rank 0 shares the caller's terminal, where the supervisor's report ends the run
            sys.stderr.write(outcome.detail + "\n")
        raise SystemExit(outcome.exit_code)


_ByValue = tuple[Callable[..., object], tuple[object, ...], dict[str, object]]


@dataclass(frozen=True, slots=True)
class PackedCall:
    """A function and its arguments. reference: None if `packed` contains the function too."""

    reference: EntryPoint | None
    packed: bytes

    @staticmethod
    def of(func: Callable[..., object], *args: object, **kwargs: object) -> PackedCall:
        """
        Raises:
            LaunchError: `func` or an argument cannot be pickled.
        """
        try:
            reference = EntryPoint.of(func)
            if _is_found(func, reference):
                return PackedCall(reference, pack_arguments(*args, **kwargs))
        except (LaunchError, pickle.PicklingError, AttributeError, TypeError):
            pass  # pickle has all three for what has no name to be found by
        try:
            return PackedCall(None, _pack_by_value((func, args, kwargs)))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise LaunchError(
                f"{func!r} cannot be run in another process: {error}; make what cannot be sent "
                f"inside of the function"
            ) from error

    def load(self) -> Callable[..., object]:
        """Return, on the rank, the function and its arguments; those of the call come first."""
        if self.reference is None:
            function, args, kwargs = cast(_ByValue, unpack(self.packed))
        else:
            function = self.reference.resolve()
            args, kwargs = cast(tuple[tuple[object, ...], dict[str, object]], unpack(self.packed))
        return lambda *first: function(*first, *args, **kwargs)

    def pack_result(self, value: object) -> bytes:
        """Return a result in packed form.

        The rank packs it, because only the caller knows a script's classes by their names.
        """
        return pack(value) if self.reference else _pack_by_value(value)

    def unpack_result(self, packed: bytes) -> object:
        """Return the result, unpacked in the caller's process."""
        return unpack(packed, self.reference.aliases if self.reference else None)


def _pack_by_value(value: object) -> bytes:
    import cloudpickle  # late: few processes need it, and it takes a tenth of a second

    return cloudpickle.dumps(value)  # pyright: ignore[reportUnknownMemberType]


def _is_found(func: Callable[..., object], reference: EntryPoint) -> bool:
    """Return whether a script's file defines `func`.

    An interactive session that began with a script may define more functions by hand.
    """
    code = getattr(inspect.unwrap(func), "__code__", None)
    if code is None or not reference.is_main or reference.file is None:
        return True
    return Path(code.co_filename).resolve() == Path(reference.file)
