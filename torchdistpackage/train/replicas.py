"""Whether the ranks that should hold the same weights still do, to the bit.

One rule: of whom a parameter is a replica follows from its layout, so no layout is checked against
less than all its holders: along data, along axes that do not cut it, and over tied stages.
"""

from torchdistpackage.checkpoint.parts import ShardedState
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.param_sync import ReplicatedTensor, check_replicas
from torchdistpackage.layout.derive import replica_ranks
from torchdistpackage.train.step import Trainer


class ReplicaCheck:
    """Made by all ranks together, and called by all after the same step.

    Calling it raises CommError, with names and ranks, on all ranks that hold a copy that differs.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        view = tpc.topology.view
        self._ranks = {
            name: replica_ranks(layout, view(layout.view), tpc.rank)
            for name, layout in trainer.layouts.items()
        }
        tpc.prepare(copies=trainer.layouts.values())

    def __call__(self) -> None:
        if isinstance(self._trainer.optimizer, ShardedState):
            self._trainer.optimizer.finish()
        check_replicas(
            ReplicatedTensor(
                self._trainer.layouts[name].name, p.data, tpc.groups.of(self._ranks[name])
            )
            for name, p in self._trainer.stage.named_parameters()
        )
