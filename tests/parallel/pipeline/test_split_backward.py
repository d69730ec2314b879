"""The backward in two passes gives what it gives in one, to the bit, and each gradient once."""

import gc
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.pipeline.split_cases import CASES, Block, build, forward, microbatch
from torchdistpackage.parallel import deferred_wgrad
from torchdistpackage.parallel.pipeline import split_backward
from torchdistpackage.parallel.pipeline.split_backward import (
    Deferred,
    backward_input,
    backward_weight,
)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def expect_equal(mine: dict[str, Tensor | None], truth: dict[str, Tensor | None]) -> None:
    for name, grad in truth.items():
        assert (grad is None) == (mine[name] is None), name
        assert grad is None or torch.equal(mine[name], grad), name


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.full] if c == "compiled" else []) for c in CASES]
)
def test_two_passes_give_what_one_gives_to_the_bit(case):
    """Several microbatches, whose second passes come late; what waits is what was expected."""
    whole, split = build(case), build(case)
    waiting: list[Deferred] = []
    for m in range(3):
        x, y = microbatch(m, whole), microbatch(m, split)
        torch.autograd.backward(*forward(whole, x))
        waiting.append(backward_input(*forward(split, y), [y]))
        assert torch.equal(x.grad, y.grad)
    names = {id(p): name for name, p in split.named_parameters()}
    for deferred in waiting:
        assert sorted(names[i] for i in deferred.parameters) == sorted(CASES[case][1])
        backward_weight(deferred)
    expect_equal(gradients(split), gradients(whole))


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.full] if c == "compiled" else []) for c in CASES]
)
def test_each_parameter_gets_its_gradient_in_one_pass_and_its_hook_runs_once(case):
    module = build(case)
    fired: dict[str, list[str]] = {"I": [], "W": []}
    where = "I"
    for name, p in module.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda _, name=name: fired[where].append(name))
    x = microbatch(0, module)
    deferred = backward_input(*forward(module, x), [x])
    where = "W"
    backward_weight(deferred)
    assert sorted(fired["W"]) == sorted(CASES[case][1])
    got = [name for name, grad in gradients(module).items() if grad is not None]
    assert sorted(fired["I"] + fired["W"]) == sorted(got)


def test_the_second_pass_keeps_the_order_of_a_whole_backward(monkeypatch):
    """So buckets of gradients fill in it as they do in one; small ones may come together."""
    monkeypatch.setattr(split_backward, "AT_ONCE_BYTES", 1)
    module = build("two blocks")
    order: list[str] = []
    tasks: set[int] = set()

    def note(name: str) -> None:
        order.append(name)
        tasks.add(torch._C._current_graph_task_id())

    for name, p in module.named_parameters():
        if name in CASES["two blocks"][1] and name.endswith("weight"):
            p.register_post_accumulate_grad_hook(lambda _, name=name: note(name))
    x = microbatch(0, module)
    torch.autograd.backward(*forward(module, x))
    whole = order.copy()
    order.clear(), tasks.clear()
    backward_weight(backward_input(*forward(module, x), [x]))
    assert order == whole
    assert len(tasks) == len(order), "one after another, as memory for them is short"


def test_gradients_of_narrow_parameters_accumulate_in_the_dtype_of_grad():
    whole, split = build("block", torch.bfloat16), build("block", torch.bfloat16)
    for module in (whole, split):
        for p in module.parameters():
            p.grad_dtype = torch.float32
    for m in range(3):
        x, y = microbatch(m, whole), microbatch(m, split)
        torch.autograd.backward(*forward(whole, x))
        backward_weight(backward_input(*forward(split, y), [y]))
    assert split.up.weight.grad.dtype == torch.float32
    expect_equal(gradients(split), gradients(whole))


@pytest.mark.parametrize("case", ["block", "convolutions", "checkpoint", "saved on the host"])
def test_a_torch_that_does_not_tell_of_hooks_gives_the_same(monkeypatch, case):
    monkeypatch.setattr(deferred_wgrad, "_TELLS", False)
    test_two_passes_give_what_one_gives_to_the_bit(case)


def test_without_an_input_that_wants_a_gradient_everything_waits():
    whole, split = build("block"), build("block")
    x = microbatch(0, whole).detach()
    torch.autograd.backward(*forward(whole, x))
    deferred = backward_input(*forward(split, x), [])
    assert deferred.parameters is None
    assert all(grad is None for grad in gradients(split).values())
    backward_weight(deferred)
    expect_equal(gradients(split), gradients(whole))


def test_the_last_stage_starts_from_its_loss():
    whole, split = build("block"), build("block")
    x, y = microbatch(0, whole), microbatch(0, split)
    whole(x).square().mean().backward()
    backward_weight(backward_input([split(y).square().mean()], [torch.ones_like(y.mean())], [y]))
    assert torch.equal(x.grad, y.grad)
    expect_equal(gradients(split), gradients(whole))


def test_memory_goes_when_it_is_no_longer_needed():
    """After I: what only the way needed. After W: the rest. Neither waits for the collector."""
    module = build("block")
    kept: dict[str, weakref.ref] = {}

    def note(name: str) -> Callable:
        def hook(_, inputs: tuple, output: Tensor) -> None:
            kept[f"{name} in"] = weakref.ref(inputs[0].untyped_storage())
            kept[f"{name} out"] = weakref.ref(output.untyped_storage())

        return hook

    module.up.register_forward_hook(note("up"))
    module.down.register_forward_hook(note("down"))
    x = microbatch(0, module)
    gc.disable()
    try:
        deferred = backward_input(*forward(module, x), [x])
        there = {name for name, storage in kept.items() if storage() is not None}
        assert there == {"up in", "down in"}
        backward_weight(deferred)
        assert all(storage() is None for storage in kept.values())
    finally:
        gc.enable()


@pytest.mark.parametrize("case", [c for c in CASES if c != "compiled"])
def test_the_second_pass_needs_no_memory_of_parameters(case):
    """ZeRO 3 frees it in between, and fills it anew before the next forward."""
    whole, split = build(case), build(case)
    x, y = microbatch(0, whole), microbatch(0, split)
    torch.autograd.backward(*forward(whole, x))
    deferred = backward_input(*forward(split, y), [y])
    for p in split.parameters():
        p.data.untyped_storage().resize_(0)
    backward_weight(deferred)
    expect_equal(gradients(split), gradients(whole))


def test_checkpointed_code_runs_again_once():
    runs = []
    module = build("checkpoint")
    module.b.register_forward_pre_hook(lambda *_: runs.append(1))
    x = microbatch(0, module)
    outputs, grads = forward(module, x)
    runs.clear()
    backward_weight(backward_input(outputs, grads, [x]))
    assert len(runs) == 1


@pytest.mark.full
def test_it_costs_less_than_torchs():
    """Of blocks so small that only what surrounds the computation counts."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    module = nn.Sequential(*(Block() for _ in range(6)))

    def ours(x: Tensor) -> None:
        backward_weight(backward_input(*forward(module, x), [x]))

    def torchs(x: Tensor) -> None:
        weights = list(module.parameters())
        _, groups = stage_backward_input(*forward(module, x), [x], iter(weights))
        stage_backward_weight(iter(weights), groups)

    took: dict[Callable, list[float]] = {ours: [], torchs: []}
    for m in range(30):
        for how, times in took.items():
            x = microbatch(m, module)
            module.zero_grad()
            began = time.perf_counter()
            how(x)
            times.append(time.perf_counter() - began)
    assert min(took[ours]) < 0.85 * min(took[torchs])
