"""Which layers of a model are split over tensor ranks, and how, as data. No torch.

A table speaks of layers by their paths in the whole model. Layouts of parameters follow from the
same statements (families/table.py); `parallel/tensor/parallelize.py` builds the layers.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torchdistpackage.layout.layout import HeadSplit, Layout

LayerKind = Literal["column", "row", "joined", "vocab", "feature", "adapter"]
Count = Literal["heads", "keys", "groups", "width"]
CachedHeads = Literal["keys", "heads"]


@dataclass(frozen=True, slots=True)
class LayerCut:
    """How one layer is split.

    kind: "column" and "row" are products split by outputs and by inputs; "vocab" and "feature" are
        embeddings split by rows and by columns; "joined" is a column layer whose outputs every rank
        needs whole; "adapter" is a product with a low-rank factor, whose result none needs so.
    weight: the layout of its matrix; a column layer's bias is split alike, a row layer's is whole.
    transposed: the matrix is stored as (inputs, outputs), as that of transformers' Conv1D.
    entrance: path of the module whose input the column layers in it multiply, often an attention
        or an MLP; the layer itself where there is no such module.
    sequence_parallel: around the split layers each rank has its part of the sequence.
    once: an embedding is looked up once for all samples, which have the same positions.
    """

    kind: LayerKind
    weight: Layout
    transposed: bool = False
    entrance: str = ""
    sequence_parallel: bool = False
    once: bool = False


@dataclass(frozen=True, slots=True)
class AttentionCut:
    """How a module that works on heads is split: each rank has heads of its own.

    queries, keys: how these heads are dealt to the ranks.
    counts: for each attribute of the module what it holds: the number of query heads, of key-value
        heads, of query heads to a key-value head, or the width of all query heads.
    by_head: arguments that hold something for each query head, such as ALiBi's distances.
    inputs: arguments that its column layers multiply; another sequence's in a cross-attention.
    cached: whether a cache of keys and values has the key-value heads, or one for each query head.
    """

    queries: HeadSplit
    keys: HeadSplit
    head_dim: int
    counts: Mapping[str, Count] = field(default_factory=dict[str, Count])
    by_head: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ("hidden_states",)
    cached: CachedHeads = "keys"

    def on_rank(self, num_ranks: int, index: int) -> dict[str, int]:
        """Attribute -> its value on the rank at `index` of `num_ranks`."""
        heads = self.queries.head_range(num_ranks, index)[1]
        keys = self.keys.head_range(num_ranks, index)[1]
        values: dict[Count, int] = {
            "heads": heads,
            "keys": keys,
            "groups": heads // keys,
            "width": heads * self.head_dim,
        }
        return {name: values[count] for name, count in self.counts.items()}


@dataclass
class SplitTable:
    """What a model splits over tensor ranks, by path.

    partial: by name the layouts of parameters that are whole, and of whose gradients each rank has
        a part.
    experts: of modules that hold matrices of many experts by name, and call no layers of their own,
        the layouts of all of their parameters; those that no axis cuts are added up as biases are.
    dropouts: those of activations of which each rank has its own part, and draws for it.
    """

    layers: dict[str, LayerCut] = field(default_factory=dict[str, LayerCut])
    attention: dict[str, AttentionCut] = field(default_factory=dict[str, AttentionCut])
    partial: dict[str, Layout] = field(default_factory=dict[str, Layout])
    experts: dict[str, dict[str, Layout]] = field(default_factory=dict[str, dict[str, Layout]])
    dropouts: frozenset[str] = frozenset()

    def __or__(self, other: "SplitTable") -> "SplitTable":
        return SplitTable(
            self.layers | other.layers,
            self.attention | other.attention,
            self.partial | other.partial,
            self.experts | other.experts,
            self.dropouts | other.dropouts,
        )

    def shared_inputs(self, paths: Iterable[str], adapted: Collection[str] = ()) -> dict[str, bool]:
        """Modules that bring together the input of their column layers; whether of a sequence.

        A layer does it by itself where it is the only one, no adapter reads the same, and the
        module around it does not ask for the length of the sequence, as an attention does.
        paths: of layers that are there; adapted: of those, layers with adapters.
        """
        columns: dict[str, list[str]] = {}
        for path in paths:
            if self.layers[path].kind in ("column", "joined"):
                columns.setdefault(self.layers[path].entrance, []).append(path)
        found: dict[str, bool] = {}
        for entrance, here in columns.items():
            is_sequence = self.layers[here[0]].sequence_parallel
            has_length = is_sequence and entrance in self.attention
            if len(here) > 1 or has_length or here[0] in adapted:
                found[entrance] = is_sequence
        return found

    def inside(self, path: str) -> "SplitTable":
        """Return the table of the module at `path`, by paths in it."""
        if not path:
            return self

        def below(name: str) -> str:
            return name.removeprefix(f"{path}.")

        def is_there(name: str) -> bool:
            return name.startswith(f"{path}.")

        return SplitTable(
            {
                below(name): replace(cut, entrance=below(cut.entrance))
                for name, cut in self.layers.items()
                if is_there(name)
            },
            {below(name): cut for name, cut in self.attention.items() if is_there(name)},
            {below(name): layout for name, layout in self.partial.items() if is_there(name)},
            {below(name): cuts for name, cuts in self.experts.items() if is_there(name)},
            frozenset(below(name) for name in self.dropouts if is_there(name)),
        )

    def with_outputs_joined(self, paths: Iterable[str]) -> "SplitTable":
        """Return the table in which every rank has all outputs of the column layers at `paths`."""
        joined = {
            path: replace(cut, kind="joined")
            for path in paths
            if (cut := self.layers.get(path)) is not None and cut.kind == "column"
        }
        return replace(self, layers=self.layers | joined)

    def also_called(self, path: str, other: str) -> None:
        """Let the layer at `path` be found at `other` too, where some releases have it."""
        if (cut := self.layers.get(path)) is not None:
            self.layers[other] = replace(cut, entrance=other if cut.entrance == path else "")
