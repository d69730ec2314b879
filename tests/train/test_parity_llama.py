"""A model with grouped queries, SwiGLU, RMS norms and scaled rotary positions gives the gradient
of one process under every layout, also on more tensor ranks than it has key-value heads."""

import math

import pytest

from tests.train.test_parity import expect_same, one_process, one_step

BASE = [
    *("model.layers=2", "model.heads=8", "model.kv_heads=2", "model.dim=32", "model.head_dim=6"),
    *("model.mlp=swiglu", "model.mlp_hidden=22", "model.mlp_bias=false", "model.norm=rms"),
    *("model.attention_bias=false", "model.vocab=257", "model.max_seq_len=64"),
    "model.rope={type: llama3, theta: 500.0, factor: 4.0, low_freq_factor: 1.0, "
    "high_freq_factor: 4.0, original_max_position_embeddings: 8}",
    *("data.seq_len=16", "data.args={seq_len: 16, vocab: 257}", "data.global_batch=8"),
    *("pipeline.microbatches=2", "precision.dtype=float64", "optim.clip=0.5", "train.steps=5"),
    *("optim.warmup_steps=0", "data.target=tests.train.sources:UnevenTokens"),
]
SMALL = ({"tensor": 4, "sp": 1}, {"pipe": 2, "tensor": 2}, {"data": 2, "tensor": 4, "zero": 1})
LAYOUTS = (
    *SMALL,
    *({"tensor": 2}, {"tensor": 2, "sp": 1}, {"tensor": 4}, {"tensor": 8, "sp": 1}, {"pipe": 2}),
    *({"data": 2, "zero": 3}, {"data": 2, "tensor": 4, "zero": 2}),
    *({"pipe": 2, "tensor": 4, "sp": 1}, {"data": 2, "pipe": 2, "tensor": 2, "sp": 1, "zero": 3}),
)


def cases():
    for layout in LAYOUTS:
        for tied in (True, False):
            marks = [] if layout in SMALL and tied else [pytest.mark.full]
            name = "x".join(f"{key}{size}" for key, size in layout.items())
            yield pytest.param(layout, tied, id=f"{name}{'-tied' * tied}", marks=marks)


@pytest.mark.few(1)
@pytest.mark.parametrize(("layout", "tied"), list(cases()))
def test_one_step_is_that_of_one_process(ranks, layout, tied):
    base = [*BASE, f"model.tied={str(tied).lower()}"]
    degrees = {axis: layout.get(axis, 1) for axis in ("data", "pipe", "tensor")}
    mine = [*base, *(f"parallel.{axis}={size}" for axis, size in degrees.items())]
    mine += [f"parallel.sequence_parallel={'sp' in layout}".lower()]
    mine += [f"parallel.zero={layout.get('zero', 0)}"]
    results = ranks(math.prod(degrees.values())).run(one_step, mine)
    expect_same(results, one_process(ranks, base))
