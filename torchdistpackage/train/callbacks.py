"""What the loop calls beside its steps: the comparison of replicas, and that of the ranks' times.

One rule: what the ranks have in common follows from layouts and plan, so nothing is compared with
less than all its peers. A parameter's replicas lie along data, along axes that do not cut it and
over tied stages; in data loading all ranks are peers, in the rest those of one stage.
"""

from torchdistpackage.checkpoint.parts import ShardedState
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.param_sync import ReplicatedTensor, check_replicas
from torchdistpackage.harness.stragglers.compare import Comparison
from torchdistpackage.layout.derive import replica_ranks
from torchdistpackage.train.plan import Plan, stage_loads
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


def comparison(trainer: Trainer, every: int) -> Comparison:
    """To be called after each step; it compares every `every`th."""
    return Comparison(
        trainer.phases, every=every, everywhere=("data",), costs=planned_costs(trainer.plan)
    )


def planned_costs(plan: Plan) -> dict[str, list[float]]:
    """By phase and rank, shares of the computation or parameters; of a user's own model nothing."""
    loads = stage_loads(plan)
    if not loads:
        return {}
    mesh = plan.topology.dense
    mine = [loads[mesh.coord(rank)["pipe"]] for rank in range(mesh.size)]
    shares = [load.share for load in mine]
    parameters = [float(load.num_parameters) for load in mine]
    return {"forward": shares, "backward": shares, "optimizer": parameters}
