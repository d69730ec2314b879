"""Where a run is cut and in which order its stages work: partition, chunks, costs, auto.

No torch.
"""

import pytest

from torchdistpackage.config.load import loads
from torchdistpackage.config.rules_pipeline import piece_names
from torchdistpackage.errors import ConfigError
from torchdistpackage.plan.run_plan import Plan, make_plan, stage_loads
from torchdistpackage.schedule.costs import PieceCosts, StageCosts, costs_text
from torchdistpackage.schedule.engine import simulate
from torchdistpackage.schedule.generators import GENERATORS, build

BASE = "model: {layers: 4, dim: 64, vocab: 512}\npipeline: {microbatches: 8}\n"
BASE += "data: {global_batch: 64}\nparallel: {pipe: 2, data: 1}"
NAMES = (
    "embed",
    *(f"blocks.{i}.{half}" for i in range(4) for half in ("attention", "mlp")),
    "head",
)


def planned(*overrides: str) -> Plan:
    config = loads(BASE, overrides=overrides)
    return make_plan(config, config.parallel.pipe)


@pytest.fixture
def costs(tmp_path) -> str:
    """Measured by piece: attention is dear, and I takes more of a backward than W."""
    pieces = {n: PieceCosts(3.0 if "attention" in n else 1.0, 4.0) for n in NAMES}
    stages = StageCosts((11.0, 12.0), (20.0, 20.0), (14.0, 14.0), (6.0, 6.0), (0.5, 0.0))
    path = tmp_path / "costs.yaml"
    path.write_text(costs_text(stages, pieces))
    return str(path)


@pytest.mark.parametrize("schedule", [name for name in GENERATORS if name != "forward"])
def test_every_piece_is_on_one_stage_and_every_stage_where_the_schedule_has_it(schedule):
    plan = planned(f"pipeline.schedule={schedule}")
    assert [i for span in plan.stages for i in span] == list(range(len(plan.pieces)))
    assert len(plan.stages) == plan.schedule.num_stages
    for index, load in enumerate(stage_loads(plan)):
        assert tuple(load.stages) == plan.schedule.stages_of(index)
        held = {n for n, x in plan.layouts.items() if index in x.stages}
        pieces = [name for names in load.stages.values() for name in names]
        assert any(n.startswith("blocks.0.mlp") for n in held) == ("blocks.0.mlp" in pieces)
    assert sum(load.share for load in stage_loads(plan)) == pytest.approx(1)


def test_there_and_back_the_tied_weight_is_held_once():
    assert planned("pipeline.schedule=zb-v").layouts["embed.weight"].stages == (0,)
    assert planned("pipeline.schedule=interleaved").layouts["embed.weight"].stages == (0, 1)


@pytest.mark.parametrize(
    ("partition", "cut"), [("uniform", [5, 5]), ("parameters", [4, 6]), ("cost", [6, 4])]
)
def test_what_is_shared_evenly_is_what_was_asked_for(partition, cut):
    plan = planned(f"pipeline.partition={partition}", "model.vocab=1024", "model.tied=true")
    assert [len(span) for span in plan.stages] == cut


def test_by_time_the_stages_take_alike(costs):
    plan = planned("pipeline.partition=time", f"pipeline.costs={costs}")
    found = plan.pipeline.costs
    assert found.forward == (9.0, 9.0) and found.backward == (20.0, 20.0)
    assert found.input == (14.0, 14.0) and found.message == (0.5, 0.5)
    # a forward ahead and eight of both, and no more than a message a microbatch to wait for
    assert 9 * 29 < plan.timeline.total <= 9 * 29 + 8 * 0.5


@pytest.mark.few(1)
@pytest.mark.parametrize("chunks", [1, 2, None])
def test_auto_is_not_longer_than_any_stock_order_on_the_same_stages(costs, chunks):
    auto = planned(
        *("pipeline.schedule=auto", f"pipeline.costs={costs}", "pipeline.partition=time"),
        f"pipeline.chunks={'null' if chunks is None else chunks}",
    )
    assert auto.schedule.num_stages == 2 * (chunks or auto.schedule.num_stages // 2)
    for name in GENERATORS:
        order = build(name, 2, 8, auto.schedule.num_stages // 2)
        if name != "forward" and order.placement == auto.schedule.placement:
            assert auto.timeline.total <= simulate(order, auto.pipeline.costs).total * (1 + 1e-9)
    assert (
        auto.timeline.total
        < planned("pipeline.schedule=gpipe", f"pipeline.costs={costs}").timeline.total
    )


def test_without_costs_auto_goes_by_operations():
    plan = planned("pipeline.schedule=auto", "model.tied=false")
    stock = build("1f1b", 2, 8, plan.schedule.num_stages // 2)
    assert plan.timeline.total < simulate(stock, plan.pipeline.costs).total


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [True, False])
def test_per_work_done_auto_is_not_longer_than_any_stock_order(tied):
    """A mean rank's forward is the unit of every plan, whatever its cut."""
    words = [f"model.tied={str(tied).lower()}", "pipeline.microbatches=16"]
    auto = planned("pipeline.schedule=auto", *words)
    stock = {
        name: planned(f"pipeline.schedule={name}", *words).timeline
        for name in GENERATORS
        if name != "forward"
    }
    busy = [sum(c.forward) + sum(c.backward) for c in [auto.pipeline.costs]]
    assert busy == pytest.approx([2 * 3])  # both ranks, forward and backward
    assert auto.schedule.num_stages == 4
    assert auto.timeline.total <= min(t.total for t in stock.values()) * (1 + 1e-9)


def test_of_orders_as_long_auto_takes_the_one_that_holds_least():
    config = loads(BASE, overrides=["pipeline.schedule=auto", "parallel.pipe=1"])
    plan = make_plan(config, 1)
    assert plan.schedule.num_stages == 1 and plan.timeline.peak_live == (1,)


def test_a_named_schedule_is_predicted_with_the_stages_as_they_are():
    plan = planned("model.layers=5", "pipeline.partition=uniform", "model.tied=false")
    assert plan.timeline.bubble > simulate(plan.schedule).bubble + 0.01


@pytest.mark.parametrize(
    ("text", "chunks", "stages"),
    [
        ("forward: [1, 1, 1, 1]\nbackward: 2", "null", 4),
        ("forward: [1, 1, 1, 1]\nbackward: 2", "2", 4),
        ("forward: 1\nbackward: 2", "2", 4),
    ],
)
def test_costs_by_stage_leave_auto_their_own_stages(tmp_path, text, chunks, stages):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    words = ["pipeline.schedule=auto", f"pipeline.costs={path}", f"pipeline.chunks={chunks}"]
    plan = planned(*words)
    assert plan.schedule.num_stages == stages
    assert plan.schedule.placement == (0, 1) * (stages // 2)


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("forward: [1, 1]\nbackward: 2", ["chunks=2"], "forward has 2 numbers for 4 stages"),
        ("forward: [1, 1, 1]\nbackward: 2", [], "costs of 3 stages, which parallel.pipe=2 ranks"),
        ("forward: 1\nbackward: 2", [], "has one number for all stages"),
    ],
)
def test_auto_refuses_costs_of_other_stages_than_asked_for(tmp_path, text, words, said):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    words = [f"pipeline.{word}" for word in ("schedule=auto", f"costs={path}", *words)]
    with pytest.raises(ConfigError) as error:
        planned(*words)
    assert said in str(error.value)


def test_costs_that_do_not_fit_are_said_with_their_line_among_all_errors(tmp_path):
    (tmp_path / "c.yaml").write_text("forward: [1, 1, 1]\nbackward: 2")
    text = f"pipeline:\n  costs: {tmp_path}/c.yaml\noptim: {{lr: -1}}\nparallel: {{pipe: 2}}"
    with pytest.raises(ConfigError) as error:
        loads(text, "run.yaml", world_size=2)
    assert "2 problems" in str(error.value) and "run.yaml:3: optim.lr" in str(error.value)
    assert f"run.yaml:2: pipeline.costs: {tmp_path}/c.yaml: forward has 3" in str(error.value)


@pytest.mark.parametrize("layers", [1, 3])
def test_the_rules_know_the_pieces_of_the_model(layers):
    config = loads(BASE, overrides=[f"model.layers={layers}", "parallel.pipe=1"])
    assert piece_names(layers) == make_plan(config, 1).pieces


def test_an_own_model_is_planned_by_its_measured_children(tmp_path):
    pieces = {str(i): PieceCosts(1.0 + i, 2.0) for i in range(6)}
    path = tmp_path / "c.yaml"
    path.write_text(costs_text(StageCosts.uniform(2), pieces))
    own = ["model={target: 'tests.train.sources:build', args: {width: 2}}"]
    own += [f"pipeline.costs={path}", "pipeline.partition=time", "pipeline.schedule=auto"]
    base = "pipeline: {microbatches: 8}\ndata: {global_batch: 64}\nparallel: {pipe: 2, data: 1}"
    plan = make_plan(loads(base, overrides=own), 2)
    assert plan.model is None and plan.stages == ()
    assert plan.schedule.num_stages == 4 and sum(plan.pipeline.costs.forward) == 21.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0B0\n1F0,1B0", "is a schedule of 1 microbatches, but pipeline.microbatches=8; set"),
        ("0F0,0B0", "is a schedule of 1 ranks, but parallel.pipe=2; set pipe to 1"),
        ("0F0,0B0\n1F0,1Q0", "line 2, cell 2: '1Q0' is not an action"),
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", "missing: 0B1"),
        ("0F0,0B0,1F0,1B0", "rank 0 runs 0B0"),
    ],
)
def test_a_file_that_is_no_schedule_of_this_run_is_refused_with_its_line(tmp_path, text, words):
    path = tmp_path / "s.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as said:
        planned("pipeline.schedule=custom", f"pipeline.file={path}")
    assert words in str(said.value) and "pipeline.file" in str(said.value)


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ("forward: [1, 1, 1]\nbackward: 2", "forward has 3 numbers for 2 stages"),
        (
            "forward: 1\nbackward: 2\npieces: {embed: [1, 1]}",
            "has no costs of 9 pieces: blocks.0.a",
        ),
        ("forward: no", "forward holds False"),
    ],
)
def test_costs_of_another_model_are_refused(tmp_path, costs, words):
    path = tmp_path / "c.yaml"
    path.write_text(costs)
    with pytest.raises(ConfigError) as said:
        planned(f"pipeline.costs={path}")
    assert words in str(said.value) and "pipeline.costs" in str(said.value)
