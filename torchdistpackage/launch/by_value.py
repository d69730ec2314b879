"""A call for another process: by the function's name where it has one, else by value.

Functions typed in a notebook or defined inside another have no name to be found by; they travel
with the globals that they use. One rule: these pickles travel over private channels alone.
"""

import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import cloudpickle

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.entrypoint import EntryPoint, pack_arguments
from torchdistpackage.launch.ipc import pack, unpack

_ByValue = tuple[Callable[..., object], tuple[object, ...], dict[str, object]]


@dataclass(frozen=True, slots=True)
class PackedCall:
    """A function and its arguments. reference: None: the function is in `packed` too."""

    reference: EntryPoint | None
    packed: bytes

    @staticmethod
    def of(func: Callable[..., object], *args: object, **kwargs: object) -> "PackedCall":
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
            return PackedCall(None, cloudpickle.dumps((func, args, kwargs)))  # pyright: ignore[reportUnknownMemberType]
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise LaunchError(
                f"{func!r} cannot be run in another process: {error}; make what cannot be sent "
                f"inside of the function"
            ) from error

    def load(self) -> Callable[..., object]:
        """The function with its arguments, which follow those that it is called with; there."""
        if self.reference is None:
            function, args, kwargs = cast(_ByValue, unpack(self.packed))
        else:
            function = self.reference.resolve()
            args, kwargs = cast(tuple[tuple[object, ...], dict[str, object]], unpack(self.packed))
        return lambda *first: function(*first, *args, **kwargs)

    def pack_result(self, value: object) -> bytes:
        """A result, packed there: only the caller knows a script's classes by their names."""
        return pack(value) if self.reference else cloudpickle.dumps(value)  # pyright: ignore[reportUnknownMemberType]

    def unpack_result(self, packed: bytes) -> object:
        """The result, here."""
        return unpack(packed, self.reference.aliases if self.reference else None)


def _is_found(func: Callable[..., object], reference: EntryPoint) -> bool:
    """Whether the file of a script has it: a session that began with a script goes on by hand."""
    code = getattr(inspect.unwrap(func), "__code__", None)
    if code is None or not reference.is_main or reference.file is None:
        return True
    return Path(code.co_filename).resolve() == Path(reference.file)
