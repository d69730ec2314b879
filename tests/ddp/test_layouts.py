"""NaiveDDP with layouts: partial sums and replicas of a parallel model, in your own loop."""

import pytest
import torch
import torch.distributed as dist

from tests.train import parity
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.layout.derive import blocks
from torchdistpackage.models.gpt import GPT
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.parallel.tensor.init import initialize


def gradients(data: int, tensor: int, reduce_op: str) -> parity.Held:
    tpc.setup_process_groups([("data", data), ("tensor", tensor)])
    shape = GPTShape(2, 8, 2, 17, 6, sequence_parallel=tensor > 1)
    model = GPT(shape, dtype=torch.float64)
    mesh, rank = tpc.topology.dense, dist.get_rank()
    initialize(model, model.layouts(), mesh, rank, 3)
    ddp = NaiveDDP(model, reduce_op=reduce_op, layouts=model.layouts(), bucket_cap_mb=0.001)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(17, (4, 7), generator=draw)
    mine = ids.chunk(data)[tpc.get_dp_rank()]
    for _ in range(2):
        ddp.zero_grad()
        total, count = model.loss(ddp(mine[:, :-1]), mine[:, 1:])
        (total / (count if reduce_op == "avg" else count * data)).backward()
    return [
        (layout.name, layout.shape, where, dict(model.named_parameters())[name].grad[local].clone())
        for name, layout in model.layouts().items()
        for where, local in blocks(layout, mesh, rank)
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("reduce_op", ["avg", "sum"])
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_partial_and_replicated_gradients_become_those_of_one_process(ranks, degrees, reduce_op):
    truth = parity.whole(ranks(1).run(gradients, 1, 1, "avg"))
    mine = parity.whole(ranks(degrees[0] * degrees[1]).run(gradients, *degrees, reduce_op))
    assert mine.keys() == truth.keys()
    for name, grad in truth.items():
        torch.testing.assert_close(mine[name], grad, rtol=0, atol=1e-12)
