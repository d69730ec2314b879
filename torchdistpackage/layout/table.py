"""Tables that say which layers of a model tensor ranks split, and how. No torch.

A table names layers by their paths in the whole model. `families/table.py` derives the layouts of
parameters from it, and `parallel/tensor/parallelize.py` builds the layers.
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
    """The split of one layer.

    kind: "column" and "row" are linear layers split by outputs and by inputs. "vocab" and "feature"
        are embeddings split by rows and by columns. "joined" is a column layer whose full outputs
        every rank needs. "adapter" is a low-rank factor, whose full outputs no rank needs, or a
        vector of magnitudes.
    weight: the layout of its matrix. A column layer's bias is split alike; a row layer's is not
        split.
    transposed: the matrix is stored as (inputs, outputs), as in transformers' Conv1D.
    entrance: path of the module whose input its column layers multiply, often an attention or an
        MLP; the layer's own path if there is no such module.
    sequence_parallel: outside the split layers each rank has its slice of the sequence.
    once: the embedding is looked up once for all samples, because they have the same positions.
    """

    kind: LayerKind
    weight: Layout
    transposed: bool = False
    entrance: str = ""
    sequence_parallel: bool = False
    once: bool = False

    def bias(self, name: str) -> Layout:
        """Return the layout of a linear layer's bias, called `name`."""
        dim = int(self.transposed)  # of the outputs
        weight, is_split = self.weight, self.kind in ("column", "joined")
        return Layout(
            name,
            weight.shape[dim : dim + 1],
            weight.split[dim : dim + 1] if is_split else (),
            parts=weight.parts[dim : dim + 1] if is_split else (),
            heads=weight.heads if is_split else None,
            uneven=is_split,
        )


@dataclass(frozen=True, slots=True)
class AttentionCut:
    """The split of an attention module: each rank computes its own heads.

    queries, keys: how the query heads and the key-value heads are dealt to the ranks.
    counts: attributes of the module that hold a number of heads, each with what it counts: query
        heads, key-value heads, query heads per key-value head, or the width of all query heads.
    by_head: arguments with one entry for each query head, such as ALiBi's slopes.
    inputs: arguments that its column layers multiply; a cross-attention has a second sequence.
    cached: whether the key-value cache has the key-value heads, or one for each query head.
    """

    queries: HeadSplit
    keys: HeadSplit
    head_dim: int
    counts: Mapping[str, Count] = field(default_factory=dict[str, Count])
    by_head: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ("hidden_states",)
    cached: CachedHeads = "keys"

    def on_rank(self, num_ranks: int, index: int) -> dict[str, int]:
        """Return each attribute's value on the rank at `index` of `num_ranks`."""
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
    """The layers that a model splits over tensor ranks, by path.

    partial: layouts, by name, of unsplit parameters whose gradient is a partial sum on each rank.
    experts: for modules that hold the matrices of many experts as parameters, the layouts of all
        their parameters. Each rank adds its share of a bias that no axis cuts.
    dropouts: dropout layers whose activations are split, so each rank draws its own mask.
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
        """Return the modules that gather the input of their column layers; True if it is a
        sequence.

        A column layer gathers its own input if it is the only one in its module, no adapter reads
        the same input, and the module does not need the sequence length, as attention does.

        paths: layers that exist. adapted: those of them that have adapters.
        """
        columns: dict[str, list[str]] = {}
        for path in paths:
            if self.layers[path].kind in ("column", "joined"):
                columns.setdefault(self.layers[path].entrance, []).append(path)
        gathered: dict[str, bool] = {}
        for entrance, layer_paths in columns.items():
            is_sequence = self.layers[layer_paths[0]].sequence_parallel
            has_length = is_sequence and entrance in self.attention
            if len(layer_paths) > 1 or has_length or layer_paths[0] in adapted:
                gathered[entrance] = is_sequence
        return gathered

    def inside(self, path: str) -> "SplitTable":
        """Return the table with paths relative to the module at `path`."""
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
        """Return the table in which the column layers at `paths` return all outputs on every
        rank.
        """
        joined = {
            path: replace(cut, kind="joined")
            for path in paths
            if (cut := self.layers.get(path)) is not None and cut.kind == "column"
        }
        return replace(self, layers=self.layers | joined)

    def also_called(self, path: str, other: str) -> None:
        """List the layer at `path` under `other` too, its path in some releases."""
        if (cut := self.layers.get(path)) is not None:
            self.layers[other] = replace(cut, entrance=other if cut.entrance == path else "")
