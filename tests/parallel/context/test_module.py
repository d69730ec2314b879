"""`context_parallel(module)`: a module that calls torch's own attention, on parts of sequences."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchdistpackage import tpc
from torchdistpackage.comm import primitives
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel import context_parallel, gather_sequence, shard_sequence


class Layer(nn.Module):
    def __init__(self, mask: bool = False):
        super().__init__()
        self.qkv, self.mask = nn.Linear(8, 24, dtype=torch.float64), mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool) if self.mask else None
        how = {} if self.mask else {"is_causal": True}
        out = F.scaled_dot_product_attention(q, k, v, mask, **how)
        return x + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        # run again in the backward, where the forward of the whole model is over
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def wrapped(size: int) -> None:
    tpc.setup_process_groups([("context", size)])
    torch.manual_seed(0)
    plain, x = Model(), torch.randn(2, 6 * size + 1, 8, dtype=torch.float64)
    model = context_parallel(copy.deepcopy(plain))
    weight = torch.randn_like(x)
    truth = plain(x)
    (truth * weight).sum().backward()
    for one in (model, copy.deepcopy(model)):
        one.zero_grad()
        out = one(shard_sequence(x, 1))
        torch.testing.assert_close(gather_sequence(out, 1), truth, rtol=0, atol=1e-12)
        (out * shard_sequence(weight, 1)).sum().backward()
        for (name, p), q in zip(one.named_parameters(), plain.parameters(), strict=True):
            grad = primitives.all_reduce(p.grad.clone(), tpc.get_group("context"))
            torch.testing.assert_close(grad, q.grad, rtol=0, atol=1e-11, msg=name)
    q = torch.randn(1, 2, 4, 4)
    F.scaled_dot_product_attention(q, q, q, torch.ones(4, 4, dtype=torch.bool))  # outside: torch's
    with pytest.raises(LayoutError, match=r"a mask of shape \(4, 4\) is neither causal"):
        context_parallel(Layer(mask=True))(torch.randn(1, 4, 8, dtype=torch.float64))
    with pytest.raises(
        LayoutError, match="attend: the attention of MultiheadAttention does not call"
    ):
        context_parallel(nn.ModuleDict({"attend": nn.MultiheadAttention(8, 2)}))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_it_computes_what_the_module_does_on_the_whole(ranks, size):
    ranks(size).run(wrapped, size)
