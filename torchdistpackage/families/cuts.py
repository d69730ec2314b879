"""How tensor ranks share the modules of a family that has no table, as data. No torch.

`models/transformers_cuts.py` finds it in transformers' modules, and `models/transformers_trial.py`
tries it; layouts and split layers follow from it as from a table that is written by hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torchdistpackage.layout.layout import HeadSplit
from torchdistpackage.layout.table import AttentionCut

FoundKind = Literal["column", "row", "joined", "vocab", "feature"]


@dataclass(frozen=True, slots=True)
class FoundCut:
    """One layer. kind: as of `LayerCut`. dim: of its matrix that is cut. parts: fused in it.

    entrance: path of the module whose input its column layers share; "": the layer itself.
    """

    kind: FoundKind
    dim: int
    heads: HeadSplit | None = None
    parts: tuple[int, ...] = ()
    transposed: bool = False
    entrance: str = ""


@dataclass(frozen=True, slots=True)
class StackedCut:
    """One matrix, or bias, of all experts of a block; dim: None where it is whole."""

    dim: int | None
    parts: tuple[int, ...] = ()
    heads: HeadSplit | None = None


@dataclass(frozen=True)
class FoundCuts:
    """layers: by path. experts: by path of a module the cuts of its parameters, by their names in
    it. attention: modules whose heads are dealt to the ranks. partial: parameters of which each
    rank has a part of the gradient. head: whether each rank has logits of its part of the
    vocabulary alone."""

    layers: Mapping[str, FoundCut] = field(default_factory=dict[str, FoundCut])
    experts: Mapping[str, Mapping[str, StackedCut]] = field(
        default_factory=dict[str, Mapping[str, StackedCut]]
    )
    attention: Mapping[str, AttentionCut] = field(default_factory=dict[str, AttentionCut])
    partial: frozenset[str] = frozenset()
    head: bool = False
