"""Write a checkpoint: each rank what it owns, into one safetensors file of its own.

Every element of every tensor is written once, by the rank that owns it
(layout/derive.py), with its place in the global tensor. The manifest is put together from the
headers of the files, so ranks exchange nothing but how it went: all succeed, or all fail.
"""

import json
import math
import shutil
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from torchdistpackage.checkpoint.commit import commit, folder_name, make_temporary, retain, settle
from torchdistpackage.checkpoint.manifest import Fact, FileFacts, Manifest, TensorChunk, TensorEntry
from torchdistpackage.checkpoint.parts import Params, TopologyRank, held, params_of
from torchdistpackage.comm import primitives
from torchdistpackage.comm.flight_recorder import dtype_name
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.errors import CheckpointError
from torchdistpackage.optim.sharded import ShardedOptimizer
from torchdistpackage.topology.mesh import Topology

Extras = Mapping[str, int | Tensor]
"""What belongs to one rank alone: random states, positions."""

EXTRA = "extra/"
"""Before the keys of a rank's own tensors in its file."""


def save(
    folder: str | Path,
    *,
    step: int,
    tokens: int,
    params: Params | nn.Module,
    topology: Topology,
    rank: int,
    optimizer: torch.optim.Optimizer | None = None,
    extras: Extras | None = None,
    facts: Mapping[str, Fact] | None = None,
    keep_last: int = 2,
    group: Group | None = None,
) -> Path:
    """Write `folder`/step_NNNNNN, all ranks together, and return its path.

    params: with their layouts, or the module, whose layers say them.

    Optimizer state is saved with each parameter, as `name#exp_avg` with the parameter's layout
    or, for scalars, `name#step`. Under ZeRO both are written by the ranks that hold their slices,
    and wide copies of narrow parameters as `name#master`. Afterwards only the last `keep_last`
    complete checkpoints stay. group: all ranks (default).

    Raises:
        CheckpointError: on all ranks if any could not write; then `folder` is as before.
    """
    folder, group = Path(folder), resolve_group(group, "global")
    ranks = primitives.ranks_of(group)
    doing = f"writing the checkpoint of step {step} to {folder}"
    temporary = folder
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.arrive()  # a gather in flight has the slices that are written
    with fail_together(group, doing):
        params = params_of(params, topology, rank)
        if rank == ranks[0]:
            temporary = make_temporary(folder, step)
    temporary = Path(str(primitives.broadcast_object(str(temporary), group)))
    written: FileFacts | None = None
    try:
        with fail_together(group, doing):
            written = write_shard(temporary, rank, params, topology, optimizer, extras or {})
        facts_of_files = cast(list[FileFacts], primitives.gather_objects(written, group))
        files = dict(zip(map(file_name, ranks), facts_of_files, strict=True))
        with fail_together(group, doing):
            if rank == ranks[0]:
                tensors = collect(temporary, files)
                degrees = degrees_of(topology)
                manifest = Manifest(step, tokens, degrees, tensors, files, facts or {})
                final = commit(temporary, manifest)
                retain(folder, keep_last, final)
    except CheckpointError:
        if rank == ranks[0]:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder / folder_name(step)


def write_shard(
    temporary: Path,
    rank: int,
    params: Params,
    topology: Topology,
    optimizer: torch.optim.Optimizer | None,
    extras: Extras,
) -> FileFacts:
    """Write and flush the file of one rank: the blocks it owns and its extras.

    Raises:
        CheckpointError: two tensors of different layouts share memory, or the optimizer has state
            of a kind that has no place.
    """
    file = file_name(rank)
    tensors: dict[str, Tensor] = {}
    entries: dict[str, TensorEntry] = {}
    for each in held(params, TopologyRank(topology, rank), optimizer):
        if each.owned is None:
            continue
        known = entries.get(each.name, TensorEntry(each.shape, dtype_name(each.dtype), ()))
        pieces = list(known.pieces)
        for where, tensor in each.owned:
            key = f"{each.name}[{len(pieces)}]"
            # safetensors writes contiguous memory that is not shared
            tensors[key] = tensor.cpu().contiguous()
            pieces.append(TensorChunk(file, key, *box_of(where)))
        entries[each.name] = replace(known, pieces=tuple(pieces))
    integers: dict[str, int] = {}
    for name, value in extras.items():
        if isinstance(value, Tensor):
            tensors[EXTRA + name] = value.detach().cpu().contiguous()
        else:
            integers[name] = int(value)
    path = temporary / file
    header = Manifest(0, 0, (), entries, {}).to_json()
    metadata = {"pieces": header, "integers": json.dumps(integers)}
    save_file(tensors, path, metadata=metadata)
    return settle(path)


def collect(temporary: Path, files: Mapping[str, FileFacts]) -> dict[str, TensorEntry]:
    """All tensors of a checkpoint, from the headers of its files.

    Raises:
        CheckpointError: ranks disagree about a tensor, or its pieces do not tile it.
    """
    found: dict[str, TensorEntry] = {}
    for file in files:
        with safe_open(temporary / file, framework="pt") as shard:
            header = Manifest.from_json(shard.metadata()["pieces"])
        for name, entry in header.tensors.items():
            have = found.get(name, TensorEntry(entry.shape, entry.dtype, ()))
            if (have.shape, have.dtype) != (entry.shape, entry.dtype):
                raise CheckpointError(
                    f"{name} is {entry.dtype} of shape {entry.shape} in {file}, but {have.dtype} "
                    f"of shape {have.shape} in {have.pieces[0].file}; give it one layout"
                )
            found[name] = TensorEntry(entry.shape, entry.dtype, have.pieces + entry.pieces)
    for name, entry in found.items():
        covered = sum(math.prod(piece.lengths) for piece in entry.pieces)
        if covered != math.prod(entry.shape):
            raise CheckpointError(
                f"{name}: the ranks own {covered} elements of {math.prod(entry.shape)} "
                f"(shape {entry.shape}); its layouts on the ranks do not belong together"
            )
    return found


def file_name(rank: int) -> str:
    """`rank00003.safetensors`."""
    return f"rank{rank:05d}.safetensors"


def degrees_of(topology: Topology) -> tuple[tuple[str, int], ...]:
    """(axis, size) of every axis longer than 1, outermost first, then of the expert axis."""
    expert = topology.expert.axis_size("expert")
    return tuple((a, n) for a, n in (*topology.dense.axes, ("expert", expert)) if n > 1)


def box_of(where: tuple[slice, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offset, lengths) of a block."""
    return tuple(s.start for s in where), tuple(s.stop - s.start for s in where)


@contextmanager
def fail_together(group: Group, doing: str) -> Generator[None]:
    """Run the block, without collectives, on every rank of the group; doing: what it does.

    Raises:
        CheckpointError: on every rank if the block raised on any; names the first of them.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    text = None if mine is None else f"on {socket.gethostname()}: {type(mine).__name__}: {mine}"
    outcomes = primitives.gather_objects(text, group)
    failed = [
        (rank, outcome)
        for rank, outcome in zip(primitives.ranks_of(group), outcomes, strict=True)
        if outcome is not None
    ]
    if failed:
        rank, outcome = failed[0]
        others = f" (and {len(failed) - 1} more failed)" if len(failed) > 1 else ""
        raise CheckpointError(f"{doing} failed on rank {rank} {outcome}{others}") from mine
