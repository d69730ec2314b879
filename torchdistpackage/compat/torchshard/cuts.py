"""Which dim of an activation is split over my group, and the arguments of calls on such ones."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from torchdistpackage.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Cut:
    """A dim (>= 0) of a tensor that is split over the group, and its length over all ranks.

    loose: here it is 1 long and a view made it, in front of a dim that may be meant as well, since
        one head of 24 and 24 features behind a new dim are the same shape.
    """

    dim: int
    length: int
    loose: bool = field(default=False, compare=False)

    def behind(self, x: Tensor) -> "Cut":
        """A loose one, as that of the next dim of `x`."""
        return Cut(self.dim + 1, self.length * x.shape[self.dim + 1])


class Touches(Exception):
    """An operation would mix what different ranks hold."""


Args, Kwargs = Sequence[Any], Mapping[str, Any]
Rule = Callable[[Args, Kwargs, Any], Cut | None]
"""Arguments and the result of a call -> the cut of the result, of each tensor in it."""


def cut_of(x: object) -> Cut | None:
    """How an activation is split; None: it is whole. Parameters are not followed."""
    found = getattr(x, "__dict__", {}).get("_cut")
    return None if found is None or isinstance(x, nn.Parameter) else found


def check_tensors(what: str, **values: object) -> None:
    """
    Raises:
        ValueError: some are no tensors; all of them.
    """
    wrong = [
        f"a tensor{f' as {name}' if len(values) > 1 else ''}, not {type(value).__name__}"
        for name, value in values.items()
        if not isinstance(value, Tensor)
    ]
    if wrong:
        raise ValueError(f"{what} takes {' and '.join(wrong)}")


def tensors(values: Iterable[object]) -> list[Tensor]:
    """Tensors among arguments, also those in lists and tuples."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors(value)
    return found


def refusal(name: str, args: Args, kwargs: Kwargs) -> LayoutError:
    """What is said of an operation that is not followed."""
    x = next(t for t in tensors([*args, *kwargs.values()]) if cut_of(t) is not None)
    cut = cut_of(x)
    assert cut is not None
    return LayoutError(
        f"{name} of a tensor of shape {tuple(x.shape)}, of whose dim {cut.dim} this rank holds "
        f"{x.shape[cut.dim]} of {cut.length}: {name} is not one of the operations that leave a "
        f"split dim alone; call torchshard.distributed.gather(x, {cut.dim}) before, or "
        f"torchshard.register_parallel_dim(x, None) where this rank's part alone is meant"
    )


def first_of(args: Args, kwargs: Kwargs) -> tuple[Tensor, Cut]:
    x = args[0] if args else kwargs.get("input", kwargs.get("self"))
    cut = cut_of(x)
    if cut is None or any(cut_of(t) is not None for t in tensors([*args[1:], *kwargs.values()])):
        raise Touches
    return x, cut


def argument(args: Args, kwargs: Kwargs, at: int, name: str, default: Any = None) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, default)


def dims_of(x: Tensor, dim: Any) -> set[int]:
    dims = dim if isinstance(dim, list | tuple) else (dim,)
    if dim is None or not all(isinstance(d, int) for d in dims):
        raise Touches
    return {d % x.dim() for d in dims}
