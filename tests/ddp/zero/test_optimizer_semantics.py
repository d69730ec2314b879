"""A ZeroOptimizer is an optimizer: whatever is done with one works as if nothing were sharded."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from tests.ddp.zero.plain_twin import (
    STEPS,
    Net,
    batch,
    build,
    equals_the_plain_one,
    loss_of,
    plain_loop,
)
from tests.ddp.zero.shared_out import assert_same
from torchdistpackage.comm.creation import world
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import CheckpointError, LayoutError
from torchdistpackage.optim.clip import clip_grad_norm_

# -- schedulers ----------------------------------------------------------------------------


def scheduled(net: nn.Module, optimizer: optim.Optimizer, x_of: Callable[[int], Tensor]) -> None:
    assert isinstance(optimizer, optim.Optimizer)
    lambdas = [lambda step: 1 / (1 + step), lambda step: 0.9**step]
    schedulers = [
        lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 3e-2], total_steps=STEPS + 1),
        lr_scheduler.LambdaLR(optimizer, lambdas),
    ]
    state = optimizer.state_dict()
    for step in range(STEPS):
        if step == STEPS // 2:
            optimizer.load_state_dict(state)  # new groups, which schedulers must find
        loss_of(net, x_of(step)).backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        optimizer.zero_grad()


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [{}, {"fused": True}], ids=str)
def test_schedulers_move_the_groups_that_are_stepped(ranks, more: dict):
    ranks(2).run(equals_the_plain_one, "AdamW", scheduled, more, {})


def scheduled_before() -> None:
    """A scheduler that was given the user's optimizer before it was sharded goes on working."""
    net = Net()
    inner = build("SGD", net)
    scheduler = lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
    optimizer = ZeroOptimizer(inner, net)
    loss_of(net, batch(0, 1)).backward()
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [2.5e-3, 5e-3]


def test_a_scheduler_made_before_sharding_counts(ranks):
    ranks(2).run(scheduled_before)


# -- how a step is made --------------------------------------------------------------------


def accumulated(net: nn.Module, optimizer: optim.Optimizer, x_of: Callable[[int], Tensor]) -> None:
    """Three backwards a step; of the sharded one, two of them send nothing."""
    for step in range(0, STEPS, 3):
        for part in range(3):
            if part == 0 and isinstance(optimizer, ZeroOptimizer):
                optimizer.reducer.hold()
            loss = loss_of(net, x_of(step + part))
            if part == 1 and isinstance(optimizer, ZeroOptimizer):
                optimizer.reducer.release()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_several_backwards_add_up(ranks, stage: int):
    ranks(2).run(equals_the_plain_one, "AdamW", accumulated, {}, {"stage": stage})


def zeroed(net: nn.Module, optimizer: optim.Optimizer, x_of: Callable[[int], Tensor]) -> None:
    """With zeros left behind a parameter is stepped, by its momentum, though nobody uses it."""
    for step in range(STEPS):
        loss = loss_of(net, x_of(step))
        if step < 3:
            loss = loss + net.spare(x_of(step)[..., :3]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def test_zeros_left_behind_are_stepped(ranks):
    ranks(2).run(equals_the_plain_one, "Adam", zeroed, {}, {})


def clipped(net: nn.Module, optimizer: optim.Optimizer, x_of: Callable[[int], Tensor]) -> None:
    for step in range(STEPS):
        loss_of(net, x_of(step)).backward()
        if isinstance(optimizer, ZeroOptimizer):
            assert clip_grad_norm_(optimizer, 1e-2) > 1e-2
        else:
            nn.utils.clip_grad_norm_(net.parameters(), 1e-2)
        optimizer.step()
        optimizer.zero_grad()


def test_clipping_is_by_the_norm_of_all_shards(ranks):
    ranks(2).run(equals_the_plain_one, "SGD", clipped, {}, {})


def with_closure(net: nn.Module, optimizer: optim.Optimizer, x_of: Callable[[int], Tensor]):
    calls: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, x_of(len(calls)))
        loss.backward()
        calls.append(loss.item())
        return loss

    with torch.no_grad():
        for step in range(STEPS):
            assert optimizer.step(closure).item() == calls[-1] and len(calls) == step + 1


def test_a_closure_is_called_once_with_gradients(ranks):
    ranks(2).run(equals_the_plain_one, "AdamW", with_closure, {}, {})


def halved(state: dict) -> dict:
    groups = [{**group, "lr": group["lr"] / 2} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def hooked() -> None:
    net, calls = Net(), []
    inner = build("AdamW", net)
    inner.register_step_pre_hook(lambda o, *_: calls.append(("inner before", o is inner)))
    optimizer = ZeroOptimizer(inner, net, bucket_cap_mb=1e-4)
    optimizer.register_step_pre_hook(lambda o, *_: calls.append(("before", o is optimizer)))
    optimizer.register_step_post_hook(lambda o, *_: calls.append(("after", o is optimizer)))
    inner.register_step_post_hook(lambda o, *_: calls.append(("inner after", o is inner)))
    assert optimizer.reducer.num_buckets > 3
    order = ["before", "inner before", "inner after", "after"]
    for step in range(2):
        loss_of(net, batch(step, 1)).backward()
        optimizer.step()
        assert calls == [(name, True) for name in order]
        calls.clear()
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "note": 7})
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("saves"))
    optimizer.register_load_state_dict_pre_hook(lambda o, state: calls.append(state["note"]))
    optimizer.register_load_state_dict_pre_hook(lambda o, state: halved(state))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["saves", 7, "loaded"]
    assert [group["lr"] for group in optimizer.param_groups] == [2.5e-3, 5e-3]


def test_hooks_run_once_a_step(ranks):
    ranks(2).run(hooked)


# -- what it has from before, and what it refuses ------------------------------------------


def wrapped_late() -> None:
    """State that the user's optimizer has by then is kept."""
    net, twin = Net(), Net()
    inner, reference = build("AdamW", net), build("AdamW", twin)
    plain_loop(net, inner, lambda step: batch(step, 2))
    plain_loop(twin, reference, lambda step: batch(step, 2))
    optimizer = ZeroOptimizer(inner, net)
    assert_same(optimizer.state_dict(), reference.state_dict())


def test_state_from_before_is_kept(ranks):
    ranks(2).run(wrapped_late)


def named() -> None:
    """Names that the user gave stay with the groups, and name parameters in errors."""
    net, twin = Net(), Net()
    optimizer = ZeroOptimizer(optim.AdamW(net.named_parameters()))
    reference = optim.AdamW(twin.named_parameters())
    for model, ours in ((net, optimizer), (twin, reference)):
        loss_of(model, batch(0, 1)).backward()
        ours.step()
    state, expected = optimizer.state_dict(), reference.state_dict()
    assert_same(state["param_groups"], expected["param_groups"])
    torch.testing.assert_close(state["state"], expected["state"], rtol=0, atol=1e-12)
    optimizer.load_state_dict(expected)
    assert_same(optimizer.state_dict(), expected)
    expected["state"][1]["exp_avg"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match=r"'exp_avg' of first\.weight has shape \(2,\)"):
        optimizer.load_state_dict(expected)


def test_named_parameters_keep_their_names(ranks):
    ranks(2).run(named)


def refusals() -> None:
    net = Net()
    optimizer = ZeroOptimizer(build("AdamW", net), net)
    with pytest.raises(LayoutError, match="give all groups to the optimizer before it is wrapped"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(CheckpointError, match=r"save its state_dict\(\)"):
        copy.deepcopy(optimizer)
    for name, reason in (("LBFGS", "as one vector"), ("SparseAdam", "rows")):
        other = Net()
        inner = getattr(optim, name)([other.scale], lr=1e-2)
        with pytest.raises(LayoutError, match=f"{name} cannot be sharded: .*{reason}"):
            ZeroOptimizer(inner, other)


def test_what_cannot_be_is_refused(ranks):
    ranks(1).run(refusals)


def unfrozen() -> None:
    net = Net()
    optimizer = ZeroOptimizer(build("AdamW", net), net)
    net.frozen.weight.requires_grad_()
    loss_of(net, batch(0, 1)).backward()
    with pytest.raises(LayoutError, match=r"^1 parameters were frozen .*: frozen.weight; freeze"):
        optimizer.step()
    net.frozen.requires_grad_(False)
    optimizer.step()


def test_a_parameter_that_is_no_longer_frozen_is_named(ranks):
    ranks(1).run(unfrozen)


def frozen_later(stage: int) -> None:
    net, me = Net(), world().rank()
    optimizer = ZeroOptimizer(build("AdamW", net, weight_decay=0.5), net, stage=stage)
    weights = []
    for step in range(3):
        loss_of(net, batch(step, 2)[me]).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.finish()
        weights.append((net.first.weight.clone(), net.last.weight.clone()))
        net.first.weight.requires_grad_(False)
    assert all(torch.equal(first, weights[0][0]) for first, _ in weights)
    assert not torch.equal(weights[1][1], weights[2][1])


@pytest.mark.few(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_that_is_frozen_later_stays_as_it_is(ranks, stage: int):
    ranks(2).run(frozen_later, stage)


# -- a run that changes its size -----------------------------------------------------------


def part_of_a_run(saved: bytes | None, first: int, last: int, stage: int) -> bytes | None:
    """Steps of a run on 12 rows a step, from what was saved to what is; stage 0 is not sharded."""
    me, size = world().rank(), world().size()
    net = Net()
    optimizer = build("AdamW", net)
    if stage:
        optimizer = ZeroOptimizer(optimizer, net, stage=stage)
    if saved is not None:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(first, last):
        loss_of(
            net, batch(step, 6).flatten(0, 1)[me * 12 // size : (me + 1) * 12 // size]
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    on_one = {"to": 0, "cpu": True} if stage else {}
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(**on_one)}
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue() if me == 0 else None


def test_a_run_goes_on_at_any_size_and_stage(ranks):
    saved = None
    for number, (size, stage) in enumerate([(4, 2), (1, 0), (3, 1), (1, 3), (2, 3)]):
        saved = ranks(size).run(part_of_a_run, saved, number * 4, number * 4 + 4, stage)[0]
    alone = ranks(1).run(part_of_a_run, None, 0, 20, 0)[0]
    ours, plain = (torch.load(io.BytesIO(file), weights_only=True) for file in (saved, alone))
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)
