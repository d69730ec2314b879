"""A batch as microbatches: cut along dim 0, and joined again.

One rule: samples are dealt out as evenly as can be, the longer microbatches first, and a mean
over microbatches is weighted by their samples, so that it is the mean over the batch.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchdistpackage.errors import CommError
from torchdistpackage.layout.partition import even_sizes


def sizes_of(num_samples: int, num_microbatches: int) -> list[int]:
    """Samples in each microbatch.

    Raises:
        CommError: fewer samples than microbatches.
    """
    if num_samples < num_microbatches:
        raise CommError(
            f"{num_samples} samples cannot fill {num_microbatches} microbatches; "
            f"use at most {num_samples}"
        )
    return list(even_sizes(num_samples, num_microbatches))


def tensors_in(value: object) -> Iterator[Tensor]:
    """Tensors that have samples, through tuples, lists and dicts."""
    if isinstance(value, Tensor):
        if value.dim():
            yield value
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from tensors_in(member)
    elif isinstance(value, tuple | list):
        for member in value:
            yield from tensors_in(member)


def samples_in(named: Sequence[tuple[str, object]]) -> tuple[int, str]:
    """(length along dim 0 of all tensors in the values, 0 without any; what is wrong, or nothing).

    named: (what an error calls it, value).
    """
    found = [(name, x.shape[0]) for name, value in named for x in tensors_in(value)]
    lengths = {length for _, length in found}
    if len(lengths) > 1:
        told = ", ".join(f"{name} {length}" for name, length in dict.fromkeys(found))
        return 0, f"inputs of one step must have one number of samples along dim 0, not {told}"
    if 0 in lengths:
        return 0, "the batch has 0 samples; give 1 or more"
    return (lengths.pop() if lengths else 0), ""


def cut(value: object, sizes: Sequence[int]) -> Sequence[object]:
    """For each microbatch its part: views of tensors, other values whole.

    Tuples, lists and dicts are cut member by member. One microbatch is the value as it is.
    """
    if len(sizes) == 1:
        return [value]
    if isinstance(value, Tensor) and value.dim():
        return value.split(list(sizes))
    if isinstance(value, Mapping) and value:
        parts = zip(*(cut(member, sizes) for member in value.values()), strict=True)
        return [dict(zip(value, members, strict=True)) for members in parts]
    if isinstance(value, tuple | list) and value:
        parts = zip(*(cut(member, sizes) for member in value), strict=True)
        return [list(part) if isinstance(value, list) else part for part in parts]
    return [value] * len(sizes)


def detached(output: object) -> object:
    """The same without its graph."""
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return {key: detached(value) for key, value in output.items()}
    if isinstance(output, tuple | list):
        return tuple(detached(value) for value in output)
    return output


def is_scalar(x: object) -> bool:
    """Whether it is a number for a whole microbatch. One of a sample has a dim, if of length 1."""
    return isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point()


def joined(outputs: Sequence[object], sizes: Sequence[int]) -> object:
    """Scalars averaged by samples, batches joined along dim 0, members one by one."""
    first = outputs[0]
    if isinstance(first, Mapping):
        return {key: joined([o[key] for o in outputs], sizes) for key in first}  # type: ignore[index]
    if isinstance(first, tuple | list):
        return tuple(joined(list(members), sizes) for members in zip(*outputs, strict=True))  # type: ignore[call-overload]
    if is_scalar(first):
        return mean(outputs, sizes)  # type: ignore[arg-type]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(outputs))  # type: ignore[arg-type]
    return first if len(outputs) == 1 or first is None else list(outputs)


def mean(values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Of one mean for each microbatch, the mean over the batch, in float32 or what is wider."""
    found = Mean(sizes)
    for m, value in enumerate(values):
        found.put(m, value)
    return found.value()


class Mean:
    """The mean over a batch, from one mean for each microbatch, in any order.

    They go into one place: a number with memory of its own, made beside the large tensors of its
    microbatch, would break up what these leave, and the next microbatch would not fit in there.

    num: how many have come.
    """

    def __init__(self, sizes: Sequence[int]):
        self._sizes, self._total = sizes, sum(sizes)
        self._parts: Tensor | None = None
        self.num = 0

    @property
    def is_whole(self) -> bool:
        return self.num == len(self._sizes)

    def put(self, m: int, value: Tensor) -> None:
        """That of microbatch `m`."""
        value, parts = value.detach(), self._parts
        dtype = torch.promote_types(value.dtype, torch.float32 if parts is None else parts.dtype)
        if parts is None:
            parts = value.new_zeros((len(self._sizes), *value.shape), dtype=dtype)
        self._parts = parts = parts.to(dtype)
        parts[m].copy_(value.reshape(parts.shape[1:])).mul_(self._sizes[m] / self._total)
        self.num += 1

    def value(self) -> Tensor:
        """When all have come."""
        assert self._parts is not None
        return self._parts.sum(0)
