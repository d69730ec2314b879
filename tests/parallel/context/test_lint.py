"""The order of calls is one that NCCL runs: a batch a hop, no tags, no circle of waits."""

import pytest
import torch

from torchdistpackage import lint
from torchdistpackage.parallel import context_attention, gather_sequence, shard_sequence


def attend(rank: int, way: str, size: int) -> None:
    q, k, v = (torch.randn(1, 4, 4 * size, 8) for _ in range(3))
    parts = [shard_sequence(x, 2).requires_grad_() for x in (q, k, v)]
    out = context_attention(*parts, is_causal=True, comm_type=way, a2a_size=2)
    gather_sequence(out, 2).sum().backward()


@pytest.mark.parametrize(
    ("way", "axes"),
    [
        ("p2p", [("data", 2), ("context", 3)]),
        ("all_gather", [("context", 2)]),
        ("a2a", [("context", 2)]),
        ("a2a+p2p", [("context", 4)]),
    ],
)
def test_the_linter_accepts_the_order_of_calls(way, axes):
    size = dict(axes)["context"]
    report = lint(lambda rank: attend(rank, way, size), axes)
    assert report.ok, report.finding.text
