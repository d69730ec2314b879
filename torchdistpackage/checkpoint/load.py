"""Read a checkpoint into a model and optimizer of the same layout.

One rule: a rank asks for the boxes of the global tensors that it holds and finds each as exactly
one piece; nothing is guessed from names or ranks. Replicas and tied copies read their owner's
piece. Everything is checked before the first element is changed, and all ranks succeed or fail.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from torchdistpackage.checkpoint import manifest as manifests
from torchdistpackage.checkpoint.agree import together
from torchdistpackage.checkpoint.commit import candidates, damage, measure, warn_skipped
from torchdistpackage.checkpoint.manifest import Fact, Manifest
from torchdistpackage.checkpoint.save import (
    EXTRA,
    Params,
    box_of,
    degrees_of,
    dtype_name,
    file_name,
    scalar_layout,
)
from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.errors import CheckpointError
from torchdistpackage.layout.derive import blocks, num_elements, owns
from torchdistpackage.layout.layout import Layout
from torchdistpackage.topology.mesh import Mesh, describe
from torchdistpackage.topology.views import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """What a checkpoint says beside the tensors; `extras` are those this rank saved."""

    path: Path
    step: int
    tokens: int
    facts: Mapping[str, Fact]
    extras: Mapping[str, int | Tensor]


def latest_together(folder: str | Path, *, rank: int, group: Group | None = None) -> Path | None:
    """The newest checkpoint whose files all have their checksums, the same on every rank.

    The ranks share the reading. Damaged newer ones are named in a warning. group: all ranks.
    """
    group = resolve_group(group, "global")
    ranks = primitives.ranks_of(group)
    share = (ranks.index(rank), len(ranks))
    # The first rank's view of the folder counts: that of a shared disk may lag on others.
    names = primitives.broadcast_object([str(path) for path in candidates(Path(folder))], group)
    assert isinstance(names, list)
    for path in map(Path, names):
        found = primitives.gather_objects(damage(path, checksums=True, share=share), group)
        problems = [problem for problem in found if problem is not None]
        if not problems:
            return path
        if rank == ranks[0]:
            warn_skipped(path, str(problems[0]))
    return None


def load(
    path: str | Path,
    *,
    params: Params,
    topology: Topology,
    rank: int,
    optimizer: torch.optim.Optimizer | None = None,
    with_extras: bool = True,
    checksums: bool = True,
    group: Group | None = None,
) -> Loaded:
    """Fill the parameters, and the optimizer's state for them, from a checkpoint folder.

    with_extras: also read what this rank saved for itself; that takes the same degrees. Without,
        weights are read wherever each box of this run is a piece of the checkpoint.
    checksums: check those of the files that this rank reads (`latest_together` has done so).

    Raises:
        CheckpointError: on all ranks if any cannot load: damaged, of another model, precision or
            layout.
    """
    path, group = Path(path), resolve_group(group, "global")
    doing = f"loading {path}"
    with together(group, doing):
        plan = _Plan(path, params, topology, rank, optimizer)
        if with_extras:
            plan.check_degrees()
        plan.check_files(checksums, {file_name(rank)} if with_extras else set())
    asked = sum(n for n in primitives.gather_objects(plan.num_owned, group) if isinstance(n, int))
    with together(group, doing):
        plan.check_total(asked)
    extras: dict[str, int | Tensor] = {}
    with together(group, doing):
        plan.read()
        if with_extras:
            extras = _read_extras(path / file_name(rank))
    manifest = plan.manifest
    return Loaded(path, manifest.step, manifest.tokens, manifest.facts, extras)


class _Plan:
    """What one rank reads from where, made and checked before anything is changed."""

    def __init__(
        self,
        path: Path,
        params: Params,
        topology: Topology,
        rank: int,
        optimizer: torch.optim.Optimizer | None,
    ):
        self.path, self.topology, self.rank, self.optimizer = path, topology, rank, optimizer
        self.manifest: Manifest = manifests.read(path)
        self.num_owned = 0
        self._reads: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)
        self._states: dict[Tensor, dict[str, Any]] = {}
        groups = [] if optimizer is None else optimizer.param_groups
        hyper = {param: group for group in groups for param in group["params"]}
        saved = defaultdict(list)
        for name in self.manifest.tensors:
            owner, _, key = name.rpartition("#")
            saved[owner].append(key)
        counted: set[str] = set()
        for param, layout in params.values():
            self._ask(layout, param.detach(), dtype_name(param))
            if layout.name not in counted and owns(layout, self._mesh(layout), rank):
                self.num_owned += num_elements(layout, self._mesh(layout), rank)
            counted.add(layout.name)
            if param in hyper:
                self._states[param] = {
                    key: self._state(param, layout, key, hyper[param]) for key in saved[layout.name]
                }

    def check_degrees(self) -> None:
        if self.manifest.degrees != degrees_of(self.topology):
            raise CheckpointError(f"{self.path} is of another layout: {self._layouts()}")

    def check_files(self, checksums: bool, more: set[str]) -> None:
        for name in sorted({*self._reads, *more}):
            expected, file = self.manifest.files[name], self.path / name
            size_bytes = file.stat().st_size if file.exists() else 0
            if size_bytes != expected.size_bytes or (checksums and measure(file) != expected):
                raise CheckpointError(
                    f"{file} is damaged: it has {size_bytes} bytes and should have "
                    f"{expected.size_bytes} with checksum {expected.crc32:08x}; "
                    f"use another checkpoint"
                )

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
                for key, target in reads:
                    target.copy_(shard.get_tensor(key))
        for param, state in self._states.items():
            assert self.optimizer is not None
            self.optimizer.state[param] = state

    def _ask(self, layout: Layout, target: Tensor, dtype: str) -> None:
        """Note where each block of `target` is to come from."""
        entry = self.manifest.tensors.get(layout.name)
        if entry is None or (entry.shape, entry.dtype) != (layout.shape, dtype):
            has = "no such tensor" if entry is None else f"{entry.dtype} of shape {entry.shape}"
            raise CheckpointError(
                f"{layout.name} is {dtype} of shape {layout.shape} in this run, but {self.path} "
                f"has {has}; use the model and precision it was written with"
            )
        for where, local in blocks(layout, self._mesh(layout), self.rank):
            offset, lengths = box_of(where)
            if (piece := entry.find(offset, lengths)) is None:
                box = ", ".join(f"{s.start}:{s.stop}" for s in where)
                raise CheckpointError(
                    f"{self.path} has no piece {layout.name}[{box}], which rank {self.rank} holds: "
                    f"{self._layouts()}"
                )
            self._reads[piece.file].append((piece.key, target[local]))

    def _state(self, param: Tensor, layout: Layout, key: str, hyper: Mapping[str, Any]) -> Tensor:
        """An empty tensor for one piece of optimizer state, noted to be filled."""
        name = f"{layout.name}#{key}"
        entry = self.manifest.tensors[name]
        dtype = getattr(torch, entry.dtype)
        if key != "step" and entry.shape == layout.shape:
            state = torch.empty_like(param, dtype=dtype, requires_grad=False)
            self._ask(layout.named(name), state, entry.dtype)
            return state
        # Where torch.optim keeps its step counts.
        on_device = hyper.get("capturable") or hyper.get("fused")
        state = torch.empty((), dtype=dtype, device=param.device if on_device else "cpu")
        self._ask(scalar_layout(layout, name), state, entry.dtype)
        return state

    def _mesh(self, layout: Layout) -> Mesh:
        return self.topology.view(layout.view)

    def _layouts(self) -> str:
        return (
            f"it was written under {describe(self.manifest.degrees)} and this run is "
            f"{describe(degrees_of(self.topology))}; resuming on another layout is not supported "
            f"yet, use the degrees it was written with"
        )


def _read_extras(file: Path) -> dict[str, int | Tensor]:
    extras: dict[str, int | Tensor] = {}
    with safe_open(file, framework="pt") as shard:
        extras.update(json.loads(shard.metadata()["integers"]))
        keys: list[str] = shard.keys()
        for key in keys:
            if key.startswith(EXTRA):
                extras[key.removeprefix(EXTRA)] = shard.get_tensor(key)
    return extras
