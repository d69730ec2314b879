"""A layer states what it sends, computes and keeps; its record on ranks has the same.

A call that nobody counted, or a count of a call that is gone, fails by the name of its layer.
"""

import json

import pytest

from tests.models.layer_numbers_ranks import Record, records
from tests.plan.test_traffic import AUTOCAST, BF16, CONFIGS, GPT, MOE, RUN, SP, TP

RANKS_IMPORT = ("tests.models.layer_numbers_ranks",)
BLOCKS = "train.recompute=blocks"
LLAMA = ("model.norm=rms", "model.mlp=swiglu", "model.kv_heads=2")
TELLING = [
    ("gpt", TP),
    ("gpt", TP, SP, *LLAMA, *AUTOCAST),
    ("gpt", TP, SP, *MOE, "model.moe.shared_hidden=8", BLOCKS),
    ("llama", TP, SP, *AUTOCAST),
    ("mixtral", TP, BLOCKS),
]
"""(model, settings, of which those without a section are of parallel), on two ranks."""
MORE = [
    ("gpt", "data=2"),
    ("gpt", "data=2", *AUTOCAST),
    ("gpt", "data=1", TP, SP, *BF16, "zero=1"),
    ("gpt", TP, *LLAMA, "model.position=learned"),
    ("gpt", TP, SP, *LLAMA, "model.position=learned", BLOCKS),
    ("gpt", TP, "model.vocab=67", "model.mlp_hidden=33"),
    ("gpt", TP, SP, *MOE, *AUTOCAST),
    ("gpt", TP, "precision.dtype=float64"),
    ("gpt", TP, *MOE, BLOCKS),
    ("llama", TP, BLOCKS),
    ("llama", "data=2"),
    ("gpt2", TP, SP),
    ("qwen3", TP, *AUTOCAST),
    ("mixtral", TP, *AUTOCAST),
    ("qwen3_moe", TP),
]


def overrides(case: tuple[str, ...], folder) -> list[str]:
    name, *settings = case
    full = [x if "." in x.partition("=")[0] else f"parallel.{x}" for x in settings]
    if name == "gpt":
        return [*GPT, *full]
    path = folder / f"{name}.json"
    path.write_text(json.dumps(CONFIGS[name]))
    return [*RUN, f"model.hf={path}", *full]


def expect_stated(case: tuple[str, ...], layers: list[Record]) -> None:
    for layer in layers:
        recorded, stated = layer.calls
        where = f"{' '.join(case)}: {layer.layer}"
        assert recorded == stated, (
            f"{where}: recorded, not stated {recorded - stated}; stated, not recorded "
            f"{stated - recorded}"
        )
        ran, counted = layer.forward_flops
        assert ran == counted, f"{where}: {ran} FLOPs forward, stated {counted}"
        if BLOCKS not in case:
            assert layer.backward_flops == 2 * ran, f"{where}: FLOPs backward"
        if layer.kept is not None:
            assert layer.kept[0] == layer.kept[1], f"{where}: kept bytes, stated {layer.kept[1]}"


def test_each_layer_states_what_it_sends_computes_and_keeps(ranks, tmp_path):
    found = ranks(2).run(records, [overrides(case, tmp_path) for case in TELLING])
    for rank in found:
        for case, layers in zip(TELLING, rank, strict=True):
            expect_stated(case, layers)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE, ids=" ".join)
def test_so_does_every_layout(ranks, tmp_path, case):
    for (layers,) in ranks(2).run(records, [overrides(case, tmp_path)]):
        expect_stated(case, layers)
