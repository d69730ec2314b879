"""Read a checkpoint into a model and optimizer, on the layout it was written on or another.

All ranks succeed or fail. Everything is checked before the first element is changed. A
rank asks for the boxes of the global tensors that it holds, and each comes together from whatever
pieces overlap it; nothing is guessed from names or ranks. What only one layout can use, the random
state of each rank, is read only there.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from torchdistpackage.checkpoint.commit import (
    candidates,
    damage,
    none_complete,
    warn_skipped,
)
from torchdistpackage.checkpoint.manifest import (
    Claim,
    Fact,
    Manifest,
    TensorEntry,
    check_header,
    check_size,
    claims,
    read_manifest,
)
from torchdistpackage.checkpoint.parts import (
    MASTER,
    Params,
    SavedTensor,
    TopologyRank,
    has_master,
    is_whole,
    params_of,
)
from torchdistpackage.checkpoint.save import degrees_of, fail_together, file_name
from torchdistpackage.checkpoint.snapshot import EXTRA
from torchdistpackage.checkpoint.tensor_file import TensorFile, read_ahead
from torchdistpackage.comm import primitives
from torchdistpackage.comm.flight_recorder import dtype_name
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.errors import CheckpointError
from torchdistpackage.layout.derive import Box
from torchdistpackage.layout.layout import Layout
from torchdistpackage.topology.mesh import Topology

STEP = "step"
"""Key of torch.optim's step counts: a number even for a parameter without dims."""

Read = tuple[str, Box, Tensor]
"""(key in the file, box in that piece, where it goes)."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """What a checkpoint says besides the tensors.

    degrees: (axis, size) of the run that wrote it. extras: those this rank saved; none where this
    run has other degrees.
    """

    path: Path
    step: int
    tokens: int
    facts: Mapping[str, Fact]
    degrees: tuple[tuple[str, int], ...]
    extras: Mapping[str, int | Tensor]


def latest_together(folder: str | Path, *, rank: int, group: Group | None = None) -> Path | None:
    """The newest checkpoint whose files all have their checksums, the same on every rank.

    The ranks share the reading. Damaged newer ones are named in a warning. group: all ranks.

    Raises:
        CheckpointError: on all ranks, if there are some and all are damaged.
    """
    group = resolve_group(group, "global")
    ranks = primitives.ranks_of(group)
    share = (ranks.index(rank), len(ranks))
    # The first rank's view of the folder counts: that of a shared disk may lag on others.
    names = primitives.broadcast_object([str(path) for path in candidates(Path(folder))], group)
    assert isinstance(names, list)
    last = ""
    for path in map(Path, names):
        found = primitives.gather_objects(damage(path, checksums=True, share=share), group)
        problems = [problem for problem in found if problem is not None]
        if not problems:
            return path
        if rank == ranks[0]:
            warn_skipped(path, str(problems[0]))
        last = str(problems[0])
    if names:
        raise none_complete(Path(folder), len(names), last)
    return None


def load(
    path: str | Path,
    *,
    params: Params | nn.Module,
    topology: Topology,
    rank: int,
    optimizer: torch.optim.Optimizer | None = None,
    with_extras: bool = True,
    checksums: bool = True,
    group: Group | None = None,
) -> Loaded:
    """Fill the parameters, and the optimizer's state for them, from a checkpoint folder.

    The run may have other degrees, and more or less ZeRO, than the one that wrote it: every rank
    reads what it needs of whichever pieces hold it. Under ZeRO parameters are full afterwards.

    params: as in `save`.
    with_extras: also read what this rank saved for itself, if the degrees are equal.
    checksums: check those of the files that this rank reads (`latest_together` has done so).

    Raises:
        CheckpointError: on all ranks if any cannot load: damaged, of another model or precision.
    """
    path, group = Path(path), resolve_group(group, "global")
    doing = f"loading {path}"
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.finish()
    with fail_together(group, doing):
        params = params_of(params, topology, rank)
        reading = ShardReader(path, params, TopologyRank(topology, rank), optimizer)
        manifest = reading.manifest
        with_extras = with_extras and manifest.degrees == degrees_of(topology)
        reading.check_files(checksums, {file_name(rank)} if with_extras else set())
    owned = primitives.gather_objects(reading.num_owned, group)
    with fail_together(group, doing):
        reading.check_total(sum(n for n in owned if isinstance(n, int)))
    extras: dict[str, int | Tensor] = {}
    with fail_together(group, doing):
        reading.read()
        if with_extras:
            extras = _read_extras(path / file_name(rank))
    return Loaded(path, manifest.step, manifest.tokens, manifest.facts, manifest.degrees, extras)


def _read_extras(file: Path) -> dict[str, int | Tensor]:
    extras: dict[str, int | Tensor] = {}
    with safe_open(file, framework="pt") as shard:
        extras.update(json.loads(shard.metadata()["integers"]))
        keys: list[str] = shard.keys()
        for key in keys:
            if key.startswith(EXTRA):
                extras[key.removeprefix(EXTRA)] = shard.get_tensor(key)
    return extras


class ShardReader:
    """What one rank reads. Nothing of the run is changed before `read`.

    Raises:
        CheckpointError: the checkpoint does not have what the run asks for.
    """

    def __init__(
        self,
        path: Path,
        params: Params,
        here: TopologyRank,
        optimizer: torch.optim.Optimizer | None,
    ):
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        self.num_owned = 0
        self._here, self._optimizer = here, optimizer
        self._reads: dict[str, list[Read]] = defaultdict(list)
        self._states: dict[Tensor, dict[str, Tensor]] = {}
        self._files: dict[str, TensorFile] = {}
        self._keys: dict[str, list[str]] = defaultdict(list)
        for name in self.manifest.tensors:
            owner, _, key = name.rpartition("#")
            if key != MASTER:
                self._keys[owner].append(key)
        layouts = dict(params.values())
        is_sharded = isinstance(optimizer, ShardedOptimizer)
        masters = self._ask_states(layouts) if is_sharded else set[Tensor]()
        counted: set[str] = set()
        for param, layout in params.values():
            mine = here.whole(layout, param)
            self._ask(mine, layout.name, rounds=param in masters)
            if mine.owned is not None and layout.name not in counted:
                self.num_owned += sum(tensor.numel() for _, tensor in mine.owned)
            counted.add(layout.name)
        if optimizer is not None and not is_sharded:
            self._ask_states(layouts)

    def check_files(self, checksums: bool, more: set[str]) -> None:
        """That the files to read, and `more`, are what the manifest says."""
        claimed = claims(self.manifest)
        names = sorted({*self._reads, *more})
        for name in names:
            try:
                self._check_file(name, claimed, checksums)
            except (FileNotFoundError, ValueError, CheckpointError) as error:
                raise CheckpointError(
                    f"{self.path / name} is damaged: {error}; use another checkpoint"
                ) from error

    def _check_file(
        self, name: str, claimed: Mapping[str, Sequence[Claim]], checksums: bool
    ) -> None:
        expected, file = self.manifest.files.get(name), self.path / name
        if expected is None:
            raise CheckpointError("the manifest does not list it")
        check_size(file, expected)
        read_ahead([file])
        check_header(file, claimed[name])
        mapped = self._files[name] = TensorFile(file)
        if checksums:
            mapped.verify(expected)

    def check_total(self, asked: int) -> None:
        """Raises CheckpointError if the checkpoint has weights that no rank asked for."""
        entries = self.manifest.tensors.items()
        saved = sum(math.prod(entry.shape) for name, entry in entries if "#" not in name)
        if saved != asked:
            raise CheckpointError(
                f"{self.path} holds {saved} elements of parameters, this run has {asked}: "
                f"it is of another model; use the model section it was written with"
            )

    def read(self) -> None:
        for name, reads in self._reads.items():
            for key, box, target in reads:
                target.copy_(self._files[name][key][box])
        for of, state in self._states.items():
            assert self._optimizer is not None
            self._optimizer.state[of] = state

    # -- the optimizer -----------------------------------------------------------------

    def _ask_states(self, layouts: Mapping[Tensor, Layout]) -> set[Tensor]:
        """State of each parameter, or of each shard, and the shard itself, written down by every
        gather, whether or not it is a wide copy; the parameters of which it is one."""
        assert self._optimizer is not None
        masters: set[Tensor] = set()
        groups = self._optimizer.param_groups
        hyper: dict[Tensor, Mapping[str, Any]] = {x: g for g in groups for x in g["params"]}
        shards: dict[Tensor, Any] = dict.fromkeys(hyper)
        if isinstance(self._optimizer, ShardedOptimizer):
            shards = {shard.tensor: shard for shard in self._optimizer.shards}
        for tensor, shard in shards.items():
            layout = layouts.get(tensor if shard is None else shard.parameter)
            if shard is not None:
                self._states[tensor] = {}
            if layout is None:
                continue
            if shard is not None:
                is_wide = has_master(shard)
                masters |= {shard.parameter} if is_wide else set()
                one = layout.named(f"{layout.name}#{MASTER}")
                self._ask(self._here.sliced(one, shard, tensor), layout.name, rounds=is_wide)
            self._states[tensor] = {
                key: self._ask_state(key, tensor, shard, layout, hyper.get(tensor, {}))
                for key in self._keys[layout.name]
            }
        return masters

    def _ask_state(
        self, key: str, of: Tensor, shard: Any, layout: Layout, hyper: Mapping[str, Any]
    ) -> Tensor:
        """Memory for one piece of state: in the shape of its tensor, a number, on the device where
        torch.optim has it, or what there is one of for a whole parameter."""
        name = f"{layout.name}#{key}"
        one, entry, here = layout.named(name), self.manifest.tensors[name], self._here
        dtype = getattr(torch, entry.dtype)
        if key == STEP or (layout.shape and not entry.shape):
            on_device = hyper.get("capturable") or hyper.get("fused")
            buffer = torch.empty((), dtype=dtype, device=of.device if on_device else "cpu")
            self._ask(here.kept(one, shard, buffer), layout.name)
        elif entry.shape != layout.shape:
            if not is_whole(layout, of):
                raise CheckpointError(
                    f"{name} has shape {entry.shape} in {self.path}, its parameter "
                    f"{layout.shape}, of which ranks hold parts in this run; go on without them, "
                    f"or with the optimizer that wrote it"
                )
            buffer = torch.empty(entry.shape, dtype=dtype, device=of.device)
            self._ask(here.kept(one, shard, buffer), layout.name)
        else:
            # zeros, as padding that a layout has is in no file
            buffer = torch.zeros_like(of, dtype=dtype, requires_grad=False)
            self._ask(here.part(one, shard, buffer), layout.name)
        return buffer

    # -- boxes -------------------------------------------------------------------------

    def _ask(self, mine: SavedTensor, of: str, rounds: bool = False) -> None:
        """Note where each part of what I hold for the parameter `of` is to come from.

        A wide copy stands in for weights and the other way round; rounds: what was saved may be
        of another width, because the optimizer keeps two.
        """
        entry = self._found(mine, of, rounds)
        for where, target in mine.parts:
            covered = 0
            for piece, of_piece, of_box in entry.covering(where):
                buffer = target[of_box]
                covered += buffer.numel()
                self._reads[piece.file].append((piece.key, of_piece, buffer))
            if covered != target.numel():
                box = ", ".join(f"{s.start}:{s.stop}" for s in where)
                raise CheckpointError(
                    f"{self.path} has {covered} of the {target.numel()} elements of "
                    f"{mine.name}[{box}], which rank {self._here.rank} holds; use a checkpoint "
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
