"""Which bytes of a checkpoint one rank reads into which memory, made and checked before it reads.

One rule: a rank asks for the boxes of the global tensors that it holds, and each comes together
from whatever pieces overlap it; nothing is guessed from names or ranks. Replicas and tied copies
read the same pieces.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from torchdistpackage.checkpoint.commit import measure
from torchdistpackage.checkpoint.manifest import Manifest, TensorEntry
from torchdistpackage.checkpoint.parts import (
    MASTER,
    Params,
    SavedTensor,
    ShardedState,
    TopologyRank,
    has_master,
)
from torchdistpackage.checkpoint.validate import check_header, check_size, claims, read_manifest
from torchdistpackage.comm.flight_recorder import dtype_name
from torchdistpackage.errors import CheckpointError
from torchdistpackage.layout.flat_slices import Box
from torchdistpackage.layout.layout import Layout

STEP = "step"
"""Key of torch.optim's step counts: a number even beside a parameter without dims."""

Read = tuple[str, Box, Tensor]
"""(key in the file, box in that piece, where it goes)."""


class ShardReader:
    """What one rank reads. Nothing of the run is changed before `read`.

    Raises:
        CheckpointError: the checkpoint does not have what the run asks for.
    """

    def __init__(
        self,
        path: Path,
        params: Params,
        place: TopologyRank,
        optimizer: torch.optim.Optimizer | None,
    ):
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        self.num_owned = 0
        self._place, self._optimizer = place, optimizer
        self._reads: dict[str, list[Read]] = defaultdict(list)
        self._states: dict[Tensor, dict[str, Tensor]] = {}
        self._keys: dict[str, list[str]] = defaultdict(list)
        for name in self.manifest.tensors:
            owner, _, key = name.rpartition("#")
            if key != MASTER:
                self._keys[owner].append(key)
        layouts = dict(params.values())
        masters = (
            self._ask_shards(layouts) if isinstance(optimizer, ShardedState) else set[Tensor]()
        )
        counted: set[str] = set()
        for param, layout in params.values():
            mine = place.whole(layout, param)
            self._ask(mine, layout.name, rounds=param in masters)
            if mine.is_owner and layout.name not in counted:
                self.num_owned += sum(tensor.numel() for _, tensor in mine.parts)
            counted.add(layout.name)
        if optimizer is not None and not isinstance(optimizer, ShardedState):
            self._ask_states(layouts)

    def check_files(self, checksums: bool, more: set[str]) -> None:
        """That the files to read, and `more`, are what the manifest says."""
        claimed = claims(self.manifest) if checksums else {}
        for name in sorted({*self._reads, *more}):
            expected, file = self.manifest.files.get(name), self.path / name
            try:
                if expected is None:
                    raise CheckpointError("the manifest does not list it")
                check_size(file, expected)
                if checksums and measure(file) != expected:
                    raise CheckpointError(f"it should have checksum {expected.crc32:08x}")
                if checksums:
                    check_header(file, claimed[name])
            except (FileNotFoundError, CheckpointError) as error:
                raise CheckpointError(
                    f"{file} is damaged: {error}; use another checkpoint"
                ) from error

    def check_total(self, asked: int) -> None:
        """Weights that nobody asked for would be lost without a word."""
        entries = self.manifest.tensors.items()
        saved = sum(math.prod(entry.shape) for name, entry in entries if "#" not in name)
        if saved != asked:
            raise CheckpointError(
                f"{self.path} holds {saved} elements of parameters, this run has {asked}: "
                f"it is of another model; use the model section it was written with"
            )

    def read(self) -> None:
        for file, reads in self._reads.items():
            with safe_open(self.path / file, framework="pt") as shard:
                for key, box, target in reads:
                    piece = shard.get_slice(key)[box] if box else shard.get_tensor(key)
                    target.copy_(piece)
        for of, state in self._states.items():
            assert self._optimizer is not None
            self._optimizer.state[of] = state

    # -- the optimizer -----------------------------------------------------------------

    def _ask_states(self, layouts: Mapping[Tensor, Layout]) -> None:
        """State of each parameter, in its shape."""
        for param, hyper in self._members():
            if (layout := layouts.get(param)) is None:
                continue
            state = self._states[param] = {}
            for key in self._keys[layout.name]:
                one, entry = layout.named(f"{layout.name}#{key}"), self._entry(layout, key)
                tensor = state[key] = _room(entry, layout, key, param, hyper)
                is_number = _is_number(entry, layout, key)
                mine = (self._place.number if is_number else self._place.whole)(one, tensor)
                self._ask(mine, layout.name)

    def _ask_shards(self, layouts: Mapping[Tensor, Layout]) -> set[Tensor]:
        """State of each shard, and the shard itself where it is a wide copy; of whom it is one."""
        assert isinstance(self._optimizer, ShardedState)
        masters: set[Tensor] = set()
        hyper = dict(self._members())
        for shard in self._optimizer.shards:
            state = self._states[shard.tensor] = {}
            if (layout := layouts.get(shard.parameter)) is None:
                continue
            # written down by every gather, so it must be right whether or not it is wider
            if has_master(shard):
                masters.add(shard.parameter)
            one = layout.named(f"{layout.name}#{MASTER}")
            mine = self._place.sliced(one, shard, shard.tensor)
            self._ask(mine, layout.name, rounds=has_master(shard))
            for key in self._keys[layout.name]:
                one, entry = layout.named(f"{layout.name}#{key}"), self._entry(layout, key)
                tensor = state[key] = _room(
                    entry, layout, key, shard.tensor, hyper.get(shard.tensor, {})
                )
                is_number = _is_number(entry, layout, key)
                of = self._place.number_of if is_number else self._place.sliced
                self._ask(of(one, shard, tensor), layout.name)
        return masters

    def _members(self) -> Iterable[tuple[Tensor, Mapping[str, Any]]]:
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            yield from ((tensor, group) for tensor in group["params"])

    # -- boxes -------------------------------------------------------------------------

    def _entry(self, layout: Layout, key: str) -> TensorEntry:
        return self.manifest.tensors[f"{layout.name}#{key}"]

    def _ask(self, mine: SavedTensor, of: str, rounds: bool = False) -> None:
        """Note where each part of what I hold for the parameter `of` is to come from.

        A wide copy stands in for weights and the other way round; rounds: what was saved may be
        of another width, because the optimizer keeps two.
        """
        entry = self._found(mine, of, rounds)
        for where, target in mine.parts:
            covered = 0
            for piece, of_piece, of_box in entry.covering(where):
                room = target[of_box]
                covered += room.numel()
                self._reads[piece.file].append((piece.key, of_piece, room))
            if covered != target.numel():
                box = ", ".join(f"{s.start}:{s.stop}" for s in where)
                raise CheckpointError(
                    f"{self.path} has {covered} of the {target.numel()} elements of "
                    f"{mine.name}[{box}], which rank {self._place.rank} holds; use a checkpoint "
                    f"that is complete"
                )

    def _found(self, mine: SavedTensor, of: str, rounds: bool) -> TensorEntry:
        tensors, dtype = self.manifest.tensors, dtype_name(mine.dtype)
        wide = f"{of}#{MASTER}"
        names = {of: (of, wide), wide: (wide, of)}.get(mine.name, (mine.name,))
        found = [tensors[name] for name in names if name in tensors]
        for entry in found:
            if (entry.shape, entry.dtype) == (mine.shape, dtype):
                return entry
        if found and rounds and found[0].shape == mine.shape:
            return found[0]
        has = f"{found[0].dtype} of shape {found[0].shape}" if found else "no such tensor"
        raise CheckpointError(
            f"{mine.name} is {dtype} of shape {mine.shape} in this run, but {self.path} "
            f"has {has}; use the model and precision it was written with"
        )


def _is_number(entry: TensorEntry, layout: Layout, key: str) -> bool:
    return key == STEP or entry.shape != layout.shape


def _room(
    entry: TensorEntry, layout: Layout, key: str, like: Tensor, hyper: Mapping[str, Any]
) -> Tensor:
    """Memory for one piece of state of `like`: its shape, or a number where torch.optim has it."""
    dtype = getattr(torch, entry.dtype)
    if not _is_number(entry, layout, key):
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    on_device = hyper.get("capturable") or hyper.get("fused")
    return torch.empty((), dtype=dtype, device=like.device if on_device else "cpu")
