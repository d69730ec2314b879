"""The same training on another number of ranks: data first, then pipe, and no larger microbatch.

No torch.
"""

import pytest

from tests.tells import tells
from torchdistpackage.config.check import violations
from torchdistpackage.config.elastic import nodes_used
from torchdistpackage.config.load import loads
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import ConfigError
from torchdistpackage.launch.slurm.job import job_shape
from torchdistpackage.plan.elastic import check_nodes, elastic_plan, fitted


def run(**more: object) -> RunConfig:
    keys = {
        "parallel.data": 4, "parallel.pipe": 2, "parallel.tensor": 2, "pipeline.microbatches": 2,
        "data.global_batch": 48, "model.layers": 4, **more,
    }  # fmt: skip
    return loads("run: {name: x}", overrides=[f"{key}={value}" for key, value in keys.items()])


@pytest.mark.parametrize(
    ("world", "data", "pipe", "accumulate", "samples"),
    [
        (16, 4, 2, 1, 6),
        (12, 3, 2, 2, 4),
        (8, 2, 2, 2, 6),
        (4, 1, 2, 4, 6),
        (2, 1, 1, 4, 6),
        (24, 6, 2, 1, 4),
        (6, 3, 1, 2, 4),  # three replicas of two stages would need four ranks each
    ],
)
def test_the_batch_stays_and_no_microbatch_grows(world, data, pipe, accumulate, samples):
    plan = elastic_plan(run(), world)
    found = plan.config.parallel
    assert (found.data, found.pipe, found.tensor, found.context) == (data, pipe, 2, 1)
    assert (plan.rounds, plan.samples_per_microbatch) == (accumulate, samples)
    assert data * accumulate * 2 * samples == 48
    assert plan.config.optim == run().optim and plan.config.train.steps == run().train.steps


def test_as_many_replicas_as_fit_keep_the_accumulation_where_they_can():
    plan = elastic_plan(run(**{"parallel.data": "auto", "train.accumulate": 3}), 8)
    assert (plan.config.parallel.data, plan.rounds, plan.samples_per_microbatch) == (2, 3, 4)


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (5, "5 ranks are not a multiple of context=1 x tensor=2 = 2"),
        (10, "10 ranks do not share data.global_batch=48 evenly in 2 microbatches"),
    ],
)
def test_what_cannot_be_is_said_with_its_numbers(world, words):
    with pytest.raises(ConfigError, match=words):
        elastic_plan(run(), world)


def test_nodes_on_which_no_degrees_do_are_left_idle():
    elastic = run(**{"launch.elastic.nodes": "[1, 6]", "launch.slurm.ntasks-per-node": 4})
    shape = job_shape(elastic)
    assert (shape.nodes_text, shape.tasks_per_node) == ("1-6", 4)
    assert nodes_used(elastic, shape) == {1: 1, 2: 2, 3: 3, 4: 4, 5: 4, 6: 6}
    check_nodes(elastic, shape, "a.yaml")
    fitted_to = fitted(elastic, 8).parallel
    assert (fitted_to.data, fitted_to.pipe, fitted_to.tensor) == (2, 2, 2)
    assert fitted(run(), 8) == run(), "only where it is asked for"


def test_the_fewest_nodes_have_to_do_and_the_number_is_said_once():
    few = run(**{"launch.elastic.nodes": "[5, 6]", "launch.slurm.ntasks-per-node": 4})
    with pytest.raises(
        ConfigError, match=r"launch\.elastic\.nodes.*20 ranks do not share data\.glob"
    ):
        check_nodes(few, job_shape(few), "a.yaml")
    both = {"launch.elastic.nodes": "[1, 2]", "launch.slurm.nodes": 2}
    (problem,) = violations(run(**both), job=True)
    assert tells(problem.text, "nodes=2", "launch.elastic.nodes=[1", "2] both")
    timed = {"launch.elastic.nodes": "[1, 4]", "launch.slurm.time": 60}
    most = job_shape(run(**timed))
    assert most.tasks_per_node == 4, "the degrees are those on the most nodes"
