"""Names that are still to come: their value.

Such a name can be imported and handed on, and refuses use. An import must never fail because of it,
as the program may not use it at all. What an import statement or a type annotation does to a value
therefore passes; a use raises.
"""

from typing import NoReturn, Union

from torchdistpackage.errors import NotAvailableError


class NotAvailable:
    """Stands for `name` of `module`; each use raises NotAvailableError with the reason."""

    __slots__ = ("_name", "_why")

    def __init__(self, module: str, name: str, why: str):
        self._name, self._why = f"{module}.{name}", why

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotAvailableError(f"{self._name} is not available yet: {self._why}")

    __call__ = __mro_entries__ = _refuse
    """A call, and `class Mine(name)`."""

    __instancecheck__ = __subclasscheck__ = _refuse
    __getitem__ = __iter__ = __enter__ = __exit__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    def __or__(self, other: object) -> object:
        return Union[self, other]  # noqa: UP007  # an annotation `Name | None`

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<{self._name}, not available yet>"


class UnavailableReason(str):
    """Why a name is not available yet; the text ends a sentence."""

    __slots__ = ()
