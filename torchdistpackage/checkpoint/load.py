"""Read a checkpoint into a model and optimizer, on the layout it was written on or another.

One rule: all ranks succeed or fail. Everything is checked before the first element is changed
(shard_reader.py), and what only one layout can use, the random state of each rank, is read only
there.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from torchdistpackage.checkpoint.commit import candidates, damage, warn_skipped
from torchdistpackage.checkpoint.manifest import Fact
from torchdistpackage.checkpoint.parts import Params, ShardedState, TopologyRank, params_of
from torchdistpackage.checkpoint.save import EXTRA, degrees_of, fail_together, file_name
from torchdistpackage.checkpoint.shard_reader import ShardReader
from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.errors import CheckpointError
from torchdistpackage.topology.views import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """What a checkpoint says beside the tensors.

    degrees: (axis, size) of the run that wrote it. extras: those this rank saved; none where this
    run has other degrees, because each then has another place.
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
        raise CheckpointError(
            f"{folder} has {len(names)} checkpoints and none is whole ({last}); mend or move them, "
            f"nothing is begun anew over them"
        )
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
    reads what it needs of whichever pieces hold it. Under ZeRO parameters are whole afterwards.

    params: as in `save`.
    with_extras: also read what this rank saved for itself, if the degrees are equal.
    checksums: check those of the files that this rank reads (`latest_together` has done so).

    Raises:
        CheckpointError: on all ranks if any cannot load: damaged, of another model or precision.
    """
    path, group = Path(path), resolve_group(group, "global")
    doing = f"loading {path}"
    if isinstance(optimizer, ShardedState):
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
