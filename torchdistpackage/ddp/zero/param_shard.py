"""What the inner optimizer works on here: pieces of parameters, each a parameter of its own.

One rule: one shard is one piece of one parameter, so state, norms, checkpoints and the skipping of
parameters that nobody used go by parameter, as without sharding.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.zero.flat_layout import FlatLayout
from torchdistpackage.ddp.zero.shard_bounds import ShardRange, pieces
from torchdistpackage.layout.layout import Layout


@dataclass(frozen=True)
class ParamShardRange:
    """Elements [start, stop) of `parameter` in memory order, `offset` into my slice of a bucket."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    offset: int
    layout: Layout | None


@dataclass(frozen=True, eq=False)
class ParamShard:
    """The part of one parameter that this rank owns.

    tensor: what the inner optimizer steps, 1-D, or of the parameter's shape where one rank owns
        all of it; its `.grad` is set once the sum is here. whole: the latter.
    shared: the parameter and the ranks that share it. place: of the parameter in its bucket.
    """

    tensor: nn.Parameter
    shared: ParamSpec
    piece: ParamShardRange
    place: int
    whole: bool

    @property
    def pieces(self) -> tuple[ParamShardRange, ...]:
        return (self.piece,)

    @property
    def name(self) -> str:
        return self.piece.name

    @property
    def parameter(self) -> nn.Parameter:
        return self.piece.parameter

    @property
    def start(self) -> int:
        return self.piece.start

    @property
    def stop(self) -> int:
        return self.piece.stop

    @property
    def layout(self) -> Layout | None:
        return self.piece.layout

    @property
    def group(self) -> Group:
        return self.shared.group

    def view(self, slice_: Tensor) -> Tensor:
        """My elements in a tensor that is laid out like my slice."""
        if self.whole:
            return self.shared.view(slice_, slice_.storage_offset() + self.piece.offset)
        return slice_.narrow(0, self.piece.offset, self.stop - self.start)

    def add_rows(self, view: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Add, to my elements of a contiguous parameter, what rows `ids` (n) have there: (n, ...).

        My first row and my last may be parts of one.
        """
        flat, rows = view.view(-1), rows.flatten(1)
        width = rows.shape[1]
        first, last = -(-self.start // width), self.stop // width
        if first < last:
            whole = flat[first * width - self.start : last * width - self.start].view(-1, width)
            inside = (ids >= first) & (ids < last)
            whole.index_add_(0, ids[inside] - first, rows[inside])
        for row in {self.start // width, last} - {*range(first, last)}:
            start, stop = max(row * width, self.start), min((row + 1) * width, self.stop)
            if start < stop:
                part = rows[ids == row, start - row * width : stop - row * width]
                flat[start - self.start : stop - self.start] += part.sum(0)


def make_shards(
    line: FlatLayout, values: Tensor, layouts: dict[str, Layout], whole: bool
) -> list[ParamShard]:
    """My shards of a bucket, in memory order; `values` are the elements that I own."""
    group = line.members[0].group
    order = line.order
    offsets = [line.offsets[place] for place in order]
    sizes = [line.members[place].parameter.numel() for place in order]
    shards: list[ParamShard] = []
    for piece in pieces(offsets, sizes, line.bounds, group.rank()):
        place = order[piece.member]
        shards.append(_shard(line, place, piece, values, layouts, whole))
    return shards


def _shard(
    line: FlatLayout,
    place: int,
    piece: ShardRange,
    values: Tensor,
    layouts: dict[str, Layout],
    whole: bool,
) -> ParamShard:
    shared = line.members[place]
    layout = layouts.get(shared.name)
    described = ParamShardRange(
        shared.name, shared.parameter, piece.start, piece.stop, piece.offset, layout
    )
    shard = ParamShard(nn.Parameter(values.new_empty(0)), shared, described, place, whole)
    shard.tensor.data = shard.view(values)
    return shard
