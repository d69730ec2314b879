"""What a stage keeps, by bytes: state, gradients until they have left, parameters while used."""

import pytest
import torch
from torch import Tensor, nn

from tests.ddp.zero.beside_one_process import DIM, adamw, batches
from torchdistpackage.comm.creation import world
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer

WIDTH, LAYERS = 64, 8


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return nn.Sequential(nn.Linear(DIM, WIDTH), *layers).double()


def held(tensors: list[Tensor]) -> int:
    """Bytes of the storages behind these, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def room(options: dict) -> tuple[int, int, int, int, int]:
    """Bytes: of whole parameters; of state; of gradients at most in a backward; of gradients and of
    parameters after a step."""
    net, size = build(), world().size()
    zero = ZeroOptimizer(adamw(net), net, bucket_cap_mb=0.04, **options)
    gradients = [bucket.bucket_comm.gradients.flat for bucket in zero._buckets]
    parameters = [bucket.parameters.flat for bucket in zero._buckets]
    most: list[int] = []
    zero.reducer.on_launch = lambda b: most.append(held(gradients))
    for x in batches(3, size):
        most.clear()
        zero.zero_grad()
        net(x.chunk(size)[world().rank()]).square().mean().backward()
        zero.step()
    tensors = [t for s in zero.state.values() for t in s.values() if t.dim()]
    whole = sum(p.numel() * p.element_size() for p in net.parameters())
    state = sum(t.numel() * t.element_size() for t in tensors)
    return whole, state, max(most), held(gradients), held(parameters)


@pytest.mark.few(3)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_keeps_what_it_says(ranks, size, stage):
    for whole, state, most, after, parameters in ranks(size).run(room, {"stage": stage}):
        assert state <= 2 * whole / size * 1.02
        bucket = (WIDTH + 1) * WIDTH * 8 * 1.06
        if stage == 1:
            assert after >= whole and parameters >= whole
        else:
            # the one that leaves, two expected after it, two on their way before it
            assert after == 0
            assert most <= 5 * bucket
        if stage == 3:
            assert parameters <= 2 * bucket, "the two that the next forward begins with"
