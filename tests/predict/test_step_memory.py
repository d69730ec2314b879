"""The memory of published runs, by kind, and their rows on the page."""

from dataclasses import replace

import pytest

from torchdistpackage.errors import ConfigError
from torchdistpackage.predict.error_table import compare_memory
from torchdistpackage.predict.published import GPT_OSS, LLAMA2_70B
from torchdistpackage.predict.published_memory import MEMORY_SOURCES
from torchdistpackage.predict.step_memory import ALLOCATOR_SHARE, step_memory
from torchdistpackage.predict.workload import StepLayout

LAYOUT = StepLayout(64, 4096, 1, 16, tensor=4, pipe=4, zero=1, sequence_parallel=True)


def total(layout: StepLayout) -> float:
    return sum(step_memory(LLAMA2_70B, layout).values())


def test_bytes_of_tensors_are_within_one_percent_and_of_the_allocator_within_five():
    found = compare_memory()
    assert {x.row.source for x in found} == {*MEMORY_SOURCES}
    allocated = [x for x in found if x.allocated_error is not None]
    assert len(allocated) == 15
    assert not [x.row.title for x in allocated if abs(x.allocated_error or 0.0) > 0.01]
    held_out = [x for x in found if x.row.use == "check"]
    assert len(held_out) == 9
    assert not [x.row.title for x in held_out if abs(x.reserved_error) > 0.05]


def test_the_share_of_the_allocator_is_that_of_the_rows_to_fit():
    rows = [x.row for x in compare_memory() if x.row.use == "fit"]
    pairs = [(x.allocated, x.reserved - x.allocated) for x in rows if x.allocated is not None]
    share = sum(a * more for a, more in pairs) / sum(a * a for a, _ in pairs)
    assert round(share, 3) == ALLOCATOR_SHARE


def test_the_state_is_that_of_the_parameters_of_a_stage():
    kinds = step_memory(LLAMA2_70B, LAYOUT)
    block = LLAMA2_70B.attention_parameters + LLAMA2_70B.mlp_parameters
    number = (20 * block + LLAMA2_70B.vocab_parameters) / 4
    assert kinds["weights"] == 2 * number
    assert kinds["gradients"] == 4 * number
    assert kinds["optimizer state"] == 12 * number / 4


@pytest.mark.parametrize(
    "less",
    [
        {"recompute": "blocks"},
        {"seq_len": 2048},
        {"pipe": 8},
        {"tensor": 8},
        {"zero": 3, "pipe": 1},
    ],
    ids=str,
)
def test_what_saves_memory_saves_some(less: dict[str, object]):
    assert total(replace(LAYOUT, **less)) < total(LAYOUT)  # type: ignore[arg-type]


def test_chunks_keep_more_micro_batches():
    assert total(replace(LAYOUT, chunks=2)) > total(LAYOUT)


@pytest.mark.parametrize(
    ("sizes", "more", "named"),
    [
        (GPT_OSS, {}, "experts"),
        (LLAMA2_70B, {"recompute": "attention"}, "attention"),
        (LLAMA2_70B, {"lora": 16}, "adapters"),
        (LLAMA2_70B, {"pipe": 1, "tensor": 1, "ranks": 3, "chunks": 3}, "3 stages"),
    ],
)
def test_what_no_row_stands_for_is_refused(sizes, more, named):
    with pytest.raises(ConfigError, match=named):
        step_memory(sizes, replace(LAYOUT, **more))
