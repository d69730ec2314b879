"""Whole steps of the trainer under many cuts of the same work: losses, evaluation, dropout."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.each import each
from tests.train import parity
from torchdistpackage.comm import primitives
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.config.load import loads
from torchdistpackage.errors import ConfigError, DataError
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.data_build import build_data

TINY = [
    "model.layers=2", "model.dim=16", "model.heads=4", "data.seq_len=16", "data.global_batch=24",
    "train.steps=4", "train.eval_batches=2", "optim.warmup_steps=1", "precision.dtype=float64",
]  # fmt: skip
UNEVEN = ["data.target=tests.train.sources:UnevenTokens", "data.args={seq_len: 16, vocab: 256}"]


def gradients(extra: list[str]) -> parity.Held:
    run = parity.trainer([*TINY, *UNEVEN, "optim.clip=0", *extra])
    run.train_step(1)
    return parity.held(run, "grad")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_ranks", "extra"),
    [
        (2, ["parallel.data=2", "pipeline.microbatches=3", "train.accumulate=2"]),
        (1, ["pipeline.microbatches=24"]),
        (1, ["pipeline.microbatches=2", "train.accumulate=3"]),
        (2, ["parallel.pipe=2", "pipeline.microbatches=4", "train.accumulate=3"]),
        (
            4,
            [
                "parallel.data=2",
                "parallel.pipe=2",
                "pipeline.microbatches=2",
                "pipeline.schedule=gpipe",
            ],
        ),
        (4, ["parallel.pipe=4", "pipeline.microbatches=2"]),
        (3, ["parallel.data=3", "pipeline.microbatches=8"]),
    ],
    ids=str,
)
def test_unequal_token_counts_weigh_alike_however_the_batch_is_cut(ranks, num_ranks, extra):
    """The gradient is that of (sum of token losses / number of tokens)."""
    truth = parity.whole(ranks(1).run(gradients, ["pipeline.microbatches=1"]))
    mine = parity.whole(ranks(num_ranks).run(gradients, extra))
    for name, grad in truth.items():
        torch.testing.assert_close(mine[name], grad, rtol=0, atol=1e-9 * float(grad.abs().max()))


def rates(extra: list[str]) -> list[float]:
    run = parity.trainer([*(x for x in TINY if "warmup" not in x), *extra])
    return [run.train_step(step).wait().lr for step in (1, 2, 3)]


def test_the_default_warmup_is_a_tenth_of_a_short_run(ranks):
    ((long, short),) = ranks(1).run(each, rates, [(["train.steps=30"],), (["train.steps=4"],)])
    assert long == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])
    assert short[0] == 1e-3 > short[1]


def train_with(extra: list[str], evaluate: bool) -> tuple[parity.Held, list[float]]:
    run = parity.trainer([*TINY, *extra])
    losses = [run.evaluate()] if evaluate else []
    for step in range(1, 4):
        losses.append(run.train_step(step).wait().loss)
        if evaluate:
            losses.append(run.evaluate())
    return parity.held(run, "data"), losses


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_ranks", "extra"),
    [
        (2, ["parallel.pipe=2", "pipeline.schedule=zb-v"]),
        (4, ["parallel.data=2", "parallel.pipe=2", "pipeline.schedule=zb-v"]),
        (4, ["parallel.data=2", "parallel.pipe=2", "pipeline.microbatches=3"]),
        (4, ["parallel.pipe=2", "parallel.tensor=2", "parallel.sequence_parallel=true"]),
        (4, ["parallel.pipe=4", "pipeline.schedule=interleaved-zb", "model.layers=3"]),
    ],
    ids=str,
)
def test_evaluation_is_that_of_one_process_and_leaves_training_bitwise_alone(
    ranks, num_ranks, extra
):
    extra = [*extra, "model.dropout=0.1", "pipeline.microbatches=4"]
    plain = ranks(num_ranks).run(train_with, extra, False)
    evaluated = ranks(num_ranks).run(train_with, extra, True)
    for (before, _), (after, _) in zip(plain, evaluated, strict=True):
        assert all(torch.equal(a[3], b[3]) for a, b in zip(before, after, strict=True))
    assert len({tuple(losses) for _, losses in evaluated}) == 1, "one loss on every rank"
    layers = [x for x in extra if x.startswith("model.layers")]
    ((_, truth),) = ranks(1).run(train_with, [*layers, "pipeline.microbatches=1"], True)
    (_, losses), *_ = ranks(num_ranks).run(train_with, [*extra, "model.dropout=0.0"], True)
    assert losses == pytest.approx(truth, abs=1e-12)


def no_model() -> None:
    target = ["model.target=builtins:list", "data.target=tests.train.sources:Line"]
    with pytest.raises(ConfigError, match=r"model\.target builtins:list returned a list"):
        parity.trainer(["data.global_batch=24", "pipeline.microbatches=1", *target])


def test_a_target_that_makes_no_module_is_refused_by_name(ranks):
    ranks(1).run(no_model)


def validation(extra: list[str]) -> float | None:
    return parity.trainer([*TINY, *extra]).evaluate()


def test_a_validation_reads_the_same_samples_however_a_step_accumulates(ranks):
    layouts = ["train.accumulate=1"], ["train.accumulate=3", "parallel.data=2"]
    (one, *_), (other, *_) = (
        ranks(n).run(validation, [*x, "pipeline.microbatches=2"]) for n, x in enumerate(layouts, 1)
    )
    assert one == pytest.approx(other, abs=1e-12)


def tied_copies(num_steps: int) -> list[torch.Tensor]:
    run = parity.trainer([*TINY, "parallel.pipe=2", "model.tied=true", "optim.clip=0.1",
                          "optim.weight_decay=0.3", f"train.steps={num_steps}",
                          "data.global_batch=4", "pipeline.microbatches=2"])  # fmt: skip
    for step in range(1, num_steps + 1):
        run.train_step(step)
    names = [name for name, layout in run.layouts.items() if layout.name == "embed.weight"]
    return [dict(run.stage.named_parameters())[name].detach() for name in names]


@pytest.mark.parametrize("num_steps", [20, pytest.param(100, marks=pytest.mark.full)])
def test_tied_copies_on_two_stages_stay_bitwise_equal(ranks, num_steps):
    (first,), (last,) = ranks(2).run(tied_copies, num_steps)
    assert torch.equal(first, last)


def initial(extra: list[str]) -> parity.Held:
    return parity.held(parity.trainer([*TINY, *extra]), "data")


LAYOUTS = [
    {"data": 2}, {"pipe": 2}, {"tensor": 2}, {"pipe": 4}, {"tensor": 4}, {"data": 2, "tensor": 2},
    {"pipe": 2, "tensor": 2}, {"data": 2, "pipe": 2, "tensor": 2},
]  # fmt: skip
SMALL_SET = [{"data": 2}, {"tensor": 2}, {"pipe": 4}, {"pipe": 2, "tensor": 2}]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("degrees", "schedule"),
    [
        *(
            pytest.param(d, "1f1b", marks=[] if d in SMALL_SET else pytest.mark.full)
            for d in LAYOUTS
        ),
        ({"pipe": 2}, "zb-v"),
    ],
    ids=str,
)
def test_initial_weights_are_bitwise_equal_under_every_layout(ranks, degrees, schedule):
    size = 1
    extra = [f"pipeline.schedule={schedule}"]
    for axis, degree in degrees.items():
        size *= degree
        extra.append(f"parallel.{axis}={degree}")
    truth = parity.whole(ranks(1).run(initial, []))
    mine = parity.whole(ranks(size).run(initial, extra), rtol=0, atol=0)
    assert mine.keys() == truth.keys()
    assert all(torch.equal(mine[name], truth[name]) for name in truth)


def wrong_batch() -> None:
    run = parity.trainer([*TINY, "parallel.tensor=2"])
    by_data_index = run.data.batch
    rank = primitives.gather_objects(run.rank).index(run.rank)
    # a loader keyed by the global rank
    run.data.batch = lambda split, seed, step, i, n, per, first=0: by_data_index(
        split, seed, step + rank, i, n, per, first=first
    )
    with pytest.raises(
        ValueError, match=r"model group of ranks 0, 1.*choose samples by data_index"
    ):
        run.train_step(1)


def test_a_loader_keyed_by_global_rank_is_caught_on_the_first_step(ranks):
    ranks(2).run(wrong_batch)


def half_precision(extra: list[str]) -> tuple[list[float], set[str]]:
    run = parity.trainer([*TINY, *UNEVEN, "precision.dtype=bf16", *extra])
    losses = [run.train_step(step).wait().loss for step in (1, 2, 3)]
    return losses, {str(p.dtype) for p in run.stage.parameters()}


def test_bf16_keeps_weights_wide_and_stays_close_on_every_layout(ranks):
    exact = ranks(1).run(losses_of, ["precision.dtype=float32"])[0]
    for extra in (["parallel.pipe=2", "parallel.tensor=2"], ["parallel.data=2", "parallel.pipe=2"]):
        for losses, dtypes in ranks(4).run(half_precision, [*extra, "pipeline.microbatches=2"]):
            assert dtypes == {"torch.float32"}
            assert losses == pytest.approx(exact, rel=5e-3) and losses != exact


def losses_of(extra: list[str]) -> list[float]:
    run = parity.trainer([*TINY, *UNEVEN, *extra])
    return [run.train_step(step).wait().loss for step in (1, 2, 3)]


def sources(folder: str) -> None:
    """text and tokens from the YAML give batches of what is in the files."""
    text = Path(folder) / "a.txt"
    text.write_text("abcdefgh" * 400)
    np.arange(3000, dtype=np.uint16).tofile(Path(folder) / "ids.bin")
    run = parity.trainer([*TINY, "data.name=text", f"data.path={text}"])
    ids, targets = run.data.batch("train", 0, 1, 0, 1, 2)
    assert bytes(ids[0, 1:].tolist()) == bytes(targets[0, :-1].tolist())
    assert set(bytes(ids.flatten().tolist())) == set(b"abcdefgh")
    run = parity.trainer([*TINY, "data.name=tokens", f"data.path={folder}/ids.bin",
                          "model.vocab=3000"])  # fmt: skip
    ids, targets = run.data.batch("val", 0, 0, 0, 1, 2)
    assert torch.equal(ids + 1, targets) and int(ids.min()) >= 2850
    with pytest.raises(ValueError, match="vocabulary of 300"):
        parity.trainer(
            [*TINY, "data.name=tokens", f"data.path={folder}/ids.bin", "model.vocab=300"]
        )


def test_text_and_token_files_are_read_as_the_yaml_names_them(ranks, tmp_path):
    ranks(1).run(sources, str(tmp_path))


def checked(extra: list[str]) -> list[float]:
    """Two steps in which all ranks compare every call first, and the same two steps without."""
    losses = []
    for check in ("true", "false"):
        run = parity.trainer([*TINY, *extra, f"train.check_calls={check}"])
        assert recorder.checks is (check == "true")
        losses += [run.train_step(step).wait().loss for step in (1, 2)]
    return losses


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "extra",
    [
        ["parallel.data=2", "parallel.pipe=2", "model.tied=true", "pipeline.microbatches=3"],
        ["parallel.pipe=2", "parallel.tensor=2", "parallel.sequence_parallel=true"],
        pytest.param(["parallel.pipe=4", "pipeline.microbatches=6"], marks=pytest.mark.full),
        pytest.param(
            ["parallel.data=2", "parallel.pipe=2", "pipeline.schedule=zb-v"],
            marks=pytest.mark.full,
        ),
    ],
    ids=str,
)
def test_calls_that_fit_pass_the_debug_mode_and_give_the_same(ranks, extra):
    extra = ["model.layers=4", *extra]
    for losses in ranks(4).run(checked, extra):
        assert losses[:2] == losses[2:]


def first_step(step: int) -> str:
    """How the first step that a process makes is refused; the second is none of this check's."""
    own = ["data.target=tests.train.sources:ByGlobalRank", "data.args={seq_len: 16, vocab: 256}"]
    run = parity.trainer([*TINY, *own, "parallel.pipe=2"])
    with pytest.raises(DataError, match="ranks of one model must get one batch") as error:
        run.train_step(step)
    return str(error.value)


@pytest.mark.parametrize("step", [1, 3])
def test_other_samples_on_ranks_of_one_model_are_refused_in_a_resumed_run_too(ranks, step):
    for text in ranks(2).run(first_step, step):
        assert "rank 1 has" in text


def test_what_a_target_of_data_returns_must_have_batches():
    plan = make_plan(loads("data: {target: 'collections:OrderedDict'}"), 1)
    with pytest.raises(DataError, match=r"data.target collections:OrderedDict .* OrderedDict"):
        build_data(plan)
