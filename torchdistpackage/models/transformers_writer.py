"""Write the table of a family in symbols, from what the finder reads of one model, for all its
sizes.

A model is made whose sizes differ from each other and from each other's products, so that every
length of a parameter says which sizes it is made of. Switches in config.json that add biases are
tried one by one. families/written.json holds what `scripts/families` writes of `WRITTEN`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.errors import NotAvailableError
from torchdistpackage.families.found import split_as
from torchdistpackage.families.table import FoundModel
from torchdistpackage.families.written import FILE
from torchdistpackage.layout.layout import HeadSplit, Layout
from torchdistpackage.models.transformers_cuts import CutChoices, find_cuts
from torchdistpackage.models.transformers_found import found_on
from torchdistpackage.models.transformers_meta import build_options, known_settings
from torchdistpackage.models.transformers_small import Sample
from torchdistpackage.models.transformers_trial import order_of
from torchdistpackage.tools.undisturbed import keep_random_states

WRITTEN = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma", "mixtral")
"""Families whose tables families/written.json holds."""
_STD = 0.5
_SETTINGS = {
    "vocab_size": 211,
    "hidden_size": 66,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 14,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": _STD,
    "pad_token_id": 7,
}
"""Sizes whose products differ; see `_symbols`."""
_EXPERTS = {"num_local_experts": 5}
_CAPS = {"softcap": "it caps its scores (attn_logit_softcapping)"}
"""Arguments of transformers' attention functions that attention over parts of a sequence lacks."""
_PROBE = "tdp_probe"


def write(path: Path = FILE) -> None:
    """Write the tables of `WRITTEN`."""
    tables = {family: symbolic_table(family) for family in WRITTEN}
    path.write_text(as_text(tables), encoding="utf-8")


def as_text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return written.json of these tables: a statement a line."""

    def value(x: object) -> str:
        if isinstance(x, list) and x and isinstance(x[0], dict):
            return "[\n   " + ",\n   ".join(map(json.dumps, x)) + "\n  ]"
        return json.dumps(x)

    parts = (
        f'"{family}": {{\n  '
        + ",\n  ".join(f'"{k}": {value(x)}' for k, x in table.items())
        + "\n }"
        for family, table in tables.items()
    )
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def symbolic_table(family: str) -> dict[str, Any]:
    """Return the table of a family as an entry of written.json.

    Raises:
        NotAvailableError: transformers is not there, or makes a model that no table states.
    """
    switches = _switches(family)
    off = dict.fromkeys(switches, False)
    plain = _Probe(family, **off)
    added = {
        name: set(_Probe(family, **off | {name: True}).shapes) - set(plain.shapes)
        for name in switches
    }
    defaults = plain.defaults(tuple(name for name in switches if added[name]))
    biases: dict[str, str] = {}
    for setting, names in added.items():
        for name in names:
            layer = name.removesuffix(".bias")
            if layer == name or layer in biases:
                raise NotAvailableError(f"{setting} of {family} adds {name}, as no table states")
            biases[layer] = setting
    order = order_of(plain.model, Sample(plain.ids), plain.found.blocks, plain.table)
    if not order.is_listed and not plain.cuts.experts:
        raise NotAvailableError(
            f"{family} runs its layers in another order than its table lists them"
        )
    embedding = plain.model.get_input_embeddings()
    table = next(path for path, x in plain.model.named_modules() if x is embedding)
    first, output = f"{plain.found.blocks}.0.", plain.found.output
    around = (f"{table}.", f"{output}.")
    beside = [name for name in plain.found.by_block[""] if not name.startswith(around)]
    return {
        "class": plain.found.class_name,
        "defaults": defaults,
        "nullable": [x for x in defaults if plain.takes_null(x, defaults[x])],
        "blocks": plain.found.blocks,
        "table": table,
        "output": output,
        "documents": plain.documents(),
        "own_attention": plain.own_attention(),
        "uses_is_causal": plain.uses_is_causal(),
        "order": asdict(order),
        "block": list(plain.statements(first, plain.found.by_block[first], biases)),
        "head": list(plain.statements("", beside, biases)),
    }


def _switches(family: str) -> list[str]:
    """Return the settings of a family alone that are true or false."""
    from transformers import CONFIG_MAPPING

    attributes = vars(CONFIG_MAPPING[family])
    others = {"tie_word_embeddings", "use_cache"}
    annotations = attributes.get("__annotations__", {})
    return [x for x in annotations if type(attributes.get(x)) is bool and x not in others]


class _Probe:
    """A model of a family with the sizes of `_SETTINGS`, and what the finder reads of it."""

    def __init__(self, family: str, **changes: object):
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        self.family, self.kind = family, CONFIG_MAPPING[family]
        experts = {key: x for key, x in _EXPERTS.items() if hasattr(self.kind, key)}
        tokens = {"bos_token_id": 1, "eos_token_id": 2}
        self.given = {"model_type": family, **_SETTINGS, **experts, **tokens, **changes}
        self.config = known_settings(self.given)
        with keep_random_states():
            torch.manual_seed(0)
            # in float64, in which experts of any width are multiplied
            options = build_options(torch.float64)
            self.model = AutoModelForCausalLM.from_config(self.config, **options).eval()
        self.found: FoundModel = found_on(self.model)
        self.cuts = find_cuts(self.model, self.found, CutChoices())
        self.table = split_as(self.found, self.cuts).table
        self.shapes = {name: layout.shape for name, layout in self.found.layouts.items()}
        draw = torch.Generator().manual_seed(0)
        self.ids: Tensor = torch.randint(8, 211, (1, 12), generator=draw)

    def defaults(self, switches: tuple[str, ...]) -> dict[str, Any]:
        """Return the settings that the table reads, with the values that config.json may omit."""
        keys = [x for x in (*_SETTINGS, *_EXPERTS) if x in self.given]
        at = keys.index("tie_word_embeddings")
        ordered = (*keys[:at], *switches, *keys[at:])
        return {name: getattr(self.kind, name, None) for name in ordered}

    def takes_null(self, setting: str, default: object) -> bool:
        """Return whether transformers makes a model if a setting with a default is null."""
        if default is None or setting == "pad_token_id":
            return False
        try:
            _Probe(self.family, **{setting: None})
        except Exception:  # of huggingface_hub, or whatever a None leads to in a constructor
            return False
        return True

    # -- statements --------------------------------------------------------------------------

    def statements(
        self, prefix: str, parameters: list[str], biases: Mapping[str, str]
    ) -> Iterator[dict[str, Any]]:
        """Yield the statements about these parameters, of one block or beside the blocks.

        biases: paths of layers that have one by a setting, and the setting.
        """
        for path in self.cuts.attention:
            if path.startswith(prefix) and prefix:
                counts = dict(self._counts(path))
                yield {"is": "attention", "name": path.removeprefix(prefix), "counts": counts}
        for path, layouts in self.cuts.experts.items():
            if path.startswith(prefix) and prefix:
                inside = {x: self._matrix(layout) for x, layout in layouts.items()}
                name = path.removeprefix(prefix)
                yield {"is": "experts", "name": name, "matrices": inside}
        for full in parameters:
            path, _, last = full.rpartition(".")
            cut, name, shape = (
                self.cuts.layers.get(path),
                full.removeprefix(prefix),
                self.shapes[full],
            )
            if path in self.cuts.experts or (cut is not None and last == "bias"):
                continue
            if cut is None:
                yield {
                    "is": "whole",
                    "name": name,
                    "shape": [self._symbol(x) for x in shape],
                    "start": self._start(full),
                    "partial": full in self.cuts.partial,
                }
                continue
            if cut.kind not in ("column", "row") or cut.transposed or any(cut.weight.parts):
                raise NotAvailableError(f"{path} of {self.family} is cut as no table states")
            if self._start(full) != "normal":
                raise NotAvailableError(f"{path} of {self.family} begins as no table states")
            yield {
                "is": cut.kind,
                "name": path.removeprefix(prefix),
                "shape": [self._symbol(x) for x in shape],
                "heads": self._heads(cut.weight.heads),
                "bias": biases.get(path, f"{path}.bias" in self.shapes),
            }

    def _counts(self, path: str) -> Iterator[tuple[str, str]]:
        module, cut = self.model.get_submodule(path), self.cuts.attention[path]
        values = cut.on_rank(1, 0)
        for name, count in cut.counts.items():
            if getattr(module, name, None) == values[name]:
                yield name, count

    def _matrix(self, layout: Layout) -> dict[str, Any]:
        """State a matrix of all experts of a block, which "tensor" splits along one dim."""
        (dim,) = (dim for dim, axes in enumerate(layout.split) if "tensor" in axes)
        return {
            "shape": [self._symbol(x) for x in layout.shape],
            "dim": dim,
            "parts": [self._symbol(x) for x in layout.parts[dim]],
        }

    def _heads(self, heads: HeadSplit | None) -> str | None:
        n = self.found.sizes
        names = {None: None, HeadSplit(n.heads): "heads"}
        names[HeadSplit(n.kv_heads, shared=True)] = "kv_heads"
        return names[heads]

    def _symbol(self, length: int) -> str:
        return self._symbols[length]

    @property
    def _symbols(self) -> dict[int, str]:
        n = self.found.sizes
        single = {x: getattr(n, x) for x in ("vocab", "dim", "hidden", "head_dim")}
        several = {"heads*head_dim": n.heads * n.head_dim, "2*hidden": 2 * n.hidden}
        several["kv_heads*head_dim"] = n.kv_heads * n.head_dim
        size_names = single | several | {x: self.given[x] for x in _EXPERTS if x in self.given}
        assert len(set(size_names.values())) == len(size_names)
        return {value: name for name, value in size_names.items()}

    def _start(self, name: str) -> str:
        """Return how transformers draws a parameter."""
        value = self.model.get_parameter(name)
        if (value == 0).all():
            return "zeros"
        if (value == 1).all():
            return "ones"
        if abs(value.std().item() / _STD - 1) > 0.2:
            raise NotAvailableError(f"{name} of {self.family} is drawn as no table states")
        return "normal"

    # -- what a forward shows ----------------------------------------------------------------

    @torch.no_grad()
    def _logits(self, ids: Tensor, **more: Any) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False, **more).logits
        return logits

    def documents(self) -> str:
        """Return whether position_ids that begin anew keep tokens apart; see `Family`."""
        half = self.ids.shape[1] // 2
        positions = torch.arange(half).repeat(2)[None]
        both = self._logits(self.ids, position_ids=positions)
        alone = self._logits(self.ids[:, half:])
        return "positions" if torch.allclose(both[:, half:], alone, atol=1e-4) else "not"

    def own_attention(self) -> str:
        """Return why attention over parts of a sequence does not serve; "": it does."""
        from transformers import AttentionInterface

        seen: list[Mapping[str, Any]] = []

        def probe(module: nn.Module, query: Tensor, *args: Any, **options: Any) -> Any:
            seen.append(options)
            return query.transpose(1, 2), None

        AttentionInterface.register(_PROBE, probe)
        implementation = self.model.config._attn_implementation
        self.model.config._attn_implementation = _PROBE
        try:
            self._logits(self.ids)
        finally:
            self.model.config._attn_implementation = implementation
            AttentionInterface._global_mapping.pop(_PROBE, None)
        if not seen:
            return "its attention is not one of transformers' functions"
        lacking = (text for name, text in _CAPS.items() if seen[0].get(name) is not None)
        return next(lacking, "")

    def uses_is_causal(self) -> bool:
        """Return whether the setting is_causal lets tokens see later ones."""
        expected = self._logits(self.ids)
        self.model.config.is_causal = False
        try:
            return not torch.allclose(self._logits(self.ids), expected)
        finally:
            del self.model.config.is_causal


if __name__ == "__main__":
    write()
