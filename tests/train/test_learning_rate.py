"""Warm-up and cosine, at the steps where they turn; transformers' schedules beside its own."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tells import tells
from torchdistpackage.config.load import load, loads
from torchdistpackage.errors import ConfigError
from torchdistpackage.train.learning_rate import learning_rate, warmup_cosine, warmup_notes

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_the_turning_points():
    at = lambda step: warmup_cosine(step, warmup_steps=4, num_steps=13, min_ratio=0.1)  # noqa: E731
    assert [at(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert at(4) == 1.0
    assert at(8) == pytest.approx(0.55)
    assert at(12) == pytest.approx(0.1) == at(100)


@given(st.integers(0, 20), st.integers(1, 50), st.floats(0, 1))
def test_the_factor_rises_then_falls_and_stays_between_its_ends(warmup, num_steps, ratio):
    factors = [
        warmup_cosine(s, warmup_steps=warmup, num_steps=num_steps, min_ratio=ratio)
        for s in range(num_steps)
    ]
    rising, falling = factors[:warmup], factors[warmup:]
    assert rising == sorted(rising) and all(0 < f <= 1 for f in rising)
    assert all(a >= b - 1e-12 for a, b in pairwise(falling))
    assert all(ratio - 1e-12 <= f <= 1 for f in falling)


SCHEDULES = [
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2}),
    ("cosine_with_min_lr", {"min_lr": 1e-4, "num_cycles": 2}),
    ("polynomial", {}),
    ("polynomial", {"power": 2.0, "lr_end": 1e-5}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 7}),
    ("warmup_stable_decay", {"num_decay_steps": 5}),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 6, "num_stable_steps": 3, "warmup_type": "cosine", "min_lr_ratio": 0.1},
    ),
    ("warmup_stable_decay", {"num_decay_steps": 8, "decay_type": "1-sqrt"}),
]


@pytest.mark.parametrize("warmup", [0, 4, 40])
@pytest.mark.parametrize(("name", "given"), SCHEDULES, ids=str)
def test_schedules_of_transformers_have_its_numbers(name, given, warmup):
    transformers = pytest.importorskip("transformers")
    parameter, lr, num_steps = torch.nn.Parameter(torch.zeros(1)), 3e-3, 20
    optimizer = torch.optim.SGD([parameter], lr=lr)
    length = None if "num_stable_steps" in given else num_steps  # it takes one of both
    if name == "inverse_sqrt":  # get_scheduler drops its timescale before transformers 5
        theirs = transformers.get_inverse_sqrt_schedule(optimizer, warmup, **given)
    else:
        theirs = transformers.get_scheduler(
            name, optimizer, warmup, length, scheduler_specific_kwargs=dict(given)
        )
    said = {"lr": lr, "schedule": name, "schedule_args": given, "warmup_steps": warmup}
    text = f"{{optim: {said}, train: {{steps: {num_steps}}}}}"
    at = learning_rate(loads(text).optim, num_steps)
    for step in range(num_steps + 3):
        assert at(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-18), step
        optimizer.step()
        theirs.step()


def test_a_run_within_its_warmup_says_so():
    long, own = loads("optim: {warmup_steps: 40}").optim, loads("").optim
    (note,) = warmup_notes(long, 10)
    assert tells(note, "warmup_steps=40", "10 steps") and "25%" in note
    assert warmup_notes(long, 40) == warmup_notes(own, 10) == ()


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_shipped_configuration_can_be_tried_for_a_few_steps(file):
    config = load(file, ["train.steps=10"], job=None)
    assert config.optim.warmup(10) <= 10 or warmup_notes(config.optim, 10)


@pytest.mark.parametrize(
    ("optim", "text"),
    [
        ("{schedule: linear, schedule_args: {power: 2}}", "has power, but optim.schedule=linear"),
        ("{schedule: cosine, schedule_args: {num_cycles: a}}", "num_cycles=a is not a number"),
        ("{schedule: cosine_with_min_lr}", "needs one of min_lr and min_lr_rate"),
        ("{schedule: warmup_stable_decay}", "needs num_decay_steps"),
        ("{schedule: polynomial, schedule_args: {lr_end: 1.0}}", "lr_end=1 is not below"),
        (
            "{schedule: warmup_stable_decay, schedule_args: {decay_type: x, num_decay_steps: 1}}",
            "decay_type=x is unknown; use one of linear, cosine, 1-sqrt",
        ),
        ("{schedule: inverse_sqrt, schedule_args: {timescale: 0}}", "timescale=0 is not above 0"),
    ],
)
def test_what_a_schedule_does_not_take_is_refused(optim, text):
    with pytest.raises(ConfigError, match=text):
        loads(f"optim: {optim}")


@pytest.mark.parametrize("name", ["adafactor", "adamw8bit"])
def test_an_optimizer_of_whole_parameters_is_refused_where_ranks_have_parts_of_them(name):
    with pytest.raises(ConfigError, match=rf"{name} .* parallel\.tensor=2 gives each rank only"):
        loads(f"{{optim: {{name: {name}}}, parallel: {{tensor: 2, zero: 1, data: 1}}}}")
