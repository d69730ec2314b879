"""The measured costs of a user's own model, compared with the model once it is built."""

import pytest
from torch import nn

from torchdistpackage.config.load import loads
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.partition.cost_split import split_by_cost
from torchdistpackage.plan.run_plan import Plan, make_plan
from torchdistpackage.schedule.costs import PieceCosts, StageCosts, costs_text
from torchdistpackage.train.build import own_cut

RUN = [
    *("model={target: 'tests.train.sources:build'}", "pipeline.partition=time"),
    *("pipeline.microbatches=2", "data.global_batch=4", "parallel.data=1"),
]


def planned(tmp_path, pipe: int, *forward_s: float) -> Plan:
    """With a file of costs of as many pieces, of which a backward takes twice a forward."""
    path = tmp_path / "c.yaml"
    pieces = {str(i): PieceCosts(s, 2 * s) for i, s in enumerate(forward_s)}
    path.write_text(costs_text(StageCosts.uniform(2), pieces))
    config = loads("", overrides=[*RUN, f"parallel.pipe={pipe}", f"pipeline.costs={path}"])
    return make_plan(config, pipe)


def chain(length: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(length)))


def test_children_are_cut_as_they_were_measured(tmp_path):
    """For 1F1B, of which a busy stage ahead is the cheaper one, though another cut is more even."""
    plan = planned(tmp_path, 2, 4.0, 2.0, 3.5)
    assert split_by_cost([4.0, 2.0, 3.5], 2) == (range(1), range(1, 3))
    assert own_cut(plan, chain(3)) == (range(2), range(2, 3))
    assert plan.pipeline.costs.forward == (6.0, 3.5)


def test_another_chain_is_refused_with_both(tmp_path):
    plan = planned(tmp_path, 2, 2.0, 3.0, 4.0)
    words = r"c.yaml has costs of 3 pieces \(0, 1, 2\).*sources:build returned a chain of 5 \(0, 1"
    with pytest.raises(ScheduleError, match=words):
        own_cut(plan, chain(5))


def test_a_model_that_is_not_cut_needs_no_children(tmp_path):
    assert own_cut(planned(tmp_path, 1, 2.0), nn.Linear(2, 2)) is None
