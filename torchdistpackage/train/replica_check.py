"""Check that ranks hold equal bits of values that must be equal.

Nothing is compared with less than all its peers. A parameter's replicas lie along data, along axes
that do not cut it, such as router weights and norms along tensor, context and expert, and over tied
stages. The states that an optimizer keeps for it have the same replicas, or those of ZeRO's shards
that hold the same elements. Random states agree along tensor.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from safetensors.torch import save_file
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import ranks_of
from torchdistpackage.comm.random import SAME_AXES
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.param_spec import ReplicatedTensor
from torchdistpackage.ddp.param_sync import (
    MAX_NAMES,
    Difference,
    ReplicatedShard,
    find_differences,
    find_shard_differences,
)
from torchdistpackage.ddp.sharded import ParamShard, ShardedOptimizer
from torchdistpackage.errors import CommError
from torchdistpackage.files import make_folder
from torchdistpackage.layout.derive import replica_ranks
from torchdistpackage.run_files import REPLICAS
from torchdistpackage.train.loop import Callback, Loop
from torchdistpackage.train.step import Trainer, random_states
from torchdistpackage.train.step_stats import PendingStep, StepResult

RANDOM = "random state"
_MASTER = "master"
_UNSAFE = re.compile(r"[^\w.#-]")


class ReplicaCheck(Callback):
    """Compares replicas bit by bit after every `every`th step, or when it is called.

    goes_on: a difference is recorded, and training continues.

    Raises:
        CommError: replicas differ, with names, ranks and the step: on all ranks after a step,
            unless `goes_on`; when called, on all ranks that hold a copy that differs.
    """

    def __init__(self, trainer: Trainer, every: int = 0, *, goes_on: bool = False):
        self._trainer, self._every, self._goes_on = trainer, every, goes_on
        view = tpc.topology.view
        # buffers have a layout only where they are saved
        self._layouts = trainer.layouts | {n: layout for n, (_, layout) in trainer.saved().items()}
        self._ranks = {
            name: replica_ranks(layout, view(layout.view), tpc.rank)
            for name, layout in self._layouts.items()
        }
        tpc.prepare(copies=self._layouts.values())

    def is_due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def on_step(self, loop: Loop, result: StepResult, issued: PendingStep) -> None:
        if not self.is_due(result.step):
            return
        with loop.heartbeat.allow_slow():
            replicas, shards = self._replicas(), self._shards()
            differences = find_differences(replicas) + find_shard_differences(shards)
            folder = loop.folder / REPLICAS / f"step_{result.step:06d}"
            self._keep(differences, replicas, shards, folder)
            # of a difference only those know that hold the tensor, and all have to end
            texts = _of_all_ranks([str(difference) for difference in differences])
        if not texts:
            return
        message = f"step {result.step}: {_text(texts)}; the values are in {folder}"
        if not self._goes_on:
            raise CommError(
                f"{message}; go back to a checkpoint, and look for faulty memory there or a missed "
                f"reduction or broadcast; train.on_replicas_differ=continue goes on"
            )
        loop.log.note(f"warning: {message}; training goes on (train.on_replicas_differ: continue)")

    def __call__(self) -> None:
        differences = find_differences(self._replicas()) + find_shard_differences(self._shards())
        if differences:
            raise CommError(
                f"{_text(list(map(str, differences)))}; go back to a checkpoint, and look for "
                f"faulty memory there or a missed reduction or broadcast"
            )

    def _replicas(self) -> list[ReplicatedTensor]:
        """Return this rank's full tensors, each with the ranks that hold the same."""
        trainer, replicas = self._trainer, list[ReplicatedTensor]()
        optimizer, sharded = trainer.optimizer, set[Tensor]()
        if isinstance(optimizer, ShardedOptimizer):
            if trainer.plan.zero == 3:
                # gathering them would take the memory that stage 3 saves; a gathered copy is of the
                # shards, which are compared
                members = (m for group in optimizer.partitions for m in group if any(m.bounds))
                sharded = {m.spec.parameter for m in members}
            else:
                optimizer.finish()
        tensors = dict(trainer.stage.named_parameters()) | {
            name: tensor for name, (tensor, _) in trainer.saved().items()
        }
        for name, tensor in tensors.items():
            if tensor in sharded:
                continue
            group = tpc.groups.of(self._ranks[name])
            global_name = self._layouts[name].name
            replicas.append(ReplicatedTensor(global_name, tensor.data, group))
            if optimizer is None or isinstance(optimizer, ShardedOptimizer):
                continue
            replicas += [
                ReplicatedTensor(f"{global_name}#{key}", x, group)
                for key, x in sorted(optimizer.state.get(tensor, {}).items())
                if isinstance(x, Tensor)
            ]
        for axis in SAME_AXES:
            group = tpc.get_group(axis)
            replicas += [
                ReplicatedTensor(RANDOM, state.to(trainer.device), group)
                for state in random_states(trainer.device)
            ]
        return replicas

    def _shards(self) -> list[ReplicatedShard]:
        """Return ZeRO's shards and their states, including the names of those held by others."""
        trainer, optimizer = self._trainer, self._trainer.optimizer
        if not trainer.plan.zero:
            return []
        param_shards: Sequence[ParamShard] = ()
        if isinstance(optimizer, ShardedOptimizer):
            param_shards = optimizer.shards
        by_parameter: dict[Tensor, ParamShard] = {x.parameter: x for x in param_shards}
        local_keys = sorted({key for x in param_shards for key, _ in self._state(x)})
        keys = sorted(_of_all_ranks(local_keys))
        shards: list[ReplicatedShard] = []
        for name, parameter in trainer.stage.named_parameters():
            if not parameter.requires_grad:
                continue
            group = tpc.groups.of(self._ranks[name])
            shard = by_parameter.get(parameter)
            for key, tensor in self._states(shard, keys):
                named = f"{trainer.layouts[name].name}#{key}"
                start, stop = (0, 0) if shard is None else (shard.start, shard.stop)
                shards.append(ReplicatedShard(named, tensor, start, stop, group))
        return shards

    def _states(
        self, shard: ParamShard | None, keys: Sequence[str]
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Yield a shard's own elements, and each optimizer state for them."""
        yield _MASTER, None if shard is None else shard.tensor.data
        state = {} if shard is None else dict(self._state(shard))
        for key in keys:
            yield key, state.get(key)

    def _state(self, shard: ParamShard) -> list[tuple[str, Tensor]]:
        """Return the tensors that the optimizer keeps for a shard, by key."""
        optimizer = self._trainer.optimizer
        state = {} if optimizer is None else optimizer.state.get(shard.tensor, {})
        return [(key, x) for key, x in sorted(state.items()) if isinstance(x, Tensor)]

    def _keep(
        self,
        differences: Sequence[Difference],
        replicas: Sequence[ReplicatedTensor],
        shards: Sequence[ReplicatedShard],
        folder: Path,
    ) -> None:
        """Write this rank's values of the differing tensors.

        Ranks in the minority and the first of the others write; without a majority all do.
        """
        tensors: dict[str, Tensor] = {}
        for difference in differences:
            others = [r for r in difference.ranks if r not in difference.odd]
            if tpc.rank not in (difference.odd and (*difference.odd, others[0])) and (
                difference.odd or tpc.rank not in difference.ranks
            ):
                continue
            for each in (*replicas, *shards):
                if each.name != difference.name or each.tensor is None:
                    continue
                if set(difference.ranks) <= set(ranks_of(each.group)):
                    key = _UNSAFE.sub("_", each.name)
                    tensors[key] = each.tensor.detach().cpu().contiguous().clone()
        if tensors:
            make_folder(folder)
            save_file(tensors, folder / f"rank{tpc.rank}.safetensors")


def _of_all_ranks(texts: list[str]) -> list[str]:
    """Return the distinct texts of all ranks. Only the first rank reads those of every other."""

    def unite(gathered: list[object]) -> list[str]:
        return list(dict.fromkeys(x for each in cast(list[list[str]], gathered) for x in each))

    return cast(list[str], primitives.reduce_objects(texts, unite))


def _text(differences: Sequence[str]) -> str:
    more = f" and {len(differences) - MAX_NAMES} more" if len(differences) > MAX_NAMES else ""
    return (
        f"{len(differences)} tensors that should be the same on all ranks of their groups differ "
        f"in bits: {'; '.join(differences[:MAX_NAMES])}{more}"
    )
