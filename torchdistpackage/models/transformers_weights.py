"""Read and write folders of models without a table, by transformers' own names and conversions.

Files may hold a model otherwise than its modules do: each expert apart where they are stacked, or
parts of a fused matrix. transformers lists these conversions, for both ways, and they are run here
for one parameter at a time, so that a rank reads and holds what is its own.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial, singledispatch
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from torchdistpackage.bounded import StoredTensor, same_bits
from torchdistpackage.config.head_tasks import ModelHead
from torchdistpackage.config.hugging_face import other_model, read_config
from torchdistpackage.config.model_section import is_adapter
from torchdistpackage.config.mtp import COUNT, DEPTH
from torchdistpackage.config.packages import is_before
from torchdistpackage.errors import CheckpointError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.hugging_face_folder import read_weights
from torchdistpackage.models.hugging_face_layout import (
    DTYPES,
    INDEX,
    SINGLE,
    UNREAD,
    FolderFiles,
    Source,
    WeightFolder,
    headers,
)
from torchdistpackage.models.transformers_layout import (
    TransformersShape,
    buffers,
    layouts,
    stored_shapes,
)
from torchdistpackage.models.transformers_meta import on_meta
from torchdistpackage.models.transformers_mtp import COPIES
from torchdistpackage.parallel.tensor.full import copy_part
from torchdistpackage.topology.mesh import Mesh

_SHOWN = 12
_ROWS = 4096
_POOLER = "pooler"
"""Name of a layer behind the blocks that classes with some heads have in their base, and others
have not.
"""


@dataclass(frozen=True)
class StoredGroup:
    """Tensors of a folder that make up `name`, and perhaps other parameters with it. keys:
    (pattern, key) of each.

    converter: transformers' way from these to those; None: the one tensor is the parameter.
    """

    name: str
    keys: tuple[tuple[str, str], ...]
    converter: Any = None

    def convert(self, model: Any, read_tensor: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the parameters that the tensors make up, by name. `read_tensor` returns the tensor
        of a key.
        """
        if self.converter is None:
            return {self.name: read_tensor(self.keys[0][1])}

        def read(key: str) -> Tensor:
            tensor = read_tensor(key)
            with suppress(AttributeError):  # a name of several parameters
                # some ways cast to the model's dtype, which would round float64
                parameter = model.get_parameter(self.name)
                if tensor.is_floating_point():
                    parameter.data = parameter.data.to(tensor.dtype)
            return tensor

        converter = deepcopy(self.converter)
        for pattern, key in self.keys:
            converter.add_tensor(self.name, key, pattern, partial(read, key))
        converted = converter.convert(self.name, model=model, config=model.config)
        return {name: _only(value) for name, value in converted.items()}


@dataclass(frozen=True)
class FoundFolder:
    """A folder that has exactly the weights of a model.

    groups: by name of a parameter or buffer what it comes from. model: on meta.
    """

    files: WeightFolder
    groups: Mapping[str, StoredGroup]
    model: Any

    def tensors(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of these names, whole, as they are stored; a group that has several
        is converted once.
        """
        groups = {id(self.groups[x]): self.groups[x] for x in names if x in self.groups}
        for group in groups.values():
            for name, value in group.convert(self.model, self._read).items():
                if name in names:
                    yield name, value

    def _read(self, key: str) -> Tensor:
        return _tensor(self.files, key)


def _model_of(shape: TransformersShape) -> Any:
    """Return the model of `shape` on meta, to read names and shapes from; nobody changes it."""
    return _made(json.dumps(dict(shape.given), sort_keys=True, default=str), shape.head)


@lru_cache(maxsize=1)
def _made(text: str, head: ModelHead | None) -> Any:
    # a start opens its folder twice, and transformers takes most of a second to make a model
    return on_meta(json.loads(text), torch.float32, head=head)


def open_found(folder: str | Path, shape: TransformersShape) -> FoundFolder:
    """Open a folder, and find which of its tensors make up which parameter; only headers are read.

    Raises:
        CheckpointError: it has no weights, or others: lists all that are missing, unexpected, or
            of another shape or type.
    """
    folder = Path(folder)
    stored = {k: x for k, x in headers(folder) if not UNREAD.search(f".{k}")}
    model = _model_of(shape)
    shapes = _shapes(shape) | stored_shapes(shape)
    groups, unexpected, _ = _groups(model, stored, shapes, shape)
    is_anew, unread = _begins_anew(folder, shape, model)
    copies = mtp_copies(shape)
    unexpected = [name for name in unexpected if not unread(name) and name not in copies]
    by_name, problems = dict[str, StoredGroup](), list[str]()
    for group in groups:
        try:
            tensors = group.convert(
                model, lambda key: torch.empty(stored[key][1].shape, device="meta")
            )
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
            problems.append(
                f"{group.name} cannot be made of its {len(group.keys)} tensors: {error}"
            )
            continue
        for name, value in tensors.items():
            owner = shape.kind.aliases.get(name, name)
            if owner not in shapes:
                unexpected.append(name)
            elif tuple(value.shape) != shapes[owner]:
                problems.append(
                    f"{name} has shape {tuple(value.shape)}, where the model has {shapes[owner]}"
                )
            elif owner in by_name:
                _check_same(folder, stored, by_name[owner], group, owner)
            else:
                by_name[owner] = group if name == owner else _renamed(group, owner)
    optional = {b.name for b in shape.kind.buffers} | {
        name for name, p in model.named_parameters() if not p.requires_grad
    }
    anew = {x for x in shapes if x not in by_name and is_anew(x)}
    optional |= anew
    if shape.lora is not None and (stuck := sorted(x for x in anew if not shape.lora.trains(x))):
        raise CheckpointError(
            f"{folder} lacks {', '.join(stuck)} of {shape.class_name}, which would begin anew and "
            f"stay as drawn, as model.lora trains and saves adapters and the head alone; name a "
            f"folder that has them, or their modules in modules_to_save, or remove model.lora"
        )
    missing = [f"{x} is missing" for x in shapes if x not in by_name and x not in optional]
    types = [
        f"{key} is of type {x.dtype}, where one of {DTYPES} is read"
        for key, (_, x) in stored.items()
        if x.dtype not in DTYPES and not x.dtype.startswith(("I", "U", "BOOL"))
    ]
    extra = [f"{name} is not expected" for name in unexpected]
    if problems := [*missing, *extra, *problems, *types]:
        if text := other_model(folder):
            raise CheckpointError(text)
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"the weights in {folder} do not fit this model: {len(problems)} of {len(shapes)} "
            f"tensors differ: {'; '.join(problems[:_SHOWN])}{more}; use the config.json that "
            "belongs to them, or another folder"
        )
    places = {key: (file, key) for key, (file, _) in stored.items()}
    return FoundFolder(WeightFolder(folder, places), by_name, model)


def ignored_tensors(
    folder: Path, shape: TransformersShape
) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return the file and the shape of each tensor of a folder that transformers' class ignores by
    its name, as the layers behind the last one that predict further tokens (MTP).
    """
    if not any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return {}
    stored = {k: x for k, x in headers(folder) if not UNREAD.search(f".{k}")}
    model = _model_of(shape)
    _, _, unmatched = _groups(model, stored, _shapes(shape), shape)
    is_read = (key for key in unmatched if stored[key][1].dtype in DTYPES)
    return {key: (folder / stored[key][0], stored[key][1].shape) for key in is_read}


def mtp_copies(shape: TransformersShape) -> dict[str, str]:
    """Return the names of tensors of a trained MTP layer that repeat a parameter -> its name."""
    if not shape.mtp_loss:
        return {}
    block = f"{shape.kind.blocks}.{shape.given[DEPTH]}"
    owners = (f"{path}.weight" for path in shape.table_paths)
    return {
        f"{block}.{key}": shape.kind.aliases.get(name, name)
        for key, name in zip(COPIES, owners, strict=True)
    }


@singledispatch
def fill(
    opened: Any,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    index: int,
) -> set[str]:
    """Overwrite the shards of parameters and buffers at `index` of `mesh`, by local name, with
    those of an opened folder. Adapters and tensors on meta are left alone.

    Returns the names of those that the folder leaves out, as a table of positions that nothing
    trains.
    """
    raise AssertionError(f"{opened!r} is not an opened folder")


@fill.register
@torch.no_grad()
def _(
    opened: WeightFolder,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    index: int,
) -> set[str]:
    """Read only this rank's shard of each parameter."""
    wanted = [(x, tensors[name]) for name, x in layouts.items() if not is_adapter(x.name)]
    sources = {x.name: (Source(x.name, x.shape),) for x, _ in wanted}
    there = [(x, tensor) for x, tensor in wanted if not tensor.is_meta and x.name in opened.places]
    grown = [(x, tensor) for x, tensor in there if _has_fewer_rows(opened, x)]
    for layout, tensor in grown:
        copy_part(tensor, _grown(_tensor(opened, layout.name), layout), layout, mesh, index)
    names = {layout.name for layout, _ in grown}
    in_full = ((x, tensor) for x, tensor in there if x.name not in names)
    read_weights(opened, sources, in_full, mesh, index)
    left_out = {x.name for x, _ in wanted} - opened.places.keys()  # a head that begins anew
    return {name for name, x in layouts.items() if x.name in left_out}


@fill.register
@torch.no_grad()
def _(
    opened: FoundFolder,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    index: int,
) -> set[str]:
    """Read and convert each parameter whole, and keep this rank's shard."""
    local = {x.name: name for name, x in layouts.items() if not is_adapter(x.name)}
    local = {key: name for key, name in local.items() if not tensors[name].is_meta}
    for key, full in opened.tensors(set(local)):
        layout = layouts[local[key]]
        copy_part(tensors[local[key]], _grown(full, layout), layout, mesh, index)
    unconverted = {name for key, name in local.items() if key not in opened.groups}
    return {name for name in unconverted if isinstance(tensors[name], nn.Parameter)}


def _has_fewer_rows(opened: WeightFolder, layout: Layout) -> bool:
    """Return whether a table or a bias of the folder has fewer rows than the model's, as where the
    vocabulary has grown.
    """
    if not layout.is_table and len(layout.shape) > 1:
        return False
    file, stored_as = opened.places[layout.name]
    with safe_open(opened.folder / file, framework="pt") as weights:
        return weights.get_slice(stored_as).get_shape()[0] < layout.shape[0]


def _tensor(opened: WeightFolder, name: str) -> Tensor:
    file, stored_as = opened.places[name]
    with safe_open(opened.folder / file, framework="pt") as weights:
        return weights.get_tensor(stored_as)


def _grown(whole: Tensor, layout: Layout) -> Tensor:
    """Return a tensor of a folder with as many rows as the model has: the mean of its rows below
    them.
    """
    more = layout.shape[0] - whole.shape[0] if layout.shape else 0
    if more <= 0:
        return whole
    # rows by the thousand, as a copy of all in float64 may be as large as a model
    total = torch.stack([rows.double().sum(0) for rows in whole.split(_ROWS)]).sum(0)
    mean = (total / len(whole)).to(whole.dtype)
    return torch.cat([whole, mean.expand(more, *whole.shape[1:])])


def _begins_anew(
    folder: Path, shape: TransformersShape, model: Any
) -> tuple[Callable[[str], bool], Callable[[str], bool]]:
    """Return (whether a parameter that the folder lacks begins anew, whether a tensor of the folder
    is another head's), by name: as transformers does it with the folder of another class.
    """
    listed = read_config(folder).get("architectures")
    if shape.head is None or (isinstance(listed, list) and shape.class_name in listed):
        return (lambda _: False), (lambda _: False)
    prefix = model.base_model_prefix
    base = getattr(model, prefix, None)
    # a base class has all that it has under its own names
    base = model if base is None else base
    parts = {name for name, _ in base.named_children()} - {_POOLER}

    def is_of_base(name: str) -> bool:
        return name.removeprefix(f"{prefix}.").partition(".")[0] in parts

    return (lambda name: not is_of_base(name)), (lambda name: not is_of_base(name))


def _renamed(group: StoredGroup, name: str) -> StoredGroup:
    return StoredGroup(name, group.keys) if group.converter is None else group


def _groups(
    model: Any,
    stored: Mapping[str, tuple[str, StoredTensor]],
    shapes: Mapping[str, tuple[int, ...]],
    shape: TransformersShape,
) -> tuple[list[StoredGroup], list[str], list[str]]:
    """Return the groups of tensors that make up parameters, the tensors that make up none, and
    those that the model ignores.
    """
    early = is_before("transformers", "5")
    renamings, converters = _conversions(model)
    by_pattern = {pattern: x for x in converters for pattern in x.source_patterns}
    ignored = _ignored(model, shape)
    everything = dict.fromkeys([*shapes, *shape.kind.aliases])
    grouped: dict[str, tuple[list[tuple[str, str]], Any]] = {}
    unexpected: list[str] = []
    unmatched: list[str] = []
    for key in sorted(stored, key=_natural):
        if early:
            name, pattern = _named_early(model, key, everything), None
        else:
            name, pattern = _named(model, key, renamings, converters, everything)
        if name not in everything and key in everything:
            name, pattern = key, None
        converter = None if pattern is None else by_pattern[pattern]
        if name not in everything:
            # experts that are left out match a converter too
            if any(x.search(key) for x in ignored):
                unmatched.append(key)
                continue
            if converter is None:
                unexpected.append(key)
                continue
        grouped.setdefault(name, ([], converter))[0].append((pattern or key, key))
    groups = [StoredGroup(name, tuple(keys), x) for name, (keys, x) in grouped.items()]
    return groups, unexpected, unmatched


def _ignored(model: Any, shape: TransformersShape) -> list[re.Pattern[str]]:
    """Return patterns of the names that transformers' class ignores, and of the layers behind the
    last one, of which the class knows the number in its largest published model alone.
    """
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    count, layers = shape.given.get(COUNT), shape.given.get("num_hidden_layers")
    if type(count) is int and type(layers) is int:
        numbers = range(layers, layers + count)
        patterns += [rf"^{re.escape(shape.kind.blocks)}\.{number}\." for number in numbers]
    return [re.compile(x) for x in patterns]


def _named(
    model: Any, key: str, renamings: Any, converters: Any, everything: Mapping[str, Any]
) -> tuple[str, str | None]:
    from transformers.core_model_loading import rename_source_key

    expected = dict.fromkeys(everything, True)
    return rename_source_key(key, renamings, converters, model.base_model_prefix, expected)


def _named_early(model: Any, key: str, everything: Mapping[str, Any]) -> str:
    """Return the name that transformers before 5 gives a folder's tensor in its modules."""
    name = key
    for old, new in (getattr(model, "_checkpoint_conversion_mapping", None) or {}).items():
        name = re.sub(old, new, name)
    full_name = f"{model.base_model_prefix}.{name}"
    return full_name if name not in everything and full_name in everything else name


def _conversions(model: Any) -> tuple[list[Any], list[Any]]:
    """Return transformers' renamings and conversions for loading a folder into its modules."""
    if is_before("transformers", "5"):
        return [], []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    mapping = get_model_conversion_mapping(model)
    converters = [x for x in mapping if isinstance(x, WeightConverter)]
    return [x for x in mapping if not isinstance(x, WeightConverter)], converters


def _natural(key: str) -> list[tuple[int, int | str]]:
    """Return a sort key that orders experts by their numbers."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in key.split(".")]


def _only(value: Any) -> Tensor:
    return value[0] if isinstance(value, list) else value


def _check_same(
    folder: Path,
    stored: Mapping[str, tuple[str, StoredTensor]],
    one: StoredGroup,
    other: StoredGroup,
    name: str,
) -> None:
    """Raise CheckpointError if two names of one parameter have different values, since one would be
    lost.
    """
    keys = one.keys[0][1], other.keys[0][1]
    if one.converter is not None or other.converter is not None or keys[0] == keys[1]:
        return
    first, second = (((folder / stored[key][0]).resolve(), stored[key][1]) for key in keys)
    if not same_bits(first, second):
        raise CheckpointError(
            f"{folder}: {keys[0]} and {keys[1]} are both {name} by config.json, but differ; set "
            f"tie_word_embeddings to false in config.json to train both, or remove one"
        )


def _shapes(shape: TransformersShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter except adapters, and of the buffers that a folder
    holds.
    """
    by_name = layouts(replace(shape, lora=None)) | buffers(shape)
    return {name: layout.shape for name, layout in by_name.items()}


# -- and back --------------------------------------------------------------------------------------


class ConvertedFolder:
    """A folder that holds a model as transformers converts it; see `NamedFolder`."""

    def __init__(self, shape: TransformersShape):
        self._shape = shape

    @cached_property
    def _stored(self) -> "Stored":
        return Stored(self._shape)

    def sources(self) -> dict[str, tuple[Source, ...]]:
        """Return the tensors of a folder that each parameter makes up, by global name in order."""
        sources, shapes = dict(self._stored.sources), _shapes(self._shape)
        for key, name in mtp_copies(self._shape).items():
            sources[name] = (*sources[name], Source(key, shapes[name]))
        return sources

    def files(self) -> FolderFiles:
        """Return how a folder that has these sources names its files."""
        if self._shape.mtp == "keep":
            ignored = partial(ignored_tensors, shape=self._shape)
            return FolderFiles(stored=self._stored.parts, ignored=ignored)
        copies = mtp_copies(self._shape)

        def stored(name: str, value: Tensor) -> dict[str, Tensor]:
            again = {key: value for key, owner in copies.items() if owner == name}
            return {**self._stored.parts(name, value), **again}

        return FolderFiles(stored=stored)

    def open(self, folder: str | Path) -> FoundFolder:
        """Open a folder that has exactly the weights of this model; see `open_found`."""
        return open_found(folder, self._shape)


class Stored:
    """The form in which save_pretrained stores parameters in a folder.

    A parameter that only goes into a file together with another keeps its name.
    """

    def __init__(self, shape: TransformersShape):
        self._model = _model_of(shape)
        self._renamings, self._converters = self._reversed()
        shapes = _shapes(shape)
        self._alone = self._which_alone(shapes)
        self.sources = {
            name: tuple(
                Source(key, tuple(x.shape))
                for key, x in self.parts(name, torch.empty(shape, device="meta")).items()
            )
            for name, shape in shapes.items()
        }

    def parts(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """Return the tensors that a parameter or buffer becomes in the files, by key."""
        return self._converted(name, value) if name in self._alone else {name: value}

    def _which_alone(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        """Return the names that convert back without another parameter, into keys that no other
        name gives.
        """
        sources: dict[str, set[str]] = {}
        for name, shape in shapes.items():
            try:
                parts = self._converted(name, torch.empty(shape, device="meta"))
            except (RuntimeError, ValueError, KeyError, IndexError, TypeError):
                continue
            if sum(x.numel() for x in parts.values()) == torch.Size(shape).numel():
                sources[name] = set(parts)
        owners: dict[str, int] = {}
        for keys in sources.values():
            for key in keys:
                owners[key] = owners.get(key, 0) + 1
        return {name for name, keys in sources.items() if all(owners[key] == 1 for key in keys)}

    def _reversed(self) -> tuple[list[Any], list[Any]]:
        if is_before("transformers", "5"):
            return [], []
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter

        # what save_pretrained does with a model that was not loaded, see revert_weight_conversion
        mapping = get_model_conversion_mapping(self._model, add_legacy=False)
        changes = [x for x in mapping if not isinstance(x, PrefixChange)]
        back = [x.reverse_transform() for x in reversed(changes)]
        converters = [x for x in back if isinstance(x, WeightConverter)]
        return [x for x in back if not isinstance(x, WeightConverter)], converters

    def _converted(self, name: str, value: Tensor) -> dict[str, Tensor]:
        for converter in self._converters:
            renamed, pattern = converter.rename_source_key(name)
            if pattern is not None:
                copied = deepcopy(converter)
                copied.add_tensor(renamed, name, pattern, value)
                converted = copied.convert(renamed, model=self._model, config=self._model.config)
                return {self._renamed(key): _only(x) for key, x in converted.items()}
        return {self._renamed(name): value}

    def _renamed(self, key: str) -> str:
        for renaming in self._renamings:
            key, _ = renaming.rename_source_key(key)
        return key
