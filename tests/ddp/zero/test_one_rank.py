"""Over a group of one rank nothing is shared: ZeRO is the plain optimizer, bit for bit."""

import pytest
import torch
from torch import nn

from tests.each import each
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import LayoutError
from torchdistpackage.optim.clip import clip_grad_norm_


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3, bias=False))


def trained(stage: int, steps: int, state: dict | None = None, model=None):
    model = model or net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if stage:
        optimizer = ZeroOptimizer(optimizer, model, stage=stage, num_grad_acc_iter=2)
    if state is not None:
        optimizer.load_state_dict(state)
    norms = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for part in range(2):
            torch.manual_seed(10 * step + part)
            model(torch.randn(4, 6)).square().mean().backward()
        norms.append(clip_grad_norm_(optimizer if stage else model.parameters(), 0.5))
        optimizer.step()
    return model, optimizer, norms


def same_as_plain(stage: int) -> None:
    plain, inner, norms = trained(0, 3)
    ours, optimizer, found = trained(stage, 3)
    hooks = [p._post_accumulate_grad_hooks for p in ours.parameters()]
    assert not any(hooks) and optimizer.reducer.num_buckets == 0
    assert [s.tensor is s.parameter for s in optimizer.shards] == [True] * 3
    assert torch.equal(torch.stack(found), torch.stack(norms))
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a.grad, b.grad)
    with pytest.raises(LayoutError, match="3 of 3 parameters have an owner of their gradients"):
        ZeroOptimizer(torch.optim.AdamW(ours.parameters()), ours)
    state = optimizer.state_dict()
    optimizer.remove()
    with pytest.raises(LayoutError, match="was removed from its 3 parameters"):
        optimizer.step()
    again, *_ = trained(stage % 3 + 1, 2, state, ours)
    wanted, *_ = trained(0, 2, inner.state_dict(), plain)
    for a, b in zip(wanted.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.own_transport("one rank sends nothing")
def test_one_rank_steps_as_without_zero(ranks):
    ranks(1).run(each, same_as_plain, [(1,), (2,), (3,)])
