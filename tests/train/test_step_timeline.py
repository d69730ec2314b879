"""A recorded step: what the run folder holds of it, that others are not, and what comes of it."""

import xml.etree.ElementTree as ET
from itertools import islice
from pathlib import Path

import pytest

from tests.train import parity
from torchdistpackage.config.load import loads
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.schedule.actions import flatten
from torchdistpackage.schedule.costs import read_costs
from torchdistpackage.schedule.generators import build
from torchdistpackage.train.build import make_loop
from torchdistpackage.train.generate import generate
from torchdistpackage.train.inference_request import Sampling
from torchdistpackage.train.metric_rows import read_metrics
from torchdistpackage.train.train_state import TrainState

RUN = [
    *("model.layers=2", "model.dim=16", "model.heads=2", "data.seq_len=16", "log.every=2"),
    *("data.global_batch=8", "pipeline.microbatches=4", "train.steps=5", "train.eval_every=0"),
    *("train.eval_batches=1", "checkpoint.save_every=0", "optim.warmup_steps=1"),
    *("parallel.pipe=2", "train.straggler_every=0", "log.plot=false"),
]


def whole_run(extra: list[str], folder: str) -> tuple[list[int], tuple[str, ...]]:
    """(steps that this rank recorded, files that it says are left)."""
    run = parity.trainer([*RUN, *extra])
    recorded, train_step = [], run.train_step

    def step(number: int, *, record: bool, **more):
        recorded.extend([number] * record)
        return train_step(number, record=record, **more)

    run.train_step = step  # type: ignore[method-assign]
    loop = make_loop(run, TrainState(), Path(folder))
    loop.run()
    return recorded, loop.artifacts


def test_the_folder_holds_the_measured_step_below_the_predicted_one(ranks, tmp_path):
    extra = ["parallel.data=2", "pipeline.schedule=zb-v"]
    told = ranks(4).run(whole_run, extra, str(tmp_path))
    # outermost first: data, pipe; the ranks of the second replica pay nothing
    assert [steps for steps, _ in told] == [[2, 4, 5], [2, 4, 5], [], []]
    assert told[0][1] == ("pipeline.svg", "costs.yaml") and told[1][1] == ()

    schedule = build("zb-v", 2, 4)
    actions = {str(a) for p in schedule.programs for a in flatten(p) if not a.kind.is_message}
    picture = ET.parse(tmp_path / "pipeline.svg").getroot()
    groups = {g.get("data-timeline"): g for g in picture.iter() if g.get("data-timeline")}
    assert list(groups) == ["predicted", "measured"]
    for group in groups.values():
        boxes = [e.get("data-action") for e in group.iter() if e.get("data-action")]
        assert sorted(boxes) == sorted(actions)

    costs = read_costs(tmp_path / "costs.yaml").of(4)
    assert min(*costs.forward, *costs.backward) > 0
    said = {row["step"]: row.get("pipeline") for row in read_metrics(tmp_path / "metrics.jsonl")}
    assert [step for step, text in said.items() if text] == [2, 4, 5]
    for reason in ("zb-v: bubble", "by pipe rank", "imbalance", "message wait", "host time"):
        assert reason in said[5]

    again = ["pipeline.schedule=auto", f"pipeline.costs={tmp_path}/costs.yaml"]
    config = loads("", overrides=[*RUN, *again, "pipeline.partition=time"], world_size=2)
    plan = make_plan(config, 2)
    assert plan.schedule.name.startswith("auto") and plan.schedule.num_microbatches == 4
    assert sum(map(len, plan.stages)) == len(plan.pieces)


@pytest.mark.full
def test_where_the_host_runs_ahead_a_recording_is_read_when_the_next_step_is_issued(pool, tmp_path):
    """By then the executor is at that step, of which it records nothing."""
    extra = ["parallel.data=1", "train.steps=7", "log.every=4"]
    told = pool(2).run(whole_run, extra, str(tmp_path), transport="late")
    assert [steps for steps, _ in told] == [[4, 7]] * 2
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "pipeline" in row] == [4, 7]
    costs = read_costs(tmp_path / "costs.yaml").of(2)
    assert min(*costs.forward, *costs.backward) > 0


def test_without_a_pipeline_nothing_is_recorded(ranks, tmp_path):
    (told,) = ranks(1).run(whole_run, ["parallel.pipe=1"], str(tmp_path))
    assert told == ([], ()) and not (tmp_path / "pipeline.svg").exists()


def generated(extra: list[str]) -> list[int]:
    run = parity.trainer([*RUN, "precision.dtype=float64", *extra])
    return list(islice(generate(run, [1, 2, 3], Sampling(0.8), 8, None), 6))


@pytest.mark.parametrize("schedule", ["zb-v", pytest.param("interleaved", marks=pytest.mark.full)])
def test_text_is_that_of_one_process_under_several_stages_a_rank(ranks, schedule):
    (truth,) = ranks(1).run(generated, ["parallel.pipe=1"])
    assert ranks(2).run(generated, [f"pipeline.schedule={schedule}"]) == [truth] * 2
