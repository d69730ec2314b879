"""The comparison of a run's ranks: what is known of their work before it is measured.

One rule: every rank draws the batches of its data index whatever its stage, so in data loading
all are peers; in the rest those of one stage. What a stage costs beside the others, the plan says.
"""

from torchdistpackage.harness.stragglers.compare import Comparison
from torchdistpackage.train.plan import Plan, stage_loads
from torchdistpackage.train.step import Trainer


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
