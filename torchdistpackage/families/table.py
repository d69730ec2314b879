"""A family of causal language models of transformers as numbers. No torch.

A table has the names, shapes, splits and initial values of the parameters, and the layers that
tensor ranks replace. Names and shapes are compared with transformers' modules when a stage is
built, so a release that renames something is refused there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from torchdistpackage.layout.layout import HeadSplit, Layout
from torchdistpackage.layout.table import (
    AttentionCut,
    CachedHeads,
    Count,
    LayerCut,
    LayerKind,
    SplitTable,
)

Documents = Literal["positions", "mask", "distances", "padding", "not"]


@dataclass(frozen=True, slots=True)
class ContextWay:
    """How the ranks of a context group share the sequences of a class.

    attends: by our attention over `parts`, or by the class's own over all ranks' `keys`.
    gathered: names of classes of modules that get the whole sequence.
    scanned: names of classes of recurrent layers, whose states cross the ranks.
    swaps: these get all of some samples, where the ranks can share the samples evenly.
    positions: its forward is given the positions of this rank's tokens.
    problem: why no way is right; empty: this one is.
    """

    attends: Literal["parts", "keys"] = "parts"
    gathered: tuple[str, ...] = ()
    scanned: tuple[str, ...] = ()
    swaps: bool = True
    positions: bool = True
    problem: str = ""


@dataclass(frozen=True, slots=True)
class DocumentsWay:
    """How the documents of a packed sample are kept apart.

    by: see `Family`; "rows": each gets a row of its own. problem: why they are not; empty: they
    are.
    """

    by: Literal["positions", "mask", "rows", "padding", "not"]
    problem: str = ""


Settings = Mapping[str, Any]
"""Settings of a config.json, with the family's defaults for missing ones."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model. positions: rows of a learned table, None if positions are computed. std: of
    the initial draws.
    """

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    tied: bool
    std: float
    positions: int | None = None
    padding: int | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter. kind, std: of its initial values. zero_row: a row initialised to zeros.

    kind "made": transformers' own modules make the values (`ModuleDraws` of
    models/transformers_meta.py). kind "norms": those of the rows of another weight, once it has its
    values (`reset_magnitudes` of models/transformers_dora.py); "rows": some of these themselves
    (models/transformers_tokens.py). inputs: the dim of a linear layer's
    matrix that multiplies its input. stacked: the same of a parameter that holds a matrix for each
    expert. share: fraction of the tokens it works on; less than 1 for an expert.
    """

    layout: Layout
    kind: Literal["normal", "uniform", "zeros", "ones", "made", "norms", "rows"]
    std: float = 0.0
    zero_row: int | None = None
    inputs: int | None = None
    share: float = 1.0
    stacked: int | None = None


@dataclass
class Weights:
    """The parameters that a table lists, under names that begin with `prefix`, and the splits of
    their layers.

    sequence_parallel: outside split layers, ranks see their slice of the sequence.
    """

    prefix: str
    axis: str
    std: float
    sequence_parallel: bool = False
    parameters: dict[str, Weight] = field(default_factory=dict)
    split: SplitTable = field(default_factory=SplitTable)

    def add(self, name: str, weight: Weight) -> None:
        """List a parameter under `name`, whatever name its layout has."""
        full = self.prefix + name
        self.parameters[full] = replace(weight, layout=weight.layout.named(full))
        if weight.layout.unreduced:
            self.split.partial[full] = self.parameters[full].layout

    def _layer(self, name: str, kind: LayerKind, weight: Layout, **options: Any) -> None:
        options["sequence_parallel"] = self.sequence_parallel
        self.split.layers[self.prefix + name] = LayerCut(kind, weight, **options)

    def whole(
        self,
        name: str,
        *shape: int,
        kind: Literal["normal", "zeros", "ones"] = "ones",
        partial: bool = False,
    ) -> None:
        """List a parameter that every rank holds in full. partial: each rank computes a partial
        gradient, as always under sequence parallelism.
        """
        is_partial = partial or self.sequence_parallel
        layout = Layout(name, shape, unreduced=(self.axis,) if is_partial else ())
        self.add(name, Weight(layout, kind, self.std))

    def norm(self, name: str, dim: int, *, bias: bool = False, kind: Any = "ones") -> None:
        self.whole(f"{name}.weight", dim, kind=kind)
        if bias:
            self.whole(f"{name}.bias", dim, kind="zeros")

    def table(
        self,
        name: str,
        rows: int,
        columns: int,
        zero_row: int | None = None,
        *,
        once: bool = False,
    ) -> None:
        """List an embedding split by columns. once: see `LayerCut`."""
        layout = replace(self.cut(name, (rows, columns), 1), is_table=True)
        self.add(f"{name}.weight", Weight(layout, "normal", self.std, zero_row))
        self._layer(name, "feature", layout, once=once)

    def cut_rows(self, name: str) -> None:
        """Split a listed embedding by rows instead, because a head that shares it is split so."""
        weight = self.parameters[f"{name}.weight"]
        cut = replace(self.cut(f"{name}.weight", weight.layout.shape, 0), is_table=True)
        self.parameters[f"{name}.weight"] = replace(weight, layout=cut)
        self._layer(name, "vocab", cut)

    def tied_head(self, name: str, rows: int, columns: int) -> None:
        """List the matrix that makes logits, split by rows, if it is tied to the embedding."""
        self._layer(name, "column", self.cut(name, (rows, columns), 0), entrance=name)

    def column(
        self,
        name: str,
        size: int,
        inputs: int,
        heads: HeadSplit | None = None,
        *,
        bias: bool = False,
        parts: Sequence[int] = (),
        transposed: bool = False,
        is_table: bool = False,
    ) -> None:
        """List a layer split by its outputs, by heads or evenly. parts: sizes of its fused parts.

        Its input is that of the surrounding module, if the block or the model has one.
        """
        dim = int(transposed)
        shape = (inputs, size) if transposed else (size, inputs)
        layout = replace(self.cut(name, shape, dim, heads, parts), is_table=is_table)
        self.add(f"{name}.weight", Weight(layout, "normal", self.std, inputs=1 - dim))
        entrance = self.prefix + (name.rpartition(".")[0] or name)
        self._layer(name, "column", layout, transposed=transposed, entrance=entrance)
        if bias:
            layout = self.split.layers[self.prefix + name].bias(name)
            self.add(f"{name}.bias", Weight(layout, "zeros"))

    def row(
        self,
        name: str,
        size: int,
        inputs: int,
        heads: HeadSplit | None = None,
        *,
        bias: bool = False,
        parts: Sequence[int] = (),
        transposed: bool = False,
        scale: float = 1.0,
    ) -> None:
        """List a layer split by its inputs, with an unsplit bias. scale: of its initial draws."""
        dim = int(not transposed)
        shape = (inputs, size) if transposed else (size, inputs)
        layout = self.cut(name, shape, dim, heads, parts)
        self.add(f"{name}.weight", Weight(layout, "normal", self.std * scale, inputs=dim))
        self._layer(name, "row", layout, transposed=transposed)
        if bias:
            self.whole(f"{name}.bias", size, kind="zeros")

    def attention(
        self,
        name: str,
        n: Sizes,
        *,
        queries: HeadSplit | None = None,
        by_head: tuple[str, ...] = (),
        inputs: tuple[str, ...] = ("hidden_states",),
        cached: CachedHeads = "keys",
        **counts: Count,
    ) -> None:
        """List a module that works on this rank's heads. queries: default: each head is its own
        group. by_head, inputs, cached, counts: see `AttentionCut`.
        """
        queries, keys = queries or HeadSplit(n.heads), HeadSplit(n.kv_heads, shared=True)
        cut = AttentionCut(queries, keys, n.head_dim, counts, by_head, inputs, cached)
        self.split.attention[self.prefix + name] = cut

    def stacked(self, name: str, **layouts: Layout) -> None:
        """List a module with matrices that stack all experts of a block. layouts: of each matrix,
        by local name.
        """
        path = self.prefix + name
        for each, layout in layouts.items():
            inputs = 2 if len(layout.shape) == 3 else None
            self.add(f"{name}.{each}", Weight(layout, "normal", self.std, stacked=inputs))
        self.split.experts[path] = {
            each: self.parameters[f"{path}.{each}"].layout for each in layouts
        }

    def dropout(self, name: str) -> None:
        """List a dropout between a column and a row layer, which acts on each rank's own
        activations.
        """
        self.split.dropouts |= {self.prefix + name}

    def cut(
        self,
        name: str,
        shape: tuple[int, ...],
        dim: int,
        heads: HeadSplit | None = None,
        parts: Sequence[int] = (),
    ) -> Layout:
        """Return the layout of a parameter that is split along `dim`."""
        return split_layout(name, shape, dim, heads, parts, axis=self.axis)


def split_layout(
    name: str,
    shape: tuple[int, ...],
    dim: int,
    heads: HeadSplit | None = None,
    parts: Sequence[int] = (),
    *,
    axis: str = "tensor",
) -> Layout:
    """Return the layout of a parameter that `axis` splits along `dim`, by heads if it has some.

    parts: sizes of fused parts along `dim`, each split separately.
    """
    split = tuple((axis,) if at == dim else () for at in range(len(shape)))
    fused = tuple(tuple(parts) if at == dim else () for at in range(len(shape)))
    return Layout(name, shape, split, parts=fused, heads=heads, uneven=True)


@dataclass(frozen=True, slots=True)
class StageSides:
    """The modules around the blocks of a model that is cut into stages.

    blocks: path of their list. before, behind: paths of modules that only the first or only the
    last stage runs. writes_input: the model's forward modifies the embedded tokens in place.
    token_dim: dim of the sequence in the activations.
    """

    blocks: str = ""
    before: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    writes_input: bool = False
    token_dim: int = 1


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """The order in which a block runs its layers.

    is_listed: the block runs its layers in listed order, column layers before the row layer that
    adds to the residual stream; this tells which gradients are needed for frozen or recomputed
    layers. is_parallel: all column layers read the block's input, not the output of earlier row
    layers. ends_in_norm: the last addition feeds a norm, which needs it again when the block is
    recomputed.
    """

    is_listed: bool = True
    is_parallel: bool = False
    ends_in_norm: bool = False


@dataclass(frozen=True)
class FoundModel:
    """One transformers model as its modules show it; `found.family` makes a table of it.

    class_name: of the module. sizes: what plans ask for.
    blocks: path of the list of blocks; "" if there is none, so that the model is one piece.
    output: path of the layer that makes logits; "" if there is none. embedding: that of the table
        of tokens.
    parameters: every parameter by name, in order; `found.split_as` cuts them.
    table: the layers that tensor ranks split; empty where nothing is to be split.
    aliases: other names of a parameter -> its own.
    buffers: those that a folder holds beside the parameters.
    unreached: paths of modules that token ids do not reach, such as towers for images, which are
        not trained.
    refused: why tokens cannot train it; None: they can.
    unstaged: why its blocks cannot stand on several stages; None: they can.
    around: what its stages run beside their blocks.
    auxiliary: the factor of its routers' loss in the loss, 0 without one.
    positions: its longest sequence, if its settings say so.
    shared_experts: of each block, if ranks can share them; 0: they cannot.
    top_k: of them, those that a token goes to.
    experts_alone: tensor ranks and ranks of `expert` cannot share them at once.
    counts_routers: its routers' loss is Switch's over all tokens, so that all ranks can count it
        together.
    order: in which a block runs the layers of `table`.
    uncut: why tensor ranks cannot split it; None: they can.
    documents: see `Family`.
    """

    class_name: str
    sizes: Sizes
    blocks: str
    output: str
    parameters: Mapping[str, Weight]
    buffers: tuple[Layout, ...]
    aliases: Mapping[str, str]
    unreached: tuple[str, ...]
    refused: str | None
    unstaged: str | None
    around: StageSides
    auxiliary: float
    positions: int | None
    shared_experts: int = 0
    top_k: int = 0
    experts_alone: bool = False
    counts_routers: bool = False
    table: SplitTable = field(default_factory=SplitTable)
    order: BlockOrder = field(default_factory=lambda: BlockOrder(is_listed=False))
    uncut: str | None = None
    documents: Documents = "not"
    embedding: str = ""

    @cached_property
    def by_block(self) -> dict[str, list[str]]:
        """The parameter names of each block, by the block's path and a dot."""
        names: dict[str, list[str]] = {}
        for name in self.parameters:
            names.setdefault(block_of(self.blocks, name), []).append(name)
        return names

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layout of every parameter by name."""
        return {name: weight.layout for name, weight in self.parameters.items()}

    @property
    def splits_head(self) -> bool:
        """True if each tensor rank has only the logits of its columns of the vocabulary."""
        head = self.table.layers.get(self.output)
        return head is not None and head.kind == "column"

    def is_before(self, name: str) -> bool:
        """Return whether a parameter outside the blocks belongs to the modules that run before
        them.
        """
        return name.startswith(tuple(f"{path}." for path in self.around.before))


def block_of(blocks: str, name: str) -> str:
    """Return the path, with a dot, of the block that has the parameter or buffer, or "".

    blocks: path of the list of blocks.
    """
    path = f"{blocks}."
    if not blocks or not name.startswith(path):
        return ""
    return path + name.removeprefix(path).partition(".")[0] + "."


Part = Callable[[Weights, Settings, Sizes], None]


@dataclass(frozen=True, slots=True)
class Family:
    """The table of a family of models. defaults: transformers' defaults of the settings that are
    read. blocks: path of the list of blocks. class_name: of transformers' causal language model.
    embed, block, head: list the parameters before the blocks, of one, and behind them but for the
    output matrix. table, output: names of the embedding and of the matrix that makes logits.
    problems: what `model.hf` cannot train of what settings ask for; uncut: what nobody can cut.
    saved_names: names of parameters in the files, and in modules of releases before they were
    renamed -> today's. earlier_settings: settings -> their names in earlier configs. shares_keys:
    several ranks may hold one key-value head, which is then a parameter's part alone. documents:
    how those of one sample are kept apart: transformers makes a mask of position_ids ("positions"),
    or has to be given one ("mask"); it counts distances across a sample ("distances"), or cannot be
    told where one ends ("not"); "padding": as "not", but behind the one document of a sample its
    padding is left out of attention. own_attention: why our own attention over parts of a
    sequence; "": it can. order: how a block runs its layers, see `BlockOrder`. nullable: settings
    that are null in a config.json that transformers takes, whatever their default: a switch is off
    then, key-value heads are as many as heads.

    What a class has beside its parameters, or what a trial of it has shown:

    aliases: other names of a parameter -> its own. found_tables: paths of the embedding and of the
    layer that makes logits, where `table` and `output` name none.
    buffers: those that a folder holds beside the parameters. unreached: paths of parts that token
    ids do not reach, which are not trained.
    sides: what its stages run beside their blocks; None: what the modules show by themselves.
    folder: how files hold it, a class with the methods of `NamedFolder` (transformers_folder.py).
    auxiliary: the factor of its routers' loss in the loss. shared_experts: of each block, if ranks
    can share them. top_k: of its experts, those that a token goes to. experts_alone: tensor ranks
    cannot share them too. counts_routers: all ranks count its routers' loss together.
    uses_is_causal: whether its forward asks the setting is_causal.
    deals_heads: whether tensor ranks have whole heads of every block, so that not any number of
    ranks can share it. unshared: why tensor ranks cannot share it; None: they can.
    unstaged: why its blocks cannot stand on several stages; None: they can.
    splits_head: whether each tensor rank has logits of its part of the vocabulary alone.
    splits_sequence: whether tensor ranks can have parts of the sequence between its layers.
    cache: a function that says whether transformers' cache of keys and values serves the model, and
    whether it does so beside padding.
    """

    defaults: Settings
    sizes: Callable[[Settings], Sizes]
    blocks: str
    embed: Part
    block: Part
    head: Part
    table: str
    class_name: str
    problems: Callable[[Settings], list[str]] = lambda _: []
    uncut: Callable[[Settings], list[str]] = lambda _: []
    output: str = "lm_head"
    saved_names: Mapping[str, str] = field(default_factory=dict[str, str])
    earlier_settings: Mapping[str, str] = field(default_factory=dict[str, str])
    shares_keys: bool = True
    documents: Documents = "positions"
    own_attention: str = ""
    order: Callable[[Settings], BlockOrder] = lambda _: BlockOrder()
    nullable: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    found_tables: tuple[str, str] = ("", "")
    buffers: tuple[Layout, ...] = ()
    unreached: tuple[str, ...] = ()
    sides: StageSides | None = None
    folder: str = "torchdistpackage.models.transformers_folder:NamedFolder"
    auxiliary: float = 0.0
    shared_experts: int = 0
    top_k: int = 0
    experts_alone: bool = False
    counts_routers: bool = False
    uses_is_causal: bool = True
    deals_heads: bool = True
    unshared: str | None = None
    unstaged: str | None = None
    splits_head: bool = True
    splits_sequence: bool = True
    cache: str = "torchdistpackage.models.transformers_cache:serves"

    def stages_of(self, name: str, block_stages: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the pipe indices that hold a parameter or buffer. block_stages: those of each
        block.
        """
        if block := block_of(self.blocks, name):
            return block_stages[int(block.removesuffix(".").rpartition(".")[2])]
        names_before = () if self.sides is None else self.sides.before
        is_before = name.startswith(tuple(f"{path}." for path in names_before))
        return block_stages[0] if is_before else block_stages[-1]
