"""`SplitModel`: a module whose layers a table has split over the ranks of a group.

It is a copy of the given module, of the same class and with the same names, whose layers
`parallelize` has replaced. It is called as before: all ranks make the same calls with the same
inputs, get the same outputs, and find the gradients of the unsplit module on their slices.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.layout.derive import blocks, local_shape
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import Layouts, mark_parameter
from torchdistpackage.layout.table import SplitTable
from torchdistpackage.parallel.auto import saving, traffic
from torchdistpackage.parallel.auto.cache_heads import CacheHeads
from torchdistpackage.parallel.auto.caches import enter_caches, with_caches_marked
from torchdistpackage.parallel.auto.draws import (
    ShardDraws,
    default_draw,
    draw_apart,
    draw_in_recomputation,
    may_draw,
    use_draws_of_first,
)
from torchdistpackage.parallel.auto.equal_weights import equalise
from torchdistpackage.parallel.auto.split_root import SplitRoot, TakesNoAdapters
from torchdistpackage.parallel.pipeline.partition.gated_blocks import BlockActivations, make_gated
from torchdistpackage.parallel.tensor.full import copy_part
from torchdistpackage.parallel.tensor.marked import Marked, is_reduced
from torchdistpackage.parallel.tensor.parallelize import parallelize
from torchdistpackage.topology.mesh import Mesh


@dataclass(frozen=True)
class ModelSplit:
    """The split of one module over tensor ranks.

    table: by paths in the module. layouts: of every parameter, by its name in the module; their own
    names are those of checkpoints. axis: the mesh axis that they name. blocks: path of the list of
    blocks between which each rank has its part of the sequence; "" if all have all of it.
    is_known: whether all rates of dropout are attributes of its modules.
    """

    table: SplitTable
    layouts: Layouts
    axis: str = "tensor"
    blocks: str = ""
    is_known: bool = False


def split_copy(
    module: nn.Module, split: ModelSplit, group: Group, tp_comm_overlap: bool = False
) -> nn.Module:
    """Return a copy of `module` with this rank's slice of each layer. `module` stays unchanged.

    Raises:
        LayoutError: the ranks' modules are not built alike.
    """
    equalise(module, group)
    cut = (p for name, p in module.named_parameters() if split.layouts[name].split_axes)
    twin = deepcopy(module, {id(p): p for p in cut})  # `parallelize` takes its part of these
    parallelize(twin, split.table, group, axis=split.axis, tp_comm_overlap=tp_comm_overlap)
    draw_apart(twin, split.table, split.blocks)
    if split.blocks:
        activations = BlockActivations(True, True)
        activations.group = group
        rows = list(twin.get_submodule(split.blocks).children())
        for block in rows:
            make_gated(block, activations, block is rows[0], block is rows[-1])
    return twin


class SplitModel(SplitRoot, TakesNoAdapters, Marked):
    """Base class, beside the class of the module, with calls, state and marks of a split module.

    `become_split` turns a module into one.
    """

    _split: ModelSplit
    _partial: list[tuple[nn.Module, str]]
    _has_equal_draws = False
    may_draw = True

    def _begin(self, split: ModelSplit, group: Group | None, module: nn.Module) -> None:
        """Take over the attributes of `module`, the unsplit one. Called once."""
        self.group, self._split = group, split
        num = 1 if group is None else group.size()
        self._original = saving.Original.of(module, lambda names: part_of(split, names, num))
        self._heads = CacheHeads(key_heads(split.table, num), full_gradients=True)
        self._partial = list(_partial_parameters(self, split.layouts))
        self._hooked: dict[int, nn.Parameter] = {}
        self.may_draw = may_draw(module, split.is_known)
        self.mark()

    # -- what it is ----------------------------------------------------------------------

    @property
    def module_shards(self) -> Sequence[nn.Module]:
        """The shards of this process: only this module."""
        return (self,)

    @property
    def has_heads_apart(self) -> bool:
        """Return whether each rank has its own attention heads."""
        return self._group is not None and bool(self._split.table.attention)

    def layouts(self) -> Layouts:
        """Return by name how the parameters are cut."""
        return dict(self._split.layouts)

    def shard_prefix(self, at: int) -> str:
        return ""

    def mark_cut(self, name: str, parameter: nn.Parameter) -> None:
        """Record on a parameter, by its name here, how it is split."""
        if (layout := self._split.layouts.get(name)) is not None:
            mark_parameter(parameter, layout, self._group, name.count("."))

    # -- the call ------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._called(super().__call__, args, kwargs)

    def call_shards(
        self, modules: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call this module without the hooks placed on it."""
        return self._called(self.forward, args, kwargs)

    def _called(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        group = self._group
        if group is None:
            return call(*args, **kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._sum_partial_gradients()
        enter_caches([*args, *kwargs.values()], self._heads, group)
        counting = nullcontext() if traffic.counts is None else traffic.counted_forward(group)
        with self._draws(group), counting:
            return with_caches_marked(call(*args, **kwargs))

    def _draws(self, group: Group) -> AbstractContextManager[Any]:
        if not (self.training and self.may_draw):
            return nullcontext()
        if not self._has_equal_draws:
            use_draws_of_first(group)
            self._has_equal_draws = True
        draw_in_recomputation(self, group.rank())
        return ShardDraws(group.rank(), default_draw)

    def _sum_partial_gradients(self) -> None:
        """Hook parameters with a partial gradient on each rank, so that the gradient is summed.

        A hook stays with its parameter, and parameters may be replaced or unfrozen, so each forward
        looks for new ones.
        """
        for module, name in self._partial:
            parameter = module._parameters[name]
            assert parameter is not None
            if parameter.requires_grad and self._hooked.get(id(parameter)) is not parameter:
                self._hooked[id(parameter)] = parameter
                parameter.register_hook(_PartialSum(parameter, self._group))

    # -- state ---------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state of this rank's slices, or inside `save_tensor_parallel` that of the
        unsplit module.

        Inside, all ranks of the group call it, and each gets the full state.
        """
        if self.preserve_shards_when_saving:
            return super().state_dict(*args, **kwargs)
        return saving.original_state_dict(self, *args, **kwargs)

    def to_full(self) -> dict[str, Tensor]:
        """Return the parameters of the unsplit module, on every rank. All ranks call it."""
        state = saving.original_state_dict(self)
        return {name: state[name] for name, _ in self.named_parameters()}

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        memo[id(self._split)] = self._split
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the two bases of the class, from which loading recreates it."""
        calls, kind, *_ = type(self).__bases__
        return _new_split, (calls, kind), self.__getstate__()

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_hooked": {}}


class _PartialSum:
    """Sums a parameter's gradient over the group, unless a reducer does."""

    def __init__(self, parameter: nn.Parameter, group: Group | None):
        self.parameter, self.group = weakref.ref(parameter), group

    def __call__(self, grad: Tensor) -> Tensor:
        parameter = self.parameter()
        if self.group is None or (parameter is not None and is_reduced(parameter)):
            return grad
        return primitives.all_reduce(grad.clone(), self.group)


@dataclass(frozen=True)
class LayoutPart:
    """A tensor divided according to its layout; see `PartOfTensor`."""

    layout: Layout
    mesh: Mesh

    def __call__(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the slice of `rank`; raises LayoutError if `tensor` has another shape."""
        part = tensor.new_empty(local_shape(self.layout, self.mesh, rank))
        with torch.no_grad():
            copy_part(part, tensor, self.layout, self.mesh, rank)
        return part

    def undo(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the full tensor."""
        full = tensors[0].new_empty(self.layout.shape, device="cpu")
        for rank, part in enumerate(tensors):
            for where, inside in blocks(self.layout, self.mesh, rank):
                full[where] = part[inside].cpu()
        return full


def become_split(
    twin: nn.Module,
    split: ModelSplit,
    group: Group | None,
    module: nn.Module,
    calls: type[SplitModel],
    device: torch.device,
) -> SplitModel:
    """Turn `twin`, this rank's copy of `module`, into a split module of the class `calls`."""
    twin._apply(lambda x: x if x.is_meta else x.to(device))
    twin.__class__ = split_class(calls, type(module))
    root: Any = twin
    root.devices = (device,)
    root._begin(split, group, module)
    return root  # type: ignore[no-any-return]


@cache
def split_class(calls: type[SplitModel], kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of split modules of `kind`, which has its name."""
    return type(kind.__name__, (calls, kind), {"__module__": kind.__module__})


def _new_split(calls: type[SplitModel], kind: type[nn.Module]) -> nn.Module:
    split_kind = split_class(calls, kind)
    return split_kind.__new__(split_kind)


def part_of(split: ModelSplit, names: Sequence[str], num: int) -> LayoutPart | None:
    """Return how a tensor with these names is shared out; None: every rank has all of it."""
    layout = next(filter(None, map(split.layouts.get, names)), None)
    if layout is None or not layout.split_axes or num == 1:
        return None
    return LayoutPart(layout, Mesh((("expert", 1), (split.axis, num))))


def key_heads(table: SplitTable, num: int) -> tuple[tuple[int, ...], ...] | None:
    """Return for each of `num` ranks the heads that its caches have; None: all heads.

    All attentions of a model fill one cache, so the first one says it.
    """
    cut = next(iter(table.attention.values()), None)
    if cut is None or num == 1:
        return None
    heads = cut.queries if cut.cached == "heads" else cut.keys
    ranges = (heads.head_range(num, index) for index in range(num))
    return tuple(tuple(range(first, first + count)) for first, count in ranges)


def _partial_parameters(
    module: nn.Module, layouts: Mapping[str, Layout]
) -> Iterator[tuple[nn.Module, str]]:
    """Return the parameters with a partial gradient on each rank, except those of layers that sum
    it themselves.
    """
    for name, layout in layouts.items():
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        is_own = isinstance(owner, Marked) and owner is not module
        if layout.unreduced and not is_own:
            yield owner, last
