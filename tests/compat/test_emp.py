"""easy-model-parallel's two programs with their import changed, and what its users could not do."""

from __future__ import annotations

import os

import pytest
from torchdistpackage.compat.emp.utils.config import BaseConfig

from torchdistpackage.errors import ConfigError, PlacementError


def two_leaves(devices: list[str]) -> tuple:
    """Two leaves on two devices meet on a third."""
    import torch

    import torchdistpackage.compat.emp as emp

    F = emp.DeviceFunctor(devices)
    device0, device1, device2 = (F.allocate_device() for _ in range(3))
    x1 = torch.tensor([[1.0, 2], [3, 4]], requires_grad=True)
    x2 = torch.tensor([[5.0, 6], [7, 8]], requires_grad=True)
    with F.under(device1):
        x3 = F(x1)
    with F.under(device2):
        x4 = F(x2)
    with F.under(device0):
        op = F(lambda a, b: torch.sum((a + b) ** 2))
    y = op(x3, x4)
    y.backward()
    return (
        repr(y),
        *(None if x.grad is None else x.grad.tolist() for x in (x1, x2)),
        [d.rank for d in (device0, device1, device2)],
        y.item(),
    )


@pytest.mark.parametrize("num", [1, 2, 3])
def test_the_first_example_has_its_numbers(ranks, num):
    results = ranks(num).run(two_leaves, ["cpu"] * num)
    expected = [[12.0, 16.0], [20.0, 24.0]]
    for rank, (text, first, second, placed, value) in enumerate(results):
        shown = "344.0" if rank == 0 else "0.0"
        assert text == f"DeviceManagedTensor(this_data={shown}, is_leaf=False, data_rank=0)"
        assert placed == [0, 1 % num, 2 % num]
        assert first == (expected if rank == placed[1] else None)
        assert second == (expected if rank == placed[2] else None)
        assert value == 344


def training(devices: list[str]) -> list[dict]:
    """Its second example, in float64, each step beside the plain program."""
    import torch
    from torch import nn

    import torchdistpackage.compat.emp as emp

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1, self.relu, self.l2 = nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)

        def forward(self, x):
            return self.l2(self.relu(self.l1(x)))[:, 0]

    torch.set_default_dtype(torch.float64)
    plain = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 3), Last()])
    xs, ys = torch.randn(100, 8), torch.randn(100)
    F = emp.DeviceFunctor(devices)
    device0, device1, device2 = (F.allocate_device() for _ in range(3))
    own = [nn.Linear(8, 2), nn.Linear(8, 3), Last()]
    for module, like in zip(own, plain, strict=True):
        module.load_state_dict(like.state_dict())
    with F.under(device1):
        f1 = F(own[0])
    with F.under(device2):
        f2 = F(own[1])
    with F.under(device0):
        cat = F(lambda a, b: torch.cat([a, b], dim=1))
        last = F(own[2])
        loss_fn = F(lambda a, b: torch.mean((a - b) ** 2))
    parameters = [p for module in (f1, f2, last) for p in module.parameters()]
    optimizer = F.optimizer(torch.optim.Adam, (f1, f2, last), lr=1e-2)
    expected = torch.optim.Adam(plain.parameters(), lr=1e-2)
    for begin in range(0, 100, 10):
        x, y = xs[begin : begin + 10], ys[begin : begin + 10]
        with F.under(device0):
            mx, my = F(x), F(y)
        loss = loss_fn(last(cat(f1(mx), f2(mx))), my)
        loss.backward()
        error = ((plain[2](torch.cat([plain[0](x), plain[1](x)], dim=1)) - y) ** 2).mean()
        error.backward()
        assert abs(loss.item() - error.item()) < 1e-12
        for mine, like in zip(own, plain, strict=True):
            for p, q in zip(mine.parameters(), like.parameters(), strict=True):
                if any(p is one for one in parameters):
                    torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
    F.finish()
    return [type(m.module).__name__ for m in (f1, f2, last)]


@pytest.mark.parametrize("num", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 4))])
def test_the_second_example_trains_as_one_process(ranks, num):
    results = ranks(num).run(training, ["cpu"] * num)
    holders = [1 % num, 2 % num, 0]
    for rank, found in enumerate(results):
        names = ["Linear", "Linear", "Last"]
        assert found == [
            name if rank == holder else "EmptyModule"
            for name, holder in zip(names, holders, strict=True)
        ]


def by_hand() -> None:
    """Its classes made by hand, its functor's errors, and its nodes for other ranks."""
    import torch
    import torch.distributed as dist
    from torchdistpackage.compat.emp.core import (
        Device,
        DeviceManagedCallable,
        DeviceManagedModule,
        DeviceManagedOperation,
        DeviceManagedTensor,
    )
    from torchdistpackage.compat.emp.core.distributed import receive_tensor, send_tensor
    from torchdistpackage.compat.emp.core.function import EmptyModule, empty_fn, to_rank_fn

    from torchdistpackage.compat import emp

    rank = dist.get_rank()
    F = emp.DeviceFunctor(["cpu", "cpu"])
    places = [F.allocate_device() for _ in range(4)]
    assert [(d.rank, d._device) for d in places] == [(0, "cpu"), (1, "cpu")] * 2
    assert places[0] == Device("cpu", 0) and DeviceManagedOperation is DeviceManagedCallable
    with pytest.raises(ValueError, match="You must be under a device context"):
        F(torch.zeros(1))
    with F.under(places[0]) as same:
        assert same is F and F.in_context()
        with F.under(places[1]):
            assert F.context_device is places[1]
        assert F.context_device is places[0]  # it lost the outer one
        with pytest.raises(ValueError, match="only to leaf tensors"):
            F(torch.ones(1, requires_grad=True) * 2)
        with pytest.raises(TypeError, match="Object must be a tensor"):
            F(3)
    assert not F.in_context()
    counter = F.to_device_counter
    x = torch.ones(2, requires_grad=True)
    tensor = DeviceManagedTensor(x, Device("cpu", 1), counter)
    linear = torch.nn.Linear(2, 1, bias=False)
    module = DeviceManagedModule(linear, Device("cpu", 0), counter)
    operation = DeviceManagedCallable(lambda a: a.sum(), Device("cpu", 1), counter)
    assert tensor.to_device(Device("cpu", 1)) is tensor and tensor.to_device_counter is counter
    assert list(module.parameters()) == (list(linear.parameters()) if rank == 0 else [])
    with pytest.raises(ValueError, match="Tensor must be wrapped in DeviceManagedTensor"):
        operation(torch.ones(1))
    result = operation(module(tensor))
    assert isinstance(result, DeviceManagedTensor)
    result.backward()
    with pytest.raises(ValueError, match="Cannot call backward on a leaf tensor"):
        tensor.backward()
    assert (x.grad is None) == (rank == 0)
    F.finish()

    moved = to_rank_fn(torch.arange(3.0, requires_grad=True), 0, 1, tag=3)
    assert moved.tolist() == ([0.0, 1, 2] if rank == 1 else 0.0)
    leaf = torch.arange(6.0).reshape(2, 3).requires_grad_()
    out = to_rank_fn(leaf, 0, 1)
    (out * torch.arange(6.0).reshape(3, 2).t() if rank == 1 else out).sum().backward()
    assert torch.equal(leaf.grad, torch.arange(6.0).reshape(3, 2).t() * (rank == 0))
    labels = to_rank_fn(torch.arange(3), 1, 0)
    assert not labels.requires_grad or rank == 1
    empty = EmptyModule()([leaf, {"k": leaf}], 3)
    assert empty.requires_grad and not empty_fn(torch.ones(1)).requires_grad
    for dtype in (torch.float16, torch.complex64, torch.bool, torch.float8_e5m2, torch.int64):
        whole = torch.arange(12).reshape(3, 4).to(torch.float32).to(dtype)
        real = (lambda x: x.real) if dtype.is_complex else torch.Tensor.float
        if rank == 0:
            send_tensor(whole.t(), 1, tag=2**30)
            send_tensor(whole[0, 0], 1, debug=True)
        else:
            came = receive_tensor(0, tag=2**30)
            assert came.dtype is dtype and torch.equal(real(came), real(whole.t()))
            assert receive_tensor(0, debug=True).shape == ()
    for wrong in (5, -1, "1"):
        with pytest.raises(PlacementError, match="not one of the 2 ranks; use 0 to 1"):
            send_tensor(leaf, wrong)
        with pytest.raises(PlacementError, match=r"to_rank_fn: rank .* is not one of the 2 ranks"):
            to_rank_fn(leaf, 0, wrong)
    with pytest.raises(PlacementError, match=f"receive_tensor: rank {rank} is this rank itself"):
        receive_tensor(rank)
    for wrong in (3, torch.eye(2).to_sparse(), torch.ones(1, device="meta")):
        with pytest.raises(PlacementError, match="only dense tensors with memory"):
            send_tensor(wrong, 1 - rank)


def test_its_names_by_hand(ranks):
    ranks(2).run(by_hand)


def settings(**fields):
    """A dataclass on BaseConfig with these fields: name = (type, default)."""
    import dataclasses

    made = [
        (name, kind, dataclasses.field(default=default)) for name, (kind, default) in fields.items()
    ]
    return dataclasses.make_dataclass("Settings", made, bases=(BaseConfig,))


def test_a_configuration_from_the_environment(monkeypatch):
    fields = {"batch": (int, 1), "alpha": (float | None, 0.5), "name": (str, "a")}
    fields |= {"on": (bool, False), "lr": (float, 1.0)}
    make = settings(**fields)
    for name, value in {"batch": "8", "alpha": "None", "on": "True", "lr": "2e-3"}.items():
        monkeypatch.setenv(f"MLCONFIG_{name}", value)
    monkeypatch.setenv("LOCAL_RANK", "3")  # under a launcher it had no such field to set
    made = make()
    assert (made.batch, made.alpha, made.name, made.on, made.lr) == (8, None, "a", True, 2e-3)
    assert settings(**fields, local_rank=(int, -1))().local_rank == 3


def test_all_wrong_variables_are_named_at_once(monkeypatch):
    monkeypatch.setenv("MLCONFIG_batch", "many")
    monkeypatch.setenv("MLCONFIG_on", "yes")
    monkeypatch.setenv("MLCONFIG_btach", "3")
    with pytest.raises(ConfigError) as caught:
        settings(batch=(int, 1), on=(bool, False))()
    for part in ("btach=3", "MLCONFIG_batch", "MLCONFIG_batch=many: no int", "MLCONFIG_on=yes"):
        assert part in str(caught.value)


def test_a_configuration_is_printed_and_read_again(monkeypatch, capsys):
    made = settings(batch=(int, 1), alpha=(float | None, None))()
    made.print_fields()
    assert (
        capsys.readouterr().out == "Settings: Fields:\nbatch: int = 1\nalpha: float | None = None\n"
    )
    monkeypatch.setenv("MLCONFIG_batch", "4")
    made.update_based_on_env_vars()
    assert made.batch == 4
    monkeypatch.setenv("MLCONFIG_beta", "4")
    with pytest.raises(ConfigError, match="MLCONFIG_beta=4; there are MLCONFIG_batch, MLCONFIG_al"):
        made.verify_unknown_env_vars()


def test_where_the_logs_go_follows_the_environment(monkeypatch, tmp_path):
    import torchdistpackage.compat.emp as emp

    monkeypatch.setenv("EMP_LOG_LEVEL", "debug")
    monkeypatch.setenv("EMP_DATA_DIR", str(tmp_path))
    assert tmp_path == emp.DATA_DIR
    assert tmp_path / "logs" == emp.LOG_DIR
    assert emp.default_log_level == "DEBUG"


def test_logging_has_a_file_for_each_rank(tmp_path, monkeypatch):
    import logging

    from torchdistpackage.compat.emp.utils.log import setup_logging

    monkeypatch.setenv("EMP_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("EMP_LOG_LEVEL", "WARNING")
    monkeypatch.setenv("RANK", "2")
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        (path,) = setup_logging(output_files=["run.log"], file_levels=[logging.INFO])
        logging.getLogger("mine").info("hello from here")
        added = [h for h in root.handlers if h not in before]
        assert path == tmp_path / "logs" / "run-rank2.log"
        assert "rank2 INFO mine" in path.read_text(encoding="utf-8")
        assert added[0].level == logging.WARNING
        monkeypatch.setenv("EMP_LOG_LEVEL", "LOUD")
        with pytest.raises(ConfigError, match="EMP_LOG_LEVEL is 'LOUD'; set it to"):
            setup_logging()
        with pytest.raises(ConfigError, match="2 output_files but 1 file_levels"):
            setup_logging(output_files=["a", "b"], file_levels=[10])
    finally:
        for handler in [h for h in root.handlers if h not in before]:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)


def traced(devices: list[str]) -> float:
    import torch

    import torchdistpackage.compat.emp as emp

    two = two_leaves(devices)
    draw = (torch.rand(()).item(), os.environ["EMP_LOG_LEVEL"])
    assert emp.launch is not None
    return two[-1], draw


def test_launch_gives_results_seeds_alike_and_traces_gradients(forks, capfd, monkeypatch):
    import torchdistpackage.compat.emp as emp

    monkeypatch.setenv("DEBUG_BACKWARD", "1")
    monkeypatch.setenv("EMP_LOG_LEVEL", "INFO")
    first, second = emp.launch(traced, ["cpu", "cpu"], 7)
    assert first == second and first[0] == 344
    shown = capfd.readouterr()
    assert "sending gradients [(2, 2)] of operation" in shown.out + shown.err
    with pytest.raises(PlacementError, match="exactly 1 argument but got 0"):
        emp.launch(lambda: None, ["cpu"])
