"""`parallel.tp_comm_overlap`: the step of one process, and one order of calls on all ranks."""

import math

import pytest

from tests.train import parity
from tests.train.test_order import expect_agreement
from tests.train.test_parity import expect_same, one_step
from torchdistpackage.parallel.tensor import chunked
from torchdistpackage.plan.run_plan import make_plan

BASE = [
    *("model.layers=2", "model.heads=4", "model.kv_heads=2", "model.dim=16", "model.mlp=swiglu"),
    *("model.mlp_hidden=23", "model.vocab=257", "model.norm=rms", "data.seq_len=24"),
    *("data.args={seq_len: 24, vocab: 257}", "data.target=tests.train.sources:UnevenTokens"),
    *("data.global_batch=8", "pipeline.microbatches=2", "precision.dtype=float64"),
    *("optim.clip=0.5", "train.steps=5", "optim.warmup_steps=0"),
]
OVERLAP = ["parallel.sequence_parallel=true", "parallel.tp_comm_overlap=true"]
LAYOUTS = [
    {"data": 1, "tensor": 2},
    {"data": 1, "tensor": 4},  # two ranks a key-value head
    {"data": 1, "pipe": 2, "tensor": 2},
]


def in_chunks(extra: list[str]) -> tuple:
    with pytest.MonkeyPatch.context() as patch:
        for least in ("CHUNK_BYTES", "QUEUED_CHUNK_BYTES"):
            patch.setattr(chunked, least, 1)
        return one_step(extra)


def asked(degrees: dict[str, int]) -> list[str]:
    return [*BASE, *OVERLAP, *(f"parallel.{axis}={size}" for axis, size in degrees.items())]


@pytest.mark.few(2)
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_an_overlapped_step_is_that_of_one_process(ranks, degrees):
    more = ["pipeline.schedule=zb-h1"] if "pipe" in degrees else []
    size = math.prod(degrees.values())
    results = ranks(size).run(in_chunks, [*asked(degrees), *more])
    expect_same(results, ranks(1).run(one_step, BASE))


@pytest.mark.parametrize("degrees", LAYOUTS[-1:], ids=str)
def test_chunks_leave_in_one_order_on_all_ranks(degrees, monkeypatch):
    for least in ("CHUNK_BYTES", "QUEUED_CHUNK_BYTES"):
        monkeypatch.setattr(chunked, least, 1)
    world = math.prod(degrees.values())
    expect_agreement(make_plan(parity.config(asked(degrees)), world))
