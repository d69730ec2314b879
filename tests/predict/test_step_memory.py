"""The memory of published runs, by kind, and their rows on the page."""

from dataclasses import replace

import pytest

from torchdistpackage.errors import ConfigError
from torchdistpackage.predict.error_table import memory_error
from torchdistpackage.predict.published import GPT_OSS, LLAMA2_70B
from torchdistpackage.predict.published_memory import MEMORY_ROWS, MEMORY_SOURCES
from torchdistpackage.predict.step_memory import step_memory
from torchdistpackage.predict.workload import StepLayout

LAYOUT = StepLayout(64, 4096, 1, 16, tensor=4, pipe=4, zero=1, sequence_parallel=True)


def total(layout: StepLayout) -> float:
    return sum(step_memory(LLAMA2_70B, layout).values())


def test_bytes_of_tensors_are_within_one_percent_and_of_the_allocator_within_ten():
    assert {row.source for row in MEMORY_ROWS} == {*MEMORY_SOURCES}
    bars = {"allocated": 0.01, "reserved": 0.1}
    missed = [row.title for row in MEMORY_ROWS if abs(memory_error(row)) > bars[row.counts]]
    assert not missed


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
