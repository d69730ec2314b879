"""What must arrive is what the operation makes of what is given, exactly, in every dtype."""

import pytest
import torch

from torchdistpackage.comm.collective_table import COLLECTIVES
from torchdistpackage.harness.bench.request import ELEMENT_BYTES
from torchdistpackage.harness.calls import expected, make_input

CPU = torch.device("cpu")
DTYPES = [getattr(torch, {"bf16": "bfloat16"}.get(name, name)) for name in ELEMENT_BYTES]


def carried_out(operation: str, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """What each rank has after the operation, worked out in one process in its own dtype."""
    size = len(inputs)
    if operation in ("all_reduce", "reduce_scatter"):
        total = inputs[0].clone()
        for x in inputs[1:]:
            total += x
        return list(total.chunk(size)) if operation == "reduce_scatter" else [total] * size
    if operation == "all_gather":
        return [torch.cat(inputs)] * size
    if operation == "all_to_all":
        pieces = [x.chunk(size) for x in inputs]
        return [torch.cat([pieces[j][i] for j in range(size)]) for i in range(size)]
    if operation == "broadcast":
        return [inputs[0]] * size
    return [None, inputs[0]] if operation == "p2p" else [inputs[1], inputs[0]]


@pytest.mark.few(12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", COLLECTIVES)
def test_what_is_expected_is_what_the_operation_makes(operation, dtype):
    for size in (2,) if COLLECTIVES[operation].is_message else (2, 3, 40):
        number = 4 * size
        kind = dtype, CPU
        inputs = [make_input(operation, range(size), i, number, kind) for i in range(size)]
        for i, out in enumerate(carried_out(operation, inputs)):
            wanted = expected(operation, range(size), i, number, kind)
            assert (out is None) == (wanted is None)
            if out is not None:
                assert wanted.dtype == dtype and torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16], ids=str)
def test_a_sum_over_a_thousand_ranks_is_still_exact_in_a_narrow_type(dtype):
    like, size = (dtype, CPU), 1000
    inputs = [make_input("all_reduce", range(size), i, 64, like) for i in range(size)]
    (out, *_) = carried_out("all_reduce", inputs)
    assert torch.equal(out, expected("all_reduce", range(size), 7, 64, like))
    assert len(out.unique()) > 20


@pytest.mark.parametrize("operation", ["all_gather", "broadcast", "all_to_all"])
def test_data_of_different_senders_differ(operation):
    """Or a rank that got its own data back would pass."""
    rows = [make_input(operation, range(300), i, 3000, (torch.int64, CPU)) for i in range(300)]
    assert len({tuple(row.tolist()) for row in rows}) == 300


@pytest.mark.few(5)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 64, 1000])
@pytest.mark.parametrize("operation", COLLECTIVES)
def test_what_is_moved_about_or_is_for_another_rank_is_found(operation, size):
    if COLLECTIVES[operation].is_message and size != 2:
        return
    like, number = (torch.bfloat16, CPU), 1000 * size
    mine, others = (expected(operation, range(size), i, number, like) for i in (size - 1, size - 2))
    torch.manual_seed(0)
    wrong = [mine[torch.randperm(len(mine))], mine.roll(5), mine.roll(128), torch.zeros_like(mine)]
    if operation in ("reduce_scatter", "all_to_all", "p2p_both"):
        wrong.append(others)
    assert all(float((x != mine).double().mean()) > 0.9 for x in wrong)
