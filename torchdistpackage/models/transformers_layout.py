"""A causal language model of transformers as numbers: what a plan asks of it. No torch.

Global names are those that transformers saves. The pieces are the blocks: the embedding goes with
the first, the norm and the head with the last, since the stages run the family's own forward.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torchdistpackage.config.hugging_face import ORIGINAL, read_config, rope_parameters
from torchdistpackage.config.model_section import is_adapter
from torchdistpackage.errors import ConfigError
from torchdistpackage.layout.layout import HeadSplit, Layout
from torchdistpackage.layout.partition import either, nearest
from torchdistpackage.layout.rope import scaled_length
from torchdistpackage.models.families_layout import FAMILIES
from torchdistpackage.models.family_layout import Family, Sizes, Weight, Weights
from torchdistpackage.models.hugging_face_layout import (
    FolderFiles,
    Source,
    WeightFolder,
    find_tensors,
)
from torchdistpackage.models.lora_layout import (
    ADAPTER_FILES,
    Lora,
    linear_layers,
    peft_name,
    target_problems,
)

BACKWARD_PER_FORWARD = 2.0
_MOST = 1 << 24
"""Of any size: what is larger is a slip."""


@dataclass(frozen=True)
class TransformersShape:
    """One model of a family. given: its config.json; seq_len: of the sequences it is trained on;
    lora: its adapters, if only these are trained."""

    family: str
    given: Mapping[str, Any]
    seq_len: int
    sequence_parallel: bool = False
    lora: Lora | None = None

    @property
    def kind(self) -> Family:
        return FAMILIES[self.family]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """With the family's defaults."""
        defaults = self.kind.defaults
        return {**defaults, **{key: self.given[key] for key in defaults if key in self.given}}

    @cached_property
    def sizes(self) -> Sizes:
        return self.kind.sizes(self.settings)

    @property
    def vocab(self) -> int:
        return self.sizes.vocab

    @property
    def dim(self) -> int:
        return self.sizes.dim

    @property
    def num_positions(self) -> int:
        """The longest sequence that the model is made for; seq_len where config.json has none."""
        found = self.sizes.positions or self.given.get("max_position_embeddings")
        return found if isinstance(found, int) and found > 0 else self.seq_len

    @property
    def longest_seq_len(self) -> int:
        """Tokens that its positions are made for, as they are scaled; seq_len if for any number."""
        positions, rope = self.settings.get("max_position_embeddings"), rope_parameters(self.given)
        if self.sizes.positions is not None or positions is None or documents_by(self) == "not":
            return self.num_positions
        read = rope.get("factor"), rope.get(ORIGINAL, self.given.get(ORIGINAL))
        factor, original = (x if type(x) in (int, float) and 0 < x <= _MOST else None for x in read)
        return scaled_length(positions, factor, original)


def shape_of_section(
    section: Mapping[str, Any], seq_len: int, sequence_parallel: bool
) -> TransformersShape:
    """The shape of the model that `hf` of a model section names.

    Raises:
        ConfigError: it is of no family that can be cut here, or its settings are no model; lists
            all.
    """
    where = section["hf"]
    found = read_config(where)
    family = found.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(
            f"model.hf={where}: model_type is {family!r}; transformers' own modules are trained of "
            f"{', '.join(FAMILIES)}. A model of your own is named by model.target"
        )
    lora = Lora.of_section(section.get("lora"))
    shape = TransformersShape(family, found, seq_len, sequence_parallel, lora)
    if problems := _setting_problems(shape):
        raise ConfigError(f"model.hf={where}: {'; '.join(problems)}")
    return shape


def _setting_problems(shape: TransformersShape) -> list[str]:
    """What is no model in the settings, whatever the layout."""
    problems: list[str] = []
    for key, default in shape.kind.defaults.items():
        value = shape.settings[key]
        is_size = type(default) is int or (default is None and value is not None)
        if is_size and not (type(value) is int and 0 <= value <= _MOST):
            problems.append(f"{key} is {value!r}, which is no size")
        elif type(default) is bool and type(value) is not bool:
            problems.append(f"{key} is {value!r}; use true or false")
        elif type(default) is float and type(value) not in (int, float):
            problems.append(f"{key} is {value!r}, which is no number")
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
    return problems + shape.kind.problems(shape.settings)


def refusals(
    shape: TransformersShape, tensor: int, num_stages: int, document_masks: bool
) -> list[tuple[str, str]]:
    """(key, text) of what this model cannot do among what a run asks of it."""
    n, found = shape.sizes, list[tuple[str, str]]()
    if shape.sequence_parallel:
        found.append(
            (
                "parallel.sequence_parallel",
                "transformers' modules take whole sequences; set sequence_parallel to false",
            )
        )
    if document_masks and documents_by(shape) == "not":
        found.append(
            (
                "data.document_masks",
                f"{shape.family} counts distances (ALiBi) across a whole sample; set it to false",
            )
        )
    if not can_share(shape, tensor):
        fits = nearest(tensor, lambda size: can_share(shape, size), at_most=tensor)
        heads = f"{n.heads} heads"
        if n.kv_heads != n.heads:
            heads += f" of {n.kv_heads} key-value heads"
        found.append(
            (
                "parallel.tensor",
                f"{shape.family} with {heads} and an MLP of {n.hidden} cannot be shared by "
                f"parallel.tensor={tensor} ranks, each of which needs whole heads and those that "
                f"they read; set tensor to {either(fits)}",
            )
        )
    if num_stages > n.layers:
        found.append(
            (
                "parallel.pipe",
                f"{num_stages} stages for the {n.layers} blocks of {shape.family}, of which every "
                f"stage needs one; set parallel.pipe to {n.layers} or less",
            )
        )
    if n.positions is not None and shape.seq_len > n.positions:
        found.append(
            (
                "data.seq_len",
                f"data.seq_len={shape.seq_len}, but positions are learned for {n.positions}; set "
                f"seq_len to {n.positions} or less",
            )
        )
    if shape.lora is not None:
        known = shape.kind.output, n.tied
        problems = target_problems(shape.lora, shape.family, weights(shape), *known)
        found += [("model.lora.target", text) for text in problems]
    return found


def documents_by(shape: TransformersShape) -> str:
    """How documents of one sample are kept apart, see `Family`."""
    return "not" if shape.given.get("alibi") else shape.kind.documents


def can_share(shape: TransformersShape, tensor: int) -> bool:
    """Whether so many ranks can share the heads and the MLP.

    A key-value head that several ranks read is held by each, and these share its queries evenly,
    as the plans of parallel/auto deal them.
    """
    n = shape.sizes
    if tensor > n.heads or tensor > n.hidden:
        return False
    if n.kv_heads == n.heads or tensor == 1:
        return True
    if tensor <= n.kv_heads:
        return n.kv_heads % tensor == 0
    if not shape.kind.shares_keys:
        return False
    return tensor % n.kv_heads == 0 and n.heads % tensor == 0


def goes_with(shape: TransformersShape) -> tuple[tuple[str, str], ...]:
    """What a run of this model may ask for, axis by axis."""
    n = shape.sizes
    sizes = [str(size) for size in range(1, n.heads + 1) if can_share(shape, size)]
    shown = sizes if len(sizes) <= 12 else [*sizes[:8], "...", sizes[-1]]
    shared = "" if n.kv_heads == n.heads else f" of {n.kv_heads} key-value heads"
    return (
        ("data", "any number of ranks"),
        ("zero", "0 to 3"),
        ("pipe", f"up to {n.layers} stages, of whole blocks"),
        ("tensor", f"{', '.join(shown)} ({n.heads} heads{shared})"),
        ("sequence_parallel", "no: transformers' modules take whole sequences"),
        ("recompute", "none, blocks, auto"),
        ("lora", f"on {', '.join(linear_layers(weights(shape)))}"),
        ("document_masks", "no: ALiBi" if documents_by(shape) == "not" else "yes"),
    )


# -- parameters ------------------------------------------------------------------------------


def pieces(shape: TransformersShape) -> tuple[str, ...]:
    """Names of the blocks."""
    return tuple(f"{shape.kind.blocks}.{index}" for index in range(shape.sizes.layers))


def _embed(shape: TransformersShape, axis: str) -> dict[str, Weight]:
    w = Weights("", axis, shape.sizes.std)
    shape.kind.embed(w, shape.settings, shape.sizes)
    if shape.sizes.tied:
        w.cut_rows(shape.kind.table)
    return w.held


def _block(shape: TransformersShape, index: int, axis: str) -> dict[str, Weight]:
    w = Weights(f"{shape.kind.blocks}.{index}.", axis, shape.sizes.std)
    shape.kind.block(w, shape.settings, shape.sizes)
    return w.held if shape.lora is None else w.held | shape.lora.adapters(w.held)


def _head(shape: TransformersShape, axis: str) -> dict[str, Weight]:
    """With the output matrix where it is no embedding."""
    w, n = Weights("", axis, shape.sizes.std), shape.sizes
    shape.kind.head(w, shape.settings, n)
    if not n.tied:
        w.column(shape.kind.output, n.vocab, n.dim, HeadSplit(n.vocab))
    return w.held if shape.lora is None else w.held | shape.lora.adapters(w.held, is_head=True)


def weights(
    shape: TransformersShape, stage_of: Sequence[int] | None = None, axis: str = "tensor"
) -> dict[str, Weight]:
    """Every parameter by global name; stage_of as for `layouts`."""
    layers = shape.sizes.layers
    places = [() if stage_of is None else (stage_of[index],) for index in range(layers)]
    parts = [(_embed(shape, axis), places[0])]
    parts += [(_block(shape, index, axis), places[index]) for index in range(layers)]
    parts.append((_head(shape, axis), places[-1]))
    found = {
        name: replace(w, layout=w.layout.on(*stages))
        for held, stages in parts
        for name, w in held.items()
    }
    if shape.sizes.tied:
        name = f"{shape.kind.table}.weight"
        w = found[name]
        both = w.layout.on(*places[0], *places[-1])
        found[name] = replace(w, layout=both)
    return found


def layouts(
    shape: TransformersShape, stage_of: Sequence[int] | None = None, axis: str = "tensor"
) -> dict[str, Layout]:
    """Every parameter's layout by global name, in order; a tied head's is the embedding's.

    stage_of: for each block the index along pipe of the ranks that hold it; None: no pipeline.
    """
    return {name: w.layout for name, w in weights(shape, stage_of, axis).items()}


def global_name(shape: TransformersShape, name: str) -> str:
    """Of a parameter that transformers' module calls `name`, with peft's layers in it or not."""
    n, name = shape.kind, name.replace(".base_layer.", ".").replace(".default.", ".")
    name = n.saved_names.get(name, name)
    is_tied = shape.sizes.tied and name == f"{n.output}.weight"
    return f"{n.table}.weight" if is_tied else name


def piece_parameters(shape: TransformersShape) -> tuple[int, ...]:
    """Of each block, with the embedding and the head where they go."""
    counts = [_count(_block(shape, index, "tensor")) for index in range(shape.sizes.layers)]
    counts[0] += _count(_embed(shape, "tensor"))
    counts[-1] += _count(_head(shape, "tensor"))
    return tuple(counts)


def _count(held: Mapping[str, Weight]) -> int:
    return sum(math.prod(w.layout.shape) for w in held.values())


def piece_costs(shape: TransformersShape) -> tuple[float, ...]:
    """Floating-point operations of each block's forward, per token of a full sequence; counted as
    `gpt_layout.piece_costs` does, the head with the last block."""
    n = shape.sizes
    scores = 4.0 * shape.seq_len * n.heads * n.head_dim
    blocks = [_block(shape, index, "tensor") for index in range(n.layers)]
    costs = [_products(held) + scores for held in blocks]
    head = {name: w for name, w in _head(shape, "tensor").items() if is_adapter(name)}
    costs[-1] += 2.0 * n.dim * n.vocab + _products(head)
    return tuple(costs)


def _products(held: Mapping[str, Weight]) -> float:
    matrices = (w.layout.shape for w in held.values() if len(w.layout.shape) == 2)
    return sum(2.0 * math.prod(shape) for shape in matrices)


def flops_per_token(shape: TransformersShape) -> float:
    """Of forward and backward for one token of a full sequence; what is frozen has no gradient."""
    both = (1 + BACKWARD_PER_FORWARD) * sum(piece_costs(shape))
    return both if shape.lora is None else both - sum(_frozen_products(shape))


def _frozen_products(shape: TransformersShape) -> tuple[float, ...]:
    """Of each block's forward, those with matrices that are not trained."""
    return piece_costs(replace(shape, lora=None, seq_len=0))


def sources(shape: TransformersShape) -> dict[str, tuple[Source, ...]]:
    """For each parameter that is trained, by global name in order, the tensor of a folder that it
    is."""
    if shape.lora is None:
        saved = {name: as_saved for as_saved, name in shape.kind.saved_names.items()}
        return {
            name: (Source(saved.get(name, name), layout.shape),)
            for name, layout in layouts(shape).items()
        }
    return {
        name: (Source(peft_name(name), layout.shape),)
        for name, layout in layouts(shape).items()
        if is_adapter(name)
    }


def files(shape: TransformersShape) -> FolderFiles:
    """Of a folder that has these sources."""
    return FolderFiles() if shape.lora is None else ADAPTER_FILES


def config_json(
    shape: TransformersShape, dtype: str, like: str | Path | None = None
) -> dict[str, Any]:
    """The config.json it was made of, with torch's name of the type of the weights; with adapters
    their settings, and `like` as the model they are for."""
    if shape.lora is not None:
        held = weights(shape).values()
        transposed = any(w.inputs == 0 for w in held)
        return shape.lora.adapter_config(None if like is None else str(like), transposed)
    kept = {key: value for key, value in shape.given.items() if key != "torch_dtype"}
    return {**kept, "dtype": dtype}


def open_folder(folder: str | Path, shape: TransformersShape) -> WeightFolder:
    """The files of a folder that has exactly the weights of this model; only headers are read.

    Raises:
        CheckpointError: it has no weights, or others: lists all that are missing, unexpected, or
            of another shape or type.
    """
    expected = {name: x.shape for name, x in layouts(replace(shape, lora=None)).items()}
    kind = shape.kind
    tied = (f"{kind.output}.weight", f"{kind.table}.weight") if shape.sizes.tied else None
    return find_tensors(folder, expected, tied, kind.saved_names)
