"""Options of NaiveDDP and ZeroOptimizer that make no sense are refused when one is made."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchdistpackage.ddp.comm_hooks import bf16_compress
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import CommError

SHARED = [
    ({"reduce_op": "mean"}, "reduce_op is 'mean'; use 'avg' or 'sum'"),
    ({"reduce_op": None}, "reduce_op is None; use 'avg' or 'sum'"),
    ({"reduce_op": dist.ReduceOp.SUM}, "reduce_op is .*; use 'avg' or 'sum'"),
    ({"num_grad_acc_iter": 0}, "num_grad_acc_iter is 0; give a whole number of 1 or more"),
    ({"num_grad_acc_iter": 1.5}, "num_grad_acc_iter is 1.5; give a whole number"),
    ({"bucket_cap_mb": -1}, "bucket_cap_mb is -1; give a number of MiB, or None"),
    ({"bucket_cap_mb": "4"}, "bucket_cap_mb is '4'; give a number of MiB"),
    ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb is nan; give a number of MiB"),
    ({"reduce_op": 1, "num_grad_acc_iter": 0}, "reduce_op is 1.*; num_grad_acc_iter is 0"),
]
DDP = [
    *SHARED,
    ({"comm_hook": None}, "comm_hook is None; use one of ddp/comm_hooks.py"),
    ({"module": [nn.Linear(2, 2)]}, "module is of type list; give a torch.nn.Module"),
    ({"reduce_dtype": "bf16"}, "reduce_dtype is 'bf16'; give a torch.dtype of floats, or None"),
    (
        {"reduce_dtype": torch.bfloat16, "comm_hook": bf16_compress},
        "reduce_dtype is torch.bfloat16, but comm_hook .* decides how gradients are sent; give one",
    ),
]
ZERO = [
    *SHARED,
    ({"stage": "1"}, "stage is '1'; use 1, 2 or 3"),
    ({"stage": 3, "module": None}, "stage 3 frees and gathers parameters while a module runs"),
    ({"wire_dtype": torch.int32}, "wire_dtype is torch.int32; give a torch.dtype of floats"),
    ({"reduce_dtype": torch.int8}, "reduce_dtype is torch.int8; give a torch.dtype of floats"),
    ({"master_dtype": "bf16"}, "master_dtype is 'bf16'; give a torch.dtype of floats"),
    ({"optimizer": [1]}, "optimizer is of type list; give an optimizer"),
    ({"module": nn.Linear(2, 2)}, "none of the optimizer's 2 parameters is in the module"),
]


def refusals() -> None:
    net = nn.Linear(2, 2)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    for options, text in DDP:
        with pytest.raises(ValueError, match=text):
            NaiveDDP(**{"module": net, **options})
    for options, text in ZERO:
        with pytest.raises(ValueError, match=text):
            ZeroOptimizer(**{"optimizer": inner, "module": net, **options})
    for make in (lambda: NaiveDDP(net, process_group="data"), lambda: zero_over(inner, net)):
        with pytest.raises(CommError, match="'data' is not a process group of this process"):
            make()
    # nothing of what was refused holds the parameters
    ddp = NaiveDDP(net)
    ddp(torch.ones(1, 2)).sum().backward()
    assert net.weight.grad is not None


def zero_over(inner: torch.optim.Optimizer, net: nn.Module) -> ZeroOptimizer:
    return ZeroOptimizer(inner, net, group="data")  # type: ignore[arg-type]


def test_options_that_make_no_sense_are_refused(ranks):
    ranks(2).run(refusals)
