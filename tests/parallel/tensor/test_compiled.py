"""Every parallel module under torch.compile: one graph, and the numbers of eager code.

The small set has what differs most: a pair of products, parts of uneven lengths, what looks at
ranks, draws, and is an operator of its own. The full set has every case, and inductor.
"""

import os
import re

import pytest
import torch
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code

from tests.each import each
from tests.parallel.tensor.compiled_cases import CASES, compared, made, step
from torchdistpackage.comm import collectives, primitives

SMALL = {
    "ParallelMlp, gated, sequence parallel": 1,
    "FeatureParallelEmbedding, sequence parallel": 2,
    "RowLinear, uneven": 1,
    "linear_cross_entropy, options": 1,
    "Dropout, split": 1,
}
"""And over how many shapes: each costs seconds."""
WITH_INDUCTOR = ["FeatureParallelEmbedding, sequence parallel", "ParallelMlp, uneven", "GPTBlock"]
"""Over three shapes; every other case over one."""
NUM_PARTS = 9
PARTS = [list(CASES)[part::NUM_PARTS] for part in range(NUM_PARTS)]
RANKS_IMPORT = ("torch._functorch.aot_autograd", "torch._inductor.compile_fx")


def check(name: str, backend: str, num_shapes: int = 3) -> None:
    breaks, recompiles, forward, backward = compared(name, backend, num_shapes)
    assert breaks == 0
    assert recompiles <= 2
    assert max(forward, backward) <= 1e-12, (forward, backward)


@pytest.mark.parametrize(
    ("names", "backend", "num_ranks"),
    [
        (SMALL, "aot_eager", 2),
        pytest.param(list(CASES), "aot_eager", 2, marks=pytest.mark.full),
        pytest.param(
            ["ParallelAttention, shared heads", *SMALL], "aot_eager", 4, marks=pytest.mark.full
        ),
        pytest.param(WITH_INDUCTOR, "inductor", 2, marks=pytest.mark.full),
        *(pytest.param(part, "inductor", 2, marks=pytest.mark.full) for part in PARTS),
    ],
    ids=["small", "all", "four", "inductor", *(f"inductor{part}" for part in range(NUM_PARTS))],
)
@pytest.mark.own_transport("a graph calls torch's collectives of its own groups")
def test_a_compiled_module_is_one_graph_with_the_numbers_of_eager(ranks, names, backend, num_ranks):
    num_shapes = 1 if names in PARTS else 3
    cases = [(name, backend, SMALL[name] if names is SMALL else num_shapes) for name in names]
    ranks(num_ranks).run(each, check, cases, timeout_s=600)


def check_export(name: str) -> None:
    """Of the forward: what an exported graph draws, and its gradients, are torch's."""
    module, inputs = made(name)
    module.eval()
    graph = torch.export.export(module, inputs[0]).module()
    torch.testing.assert_close(graph(*inputs[0]), module(*inputs[0]), rtol=0, atol=1e-12)


@pytest.mark.full
@pytest.mark.own_transport("a graph calls torch's collectives of its own groups")
def test_an_exported_module_has_the_numbers_of_eager(ranks):
    ranks(2).run(each, check_export, [(name,) for name in CASES], timeout_s=600)


def cached_by_the_other(folder: str) -> None:
    """Rank 1 compiles with the cache that rank 0 filled with a graph of its own place."""
    module, inputs = made("FeatureParallelEmbedding, sequence parallel")
    rank = primitives.world().rank()
    expected = step(module, list(module.parameters()), inputs[0])
    whole = collectives.all_gather(expected[0], 0, primitives.world())
    assert not torch.equal(*whole.chunk(2)), "the ranks have parts of their own"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True)
    found = step(compiled, list(module.parameters()), inputs[0])
    assert rank in (0, 1)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.full
@pytest.mark.own_transport("a graph calls torch's collectives of its own groups")
def test_ranks_may_share_a_cache_of_compiled_graphs(ranks, tmp_path):
    for _ in range(2):  # filled, then read
        ranks(2).run(cached_by_the_other, str(tmp_path), timeout_s=600)


def calls_in_order(reorder: bool) -> list[str]:
    """The collectives of the generated code of uneven parts, whose graphs differ between ranks."""
    module, inputs = made("ParallelMlp, uneven")
    torch._dynamo.reset()

    def run() -> None:
        step(torch.compile(module, fullgraph=True), list(module.parameters()), inputs[0])

    with inductor.patch(reorder_for_compute_comm_overlap=reorder):
        _, codes = run_and_get_code(run)
    return re.findall(r"_c10d_functional\.(\w+?)_?\.default\(", "\n".join(codes))


@pytest.mark.full
@pytest.mark.parametrize("reorder", [False, True])
@pytest.mark.own_transport("a graph calls torch's collectives of its own groups")
def test_the_collectives_of_a_graph_are_in_one_order_on_all_ranks(ranks, reorder):
    first, second = ranks(2).run(calls_in_order, reorder, timeout_s=600)
    assert first == second
    started = [call for call in first if call != "wait_tensor"]
    assert started[:2] == ["all_gather_into_tensor", "reduce_scatter_tensor"]
    assert started[2:] == ["all_gather_into_tensor", "reduce_scatter_tensor"]


def out_of_range(backend: str) -> None:
    module, inputs = made("VocabParallelEmbedding")
    torch._dynamo.reset()
    (ids,) = inputs[0]
    with pytest.raises(RuntimeError, match="ids hold values outside 0 to 30"):
        torch.compile(module, backend=backend, fullgraph=True)(ids + 31)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.own_transport("a graph calls torch's collectives of its own groups")
def test_a_graph_refuses_ids_outside_the_vocabulary(ranks, backend):
    ranks(2).run(out_of_range, backend)
