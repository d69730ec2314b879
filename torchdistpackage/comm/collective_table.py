"""The table of collective operations: everything that the package needs to know about each. No
torch.

From a row follow the names in `torchdistpackage.comm`, what `tdp comm test`, `tdp comm bench` and
benchmarks/comm_overhead.py run, the bytes in predictions, the table of docs/collectives.md
(scripts/docs), and the tests of its answer, gradients and types (tests/comm/collective_cases.py).

Bytes and factors are those of nccl-tests (doc/PERFORMANCE.md), or a bandwidth could not be compared
with others'. The *counted* bytes are those of the larger buffer of a rank; the algorithm bandwidth
is counted bytes by time, and the bus bandwidth that times `bus_factor(size)`: the speed of the
busiest link at any size of the group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchdistpackage.errors import LayoutError
from torchdistpackage.lazy import resolve

_MAPS = "torchdistpackage.comm.autograd"
_CALLS = "torchdistpackage.comm.primitives"
_BY_TORCH = "torchdistpackage.comm.by_torch"


def _not_measured(size: int) -> float:
    raise NotImplementedError("the table has no bus factor for this operation")


@dataclass(frozen=True, slots=True)
class CollectiveSpec:
    """One operation over a group of `size` ranks.

    home: the module below the package that defines `names`, its public functions; it has another
        name than each of them, or it would hide that function. The first is `name`, which autograd
        goes through, where there is a `map`.
    map: "module:class" of the `LinearMap` of comm/autograd.py, which has its transpose, and in
        `answer` the right answer without communication.
    takes, gives: the types of its input and output, which its gradients have the duals of: I is
        equal on all ranks and one thing, R equal on all and used by each for itself, P a term of a
        sum, V each rank's own.
    call, torch: "module:function" of what is measured, along dim 0 without autograd, and of what a
        user would write with `torch.distributed` alone; both are called with a tensor and a group.
    signature, returns, backward, use: its row of docs/collectives.md.
    bus_factor: of the group's size; 0 where a group of one moves nothing.
    input_is_part, output_is_part: that buffer of a rank is one of `size` equal parts of what is
        counted, else all of it.
    in_parts: what is counted falls into `size` equal parts.
    is_sum: inputs are added; else they are moved.
    is_message: between two ranks.
    tested: element types that `tdp comm test` sends; () where harness/comm_checks.py has a check.
    """

    name: str
    home: str = "comm.collectives"
    names: tuple[str, ...] = ()
    map: str = ""
    takes: str = ""
    gives: str = ""
    call: str = ""
    torch: str = ""
    signature: str = ""
    returns: str = ""
    backward: str = ""
    use: str = ""
    bus_factor: Callable[[int], float] = _not_measured
    input_is_part: bool = False
    output_is_part: bool = False
    in_parts: bool = False
    is_sum: bool = False
    is_message: bool = False
    tested: tuple[str, ...] = ("float32",)

    @property
    def cuts(self) -> bool:
        """Return whether each rank receives a slice of another rank's input."""
        return self.in_parts and not self.input_is_part

    @property
    def joins(self) -> bool:
        """Return whether a rank joins the slices of all ranks."""
        return self.in_parts and not self.output_is_part

    def load(self, path: str) -> Any:
        """Return the object that `map`, `call` or `torch` names."""
        return resolve(path)

    def input_bytes(self, counted_bytes: int, size: int) -> int:
        """Return the bytes of each rank's input.

        Raises:
            LayoutError: the counted bytes cannot be cut into equal parts.
        """
        return self._buffer_bytes(self.input_is_part, counted_bytes, size)

    def output_bytes(self, counted_bytes: int, size: int) -> int:
        """Return the bytes of each rank's output; raises as `input_bytes`."""
        return self._buffer_bytes(self.output_is_part, counted_bytes, size)

    def bus_bytes_per_s(self, counted_bytes: int, size: int, time_s: float) -> float:
        """Return the bus bandwidth of one call that took `time_s`."""
        return counted_bytes / time_s * self.bus_factor(size)

    def _buffer_bytes(self, is_part: bool, counted_bytes: int, size: int) -> int:
        if self.in_parts and counted_bytes % size:
            raise LayoutError(
                f"{self.name}: {counted_bytes} bytes cannot be cut into {size} equal parts, one "
                f"for each rank of the group; use a multiple of {size}"
            )
        return counted_bytes // size if is_part else counted_bytes


def _one(size: int) -> float:
    return float(size > 1)


def _others_share(size: int) -> float:
    return (size - 1) / size


OPERATIONS: dict[str, CollectiveSpec] = {
    spec.name: spec
    for spec in (
        CollectiveSpec("p2p", bus_factor=_one, is_message=True, tested=()),
        CollectiveSpec("p2p_both", bus_factor=_one, is_message=True, tested=()),
        CollectiveSpec(
            "copy",
            names=("copy",),
            map=f"{_MAPS}:IdentityForward",
            takes="I",
            gives="R",
            signature="x, group",
            returns="x",
            backward="`reduce` of the gradients",
            use="the replicated input of a column-parallel matmul",
        ),
        CollectiveSpec(
            "reduce",
            names=("reduce",),
            map=f"{_MAPS}:Reduce",
            takes="P",
            gives="I",
            is_sum=True,
            signature="x, group",
            returns="the sum over the group",
            backward="`copy`",
            use="the partial output of a row-parallel matmul",
        ),
        CollectiveSpec(
            "scatter",
            names=("scatter",),
            map=f"{_MAPS}:Scatter",
            takes="I",
            gives="V",
            output_is_part=True,
            in_parts=True,
            signature="x, dim, group",
            returns="this rank's part of x along `dim`",
            backward="`gather`",
            use="a replicated tensor of which each rank then uses its part",
        ),
        CollectiveSpec(
            "gather",
            names=("gather",),
            map=f"{_MAPS}:Gather",
            takes="V",
            gives="I",
            input_is_part=True,
            in_parts=True,
            signature="x, dim, group",
            returns="all parts, joined along `dim`",
            backward="`scatter`: the gradient of this rank's part",
            use="parts of a whole that every rank then uses in the same way",
        ),
        CollectiveSpec(
            "all_reduce",
            names=("all_reduce", "start_all_reduce"),
            call=f"{_CALLS}:all_reduce",
            torch=f"{_BY_TORCH}:all_reduce",
            bus_factor=lambda size: 2 * _others_share(size),
            is_sum=True,
            tested=("float32", "int64", "bfloat16"),
        ),
        CollectiveSpec(
            "all_gather",
            names=("all_gather", "start_all_gather"),
            map=f"{_MAPS}:AllGather",
            takes="V",
            gives="R",
            call=f"{_CALLS}:all_gather",
            torch=f"{_BY_TORCH}:all_gather",
            bus_factor=_others_share,
            input_is_part=True,
            in_parts=True,
            tested=("bfloat16",),
            signature="x, dim, group",
            returns="all parts, joined along `dim`",
            backward="`reduce_scatter`",
            use="parts of a whole that every rank uses in its own way",
        ),
        CollectiveSpec(
            "reduce_scatter",
            names=("reduce_scatter", "start_reduce_scatter"),
            map=f"{_MAPS}:ReduceScatter",
            takes="P",
            gives="V",
            call=f"{_CALLS}:reduce_scatter",
            torch=f"{_BY_TORCH}:reduce_scatter",
            bus_factor=_others_share,
            output_is_part=True,
            in_parts=True,
            is_sum=True,
            signature="x, dim, group",
            returns="this rank's part of the sum",
            backward="`all_gather`",
            use="partial sums of which each rank then uses its part",
        ),
        CollectiveSpec(
            "all_to_all",
            names=("all_to_all", "start_all_to_all"),
            map=f"{_MAPS}:AllToAll",
            takes="V",
            gives="V",
            call=f"{_CALLS}:all_to_all",
            torch=f"{_BY_TORCH}:all_to_all",
            bus_factor=_others_share,
            in_parts=True,
            tested=("float64",),
            signature="x, split_dim, join_dim, group",
            returns="of every rank's x the part for this rank, joined along `join_dim`",
            backward="`all_to_all`, the dims swapped",
            use="heads split to sequence split; tokens to their experts and back",
        ),
        CollectiveSpec(
            "broadcast",
            names=("broadcast", "start_broadcast"),
            map=f"{_MAPS}:Broadcast",
            takes="V",
            gives="R",
            call=f"{_CALLS}:broadcast",
            torch=f"{_BY_TORCH}:broadcast",
            bus_factor=_one,
            tested=(),
            signature="x, group, source=None",
            returns="x of global rank `source`, or of the group's first",
            backward="the sum of the gradients on the source, zeros elsewhere",
            use="a tensor that one rank made and all use",
        ),
        CollectiveSpec("reduce_to", map=f"{_MAPS}:ReduceTo", takes="P", gives="V", is_sum=True),
    )
}
"""Operations by name. `p2p` sends from one rank to another; `p2p_both` sends both ways at once and
counts one."""

COLLECTIVES = {
    name: spec for name, spec in OPERATIONS.items() if spec.bus_factor is not _not_measured
}
"""The operations that the benchmark measures."""


def homes_of_names() -> dict[str, tuple[str, ...]]:
    """Return the public names of all operations, by the module that defines them."""
    homes = dict.fromkeys(spec.home for spec in OPERATIONS.values() if spec.names)
    return {
        home: tuple(n for spec in OPERATIONS.values() if spec.home == home for n in spec.names)
        for home in homes
    }


def page_rows() -> str:
    """Return the table of docs/collectives.md: the operations with autograd."""
    head = "| forward | returns | backward | for |\n|---|---|---|---|\n"
    return head + "".join(
        f"| `{x.name}({x.signature})` | {x.returns} | {x.backward} | {x.use} |\n"
        for x in OPERATIONS.values()
        if x.signature
    )
