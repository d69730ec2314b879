"""Mixtures of experts in `tdp train`: every layout trains as one process, biases and counts too."""

import pytest

from tests.train import parity

BASE = [
    *("model.layers=3", "model.heads=2", "model.dim=8", "model.mlp_ratio=2.0", "model.vocab=257"),
    *("model.tied=false", "data.seq_len=8", "data.args={seq_len: 8, vocab: 257}"),
    *("data.global_batch=8", "pipeline.microbatches=2", "precision.dtype=float64"),
    *("optim.clip=0.5", "train.steps=5", "optim.warmup_steps=0"),
    "data.target=tests.train.sources:UnevenTokens",
]
KINDS = {
    "sequence": [
        "model.moe={num_experts: 5, top_k: 2, hidden: 6, aux_loss: 0.5, z_loss: 0.1, every: 2, "
        "first: 1, shared_hidden: 4}",
        *("model.mlp=swiglu", "model.mlp_bias=false"),
    ],
    "bias": [
        "model.moe={num_experts: 4, top_k: 2, hidden: 6, balance: bias, bias_rate: 0.1, "
        "score: sigmoid}"
    ],
    "global": [
        "model.moe={num_experts: 4, top_k: 1, hidden: 6, balance: global_aux_loss, aux_loss: 0.5, "
        "capacity_factor: 1.1}"
    ],
}
SPLIT = {"tensor": 2, "sequence_parallel": "true"}
STEPS = 3


def trained(changes: list[str]) -> tuple[parity.Held, list[tuple[float, float, dict]]]:
    """(weights after some steps, (loss, gradient norm, choices of each expert) of each step)."""
    run = parity.trainer(changes)
    results = [run.train_step(step).wait() for step in range(1, STEPS + 1)]
    rows = [
        (x.loss, x.grad_norm, {name: load.choices for name, load in x.experts.items()})
        for x in results
    ]
    return parity.held(run, "data"), rows


def cases():
    """Kind, degrees, other keys; the small set has each kind and each mechanism once."""
    small = [
        ("sequence", {"data": 2, "expert": 2, "zero": 3}, []),
        ("bias", {"data": 2, "expert": 2, "pipe": 2}, ["pipeline.schedule=zb-h1"]),
        ("global", {"data": 2, "expert": 2}, ["train.accumulate=2", "train.recompute=blocks"]),
        ("sequence", {"data": 2, "expert": 2, **SPLIT}, []),
        ("sequence", {"context": 2}, []),
    ]
    more = [
        *((kind, {"data": 4, "expert": e}, ONE) for kind in KINDS for e in (1, 2, 4)),
        *((kind, {"data": 2, "expert": 2, "zero": z}, []) for kind in KINDS for z in (1, 2, 3)),
        *((kind, {"data": 2, "expert": 2, "pipe": 2}, []) for kind in KINDS),
        *((kind, {"pipe": 2, **SPLIT}, []) for kind in KINDS),
        ("bias", {"data": 2, "expert": 2, "context": 2}, []),
    ]
    for number, case in enumerate((*small, *more)):
        full = [] if number < len(small) else [pytest.mark.full]
        kind, degrees, changes = case
        label = "-".join((kind, *(f"{k}{v}" for k, v in degrees.items()), *changes))
        yield pytest.param(*case, id=label, marks=full)


ONE = ["pipeline.microbatches=1"]
TRUTH: dict[str, list] = {}


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "degrees", "changes"), list(cases()))
def test_experts_train_as_in_one_process(ranks, kind, degrees, changes):
    base = [*BASE, *KINDS[kind]]
    if kind not in TRUTH:
        TRUTH[kind] = ranks(1).run(trained, base)
    mine = [*base, *changes, *(f"parallel.{axis}={size}" for axis, size in degrees.items())]
    size = degrees.get("data", 1) * degrees.get("pipe", 1) * degrees.get("tensor", 1)
    size *= degrees.get("context", 1)
    results = ranks(size).run(trained, mine)
    parity.expect_close([held for held, _ in results], [held for held, _ in TRUTH[kind]])
    for _, rows in results:
        for (loss, norm, choices), true in zip(rows, TRUTH[kind][0][1], strict=True):
            assert abs(loss - true[0]) < 1e-11 * true[0]
            assert abs(norm - true[1]) < 1e-9 * true[1]
            assert choices == true[2]
