"""Collective methods that only some ranks call raise in time; late ranks are waited for."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from torchdistpackage.checkpoint.save import save
from torchdistpackage.comm import attendance
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.ema import ShardedEMA
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import CommError
from torchdistpackage.models.gpt import GPT
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.models.hugging_face_export import save_weights
from torchdistpackage.optim.clip import clip_grad_norm_
from torchdistpackage.parallel import ColumnLinear
from torchdistpackage.parallel.expert.layer import MoELayer

SHAPE = GPTShape(layers=1, dim=8, heads=2, vocab=8, seq_len=8)


def alone_and_together() -> tuple[dict[str, str], bool]:
    """Of each method what rank 0 was told alone, and whether all are well together."""
    tpc.setup_process_groups([("data", 2)])
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    zero = ZeroOptimizer(torch.optim.AdamW(model.parameters()), model, stage=1)
    freed = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    third = ZeroOptimizer(torch.optim.SGD(freed.parameters()), freed, stage=3, bucket_cap_mb=1e-5)
    split = ColumnLinear(4, 4, group=dist.new_group([0, 1]))
    (split.weight.sum() + split.bias.sum()).backward()
    calls: dict[str, Callable[[], object]] = {
        "ZeroOptimizer.state_dict()": lambda: zero.state_dict(to=0, cpu=True),
        "state_dict() of a module under ZeRO 3": freed.state_dict,
        "ShardedEMA.state_dict_cpu()": ShardedEMA(nn.Linear(4, 4)).state_dict_cpu,
        "to_full()": ColumnLinear(4, 4, group=tpc.get_group("data")).to_full,
        "MoELayer.to_full()": MoELayer(4, 4, 2, group=tpc.get_group("data")).to_full,
        "save() of a checkpoint": lambda: save(
            "never-there", step=1, tokens=0, params=model, topology=tpc.topology, rank=tpc.rank
        ),
        "save_weights()": lambda: save_weights(GPT(SHAPE), "never-there"),
        "clip_grad_norm_()": lambda: clip_grad_norm_(zero, 1.0),
        "clip_grad_norm_() of torch": lambda: nn.utils.clip_grad_norm_(split.parameters(), 1.0),
    }
    told: dict[str, str] = {}
    before = attendance.LIMIT_S, attendance.FIRST_CALL_LIMIT_S
    attendance.LIMIT_S = attendance.FIRST_CALL_LIMIT_S = 0.3
    try:
        for name, call in calls.items() if dist.get_rank() == 0 else ():
            try:
                call()
                told[name] = "nothing"
            except CommError as error:
                told[name] = str(error)
        dist.barrier()
        attendance._calls.clear()  # what was called alone counts no more
        names = [f"{name} again" for name in calls]
        # rank 0 may be saving something by itself, longer than others would be waited for
        time.sleep(0.6 if dist.get_rank() == 0 else 0)
        for name in names:
            attendance.expect_all(name, dist.group.WORLD)
    finally:
        attendance.LIMIT_S, attendance.FIRST_CALL_LIMIT_S = before
    attendance._calls.clear()
    third.remove()
    return told, True


def test_a_collective_method_of_some_ranks_alone_says_what_to_do(ranks):
    (told, _), (nothing, well) = ranks(2).run(alone_and_together)
    assert not nothing and well and len(told) == 9
    for name, text in told.items():
        method = name.removesuffix(" of torch")
        assert text.startswith(f"{method} is collective") and "(ranks 1)" in text
        assert "call it on all ranks" in text
