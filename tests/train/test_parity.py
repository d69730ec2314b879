"""The parity matrix: every layout gives the gradient of one process.

Rows come from the topology's own list of axes: every combination of sizes with a product of at
most 8, with sequence parallelism on and off and the embedding tied and untied.
"""

import itertools
import json
import math
from pathlib import Path

import pytest

from tests.train import parity
from torchdistpackage.config.load import load
from torchdistpackage.config.types import SCHEDULES
from torchdistpackage.schedule.actions import Action, ActionKind, Schedule
from torchdistpackage.schedule.resolve import to_csv
from torchdistpackage.topology.mesh import DEFAULT_ORDER

# heads that 1..8 tensor ranks can share; the sequence length follows them
HEADS = {1: 2, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, 8: 8}


def test_every_axis_of_the_topology_has_its_rows():
    assert all(any(row[axis] > 1 for row in layouts()) for axis in DEFAULT_ORDER)


def layouts() -> list[dict[str, int]]:
    sizes = itertools.product(range(1, 9), repeat=len(DEFAULT_ORDER))
    return [dict(zip(DEFAULT_ORDER, s, strict=True)) for s in sizes if 1 < math.prod(s) <= 8]


def cases():
    """All of them; the small set has every variant up to 3 ranks, one a layout on 4, one of 8, and
    of those with context one each up to 4."""
    for degrees in layouts():
        split = degrees["tensor"] > 1
        for sequence_parallel, tied in itertools.product((False, True)[: 1 + split], (False, True)):
            size = math.prod(degrees.values())
            each_axis = [degrees[axis] for axis in ("data", "pipe", "tensor")] == [2, 2, 2]
            large = size == 4 or each_axis
            small = size <= 3 or (large and sequence_parallel == split and tied)
            if degrees["context"] > 1:
                small = size <= 4 and sequence_parallel == split and tied == (size % 2 == 0)
            case = (degrees, sequence_parallel, tied)
            yield pytest.param(case, id=name_of(case), marks=[] if small else [pytest.mark.full])


def name_of(case) -> str:
    degrees, sequence_parallel, tied = case
    shown = "x".join(f"{axis}{size}" for axis, size in degrees.items() if size > 1)
    return f"{shown}{'-sp' if sequence_parallel else ''}{'-tied' if tied else ''}"


def overrides(degrees: dict[str, int], tied: bool) -> list[str]:
    """A small model that `degrees` can share; the same numbers for one process."""
    heads = HEADS[degrees["tensor"]]
    seq_len = 2 * heads * (2 * context if (context := degrees.get("context", 1)) > 1 else 1)
    return [
        f"model.layers={max(2, degrees['pipe'] - 2)}", f"model.heads={heads}",
        f"model.dim={heads * 4}", "model.mlp_ratio=2.0",
        "model.vocab=257", f"model.tied={str(tied).lower()}",
        f"model.position={'learned' if tied else 'rotary'}",
        f"data.seq_len={seq_len}", f"data.args={{seq_len: {seq_len}, vocab: 257}}",
        f"data.global_batch={degrees['data'] * 4}", "pipeline.microbatches=2",
        "precision.dtype=float64", "optim.clip=0.5", "train.steps=5", "optim.warmup_steps=0",
        "data.target=tests.train.sources:UnevenTokens",
    ]  # fmt: skip


REFERENCES: dict[tuple[str, ...], list] = {}


def one_process(ranks, extra: list[str]) -> list:
    """The reference: the same entry on one rank, once for all layouts that share it."""
    key = tuple(extra)
    if key not in REFERENCES:
        REFERENCES[key] = ranks(1).run(one_step, extra)
    return REFERENCES[key]


def one_step(extra: list[str]) -> tuple[parity.Held, float, float]:
    """(gradients of the clipped mean loss, loss, gradient norm before clipping) of a step."""
    run = parity.trainer(extra)
    result = run.train_step(1).wait()
    return parity.held(run, "grad"), result.loss, result.grad_norm


def expect_same(results: list, truth: list) -> None:
    parity.expect_close([held for held, _, _ in results], [held for held, _, _ in truth])
    _, loss, norm = truth[0]
    for _, my_loss, my_norm in results:
        assert abs(my_loss - loss) < 1e-12 * loss
        assert abs(my_norm - norm) < 1e-9 * norm


@pytest.mark.few(6)
@pytest.mark.parametrize("case", list(cases()))
def test_one_step_is_that_of_one_process(ranks, case):
    degrees, sequence_parallel, tied = case
    base = overrides(degrees, tied)
    mine = [*base, *(f"parallel.{axis}={size}" for axis, size in degrees.items())]
    mine.append(f"parallel.sequence_parallel={str(sequence_parallel).lower()}")
    results = ranks(math.prod(degrees.values())).run(one_step, mine)
    expect_same(results, one_process(ranks, base))


def test_a_loss_of_your_own_gets_all_logits(ranks):
    base = overrides({"data": 1, "pipe": 1, "tensor": 2}, tied=False)
    truth = one_process(ranks, base)
    for size in (1, 2):
        mine = [*base, f"parallel.tensor={size}", "model.loss=tests.train.sources:token_losses"]
        expect_same(ranks(size).run(one_step, mine), truth)


SCHEDULED = {
    "pipe2": {"pipe": 2},
    "pipe3": {"pipe": 3},
    "pipe4": {"pipe": 4},
    "data2xpipe2": {"data": 2, "pipe": 2},
    "pipe2xtensor2": {"pipe": 2, "tensor": 2},
}
"""Layouts under which every schedule is tried."""
ZERO_OF = {
    "gpipe": 0, "1f1b": 3, "interleaved": 1, "looped-bfs": 2, "zb-h1": 2, "zb-h2": 1,
    "interleaved-zb": 3, "zb-v": 2, "dualpipe-v": 1, "auto": 3, "custom": 0,
}  # fmt: skip
"""In the small set each schedule runs on data 2 x pipe 2 under one stage of ZeRO."""


def scheduled():
    for name in SCHEDULES:
        for layout, degrees in SCHEDULED.items():
            for zero in range(4 if "data" in degrees else 1):
                for tied in (True, False):
                    small = tied and layout == "data2xpipe2" and zero == ZERO_OF[name]
                    small |= tied and layout == "pipe3" and name in ("zb-v", "interleaved")
                    case = name, degrees, zero, tied
                    label = f"{name}-{layout}{f'-zero{zero}' * bool(zero)}{'-tied' * tied}"
                    yield pytest.param(case, id=label, marks=[] if small else [pytest.mark.full])


@pytest.mark.few(1)
@pytest.mark.parametrize("case", list(scheduled()))
def test_every_schedule_gives_the_step_of_one_process(ranks, case, tmp_path):
    name, degrees, zero, tied = case
    base = [
        *overrides({"data": 1, "pipe": 1, "tensor": 1} | degrees, tied),
        *("model.layers=3", "pipeline.microbatches=4"),
    ]
    mine = [*base, *(f"parallel.{axis}={size}" for axis, size in degrees.items())]
    mine += [f"parallel.zero={zero}", f"pipeline.schedule={name}"]
    if name == "custom":
        # three stages on two ranks, the last two on one
        path = tmp_path / "mine.csv"
        path.write_text(to_csv(uneven(degrees["pipe"], 4)))
        mine.append(f"pipeline.file={path}")
    results = ranks(math.prod(degrees.values())).run(one_step, mine)
    expect_same(results, one_process(ranks, base))


def uneven(num_ranks: int, num_microbatches: int) -> Schedule:
    """GPipe over one stage more than there are ranks, the last rank with two."""
    placement = (*range(num_ranks), num_ranks - 1)
    stages = [[s for s, place in enumerate(placement) if place == r] for r in range(num_ranks)]
    programs = tuple(
        (
            *(Action(s, ActionKind.F, m) for m in range(num_microbatches) for s in held),
            *(Action(s, ActionKind.B, m) for m in range(num_microbatches) for s in reversed(held)),
        )
        for held in stages
    )
    return Schedule("uneven", num_ranks + 1, num_microbatches, placement, programs)


def exchanged():
    """Context under each schedule and stage of ZeRO, and each way to exchange."""
    ways = ("p2p", "all_gather", "a2a", "a2a+p2p")
    small = {
        ("1f1b", 0, "a2a"), ("interleaved", 1, "p2p"), ("zb-v", 2, "all_gather"), ("zb-v", 3, "p2p")
    }  # fmt: skip
    for name, zero, way in itertools.product(("1f1b", "interleaved", "zb-v"), range(4), ways):
        marks = [] if (name, zero, way) in small else [pytest.mark.full]
        yield pytest.param(name, zero, way, 2, id=f"{name}-zero{zero}-{way}", marks=marks)
    yield pytest.param("1f1b", 1, "a2a+p2p", 4, id="context4-zero1-a2a+p2p", marks=pytest.mark.full)


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "zero", "way", "context"), list(exchanged()))
def test_context_under_schedules_and_zero(ranks, name, zero, way, context):
    degrees = {"data": 1, "pipe": 2, "context": context, "tensor": 1}
    base = [
        *overrides(degrees, tied=False),
        *("model.layers=3", "model.heads=4", "model.kv_heads=2", "pipeline.microbatches=4"),
    ]
    mine = [*base, *(f"parallel.{axis}={size}" for axis, size in degrees.items())]
    mine += [f"parallel.zero={zero}", f"pipeline.schedule={name}", f"parallel.cp_comm_type={way}"]
    expect_same(ranks(2 * context).run(one_step, mine), one_process(ranks, base))


LAYOUTS = {
    "data4": ["parallel.data=4"],
    "pipe4": ["parallel.pipe=4"],
    "tensor4": ["parallel.tensor=4"],
    "data2xpipe2": ["parallel.data=2", "parallel.pipe=2"],
    "pipe2xtensor2": ["parallel.pipe=2", "parallel.tensor=2"],
    "data2xtensor2": ["parallel.data=2", "parallel.tensor=2"],
}
NARROW = ["model.dim=16", "data.seq_len=16", "data.global_batch=16", "precision.dtype=float64"]
"""gpt_tiny with less to compute, and with hardly any rounding, for the small set."""


def losses(changes: list[str], num_steps: int) -> list[float]:
    """Training losses of configs/gpt_tiny.yaml with `changes`."""
    run = parity.trainer(changes)
    return [run.train_step(step).wait().loss for step in range(1, num_steps + 1)]


def of_gpt_tiny(changes: list[str]) -> list[str]:
    """gpt_tiny's own values, as overrides, on one rank but for `changes`."""
    file = load(Path(__file__).parents[2] / "configs" / "gpt_tiny.yaml")
    keep = ("model", "data", "optim", "train", "pipeline", "precision")
    written = {
        f"{section}.{key}": value
        for section in keep
        for key, value in getattr(file, section).model_dump().items()
        if not isinstance(value, dict | list | tuple)
    }
    return [*(f"{k}={json.dumps(v)}" for k, v in written.items()), "parallel.data=1", *changes]


def expect_one_loss(ranks, changes: list[str], layout: str, rel: float, steps: int = 50) -> None:
    (truth,) = ranks(1).run(losses, of_gpt_tiny(changes), steps, timeout_s=300)
    assert truth[-1] < truth[0] - (0.5 if steps == 50 else 0.05), "it learns"
    changes = [*changes, *LAYOUTS[layout]]
    for mine in ranks(4).run(losses, of_gpt_tiny(changes), steps, timeout_s=300):
        assert mine == pytest.approx(truth, rel=rel, abs=0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "steps"),
    [("data2xpipe2", 12), *(pytest.param(name, 50, marks=pytest.mark.full) for name in LAYOUTS)],
)
def test_narrow_gpt_tiny_has_one_loss_over_many_steps(ranks, layout, steps):
    expect_one_loss(ranks, NARROW, layout, rel=1e-9, steps=steps)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpt_tiny_has_one_loss_over_50_steps(ranks, layout):
    """In float32, where Adam turns another order of sums into another 1e-6 of the loss; at most
    1.003e-5 of it in one of 50 steps (tensor4)."""
    expect_one_loss(ranks, [], layout, rel=1.1e-5)
