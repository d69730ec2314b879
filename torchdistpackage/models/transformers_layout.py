"""The sizes, parameters and layouts of a causal language model of transformers, for plans. No
torch.

Global names are those that transformers saves. The pieces are the blocks: the embedding goes with
the first, the norm and the head with the last, since the stages run the family's own forward.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torchdistpackage.config.head_tasks import WITHOUT_HEAD, ModelHead
from torchdistpackage.config.hugging_face import (
    ORIGINAL,
    read_config,
    rope_parameters,
    stored_vocabulary,
    with_vocabulary,
)
from torchdistpackage.config.model_section import TOKEN_ROWS, is_token_rows
from torchdistpackage.config.mtp import mtp_problem, with_mtp
from torchdistpackage.config.types import MtpUse
from torchdistpackage.errors import ConfigError
from torchdistpackage.families.registry import FAMILIES
from torchdistpackage.families.table import (
    ContextWay,
    Documents,
    DocumentsWay,
    Family,
    Sizes,
    Weight,
    Weights,
)
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.partition import share_heads_evenly
from torchdistpackage.layout.rope import scaled_length
from torchdistpackage.layout.table import LayerCut, SplitTable
from torchdistpackage.lazy import resolve
from torchdistpackage.models.lora_layout import (
    Lora,
    global_adapter_name,
    is_in_scan,
    is_of_stack,
    local_name,
)
from torchdistpackage.models.transformers_heads import config_with_head, has_bias, with_head

_FOUND = "torchdistpackage.models.transformers_found:found_family"
_CONTEXT = "torchdistpackage.models.transformers_context:found_context"
_DOCUMENTS = "torchdistpackage.models.transformers_documents:found_documents"
_IS_CAUSAL = "torchdistpackage.models.transformers_found:is_causal"
"""Import paths of what reads or tries a class, loaded late because it needs torch."""
_MOST = 1 << 24
"""Largest accepted size; a larger one is a typing error."""


@dataclass(frozen=True)
class TransformersShape:
    """One model of a family. given: its config.json. seq_len: length of the sequences it is trained
    on. lora: its adapters, if only these are trained. tensor: number of ranks that share a model
    without a table; with 1 nothing of it is split. head: in place of the one for the next token.
    stored_vocab: rows of the embedding in its folder, if it has grown. mtp: the use of its layers
    for further tokens. mtp_loss: factor of the loss of the one that trains.
    """

    family: str
    given: Mapping[str, Any]
    seq_len: int
    sequence_parallel: bool = False
    lora: Lora | None = None
    tensor: int = 1
    head: ModelHead | None = None
    stored_vocab: int | None = None
    mtp: MtpUse = "keep"
    mtp_loss: float = 0.0

    @cached_property
    def kind(self) -> Family:
        table = FAMILIES.get(self.family)
        if table is None:
            return resolve(_FOUND)(self.given, self.tensor, self.head)
        return table if self.head is None else with_head(self.family, self.head)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of config.json, with the family's defaults for what it leaves out."""
        defaults = self.kind.defaults
        return {**defaults, **{key: self.given[key] for key in defaults if key in self.given}}

    @cached_property
    def sizes(self) -> Sizes:
        sizes = self.kind.sizes(self.settings)
        return sizes if self.head is None else replace(sizes, tied=False)

    @cached_property
    def tables(self) -> dict[str, list[Weights]]:
        """The tables that `parts` has built, by the tensor ranks' axis."""
        return {}

    @property
    def has_table(self) -> bool:
        """Whether the family has a table, and is not read from transformers' modules."""
        return self.family in FAMILIES

    @cached_property
    def context_way(self) -> ContextWay:
        """How context ranks share its sequences, tried on a small copy where no table says it."""
        if self.has_table and not self.kind.own_attention:
            return ContextWay()
        if self.head is not None and not self.has_table:
            return ContextWay(problem=f"no way was tried for {self.class_name}, which has a head")
        return resolve(_CONTEXT)(self.given)

    @cached_property
    def documents_way(self) -> DocumentsWay:
        """How documents of one sample are kept apart, tried on a small copy where no table says
        it.
        """
        by = documents_by(self)
        if by == "distances":  # counted from the beginning of a row
            return DocumentsWay("rows")
        if self.has_table or self.head is not None:
            return DocumentsWay(by)
        return resolve(_DOCUMENTS)(self.given)

    @cached_property
    def packed(self) -> Mapping[str, int]:
        """Weights that ranks hold in 4 or 8 bits: by global name the dim of their inputs."""
        if self.lora is None:
            return {}
        return self.lora.packed(weights(self), self.table_paths[1])

    @property
    def table_paths(self) -> tuple[str, str]:
        """The paths of the embedding and of the layer that makes logits."""
        table, output = self.kind.found_tables
        return self.kind.table or table, self.kind.output or output

    @property
    def tied(self) -> dict[str, str]:
        """The names of the embedding's weight as that of the output head, each with its own."""
        if self.sizes.tied:
            return {f"{self.kind.output}.weight": f"{self.kind.table}.weight"}
        listed = weights(self)
        return {x: name for x, name in self.kind.aliases.items() if listed[name].layout.is_table}

    @property
    def class_name(self) -> str:
        """The name of the model in texts."""
        return self.kind.class_name

    @property
    def vocab(self) -> int:
        return self.sizes.vocab

    @property
    def dim(self) -> int:
        return self.sizes.dim

    @property
    def num_positions(self) -> int:
        """The longest sequence that the model is made for; seq_len where config.json has none."""
        positions = self.sizes.positions or self.settings.get("max_position_embeddings")
        return positions if isinstance(positions, int) and positions > 0 else self.seq_len

    @property
    def longest_seq_len(self) -> int:
        """The longest sequence that its positions are made for, with their scaling; seq_len if
        there is no limit.
        """
        positions, rope = self.settings.get("max_position_embeddings"), rope_parameters(self.given)
        by = documents_by(self)
        if by == "distances" and self.sizes.positions is None:
            return self.seq_len  # ALiBi, whatever the family's default says
        if (
            self.sizes.positions is not None
            or positions is None
            or by in ("distances", "padding", "not")
        ):
            return self.num_positions
        values = rope.get("factor"), rope.get(ORIGINAL, self.given.get(ORIGINAL))
        factor, original = (
            x if type(x) in (int, float) and 0 < x <= _MOST else None for x in values
        )
        return scaled_length(positions, factor, original)


def shape_of_section(
    section: Mapping[str, Any],
    seq_len: int,
    sequence_parallel: bool,
    tensor: int = 1,
    head: ModelHead | None = None,
    is_embedding: bool = False,
) -> TransformersShape:
    """Return the shape of the model that `hf` of a model section names. is_embedding: its hidden
    states are compared, so that an encoder is one too.

    Raises:
        ConfigError: transformers has no such model, or its settings describe no model; lists all.
    """
    where = section["hf"]
    config_dict = read_config(where)
    lora = Lora.of_section(section.get("lora"))
    stored, vocab = stored_vocabulary(config_dict), section.get("vocab")
    grows = type(stored) is int and type(vocab) is int and vocab > stored
    if grows and type(vocab) is int:
        config_dict = with_vocabulary(config_dict, vocab)
    mtp: MtpUse = section.get("mtp", "keep")
    if mtp == "train":
        if problem := mtp_problem(config_dict):
            raise ConfigError(f"model.hf={where}: model.mtp: {problem}")
        config_dict = with_mtp(config_dict)
    family = str(config_dict.get("model_type"))
    if is_embedding and family not in FAMILIES and not resolve(_IS_CAUSAL)(config_dict):
        head = ModelHead(WITHOUT_HEAD)
    if head is not None:
        try:
            config_dict = config_with_head(config_dict, head)
        except ConfigError as error:
            raise ConfigError(f"model.hf={where}: {error}") from error
    shape = TransformersShape(
        family,
        config_dict,
        seq_len,
        sequence_parallel,
        lora,
        tensor,
        head,
        stored if grows and type(stored) is int else None,
        mtp,
        section.get("mtp_loss", 0.0) if mtp == "train" else 0.0,
    )
    try:
        shape.kind  # noqa: B018  read now, as it may be none
    except ConfigError as error:
        raise ConfigError(f"model.hf={where}: {error}") from error
    if problems := setting_problems(shape):
        raise ConfigError(f"model.hf={where}: {'; '.join(problems)}")
    return shape


def setting_problems(shape: TransformersShape) -> list[str]:
    """Return what is wrong with the settings, whatever the layout."""
    problems: list[str] = []
    for key, default in shape.kind.defaults.items():
        value = shape.settings[key]
        if value is None and (key == "pad_token_id" or key in shape.kind.nullable):
            continue  # without padding no row of the embedding is zero
        is_size = type(default) is int or (default is None and value is not None)
        if is_size and not (type(value) is int and 0 <= value <= _MOST):
            problems.append(f"{key} is {_as_json(value)}, which is not a size")
        elif type(default) is bool and type(value) is not bool:
            problems.append(f"{key} is {_as_json(value)}; use true or false")
        elif type(default) is float and type(value) not in (int, float):
            problems.append(f"{key} is {_as_json(value)}, which is not a number")
    if shape.kind.uses_is_causal and shape.given.get("is_causal") is False:
        problems.append(
            "is_causal is false, so that tokens see those that they are to predict; set it to true"
        )
    if shape.given.get("quantization_config") is not None:
        problems.append("quantization_config is set; use the folder of the full weights")
    if problems:
        return problems
    try:
        n = shape.sizes
    except ZeroDivisionError:
        return ["it has no attention heads"]
    few = {"vocab": n.vocab, "dim": n.dim, "layers": n.layers, "heads": n.heads, "mlp": n.hidden}
    problems += [
        f"its size {name} is {value}; use 1 or more" for name, value in few.items() if value < 1
    ]
    if not problems and n.heads % n.kv_heads:
        problems.append(f"{n.heads} heads cannot share {n.kv_heads} key-value heads evenly")
    if not problems and n.padding is not None and n.padding >= n.vocab:
        problems.append(f"pad_token_id is {n.padding}, but the vocabulary has {n.vocab} tokens")
    kind, settings = shape.kind, shape.settings
    return problems + kind.uncut(settings) + kind.problems(settings)


def _as_json(value: object) -> str:
    return "null" if value is None else repr(value)


def context_problem(shape: TransformersShape) -> str:
    """Return why ranks cannot share a sequence; "": they can."""
    rope = shape.given.get("rope_parameters") or shape.given.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind in ("dynamic", "longrope"):
        return f"its positions (rope type {kind}) depend on the length of what is seen"
    if shape.kind.auxiliary and not shape.kind.counts_routers:
        return "the loss of its routers (output_router_logits) is of whole sequences"
    return shape.context_way.problem


def documents_by(shape: TransformersShape) -> Documents:
    """Return how documents of one sample are kept apart; see `Family`."""
    by = shape.kind.documents
    return "distances" if by in ("positions", "mask") and shape.given.get("alibi") else by


def can_share(shape: TransformersShape, tensor: int) -> bool:
    """Return whether so many ranks can share the heads and the MLP.

    A key-value head that several ranks read is held by each, and these share its queries evenly,
    as the plans of parallel/auto deal them.
    """
    n = shape.sizes
    if not shape.kind.deals_heads:
        return tensor == 1 or shape.kind.unshared is None
    if tensor > n.hidden or (tensor > n.kv_heads and not shape.kind.shares_keys):
        return False
    return share_heads_evenly(n.heads, n.kv_heads, tensor)


# -- parameters ------------------------------------------------------------------------------


def pieces(shape: TransformersShape) -> tuple[str, ...]:
    """Return the names of the blocks; a model without a list of blocks has one name for all of
    it.
    """
    if not shape.kind.blocks:
        return ("model",)
    return tuple(f"{shape.kind.blocks}.{index}" for index in range(shape.sizes.layers))


def _embed(shape: TransformersShape, axis: str) -> Weights:
    w = Weights("", axis, shape.sizes.std)
    shape.kind.embed(w, shape.settings, shape.sizes)
    if shape.sizes.tied:
        w.cut_rows(shape.kind.table)
    if shape.lora is None:
        return w
    return _adapted(w, shape, shape.lora, has_tables=True, rows_of=shape.table_paths)


def _block(shape: TransformersShape, index: int, axis: str) -> Weights:
    prefix, sequence_parallel = f"{shape.kind.blocks}.{index}.", shape.sequence_parallel
    w = Weights(prefix, axis, shape.sizes.std, sequence_parallel)
    shape.kind.block(w, shape.settings, shape.sizes)
    return w if shape.lora is None else _adapted(w, shape, shape.lora)


def _head(shape: TransformersShape, axis: str) -> Weights:
    """Return the parameters behind the blocks, with the output matrix unless it is the
    embedding.
    """
    w, n = Weights("", axis, shape.sizes.std), shape.sizes
    shape.kind.head(w, shape.settings, n)
    if not shape.kind.output:
        pass  # a class without a table lists all that it has by itself
    elif shape.head is not None:
        # small, so each rank has all of it
        w.whole(f"{shape.kind.output}.weight", shape.head.num_outputs, n.dim, kind="normal")
        if has_bias(shape.head, shape.given):
            w.whole(f"{shape.kind.output}.bias", shape.head.num_outputs, kind="zeros")
    elif n.tied:
        w.tied_head(shape.kind.output, n.vocab, n.dim)
    else:
        w.column(shape.kind.output, n.vocab, n.dim, is_table=True)
    if shape.lora is None:
        return w
    return _adapted(w, shape, shape.lora, is_head=True, rows_of=shape.table_paths)


def _adapted(
    w: Weights,
    shape: TransformersShape,
    lora: Lora,
    is_head: bool = False,
    has_tables: bool = False,
    rows_of: tuple[str, ...] = (),
) -> Weights:
    """Return `w` with adapters on the layers that it lists. is_head, has_tables: as of
    `Lora.adapters`. rows_of: the layers that have rows of tokens.
    """
    may_adapt = {
        name: weight
        for name, weight in w.parameters.items()
        if not (lora.is_all and is_in_scan(shape.family, name.removesuffix(".weight")))
    }
    of_adapters = lora.adapters(may_adapt, is_head, has_tables)
    for path in rows_of:
        if (table := w.parameters.get(f"{path}.weight")) is not None:
            of_adapters |= lora.token_rows(path, table.layout)
    layers = {
        name.removesuffix(".weight"): LayerCut("adapter", weight.layout)
        for name, weight in of_adapters.items()
        if not is_of_stack(weight.layout) and not is_token_rows(name)
    }
    experts = {path: dict(layouts) for path, layouts in w.split.experts.items()}
    for name, weight in of_adapters.items():
        module = name.rpartition(".")[0].rpartition(".")[0]
        if is_of_stack(weight.layout) and module in experts:
            experts[module][local_name(name)] = weight.layout
    split = w.split | SplitTable(layers, experts=experts)
    return replace(w, parameters=w.parameters | of_adapters, split=split)


def parts(shape: TransformersShape, axis: str) -> list[Weights]:
    """Return the parameters before the blocks, of each block, and behind them.

    A shape builds its table once an axis, and all that is read of it comes from here.
    """
    if axis not in shape.tables:
        blocks = (_block(shape, index, axis) for index in range(shape.sizes.layers))
        shape.tables[axis] = [_embed(shape, axis), *blocks, _head(shape, axis)]
    return shape.tables[axis]


def part_tables(shape: TransformersShape, axis: str = "tensor") -> list[SplitTable]:
    """Return the split tables of the modules before the blocks, of each block, and of the modules
    after them.
    """
    return [w.split for w in parts(shape, axis)]


def split_table(shape: TransformersShape, axis: str = "tensor") -> SplitTable:
    """Return which layers tensor ranks replace, and their replacements, by path in transformers'
    model.
    """
    embed, *blocks, head = part_tables(shape, axis)
    table = embed | head
    for block in blocks:
        table |= block
    for saved, name in shape.kind.saved_names.items():
        table.also_called(name.removesuffix(".weight"), saved.removesuffix(".weight"))
    return table


def weights(
    shape: TransformersShape, stage_of: Sequence[int] | None = None, axis: str = "tensor"
) -> dict[str, Weight]:
    """Return every parameter by global name; stage_of as for `layouts`."""
    layers = shape.sizes.layers
    block_stages = [() if stage_of is None else (stage_of[index],) for index in range(layers)]
    part_stages = (block_stages[0], *block_stages, block_stages[-1])
    by_name = {
        name: replace(w, layout=w.layout.on(*stages))
        for part, stages in zip(parts(shape, axis), part_stages, strict=True)
        for name, w in part.parameters.items()
    }
    for alias, name in shape.kind.aliases.items():
        w = by_name[name]
        on = shape.kind.stages_of(alias, block_stages)
        by_name[name] = replace(w, layout=w.layout.on(*sorted({*w.layout.stages, *on})))
    if shape.sizes.tied:
        name = f"{shape.kind.table}.weight"
        w = by_name[name]
        both = w.layout.on(*block_stages[0], *block_stages[-1])
        by_name[name] = replace(w, layout=both)
    table, _ = shape.table_paths
    rows = f"{table}{TOKEN_ROWS}"
    if rows in by_name:  # which the head has too, if it has its table
        stages = by_name[f"{table}.weight"].layout.stages
        by_name[rows] = replace(by_name[rows], layout=by_name[rows].layout.on(*stages))
    return by_name


def stored_shapes(shape: TransformersShape) -> dict[str, tuple[int, ...]]:
    """Return the shape in the folder of every parameter except adapters, by global name."""
    by_name = {name: x.shape for name, x in layouts(replace(shape, lora=None)).items()}
    if shape.stored_vocab is not None:
        for name in (f"{path}.{last}" for path in shape.table_paths for last in ("weight", "bias")):
            if name in by_name and by_name[name][0] == shape.vocab:
                by_name[name] = (shape.stored_vocab, *by_name[name][1:])
    return by_name


def buffers(shape: TransformersShape, stage_of: Sequence[int] | None = None) -> dict[str, Layout]:
    """Return the buffers that a folder holds beside the parameters, by global name. They are never
    split. stage_of as for `layouts`.
    """
    block_stages = [() if stage_of is None else (stage_of[i],) for i in range(shape.sizes.layers)]
    return {b.name: b.on(*shape.kind.stages_of(b.name, block_stages)) for b in shape.kind.buffers}


def layouts(
    shape: TransformersShape, stage_of: Sequence[int] | None = None, axis: str = "tensor"
) -> dict[str, Layout]:
    """Return every parameter's layout by global name, in order; a tied head has the embedding's.

    stage_of: for each block the index along pipe of the ranks that hold it; None: no pipeline.
    """
    return {name: w.layout for name, w in weights(shape, stage_of, axis).items()}


def global_name(shape: TransformersShape, name: str) -> str:
    """Return the global name of a parameter that transformers' module calls `name`, with peft's
    layers in it or not.
    """
    name = name.removesuffix(".default")  # peft's parameters of an embedding
    n, name = shape.kind, name.replace(".base_layer.", ".").replace(".default.", ".")
    if is_token_rows(name):
        table = global_name(shape, f"{name.removesuffix(TOKEN_ROWS)}.weight")
        return table.removesuffix(".weight") + TOKEN_ROWS
    name = global_adapter_name(name)
    name = n.aliases.get(name, name)
    name = n.saved_names.get(name, name)
    is_tied = shape.sizes.tied and name == f"{n.output}.weight"
    return f"{n.table}.weight" if is_tied else name


def piece_parameters(shape: TransformersShape) -> tuple[int, ...]:
    """Return the number of parameters of each piece; the embedding and the head count with the
    pieces that include them.
    """
    embed, *counts, head = (_count(part.parameters) for part in parts(shape, "tensor"))
    counts[0] += embed
    counts[-1] += head
    return tuple(counts)


def _count(parameters: Mapping[str, Weight]) -> int:
    return sum(math.prod(w.layout.shape) for w in parameters.values())
