"""Loading of a checkpoint into a model and optimizer, under the layout that wrote it or another.

All ranks succeed, or all fail. They check everything before they change the first element. A rank
asks for the boxes of global tensors that it holds, and fills each from all pieces that overlap it;
it does not rely on names or rank numbers. State of one rank, such as its random state, is read only
by a run with the same degrees.
"""

import json
import logging
import math
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from torchdistpackage.checkpoint.commit import (
    absent,
    candidates,
    damage,
    folder_name,
    newest_first,
    none_complete,
    step_of,
    wait_for_files,
    warn_skipped,
)
from torchdistpackage.checkpoint.manifest import (
    NAME,
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
from torchdistpackage.files import appears
from torchdistpackage.layout.derive import Box
from torchdistpackage.layout.layout import Layout
from torchdistpackage.topology.mesh import Topology

log = logging.getLogger(__name__)

_ASKED = 1000
"""Largest number of files that all ranks look for, because some rank does not see them."""
STEP = "step"
"""Key of torch.optim's step count, a scalar also for parameters that have dims."""

Read = tuple[str, Box, Tensor]
"""(key in the file, box in that piece, the view to fill)."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """The contents of a loaded checkpoint other than its tensors.

    degrees: (axis, size) of the run that wrote it.
    extras: what this rank saved for itself; empty if this run has other degrees.
    """

    path: Path
    step: int
    tokens: int
    facts: Mapping[str, Fact]
    degrees: tuple[tuple[str, int], ...]
    extras: Mapping[str, int | Tensor]


def latest_together(
    folder: str | Path, *, rank: int, saved: Collection[int] = (), group: Group | None = None
) -> Path | None:
    """Return the newest checkpoint with correct checksums, the same path on every rank.

    The ranks share the reading, and log a warning for each damaged newer checkpoint. Each node
    waits for files that another node sees, because a file system may show them there later.

    saved: steps that were saved, as the run's record says. A listing may lack the newest ones, so
        it also looks for these by name; it warns if a newer one is lost.
    group: all ranks.

    Raises:
        CheckpointError: on all ranks, if every checkpoint is damaged.
    """
    group = resolve_group(group, "global")
    ranks = primitives.ranks_of(group)
    share = (ranks.index(rank), len(ranks))
    listed = candidates(Path(folder), saved)
    names = cast(list[str], primitives.reduce_objects([x.name for x in listed], _union, group))
    steps = {step_of(Path(name)) for name in names}
    for step in {*saved} - steps:
        newest = folder_name(max(steps)) if steps else "none"
        log.warning(
            "step %d was saved in %s, but no node can see it: the newest visible one is %s",
            step,
            folder,
            newest,
        )
    last = ""
    for path in (Path(folder) / name for name in names):
        if _is_somewhere(path, share, group):
            wait_for_files(path, share)
        own_damage = damage(path, checksums=True, share=share)
        problem = primitives.reduce_objects(own_damage, _first_problem, group)
        if problem is None:
            return path
        if rank == ranks[0]:
            warn_skipped(path, str(problem))
        last = str(problem)
    if names:
        raise none_complete(Path(folder), len(names), last)
    return None


def _union(listings: list[Any]) -> object:
    """Return the names that some rank has listed, newest first, as `candidates` orders them."""
    names = {name for listing in listings for name in listing}
    return [path.name for path in newest_first(Path(name) for name in names)]


def _is_somewhere(path: Path, share: tuple[int, int], group: Group) -> bool:
    """Return True on all ranks if some rank sees each file of a checkpoint.

    Each rank first looks for its share of the files; then all look for those that were not seen.
    """

    def some(absent_files: list[Any]) -> object:
        return sorted({name for names in absent_files for name in names})[:_ASKED]

    names = cast(list[str], primitives.reduce_objects(absent(path, share), some, group))
    if not names:
        return True
    seen = [name for name in names if os.path.lexists(path / name)]
    num_seen = primitives.reduce_objects(
        seen, lambda seen_files: len({name for x in seen_files for name in cast(list[str], x)}),
        group,
    )  # fmt: skip
    return num_seen == len(names)


def _first_problem(problems: list[object]) -> object:
    return next((problem for problem in problems if problem is not None), None)


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

    The run may have other degrees and another ZeRO stage than the one that wrote it, because every
    rank reads what it needs from whichever pieces hold it. Under ZeRO, parameters are full
    afterwards.

    params: as in `save`.
    with_extras: also read what this rank saved for itself, if the degrees are equal.
    checksums: check the files that this rank reads; not needed after `latest_together`.

    Raises:
        CheckpointError: on all ranks, if any rank finds damage, another model or another precision.
    """
    path, group = Path(path), resolve_group(group, "global")
    doing = f"loading {path}"
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.finish()  # a gather in flight would overwrite what is loaded
    # `latest_together` has seen all files, though perhaps from other nodes
    is_there = not checksums or _is_somewhere(path, (group.rank(), group.size()), group)
    with fail_together(group, doing):
        params = params_of(params, topology, rank)
        if is_there:
            appears(path / NAME)
        reading = ShardReader(path, params, TopologyRank(topology, rank), optimizer)
        manifest = reading.manifest
        with_extras = with_extras and manifest.degrees == degrees_of(topology)
        reading.check_files(checksums, {file_name(rank)} if with_extras else set(), is_there)
    owned = primitives.reduce_objects(reading.num_owned, cast(Any, sum), group)
    with fail_together(group, doing):
        reading.check_total(cast(int, owned))
    extras: dict[str, int | Tensor] = {}
    with fail_together(group, doing):
        reading.read()
        if with_extras:
            extras = _read_extras(path / file_name(rank))
    return Loaded(path, manifest.step, manifest.tokens, manifest.facts, manifest.degrees, extras)


def _read_extras(file: Path) -> dict[str, int | Tensor]:
    """Return what a rank saved for itself: integers of the header and tensors."""
    extras: dict[str, int | Tensor] = {}
    with safe_open(file, framework="pt") as shard:
        extras.update(json.loads(shard.metadata()["integers"]))
        keys: list[str] = shard.keys()
        for key in keys:
            if key.startswith(EXTRA):
                extras[key.removeprefix(EXTRA)] = shard.get_tensor(key)
    return extras


class ShardReader:
    """The reads of one rank; nothing in the run changes before `read`.

    Raises:
        CheckpointError: the checkpoint lacks something that the run needs.
    """

    def __init__(
        self,
        path: Path,
        params: Params,
        topology_rank: TopologyRank,
        optimizer: torch.optim.Optimizer | None,
    ):
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        self.num_owned = 0
        self._here, self._optimizer = topology_rank, optimizer
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
            saved = topology_rank.whole(layout, param)
            self._ask(saved, layout.name, rounds=param in masters)
            if saved.owned is not None and layout.name not in counted:
                self.num_owned += sum(tensor.numel() for _, tensor in saved.owned)
            counted.add(layout.name)
        if optimizer is not None and not is_sharded:
            self._ask_states(layouts)

    def check_files(self, checksums: bool, more_files: set[str], is_there: bool) -> None:
        """Check the files to read, and those in `more_files`, against the manifest.

        is_there: True: some node sees each file, so this rank waits until it sees them too.
        """
        claims_of = claims(self.manifest)
        names = sorted({*self._reads, *more_files})
        for name in names:
            if is_there:
                appears(self.path / name)
            try:
                self._check_file(name, claims_of, checksums)
            except (FileNotFoundError, ValueError, CheckpointError) as error:
                raise CheckpointError(
                    f"{self.path / name} is damaged: {error}; use another checkpoint"
                ) from error

    def _check_file(
        self, name: str, claimed: Mapping[str, Sequence[Claim]], checksums: bool
    ) -> None:
        """Check one file's size, header and checksum, and keep its mapping for `read`."""
        expected, file = self.manifest.files.get(name), self.path / name
        if expected is None:
            raise CheckpointError("the manifest does not list it")
        check_size(file, expected)
        read_ahead([file])
        check_header(file, claimed[name])
        mapped = self._files[name] = TensorFile(file)
        if checksums:
            mapped.verify(expected)

    def check_total(self, expected: int) -> None:
        """Raise CheckpointError if the checkpoint has weights that no rank asked for."""
        entries = self.manifest.tensors.items()
        saved = sum(math.prod(entry.shape) for name, entry in entries if "#" not in name)
        if saved != expected:
            raise CheckpointError(
                f"{self.path} holds {saved} elements of parameters, but this run's model has "
                f"{expected}; use the model section that it was written with"
            )

    def read(self) -> None:
        """Copy all requested pieces into the run's tensors and the optimizer's state."""
        for name, reads in self._reads.items():
            for key, box, target in reads:
                target.copy_(self._files[name][key][box])
        for tensor, state in self._states.items():
            assert self._optimizer is not None
            self._optimizer.state[tensor] = state

    # -- the optimizer -----------------------------------------------------------------

    def _ask_states(self, layouts: Mapping[Tensor, Layout]) -> set[Tensor]:
        """Ask for the optimizer state of each parameter or shard, and for the shards themselves.

        A shard is read even if it is not a wide copy, because the next gather overwrites the
        parameter with it. Return the parameters whose shard is a wide copy.
        """
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
                master_layout = layout.named(f"{layout.name}#{MASTER}")
                self._ask(
                    self._here.sliced(master_layout, shard, tensor), layout.name, rounds=is_wide
                )
            self._states[tensor] = {
                key: self._ask_state(key, tensor, shard, layout, hyper.get(tensor, {}))
                for key in self._keys[layout.name]
            }
        return masters

    def _ask_state(
        self, key: str, tensor: Tensor, shard: Any, layout: Layout, hyper: Mapping[str, Any]
    ) -> Tensor:
        """Allocate memory for one piece of optimizer state, ask for it, and return the memory.

        State is a scalar, has the parameter's shape, or has another shape, which only an optimizer
        that holds the full parameter can load.
        """
        name = f"{layout.name}#{key}"
        state_layout, entry, topology_rank = (
            layout.named(name),
            self.manifest.tensors[name],
            self._here,
        )
        dtype = getattr(torch, entry.dtype)
        if key == STEP or (layout.shape and not entry.shape):
            # torch.optim wants step counts on the device only for capturable and fused steps
            on_device = hyper.get("capturable") or hyper.get("fused")
            buffer = torch.empty((), dtype=dtype, device=tensor.device if on_device else "cpu")
            self._ask(topology_rank.kept(state_layout, shard, buffer), layout.name)
        elif entry.shape != layout.shape:
            if not is_whole(layout, tensor):
                raise CheckpointError(
                    f"{name} has shape {entry.shape} in {self.path}, but its parameter has shape "
                    f"{layout.shape} and is split over ranks in this run; continue with the layout "
                    "or the optimizer that wrote it"
                )
            buffer = torch.empty(entry.shape, dtype=dtype, device=tensor.device)
            self._ask(topology_rank.kept(state_layout, shard, buffer), layout.name)
        else:
            # zeros, because no file holds the padding that a layout may have
            buffer = torch.zeros_like(tensor, dtype=dtype, requires_grad=False)
            self._ask(topology_rank.part(state_layout, shard, buffer), layout.name)
        return buffer

    # -- boxes -------------------------------------------------------------------------

    def _ask(self, tensor: SavedTensor, parameter: str, rounds: bool = False) -> None:
        """Note which pieces fill each part of a tensor that this rank holds for `parameter`.

        A wide copy may stand in for the weights, and the weights for a wide copy.

        rounds: accept another dtype, because the optimizer keeps a narrow and a wide copy.
        """
        entry = self._entry_for(tensor, parameter, rounds)
        for where, target in tensor.parts:
            covered = 0
            for piece, of_piece, of_box in entry.covering(where):
                buffer = target[of_box]
                covered += buffer.numel()
                self._reads[piece.file].append((piece.key, of_piece, buffer))
            if covered != target.numel():
                box = ", ".join(f"{s.start}:{s.stop}" for s in where)
                raise CheckpointError(
                    f"{self.path} has {covered} of the {target.numel()} elements of "
                    f"{tensor.name}[{box}], which rank {self._here.rank} holds; use a complete "
                    f"checkpoint"
                )

    def _entry_for(self, tensor: SavedTensor, parameter: str, rounds: bool) -> TensorEntry:
        """Return the saved tensor to fill `tensor` from; refuse another shape or dtype."""
        tensors, dtype = self.manifest.tensors, dtype_name(tensor.dtype)
        wide = f"{parameter}#{MASTER}"
        names = {parameter: (parameter, wide), wide: (wide, parameter)}.get(
            tensor.name, (tensor.name,)
        )
        entries = [tensors[name] for name in names if name in tensors]
        for entry in entries:
            if (entry.shape, entry.dtype) == (tensor.shape, dtype):
                return entry
        if entries and rounds and entries[0].shape == tensor.shape:
            return entries[0]
        has = f"{entries[0].dtype} of shape {entries[0].shape}" if entries else "no such tensor"
        raise CheckpointError(
            f"{tensor.name} is {dtype} of shape {tensor.shape} in this run, but {self.path} "
            f"has {has}; use the model and precision that it was written with"
        )
