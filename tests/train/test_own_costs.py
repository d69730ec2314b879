"""The measured costs of a user's own model, compared with the model once it is built."""

import pytest
from torch import nn

from torchdistpackage.config.load import loads
from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.costs import StageCosts
from torchdistpackage.schedule.costs_file import PieceCosts, costs_text
from torchdistpackage.train.build import own_cut
from torchdistpackage.train.plan import Plan, make_plan

RUN = [
    *("model={target: 'tests.train.sources:build'}", "pipeline.partition=time"),
    *("pipeline.microbatches=2", "data.global_batch=4", "parallel.data=1"),
]


def planned(tmp_path, pipe: int, *names: str) -> Plan:
    """With a file of costs of these pieces, of 2 and more."""
    path = tmp_path / "c.yaml"
    pieces = {name: PieceCosts(2.0 + i, 1.0) for i, name in enumerate(names)}
    path.write_text(costs_text(StageCosts.uniform(2), pieces))
    config = loads("", overrides=[*RUN, f"parallel.pipe={pipe}", f"pipeline.costs={path}"])
    return make_plan(config, pipe)


def chain(length: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(length)))


def test_children_are_cut_as_they_were_measured(tmp_path):
    cut = own_cut(planned(tmp_path, 2, "0", "1", "2"), chain(3))
    assert cut == (range(2), range(2, 3))


def test_another_chain_is_refused_with_both(tmp_path):
    plan = planned(tmp_path, 2, "0", "1", "2")
    words = r"c.yaml has costs of 3 pieces \(0, 1, 2\).*sources:build returned a chain of 5 \(0, 1"
    with pytest.raises(ScheduleError, match=words):
        own_cut(plan, chain(5))


def test_a_model_that_is_not_cut_needs_no_children(tmp_path):
    assert own_cut(planned(tmp_path, 1, "0"), nn.Linear(2, 2)) is None
