"""The layouts of low-rank adapters: the adapted layers and their splits. No torch.

An adapter adds alpha / r, or alpha / sqrt(r), times B A x to what a linear layer makes of x. Where
the layer is cut by outputs B is cut alike, where it is cut by inputs A is; ranks have the other one
whole, and each a part of its gradient. Names are those of peft's files without their prefix.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchdistpackage.config.head_tasks import ModelHead, is_head
from torchdistpackage.config.hugging_face import ADAPTER_FILE
from torchdistpackage.config.model_section import (
    TOKEN_ROWS,
    is_adapter,
    is_inside,
    is_token_rows,
    trains_with_adapters,
)
from torchdistpackage.families.table import Weight
from torchdistpackage.layout.four_bit import (
    BLOCK_SIZE,
    PackedFormat,
    keeps_blocks,
    packed_format,
)
from torchdistpackage.layout.layout import Axes, Layout
from torchdistpackage.layout.partition import either, nearest
from torchdistpackage.models.hugging_face_layout import FolderFiles
from torchdistpackage.topology.mesh import Mesh

ALL_LINEAR = "all-linear"
"""The target that means every linear layer of the blocks."""
PREFIX = "base_model.model."
"""Prefix of names in peft's files."""
MAGNITUDE = "lora_magnitude_vector"
"""Name of DoRA's magnitudes in a layer, and in peft's files."""
ADAPTER_FILES = FolderFiles(ADAPTER_FILE, "adapter_model.safetensors", is_sharded=False)


@dataclass(frozen=True, slots=True)
class Lora:
    """The settings of adapters: peft's r, lora_alpha, lora_dropout and target_modules. packing:
    the format of the frozen weights; None: they have the model's type. use_rslora: peft's.
    adapter: the folder whose values they start with; None: they are drawn. modules_to_save,
    use_dora, trainable_token_indices: peft's.
    """

    r: int
    alpha: float
    dropout: float
    target: tuple[str, ...]
    packing: PackedFormat | None = None
    use_rslora: bool = False
    adapter: str | None = None
    modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    trainable_token_indices: tuple[int, ...] = ()

    @classmethod
    def of_section(cls, section: Mapping[str, Any] | None) -> "Lora | None":
        if section is None or section["target"] is None:
            return None
        packing = packed_format(
            section["load_in_4bit"],
            section["load_in_8bit"],
            section["bnb_4bit_quant_type"],
            section["bnb_4bit_use_double_quant"],
        )
        return cls(
            section["r"],
            section["alpha"],
            section["dropout"],
            tuple(section["target"]),
            packing,
            section["use_rslora"],
            section["adapter"],
            tuple(section["modules_to_save"] or ()),
            section["use_dora"],
            tuple(section["trainable_token_indices"] or ()),
        )

    def adapters(
        self, parameters: Mapping[str, Weight], is_head: bool = False, has_tables: bool = False
    ) -> dict[str, Weight]:
        """Return the adapters of the linear layers among these parameters, by name; has_tables: of
        the embeddings too.
        """
        by_name: dict[str, Weight] = {}
        for name, weight in parameters.items():
            layer = name.removesuffix(".weight")
            is_meant = any(names(target, layer) for target in self.target)
            if is_inside(self.modules_to_save, name):
                continue  # trained whole; `target_problems` refuses a name in both
            if weight.inputs is not None and (is_meant or (self.is_all and not is_head)):
                by_name |= self._adapter(layer, weight.layout, weight.inputs)
            elif is_meant and has_tables and is_embedding(weight):
                by_name |= self._adapter_of_table(layer, weight.layout)
            elif weight.stacked is not None and self._means_stack(name):
                by_name |= self._adapter_of_stack(name, weight, weight.stacked)
        return by_name

    def saves(self, layer: str) -> bool:
        """Return whether the layer at this path is trained as a whole."""
        return is_inside(self.modules_to_save, f"{layer}.weight")

    def trains(self, parameter: str) -> bool:
        """Return whether the parameter of this global name is trained."""
        return trains_with_adapters(parameter, self.modules_to_save)

    @property
    def is_all(self) -> bool:
        return ALL_LINEAR in self.target

    def _means_stack(self, parameter: str) -> bool:
        return any(names_stack(target, parameter) for target in self.target)

    def _adapter(self, layer: str, adapted: Layout, inputs: int) -> dict[str, Weight]:
        outputs = 1 - inputs
        axes, num_inputs = adapted.split_axes, adapted.shape[inputs]
        a = Layout(f"{layer}.lora_A.weight", (self.r, num_inputs), unreduced=axes)
        b = Layout(
            f"{layer}.lora_B.weight",
            (adapted.shape[outputs], self.r),
            unreduced=axes,
            is_table=adapted.is_table,
        )
        if adapted.split[outputs]:
            b = _cut_like(adapted, outputs, b, 0)
        else:
            a = _cut_like(adapted, inputs, a, 1)
        # peft draws A uniformly within 1 / sqrt(inputs)
        std = (3 * num_inputs) ** -0.5
        of_layer = {a.name: Weight(a, "uniform", std), b.name: Weight(b, "zeros")}
        if self.use_dora:
            m = Layout(f"{layer}.{MAGNITUDE}.weight", (adapted.shape[outputs],), unreduced=axes)
            if adapted.split[outputs]:
                m = _cut_like(adapted, outputs, m, 0)
            of_layer[m.name] = Weight(m, "norms")
        return of_layer

    def _adapter_of_table(self, layer: str, adapted: Layout) -> dict[str, Weight]:
        """Return the adapter of an embedding: every rank has all of it, and all of its result."""
        rows, columns = adapted.shape
        a = Layout(f"{layer}.lora_embedding_A", (self.r, rows), is_table=True)
        b = Layout(f"{layer}.lora_embedding_B", (columns, self.r))
        # peft draws B, and not A as in linear layers
        return {a.name: Weight(a, "zeros"), b.name: Weight(b, "normal", 1.0)}

    def _adapter_of_stack(self, name: str, adapted: Weight, inputs: int) -> dict[str, Weight]:
        """Return the adapters of the matrices of a block's experts, which ranks share as these."""
        layout, outputs = adapted.layout, 3 - inputs
        num_experts, num_inputs = layout.shape[0], layout.shape[inputs]

        def like(factor: str, shape: tuple[int, ...], at: int, dim: int) -> Layout:
            """Return the layout of a factor, whose dim `at` is the matrix's `dim`."""
            dims = {0: 0, at: dim}
            split = tuple(layout.split[dims[x]] if x in dims else () for x in range(3))
            return Layout(
                f"{name}.{factor}",
                shape,
                split,
                unreduced=() if split[at] else tuple(x for axes in layout.split[1:] for x in axes),
                view=layout.view,
                parts=tuple(layout.parts[dims[x]] if x in dims else () for x in range(3)),
                uneven=layout.uneven,
                heads=layout.heads if split[at] else None,
            )

        a = like("lora_A", (num_experts, self.r, num_inputs), 2, inputs)
        b = like("lora_B", (num_experts, layout.shape[outputs], self.r), 1, outputs)
        std = (3 * num_inputs) ** -0.5  # as of a linear layer
        return {
            a.name: Weight(a, "uniform", std, share=adapted.share),
            b.name: Weight(b, "zeros", share=adapted.share),
        }

    @property
    def scaling(self) -> float:
        """The factor of what adapters add."""
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def token_rows(self, layer: str, table: Layout) -> dict[str, Weight]:
        """Return the parameter with the rows of tokens of an embedding or an output head, which
        every rank has, and of whose gradient it has the terms of its own shard of the table.
        """
        if not self.trainable_token_indices or self.saves(layer):
            return {}
        shape = (len(self.trainable_token_indices), *table.shape[1:])
        axes = table.split_axes or table.unreduced
        rows = Layout(f"{layer}{TOKEN_ROWS}", shape, unreduced=axes, is_table=True)
        return {rows.name: Weight(rows, "rows")}

    def packed(self, weights: Mapping[str, Weight], output: str) -> dict[str, int]:
        """Return the weights held in 4 or 8 bits, by name the dim of their inputs: those of frozen
        linear layers except the head, as transformers chooses them. output: path of the head.
        """
        if self.packing is None:
            return {}
        return {
            name: weight.inputs
            for name, weight in weights.items()
            if weight.inputs is not None
            if not self.trains(name) and name != f"{output}.weight"
        }

    def adapter_config(
        self,
        base: str | None,
        weights: Mapping[str, Weight],
        head: ModelHead | None = None,
        ties: bool = False,
    ) -> dict[str, Any]:
        """Return peft's adapter_config.json. base: the folder of the model. weights: all parameters
        of the model, adapters included. head: trained beside them. ties: one of
        modules_to_save is an embedding whose weight is that of the output head too.

        It names the layers that have adapters here. What `all-linear` stands for is peft's to say,
        and on mixtures it is more than what was trained.
        """
        modules, parameters = peft_targets(weights)
        # dropout matters to training alone, and peft has none on parameters
        dropout = 0.0 if parameters else self.dropout
        more: dict[str, Any] = {"target_parameters": parameters} if parameters else {}
        task_type = "CAUSAL_LM"
        if head is not None:
            task_type = "TOKEN_CLS" if head.task.is_of_tokens else "SEQ_CLS"
            # peft takes a head of several layers as one
            layers = (name.partition(".")[0] for name in weights if is_head(name))
            more |= {"modules_to_save": list(dict.fromkeys(layers))}
        if self.modules_to_save:
            saved = [*more.get("modules_to_save", ()), *self._saved_modules(weights)]
            more |= {"modules_to_save": list(dict.fromkeys(saved))}
        if self.trainable_token_indices:
            more |= {"trainable_token_indices": self._token_indices(weights)}
        if ties:
            more |= {"ensure_weight_tying": True}
        return {
            "peft_type": "LORA",
            "task_type": task_type,
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": self.r,
            "lora_alpha": int(self.alpha) if self.alpha.is_integer() else self.alpha,
            "lora_dropout": dropout,
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "target_modules": modules,
            "fan_in_fan_out": any(weight.inputs == 0 for weight in weights.values()),
            "bias": "none",
            **more,
        }

    def _token_indices(self, weights: Mapping[str, Weight]) -> dict[str, list[int]]:
        """Return peft's trainable_token_indices, by the names of the layers."""
        layers = [x.removesuffix(TOKEN_ROWS) for x in weights if is_token_rows(x)]
        return {_last(layer): list(self.trainable_token_indices) for layer in layers}

    def _saved_modules(self, weights: Mapping[str, Weight]) -> Iterator[str]:
        """Yield the names by which peft finds the modules of modules_to_save and no others: peft
        takes every path that ends with one, whether or not a dot is before it.
        """
        paths = dict.fromkeys(path for name in weights for path in _parents(name))
        for module in self.modules_to_save:
            if all(names(module, path) for path in paths if path.endswith(module)):
                yield module
            else:
                yield from (path for path in paths if names(module, path))


def is_embedding(weight: Weight) -> bool:
    """Return whether the weight is a table of vectors, and no linear layer's."""
    return weight.layout.is_table and weight.inputs is None and len(weight.layout.shape) == 2


def names(target: str, layer: str) -> bool:
    """Return whether `target` is a layer's name, or the end of it after a dot, as peft matches
    names.
    """
    return f".{layer}".endswith(f".{target}")


def names_stack(target: str, parameter: str) -> bool:
    """Return whether `target` is the name of a parameter of experts, or the end of it with the
    module's name, such as `experts.down_proj`: alone the last word is that of linear layers.
    """
    return "." in target and names(target, parameter)


def peft_targets(weights: Mapping[str, Weight]) -> tuple[list[str], list[str]]:
    """Return (target_modules, target_parameters) by which peft finds exactly the layers with
    adapters among these parameters.

    The last word of a layer's name does where it ends no other module's name; a router may be
    called as a layer is. Else it is the whole name. On models with stacked experts peft (0.21)
    takes names of transformers 4's experts, also at the end of a longer name, for the stacks; a
    layer that has such a name it finds as a parameter, under the same keys in the file.
    """
    layers = _adapted_layers(weights)
    has_stacks = any(_STACKED.search(name) for name in weights)
    as_expert = [x for x in layers if has_stacks and _last(x) in _EXPERT_WORDS]
    stacks = [x for x in layers if weights.get(x) is not None]
    adapted = {layer: None for layer in layers if layer not in {*as_expert, *stacks}}
    paths = {path for name in weights if not is_adapter(name) for path in _parents(name)}
    others = {_last(path) for path in paths if path not in adapted}
    names = (layer if _last(layer) in others else _last(layer) for layer in adapted)
    frozen = {_with_module(x) for x, w in weights.items() if w.stacked and x not in stacks}
    parameters = [f"{layer}.weight" for layer in as_expert]
    parameters += [x if _with_module(x) in frozen else _with_module(x) for x in stacks]
    return list(dict.fromkeys(names)), list(dict.fromkeys(parameters))


def left_out(lora: Lora, weights: Mapping[str, Weight]) -> str | None:
    """Return the matrices of the blocks that get no adapters from `all-linear`, as text, or
    None.
    """
    adapted = _adapted_layers(weights)
    matrices = {
        name: math.prod(weight.layout.shape)
        for name, weight in weights.items()
        if len(weight.layout.shape) > 1 and not weight.layout.is_table and not is_adapter(name)
    }
    frozen = {n: x for n, x in matrices.items() if n.removesuffix(".weight") not in adapted}
    if not lora.is_all or not frozen:
        return None
    words = ", ".join(dict.fromkeys(_last(layer) for layer in adapted)) or "no layer"
    kinds = ", ".join(dict.fromkeys(_NUMBERS.sub(".*", name) for name in frozen))
    share = sum(frozen.values()) / sum(matrices.values())
    return (
        f"model.lora.target=[{ALL_LINEAR}] adapts {len(adapted)} layers ({words}); {len(frozen)} "
        f"matrices, {share:.0%} of the weights of all, are not linear layers that peft adapts and "
        f"stay as they are: {kinds}"
    )


_SCANS = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
_IN_SCAN = ("out_proj", "conv1d")
"""Types of models, and their layers, that peft (0.21) refuses."""
_REVERSIBLE = {"reformer": "the encoder of reversible layers (ReformerEncoder)"}
_FACTOR = re.compile(r"\.(lora_[AB])\.(?!weight$)(\w+)$")
_NUMBERS = re.compile(r"\.\d+")
_STACKED = re.compile(r"\.experts\.[^.]+$")
_EXPERT_WORDS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def is_in_scan(family: str, layer: str) -> bool:
    """Return whether kernels multiply by the weight of this layer alone, so that peft refuses it
    and `all-linear` leaves it out.
    """
    return family in _SCANS and _last(layer) in _IN_SCAN


def _adapted_layers(weights: Mapping[str, Weight]) -> dict[str, None]:
    return dict.fromkeys(name.rpartition(".lora_")[0] for name in weights if ".lora_" in name)


def _parents(name: str) -> Iterator[str]:
    """Yield the paths of the modules around a parameter."""
    while name := name.rpartition(".")[0]:
        yield name


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _with_module(parameter: str) -> str:
    """Return the last two words of a parameter's name, the first of which is its module's."""
    return ".".join(parameter.split(".")[-2:])


def is_of_stack(adapter: Layout) -> bool:
    """Return whether the trained parameter is a factor of the matrices of a block's experts."""
    return is_adapter(adapter.name) and len(adapter.shape) == 3


def peft_names(layouts: Mapping[str, Layout]) -> dict[str, str]:
    """Return the names in peft's files of the adapters among these parameters.

    A module with several adapted parameters is wrapped once for each, the first innermost, and its
    files tell them apart by the depth alone.
    """
    by_module: dict[str, list[str]] = {}
    for name, layout in layouts.items():
        if is_of_stack(layout) and name.endswith(".lora_A"):
            stack = name.removesuffix(".lora_A")
            by_module.setdefault(stack.rpartition(".")[0], []).append(stack)
    depths = {
        stack: (module, len(stacks) - 1 - index)
        for module, stacks in by_module.items()
        for index, stack in enumerate(stacks)
    }
    names: dict[str, str] = {}
    for name, layout in layouts.items():
        if is_of_stack(layout):
            stack, _, factor = name.rpartition(".")
            module, depth = depths[stack]
            names[name] = f"{PREFIX}{module}{'.base_layer' * depth}.{factor}.weight"
        elif is_adapter(name):
            names[name] = peft_name(name)
    return names


def peft_shape(layout: Layout) -> tuple[int, ...]:
    """Return the shape of a trained parameter in peft's files."""
    if not is_of_stack(layout):
        return layout.shape
    num, rows, columns = layout.shape
    return (num * rows, columns) if layout.name.endswith("A") else (rows, columns * num)


def to_peft(layout: Layout, value: Any) -> Any:
    """Return the full tensor of a trained parameter as peft's files have it: of experts A one
    below the other, and B with the experts of each rank side by side.
    """
    if not is_of_stack(layout):
        return value
    stacked = value if layout.name.endswith("A") else value.permute(1, 2, 0)
    return stacked.reshape(peft_shape(layout))


def from_peft(layout: Layout, value: Any) -> Any:
    """Return the full tensor of a trained parameter from that of peft's files."""
    if not is_of_stack(layout):
        return value
    num, rows, columns = layout.shape
    if layout.name.endswith("A"):
        return value.reshape(num, rows, columns)
    return value.reshape(rows, columns, num).permute(2, 0, 1)


def local_name(adapter: str) -> str:
    """Return the name of a factor of experts in their module, such as lora_A.down_proj."""
    stack, _, factor = adapter.rpartition(".")
    return f"{factor}.{_last(stack)}"


def global_adapter_name(name: str) -> str:
    """Return the global name of a parameter that the model calls `name`, which is another one for
    a factor of experts.
    """
    return _FACTOR.sub(r".\2.\1", name)


def peft_name(parameter: str) -> str:
    """Return the name of a trained parameter, but for a factor of experts, in peft's files."""
    is_magnitude = parameter.endswith(f"{MAGNITUDE}.weight")
    return PREFIX + (parameter.removesuffix(".weight") if is_magnitude else parameter)


def _cut_like(adapted: Layout, dim: int, adapter: Layout, at: int) -> Layout:
    """Return `adapter` with its dim `at` split in the same way as `adapted` along `dim`."""

    def only(x: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x if dim == at else () for dim in range(len(adapter.shape)))

    split: Sequence[Axes] = only(adapted.split[dim])
    parts, uneven = only(adapted.parts[dim]), adapted.uneven
    return replace(
        adapter, split=tuple(split), unreduced=(), parts=parts, heads=adapted.heads, uneven=uneven
    )


def linear_layers(weights: Mapping[str, Weight]) -> tuple[str, ...]:
    """Return the last words of the names of the layers that can have adapters."""
    layers = (name.split(".")[-2] for name, w in weights.items() if w.inputs is not None)
    return tuple(dict.fromkeys(layers))


def stack_names(weights: Mapping[str, Weight]) -> tuple[str, ...]:
    """Return the names by which the matrices of experts get adapters."""
    stacks = (_with_module(name) for name, w in weights.items() if w.stacked is not None)
    return tuple(dict.fromkeys(stacks))


def target_problems(
    lora: Lora, family: str, weights: Mapping[str, Weight], tied: Mapping[str, str]
) -> list[str]:
    """Return the problems of the targets for a model with these parameters. tied: the names of the
    embedding's weight as that of the output head, each with its own.
    """
    layers = {name.rpartition(".")[0]: False for name in weights if not is_adapter(name)}
    layers |= {
        name.removesuffix(".weight"): True for name, w in weights.items() if w.inputs is not None
    }
    tables = [x for x in _adapted_layers(weights) if f"{x}.lora_embedding_A" in weights]
    layers |= dict.fromkeys(tables, True)
    fits = f"its linear layers are {', '.join(linear_layers(weights))}"
    stacks = [name for name, w in weights.items() if w.stacked is not None]
    if stacks:
        fits += f", and its experts {', '.join(stack_names(weights))}"
    problems: list[str] = []
    if lora.is_all and len(lora.target) > 1:
        problems.append(f"{ALL_LINEAR} stands for all linear layers; leave the others out")
    both = [x for x in lora.target for layer in layers if names(x, layer) and lora.saves(layer)]
    problems += [
        f"{target} is in modules_to_save too, which trains it whole; name it in one of them"
        for target in dict.fromkeys(both)
    ]
    if family in _REVERSIBLE:
        problems.append(
            f"{_REVERSIBLE[family]} of {family} takes gradients only of embedded tokens that have "
            f"one, which adapters over frozen embeddings do not; train the whole model"
        )
    if fused := [layer for layer in _adapted_layers(weights) if is_in_scan(family, layer)]:
        others = (x for x in linear_layers(weights) if x not in _IN_SCAN)
        problems.append(
            f"peft puts no adapter on {fused[0]} of {family}, whose kernels multiply by the "
            f"weight alone; name other layers, such as {', '.join(others)}, or {ALL_LINEAR}"
        )
    for target in lora.target:
        if experts := [x for x in stacks if names_stack(target, x)]:
            problems += _stack_problems(lora, target, experts)
            continue
        chosen = [table for table in tables if names(target, table)]
        shared = [x for x, name in tied.items() if name.removesuffix(".weight") in chosen]
        if shared:
            problems.append(
                f"{target} of {family} is {', '.join(shared)} too (tie_word_embeddings), and an "
                "adapter of one would not change the other; name it in modules_to_save"
            )
        elif chosen and lora.use_dora:
            problems.append(f"use_dora is for linear layers, and {target} is an embedding")
        matches = [is_one for layer, is_one in layers.items() if names(target, layer)]
        if target == ALL_LINEAR or any(matches):
            continue
        if matches or any(names(target, x.removesuffix(".weight")) for x in tied):
            reason = "not a linear layer" if matches else "its embedding"
            problems.append(
                f"{target} of {family} is {reason}, and only linear layers and embeddings can have "
                "adapters"
            )
        elif name := next((x for x in stacks if names(target, x)), None):
            problems.append(
                f"{target} of {family} is a matrix of all experts; name it {_with_module(name)}"
            )
        else:
            problems.append(f"{family} has no layer {target}")
    return [*problems[:-1], f"{problems[-1]}; {fits}"] if problems else []


def token_problems(
    lora: Lora, family: str, weights: Mapping[str, Weight], vocab: int, stored_vocab: int | None
) -> list[tuple[str, str]]:
    """Return (key, text) of what is wrong with the trained rows of a model of `vocab` tokens.
    stored_vocab: rows in its folder, if it has grown.
    """
    problems: list[tuple[str, str]] = []
    key, ids = "model.lora.trainable_token_indices", lora.trainable_token_indices
    layers = [x.removesuffix(TOKEN_ROWS) for x in weights if is_token_rows(x)]
    if ids and (high := max(ids)) >= vocab:
        problems.append((key, f"token {high} is none of the {vocab} of {family}"))
    if len(set(ids)) < len(ids):
        twice = next(x for x in ids if ids.count(x) > 1)
        problems.append((key, f"token {twice} is listed twice; list each once"))
    if ids and not layers:
        text = "modules_to_save trains these rows and all others; remove one of the two"
        problems.append((key, text))
    problems += [
        (key, f"{layer} has an adapter too, by target; leave one of the two out")
        for layer in layers
        if layer in _adapted_layers(weights)
    ]
    if stored_vocab is None or set(range(stored_vocab, vocab)) <= {*ids}:
        return problems
    tables = [
        name.removesuffix(".weight")
        for name, w in weights.items()
        if w.layout.is_table and w.layout.shape[0] == vocab and not is_adapter(name)
    ]
    stuck = [table for table in tables if not lora.saves(table)]
    if stuck:
        text = (
            f"{stuck[0]} of {family} grows from {stored_vocab} to {vocab} rows, which adapters do "
            f"not save; train them by model.lora.trainable_token_indices, or name "
            f"{_last(stuck[0])} in modules_to_save"
        )
        problems.append(("model.vocab", text))
    return problems


def _stack_problems(lora: Lora, target: str, stacks: Sequence[str]) -> Iterator[str]:
    """Yield what peft has not on matrices of experts, which it adapts as parameters."""
    if any(is_inside(lora.modules_to_save, stack) for stack in stacks):
        yield f"{target} is in modules_to_save too, which trains it whole; name it in one of them"
    if lora.dropout:
        yield f"peft has no dropout on the experts of {target}; set model.lora.dropout to 0"
    if lora.use_dora:
        yield f"use_dora is for linear layers, and {target} is a matrix of all experts"


def saved_problems(
    lora: Lora, family: str, weights: Mapping[str, Weight], tied: Mapping[str, str]
) -> list[str]:
    """Return the problems of modules_to_save for a model with these parameters. tied: the names of
    the embedding's weight as that of the output head, each with its own.
    """
    problems: list[str] = []
    if len(saved := [x for x, name in tied.items() if lora.trains(name)]) > 1:
        problems.append(
            f"{tied[saved[0]]} of {family} is {', '.join(saved)} too, and peft ties at most two "
            "names; leave it out"
        )
    for module in lora.modules_to_save:
        if any(is_inside((module,), name) for name in weights if not is_adapter(name)):
            continue
        if any(is_inside((module,), x) for x in tied):
            table = _last(next(iter(tied.values())).removesuffix(".weight"))
            problems.append(
                f"{module} of {family} is its embedding (tie_word_embeddings); name {table}, which "
                f"trains the one weight of both"
            )
        else:
            paths = (path for x in weights if not is_adapter(x) for path in _parents(x))
            words = (x for x in dict.fromkeys(map(_last, paths)) if not x.isdigit())
            problems.append(
                f"{family} has no module {module} with weights; its modules are {', '.join(words)}"
            )
    return problems


def cut_problem(
    lora: Lora,
    weights: Mapping[str, Weight],
    packed: Collection[str],
    tensor: int,
    axis: str = "tensor",
) -> str | None:
    """Return the error text if `tensor` ranks would split blocks of 4-bit weights, or None."""
    packing = lora.packing
    if tensor == 1 or packing is None or packing.bits == 8:  # rows of 8 bits may be cut anywhere
        return None

    def cut_within(size: int) -> list[str]:
        mesh = Mesh(((axis, size),))
        pairs = ((name, weights[name]) for name in sorted(packed))
        return [n for n, w in pairs if not keeps_blocks(w.layout, w.inputs or 0, mesh)]

    wrong = cut_within(tensor)
    if not wrong:
        return None
    shape = weights[wrong[0]].layout.shape
    fits = nearest(tensor, lambda size: size == 1 or not cut_within(size), at_most=tensor)
    return (
        f"4-bit weights share a scale in blocks of {BLOCK_SIZE} elements along a layer's inputs, "
        f"which parallel.tensor={tensor} ranks cut in {len(wrong)} weights, such as {wrong[0]} "
        f"{shape}; set tensor to {either(fits)}, or model.lora.load_in_4bit to false"
    )
