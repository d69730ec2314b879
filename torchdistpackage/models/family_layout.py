"""What a family of transformers' causal language models is as numbers: names, shapes and cuts of
its parameters, and what they start as. No torch.

A cut is that of the family's plan in parallel/auto/families. Names and shapes are compared with
transformers' own modules when a stage is built, so what another release names otherwise is refused
there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torchdistpackage.layout.layout import HeadSplit, Layout

Settings = Mapping[str, Any]
"""Of a config.json, with the family's defaults for what it leaves out."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """positions: rows of a learned table; None: positions are computed. std: of initial draws."""

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
    """One parameter. kind, std: of its initial values. zero_row: a row of zeros among them.

    inputs: the dim of a linear layer's matrix that is multiplied by what the layer is given.
    """

    layout: Layout
    kind: Literal["normal", "uniform", "zeros", "ones"]
    std: float = 0.0
    zero_row: int | None = None
    inputs: int | None = None


@dataclass
class Weights:
    """Parameters as they are listed, under names that begin with `prefix`."""

    prefix: str
    axis: str
    std: float
    held: dict[str, Weight] = field(default_factory=dict)

    def _add(self, name: str, weight: Weight) -> None:
        full = self.prefix + name
        self.held[full] = replace(weight, layout=weight.layout.named(full))

    def whole(
        self,
        name: str,
        *shape: int,
        kind: Literal["normal", "zeros", "ones"] = "ones",
        partial: bool = False,
    ) -> None:
        """On every rank; partial: each of which has a part of the gradient."""
        layout = Layout(name, shape, unreduced=(self.axis,) if partial else ())
        self._add(name, Weight(layout, kind, self.std))

    def norm(self, name: str, dim: int, *, bias: bool = False, kind: Any = "ones") -> None:
        self.whole(f"{name}.weight", dim, kind=kind)
        if bias:
            self.whole(f"{name}.bias", dim, kind="zeros")

    def table(self, name: str, rows: int, columns: int, zero_row: int | None = None) -> None:
        """An embedding, cut by columns."""
        layout = self._cut(name, (rows, columns), 1, HeadSplit(columns))
        self._add(f"{name}.weight", Weight(layout, "normal", self.std, zero_row))

    def cut_rows(self, name: str) -> None:
        """Cut a table by rows instead, as a head that shares it is."""
        weight = self.held[f"{name}.weight"]
        rows = weight.layout.shape[0]
        cut = self._cut(f"{name}.weight", weight.layout.shape, 0, HeadSplit(rows))
        self.held[f"{name}.weight"] = replace(weight, layout=cut)

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
    ) -> None:
        """A layer cut by its outputs, along heads or each for itself. parts: fused in them."""
        heads, dim = heads or HeadSplit(size), int(transposed)
        shape = (inputs, size) if transposed else (size, inputs)
        layout = self._cut(name, shape, dim, heads, parts)
        self._add(f"{name}.weight", Weight(layout, "normal", self.std, inputs=1 - dim))
        if bias:
            layout = self._cut(name, (size,), 0, heads, parts)
            self._add(f"{name}.bias", Weight(layout, "zeros"))

    def row(
        self,
        name: str,
        size: int,
        inputs: int,
        heads: HeadSplit | None = None,
        *,
        bias: bool = False,
        transposed: bool = False,
        scale: float = 1.0,
    ) -> None:
        """A layer cut by its inputs; its bias is whole. scale: of its initial draws."""
        heads, dim = heads or HeadSplit(inputs), int(not transposed)
        shape = (inputs, size) if transposed else (size, inputs)
        layout = self._cut(name, shape, dim, heads)
        self._add(f"{name}.weight", Weight(layout, "normal", self.std * scale, inputs=dim))
        if bias:
            self.whole(f"{name}.bias", size, kind="zeros")

    def _cut(
        self,
        name: str,
        shape: tuple[int, ...],
        dim: int,
        heads: HeadSplit,
        parts: Sequence[int] = (),
    ) -> Layout:
        split = tuple((self.axis,) if at == dim else () for at in range(len(shape)))
        fused = tuple(tuple(parts) if at == dim else () for at in range(len(shape)))
        return Layout(name, shape, split, parts=fused, heads=heads)


Part = Callable[[Weights, Settings, Sizes], None]


@dataclass(frozen=True, slots=True)
class Family:
    """defaults: transformers', of the settings that are read. blocks: path of the list of blocks.
    embed, block, head: list the parameters before the blocks, of one, and behind them but for the
    output matrix. table, output: names of the embedding and of the matrix that makes logits.
    problems: what is no model in settings. saved_names: of parameters in the files, and in modules
    of releases before they were renamed -> today's.
    shares_keys: several ranks may hold one key-value head, which is then a parameter's part alone.
    documents: how those of one sample are kept apart: transformers makes a mask of position_ids, or
    has to be given one, or it cannot be done.
    """

    defaults: Settings
    sizes: Callable[[Settings], Sizes]
    blocks: str
    embed: Part
    block: Part
    head: Part
    table: str
    problems: Callable[[Settings], list[str]] = lambda _: []
    output: str = "lm_head"
    saved_names: Mapping[str, str] = field(default_factory=dict)
    shares_keys: bool = True
    documents: Literal["positions", "mask", "not"] = "positions"
