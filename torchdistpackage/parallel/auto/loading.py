"""Load weights of the unsplit model into its shards, the reverse of saving.py.

Files are read tensor by tensor, and the slices that local shards hold are copied. So a model that
was split on the meta device gets its weights with memory for its shards and the tensors of one
file, which safetensors maps into memory.
"""

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto.nested import find_tied_weight_aliases
from torchdistpackage.parallel.auto.saving import OriginalEntry
from torchdistpackage.parallel.auto.split_root import SplitRoot

AnyPath = str | PathLike[str]


def load_tensor_parallel(model: nn.Module, files: AnyPath | Sequence[AnyPath]) -> None:
    """Load safetensors files of the unsplit model into the shards of `model`.

    files: a folder written by `save_pretrained`, or files. model: made by `tensor_parallel`; its
    tensors on the meta device move to the devices of its shards. If shards are processes, each
    calls this for itself.

    Raises:
        LayoutError: files and model do not fit, with all names; nothing was loaded then. Or tensors
            that are in no file are still on the meta device.
    """
    root: Any = getattr(model, "wrapped_model", model)
    if not isinstance(root, SplitRoot) or not hasattr(root, "_original"):
        raise LayoutError(
            f"a {type(model).__name__} was given, which has no shards; pass what tensor_parallel "
            f"made of a module for several devices or ranks"
        )
    root.begin_loading()
    paths = files_of(files)
    shards = [Shard(root, at) for at in range(len(root.module_shards))]
    check_fit(root, shards, paths)
    entries = {entry.name: entry for entry in root._original.entries}
    loaded: set[str] = set()
    for path in paths:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118, it is not a mapping
                if (entry := entries[name]).first not in loaded:
                    loaded.add(entry.first)
                    load_entry(shards, entry, opened.get_tensor(name))
    check_none_is_meta(root)


class Shard:
    """One shard of this process: its tensors, under all their names."""

    def __init__(self, root: Any, at: int):
        self.root, self.at, self.module = root, at, root.module_shards[at]
        self.rank = at if root._group is None else root._group.rank()
        self.device = root.devices[at] if root.devices else torch.device("cpu")
        self.names = {names[0]: names for names in find_tied_weight_aliases(self.module).values()}
        self.names |= {name: names for names in self.names.values() for name in names}

    def held(self, name: str) -> Tensor:
        path, _, attribute = name.rpartition(".")
        tensor: Tensor = getattr(self.module.get_submodule(path), attribute)
        return tensor

    @torch.no_grad()
    def put(self, name: str, part: Tensor) -> None:
        """Copy `part` into the tensor called `name`, or create that tensor from it, under all its
        names.
        """
        current = self.held(name)
        if not current.is_meta:
            current.copy_(part)
            return
        replacement = torch.empty(part.shape, dtype=current.dtype, device=self.device).copy_(part)
        if isinstance(current, nn.Parameter):
            replacement = nn.Parameter(replacement, current.requires_grad)
            self.root.mark_cut(f"{self.root.shard_prefix(self.at)}{name}", replacement)
        for alias in self.names[name]:
            path, _, attribute = alias.rpartition(".")
            setattr(self.module.get_submodule(path), attribute, replacement)


def load_entry(shards: Sequence[Shard], entry: OriginalEntry, tensor: Tensor) -> None:
    for shard in shards:
        shard.put(entry.in_shard, part_of(entry, tensor, shard.rank))


def part_of(entry: OriginalEntry, tensor: Tensor, rank: int) -> Tensor:
    return tensor if entry.action is None else entry.action(tensor, rank=rank)


def files_of(files: AnyPath | Sequence[AnyPath]) -> list[Path]:
    """Return the safetensors files in a folder; raises LayoutError if there are none."""
    if not isinstance(files, (str, PathLike)):
        return [Path(file) for file in files]
    path = Path(files)
    paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not paths:
        raise LayoutError(f"{path} has no *.safetensors; write them with save_pretrained(folder)")
    return paths


def shapes_in(paths: Sequence[Path]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of the tensors in the files, from their headers alone."""
    for path in paths:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, tuple(opened.get_slice(name).get_shape())


def check_fit(root: Any, shards: Sequence[Shard], paths: Sequence[Path]) -> None:
    """Check all tensors before one is loaded; raises one LayoutError that lists every misfit."""
    entries = {entry.name: entry for entry in root._original.entries}
    shapes = dict(shapes_in(paths))
    present = {entries[name].first for name in shapes if name in entries}
    problems = [f"{name} is of no such model" for name in shapes if name not in entries]
    missing = [e.name for e in entries.values() if e.first not in present and e.name == e.first]
    problems += [f"{name} is in no file" for name in missing]
    for name, shape in shapes.items():
        if (entry := entries.get(name)) is not None:
            outline = torch.empty(shape, device="meta")
            for shard in shards:
                expected_shape = tuple(shard.held(entry.in_shard).shape)
                try:
                    part_shape: Any = tuple(part_of(entry, outline, shard.rank).shape)
                except (RuntimeError, IndexError, LayoutError) as error:
                    part_shape = error
                if part_shape != expected_shape:
                    problems.append(
                        f"{name} of shape {shape} gives shard {shard.rank} {part_shape}, not "
                        f"{expected_shape}"
                    )
    if problems:
        raise LayoutError(
            f"{len(paths)} files do not fit the model that was split: {'; '.join(problems[:8])}"
            f"{f'; and {len(problems) - 8} more' if len(problems) > 8 else ''}; pass all files of "
            f"that model, and tie its weights before it is split"
        )


def check_none_is_meta(root: nn.Module) -> None:
    tensors = [*root.named_parameters(), *root.named_buffers()]
    if missing := [name for name, tensor in tensors if tensor.is_meta]:
        raise LayoutError(
            f"{', '.join(missing[:3])} and {len(missing) - 1} more are buffers on the meta device, "
            "and no file has them; build the model under accelerate.init_empty_weights(), which "
            "leaves buffers alone"
        )
