"""Pipelines, clipping and training's reducers ask a protocol, so a tree without ZeRO has them.

In the small set `tests/test_layers.py` looks at what they import.
"""

import subprocess
import sys

import pytest

from tests.package_files import ROOT

PROGRAM = """
import sys

class NoZero:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torchdistpackage.ddp.zero"):
            raise ModuleNotFoundError(f"{name} is not in this tree", name=name)

sys.meta_path.insert(0, NoZero())

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from torchdistpackage import GradScaler, NaiveDDP, Pipeline, clip_grad_norm_

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
net, x, y = nn.Linear(4, 3).double(), torch.randn(6, 4).double(), torch.tensor([0, 1, 2] * 2)
twin = nn.Linear(4, 3).double()
twin.load_state_dict(net.state_dict())

def counted(out, targets):
    return cross_entropy(out, targets, reduction="sum"), torch.tensor(len(targets))

wrapped = NaiveDDP(net)
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), GradScaler(init_scale=1.0)
pipe = Pipeline(wrapped, loss=counted, num_microbatches=3, group=dist.group.WORLD)
for _ in range(2):
    optimizer.zero_grad()
    loss = pipe.step(x, targets=y)
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(net.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    twin.zero_grad()
    cross_entropy(twin(x), y).backward()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    torch.testing.assert_close(norm, expected)
    with torch.no_grad():
        for p in twin.parameters():
            p -= 0.1 * p.grad
torch.testing.assert_close(net.state_dict(), twin.state_dict())
print("stepped", not any(m.startswith("torchdistpackage.ddp.zero") for m in sys.modules))
dist.destroy_process_group()
"""


@pytest.mark.full
def test_a_tree_without_zero_trains_a_pipeline_and_clips():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "stepped True\n", done.stderr
