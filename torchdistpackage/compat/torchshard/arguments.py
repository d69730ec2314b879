"""Arguments of a call on split activations: which are tensors, which dims are meant, refusals."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torchdistpackage.compat.torchshard.cuts import Args, Cut, Kwargs, Touches, cut_of
from torchdistpackage.errors import LayoutError


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
