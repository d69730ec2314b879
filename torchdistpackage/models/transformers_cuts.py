"""Rules that find which layers of a model without a table tensor ranks can share.

| module | cut | |---|---| | attention whose q, k, v and output layers are apart | by heads, one sum
behind it | | MLP of the usual names, gate and up apart or in one | by hidden channels, one sum
behind it | | experts in one module | each by its hidden channels, one sum behind them | | what
transformers' own plan (`base_model_tp_plan`) calls colwise or rowwise | so | | any other linear
layer in a block | by outputs, which are joined again | | embedding, head | by rows or columns, as
one table where they are tied |

Where transformers' plan joins the queries, as of norms over all heads, so does this. Rules do not
know what a forward does between layers: what they say is tried on a small copy
(transformers_trial.py), the most that may be shared first (`CHOICES`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from torchdistpackage.families.table import FoundModel, split_layout
from torchdistpackage.layout.layout import HeadSplit, Layout
from torchdistpackage.layout.table import AttentionCut, Count, LayerCut, LayerKind, SplitTable


@dataclass(frozen=True, slots=True)
class CutChoices:
    """The rules to apply. by_heads: split attention by heads. fused: split gate and up separately
    if one layer has both. others: split layers of unknown modules too. head: leave logits split
    over the ranks. experts: split stacked experts inside. mlps: split MLPs by hidden channels;
    otherwise their layers are joined again.
    """

    by_heads: bool = True
    fused: bool = True
    others: bool = True
    head: bool = True
    experts: bool = True
    mlps: bool = True


CHOICES = (
    CutChoices(),
    CutChoices(others=False),
    CutChoices(fused=False, head=False),
    CutChoices(by_heads=False, fused=False, others=False, head=False),
    CutChoices(by_heads=False, fused=False, others=False, head=False, experts=False),
    CutChoices(by_heads=False, fused=False, others=False, head=False, mlps=False),
)
"""Choices in the order in which they are tried."""

_MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("c_fc_0", "c_fc_1"), "c_proj"),
    (("up_proj",), "down_proj"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("fc_in",), "fc_out"),
    (("wi",), "wo"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("linear_1",), "linear_2"),
)
_FUSED = (
    ("gate_up_proj", "down_proj"),
    ("input_linear", "output_linear"),
    ("w1", "w2"),
    ("fc1", "fc2"),
    ("up_proj", "down_proj"),
    ("Wi", "Wo"),
)
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")
_ROUTERS = ("gate", "router", "shared_expert_gate", "shared_experts_gate")
"""Layers whose few outputs choose experts; they stay unsplit, as every rank needs all outputs."""
_COUNTS: dict[str, Count] = {
    "num_heads": "heads",
    "n_heads": "heads",
    "num_attention_heads": "heads",
    "num_key_value_heads": "keys",
    "num_kv_heads": "keys",
    "num_key_value_groups": "groups",
}


def find_cuts(model: Any, model_facts: FoundModel, choices: CutChoices) -> SplitTable:
    """Return the layers that tensor ranks split of a model, which may be on the meta device.

    model_facts: facts read from the model before any split.
    """
    rules = _CutRules(model, model_facts, choices)
    for path in model_facts.by_block:
        if path:
            rules.add_block(path.removesuffix("."))
    rules.add_tables()
    return rules.table


class _CutRules:
    def __init__(self, model: Any, found_model: FoundModel, choices: CutChoices):
        self.model, self.found, self.choices = model, found_model, choices
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.table = SplitTable()
        self._tied = set(found_model.aliases.values()) | set(found_model.aliases)

    # -- what transformers says ------------------------------------------------------------

    @cached_property
    def _plan(self) -> list[tuple[re.Pattern[str], str]]:
        """Return transformers' own tensor parallel plan: patterns of paths inside a block, each
        with a style.
        """
        config = self.model.config.get_text_config()
        tp_plan = getattr(config, "base_model_tp_plan", None) or {}
        return [
            (re.compile(re.escape(inner).replace(r"\*", r"\d+")), style)
            for path, style in tp_plan.items()
            if (inner := path.partition("*.")[2])
        ]

    def _style(self, block: str, path: str) -> str:
        """Return transformers' style for a module or parameter of a block; "" if it has none."""
        inner = path.removeprefix(f"{block}.")
        return next((style for pattern, style in self._plan if pattern.fullmatch(inner)), "")

    # -- blocks ----------------------------------------------------------------------------

    def add_block(self, block: str) -> None:
        inside = [p for p in self.modules if p.startswith(f"{block}.")]
        for path in inside if self.choices.experts else ():
            if layouts := self._stacked(path):
                self.table.experts[path] = layouts
        for path in [block, *inside]:
            linears = dict(self._linears(path))
            if not linears:
                continue
            if not (self._attention(block, path, linears) or self._mlp(block, path, linears)):
                self._alone(block, path, linears)

    def _linears(self, path: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in self.modules[path].named_children():
            full = f"{path}.{name}"
            is_whole = any(full == x or full.startswith(f"{x}.") for x in self.found.unreached)
            if is_linear(child) and not is_whole and f"{full}.weight" not in self._tied:
                yield name, child

    def _attention(self, block: str, path: str, linears: Mapping[str, nn.Module]) -> bool:
        """Cut the module by heads, if it is an attention whose layers allow it."""
        n, module = self.found.sizes, self.modules[path]
        output = next((x for x in _OUTPUTS if x in linears), None)
        if output is None or not {"q_proj", "k_proj", "v_proj"} <= set(linears):
            return False
        if not self.choices.by_heads:
            return False
        styles = {name: self._style(block, f"{path}.{name}") for name in linears}
        is_planned = any(styles.values())
        queries, keys = HeadSplit(n.heads), HeadSplit(n.kv_heads, shared=True)
        splits = dict.fromkeys(linears, queries) | {"k_proj": keys, "v_proj": keys}
        for name, layer in linears.items():
            outputs, inputs = sizes_of(layer)
            dealt = inputs if name == output else outputs
            cut = "rowwise" if name == output else "colwise"
            is_known = name in ("q_proj", "k_proj", "v_proj", output)
            if dealt % splits[name].groups or (styles[name] or cut) != cut:
                return False
            if (not is_known and not styles[name]) or (is_planned and not styles[name]):
                return False
        width = sizes_of(linears["k_proj"])[0] // n.kv_heads
        partial: list[str] = []
        for name, parameter in module.named_parameters():
            inner, _, _ = name.rpartition(".")
            if inner in linears:
                continue
            style = self._style(block, f"{path}.{inner}") if inner else ""
            is_of_head = bool(inner) and tuple(parameter.shape) == (width,)
            if not is_of_head or style not in ("", "replicated_with_grad_allreduce"):
                return False
            partial.append(f"{path}.{name}")
        self._sum_gradients(partial)
        for name in linears:
            if name == output:
                self._split(f"{path}.{name}", "row", splits[name])
            else:
                self._split(f"{path}.{name}", "column", splits[name], entrance=path)
        self.table.attention[path] = AttentionCut(queries, keys, width, _COUNTS)
        return True

    def _mlp(self, block: str, path: str, linears: Mapping[str, nn.Module]) -> bool:
        """Cut the module, or the layers that a block itself has, by hidden channels."""
        if not self.choices.mlps:
            return False
        between: list[str] = []
        if path != block:
            for name, parameter in self.modules[path].named_parameters():
                if name.partition(".")[0] not in linears:
                    if parameter.numel() != 1:  # of all channels, as a norm of them
                        return False
                    between.append(f"{path}.{name}")
        if not self._pair(path, linears):
            return False
        self._sum_gradients(between)  # of a function of each channel, as a learned slope
        return True

    def _pair(self, path: str, linears: Mapping[str, nn.Module]) -> bool:
        for firsts, second in _MLPS:
            if second not in linears or not set(firsts) <= set(linears):
                continue
            hidden = sizes_of(linears[second])[1]
            if all(sizes_of(linears[name])[0] == hidden for name in firsts):
                entrance = path if set(linears) == {*firsts, second} else ""
                for name in firsts:
                    self._split(f"{path}.{name}", "column", entrance=entrance)
                self._split(f"{path}.{second}", "row")
                self._others(path, linears, {*firsts, second})
                return True
        for first, second in _FUSED if self.choices.fused else ():
            if {first, second} <= set(linears):
                hidden = sizes_of(linears[second])[1]
                if sizes_of(linears[first])[0] == 2 * hidden:
                    self._split(f"{path}.{first}", "column", parts=(hidden, hidden))
                    self._split(f"{path}.{second}", "row")
                    self._others(path, linears, {first, second})
                    return True
        return False

    def _alone(self, block: str, path: str, linears: Mapping[str, nn.Module]) -> None:
        """Split each of the layers by itself."""
        is_named = any(self._style(block, f"{path}.{name}") for name in linears)
        if self.choices.others or is_named or "attn" in path or "attention" in path:
            self._others(path, linears, set())

    def _others(self, path: str, linears: Mapping[str, nn.Module], handled: set[str]) -> None:
        for name in linears:
            if name not in handled and name not in _ROUTERS:
                self._split(f"{path}.{name}", "joined")

    def _stacked(self, path: str) -> dict[str, Layout]:
        """Return the layout of each parameter of a module of stacked experts, or {} for another
        module.
        """
        module, dim = self.modules[path], self.found.sizes.dim
        shapes = {name: tuple(p.shape) for name, p in module._parameters.items() if p is not None}
        down = shapes.get("down_proj")
        first = "gate_up_proj" if "gate_up_proj" in shapes else "up_proj"
        up = shapes.get(first)
        if down is None or up is None or len(down) != 3 or len(up) != 3:
            return {}
        handled = {first, "down_proj", f"{first}_bias", "down_proj_bias"}
        if set(shapes) - handled or any(True for x in module.children() if any(x.parameters())):
            return {}
        times = 2 if first == "gate_up_proj" else 1
        for at, out in ((1, 2), (2, 1)):  # (E, Dout, Din) or (E, Din, Dout)
            hidden = down[out]
            if up[at] != times * hidden or down[at] != up[out] or down[at] != dim:
                continue
            # with biases gate and up alternate, as in GPT-OSS
            alternate = times == 2 and f"{first}_bias" in shapes
            parts = (hidden, hidden) if times == 2 and not alternate else ()
            heads = HeadSplit(hidden) if alternate else None
            layouts = {name: Layout(f"{path}.{name}", shape) for name, shape in shapes.items()}
            dims = {first: at, f"{first}_bias": 1}
            for name in (x for x in dims if x in shapes):
                full = f"{path}.{name}"
                layouts[name] = split_layout(full, shapes[name], dims[name], heads, parts)
            layouts["down_proj"] = split_layout(f"{path}.down_proj", down, out)
            return layouts
        return {}

    def _split(
        self,
        path: str,
        kind: LayerKind,
        heads: HeadSplit | None = None,
        *,
        parts: tuple[int, ...] = (),
        entrance: str = "",
    ) -> None:
        """Split the linear layer at `path`. entrance: by default the layer itself."""
        layer: Any = self.modules[path]
        transposed = not isinstance(layer, nn.Linear)
        dim = int(transposed) if kind != "row" else int(not transposed)
        shape = tuple(layer.weight.shape)
        layout = split_layout(self._weight_name(path), shape, dim, heads, parts)
        self.table.layers[path] = LayerCut(kind, layout, transposed, entrance or path)

    def _weight_name(self, path: str) -> str:
        """Return the name of a layer's matrix, which a tied head shares with the embedding."""
        return self.found.aliases.get(f"{path}.weight", f"{path}.weight")

    def _sum_gradients(self, names: Iterable[str]) -> None:
        """Record that each rank has a partial gradient of these parameters."""
        for name in self.found.parameters.keys() & set(names):
            shape = self.found.parameters[name].layout.shape
            self.table.partial[name] = Layout(name, shape, unreduced=("tensor",))

    # -- around them -----------------------------------------------------------------------

    def add_tables(self) -> None:
        """Split the embedding and the matrix that makes logits."""
        names = {id(module): path for path, module in self.modules.items()}
        table: Any = self.model.get_input_embeddings()
        head: Any = self.model.get_output_embeddings()
        is_table = isinstance(table, nn.Embedding) and table.max_norm is None
        is_head = is_linear(head) and sizes_of(head)[0] == self.found.sizes.vocab
        # a bias that another module has too, as BERT's, is used whole there
        is_head = is_head and f"{names[id(head)]}.bias" not in self._tied
        is_tied = is_table and head is not None and head.weight is table.weight
        if is_head and (is_table or not is_tied):
            self._split(names[id(head)], "column" if self.choices.head else "joined")
        if is_table and (not is_tied or is_head):
            path, shape = names[id(table)], tuple(table.weight.shape)
            kind, dim = ("vocab", 0) if is_tied else ("feature", 1)
            layout = split_layout(self._weight_name(path), shape, dim)
            self.table.layers[path] = LayerCut(kind, layout, entrance=path)


def is_linear(module: object) -> bool:
    """Return whether a module multiplies by its matrix and does nothing else."""
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def sizes_of(layer: Any) -> tuple[int, int]:
    """Return (outputs, inputs) of a linear layer."""
    first, second = layer.weight.shape
    return (first, second) if isinstance(layer, nn.Linear) else (second, first)
