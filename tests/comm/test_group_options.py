"""Which groups get which options, and how NCCL is told."""

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.comm import creation, groups, runtime
from torchdistpackage.comm.backends import Transport
from torchdistpackage.comm.group_options import AXIS_OPTIONS, GroupOptions, merged, nccl_options
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.config.load import loads
from torchdistpackage.environment.rendezvous import Rendezvous
from torchdistpackage.errors import ConfigError
from torchdistpackage.launch.process import SignalFlag
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.testing import mirror
from torchdistpackage.train import build, worker
from torchdistpackage.train.build import group_options, world_options

HIGH = GroupOptions(high_priority=True)


class OptionsDouble:
    """Fields of `ProcessGroupNCCL.Options`, which a torch without CUDA lacks."""

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=-1)
        self._timeout = timedelta(minutes=10)


@pytest.fixture
def nccl(monkeypatch):
    if not hasattr(dist, "ProcessGroupNCCL"):
        double = SimpleNamespace(Options=OptionsDouble)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", double, raising=False)


@pytest.mark.usefixtures("nccl")
def test_nccl_is_told_of_what_differs_from_its_defaults():
    assert nccl_options(GroupOptions(), 60.0) is None
    made = nccl_options(GroupOptions(high_priority=True, max_ctas=8), 90.0)
    assert made.is_high_priority_stream and made.config.max_ctas == 8
    assert made._timeout == timedelta(seconds=90), "or torch warns of another one"
    made = nccl_options(HIGH, 60.0)
    assert made.config.max_ctas == dist.ProcessGroupNCCL.Options().config.max_ctas


def test_a_group_of_several_axes_has_what_one_of_them_needs():
    few, many = GroupOptions(max_ctas=4), GroupOptions(True, 16)
    assert merged([few, many]) == GroupOptions(True, 16)
    assert merged([many, GroupOptions()]) == HIGH
    assert merged([]) == GroupOptions()


def asked(expert: int, monkeypatch, **options) -> dict[tuple[int, ...], GroupOptions]:
    """By ranks what the groups of rank 0 of eight are made with."""
    found: dict[tuple[int, ...], GroupOptions] = {}
    make = groups.create

    def noted(ranks, *args, options, **kwargs):
        found[tuple(ranks)] = options
        return make(ranks, *args, options=options, **kwargs)

    monkeypatch.setattr(groups, "create", noted)
    with mirror(8):
        tpc.setup_process_groups([("data", 4), ("tensor", 2)], expert=expert, **options)
    return found


def test_groups_along_tensor_context_and_expert_go_first(monkeypatch):
    assert {*AXIS_OPTIONS} == {"tensor", "context", "expert"}
    assert asked(2, monkeypatch) == {
        (0, 2, 4, 6): GroupOptions(),  # data
        (0, 1): HIGH,  # tensor
        (0, 2): HIGH,  # expert
        (0, 4): GroupOptions(),  # replicas of experts
    }


def test_options_are_given_by_axis(monkeypatch):
    options = {"data": GroupOptions(max_ctas=16)}
    found = asked(1, monkeypatch, options=options)
    assert found == {(0, 2, 4, 6): options["data"], (0, 1): GroupOptions()}


@pytest.mark.usefixtures("nccl")
def test_torch_gets_them_for_groups_over_nccl_alone(monkeypatch):
    given: list[object] = []
    make = dist.new_group

    def without(*args, pg_options, **kwargs):
        given.append(pg_options)
        return make(*args, **kwargs)

    with mirror(4), monkeypatch.context() as patch:
        patch.setattr(dist, "new_group", without)
        creation.create([0, 1], options=HIGH)
        patch.setattr(creation, "transport_of", lambda group: Transport("late", queued=True))
        patch.setattr(dist, "get_backend", lambda group: "nccl")
        creation.create([0, 1], "again", options=HIGH, limit_s=70.0)
        creation.create([0, 1], "default")
        creation.create([0, 1], "companion", options=HIGH, backend="late")
    assert [x is None for x in given] == [True, False, True, True]
    assert given[1].is_high_priority_stream and given[1]._timeout.total_seconds() == 70


class Handed(Exception):
    """Ends a start once its groups would be made."""


def ends(given: dict[str, object]):
    def call(*args, **kwargs):
        given.update(kwargs)
        raise Handed

    return call


PLACE = Rendezvous(0, 4, 0, 4, 0, "127.0.0.1", (1,), "token", "test")


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_default_group_gets_them_over_nccl_alone(monkeypatch, backend):
    given: dict[str, object] = {}
    store, cpu = dist.HashStore(), torch.device("cpu")
    for name, answer in (
        ("_as_of", PLACE),
        ("_prepare_for_many", ""),
        ("_meet", (store, None, "")),
        ("_agree_on_device", (cpu, backend, (), "")),
        ("joins_within", nullcontext()),
    ):
        monkeypatch.setattr(runtime, name, lambda *_, answer=answer, **__: answer)
    monkeypatch.setattr(dist, "init_process_group", ends(given))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(Handed):
        runtime.join(PLACE, options=GroupOptions(True, 8), init_timeout_s=700.0)
    options: Any = given["pg_options"]
    if backend == "gloo":
        assert options is None
        return
    assert options.is_high_priority_stream and options.config.max_ctas == 8
    assert options._timeout == given["timeout"] == timedelta(seconds=700)


def test_a_run_hands_its_keys_to_the_default_group_and_to_those_of_the_axes(monkeypatch):
    text = "parallel: {tensor: 4, high_priority: [data], max_ctas: {data: 8, tensor: 4}}"
    config, given = loads(text), dict[str, object]()
    for name in ("add_user_code", "end_processes"):
        monkeypatch.setattr(worker, name, lambda *_: None)
    monkeypatch.setattr(worker, "detect", lambda env: PLACE)
    monkeypatch.setattr(worker, "join", ends(given))
    with pytest.raises(Handed):
        worker._join(config, "never", SignalFlag())
    assert given["options"] == GroupOptions(max_ctas=4)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    monkeypatch.setattr(type(build.tpc), "setup", ends(given))
    with pytest.raises(Handed):
        build.build_model(make_plan(config, 8), 0, torch.device("cpu"))
    assert given["options"] == {"data": GroupOptions(True, 8), "tensor": GroupOptions(max_ctas=4)}


def test_keys_say_which():
    text = "parallel: {tensor: 4, high_priority: [data], max_ctas: {data: 8, tensor: 4}}"
    config = loads(text)
    data, tensor = GroupOptions(True, 8), GroupOptions(max_ctas=4)
    assert group_options(config) == {"data": data, "tensor": tensor}
    # all ranks lie along tensor, and so the default group serves it
    assert world_options(make_plan(config, 4)) == tensor
    assert world_options(make_plan(config, 8)) == GroupOptions()
    assert group_options(loads("")) == AXIS_OPTIONS
    for wrong in ("high_priority: [model]", "max_ctas: {model: 4}", "max_ctas: {data: 0}"):
        with pytest.raises(ConfigError, match=r"out of data|mapping of axes"):
            loads(f"parallel: {{{wrong}}}")
