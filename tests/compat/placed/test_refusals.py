"""Mistakes in placed programs: refused with what, where, and what to change."""

from __future__ import annotations

import os

import pytest

from tests.compat.placed.test_programs import at, functor
from tests.tells import facts_pattern
from torchdistpackage.errors import PlacementError, RankError


def mixed() -> None:
    """Arguments that have no place, or several; outputs that are not what was said."""
    import torch

    from torchdistpackage.compat.placed import DeviceFunctor

    F, (a, b, _), rank = functor()
    add = at(F, a, torch.add)
    with pytest.raises(PlacementError, match=r"add on cpu of rank 0: Tensor must.*\(2,\)"):
        add(at(F, a, torch.zeros(2)), [torch.zeros(2)])
    with pytest.raises(PlacementError, match=facts_pattern("rank 0", "rank 1")):
        torch.cat([at(F, a, torch.zeros(2)), at(F, b, torch.zeros(2))])
    with pytest.raises(PlacementError, match=r"under\(\) takes a place"), F.under("cpu"):
        pass
    for wrong in ([0, 5], [], [1, 1], None, 0.5):
        with pytest.raises(PlacementError, match=r"name different ranks out of \[0, 1\]"):
            F.place(wrong)
    with pytest.raises(PlacementError, match="rank 1 has no device cuda:3; it has cpu"):
        F.place(1, "cuda:3")
    with pytest.raises(PlacementError, match="'foo' is not a device"):
        F.place(1, "foo")
    with pytest.raises(PlacementError, match="does not fit into the 2 ranks"):
        F.allocate_device(3)
    with pytest.raises(PlacementError, match=facts_pattern("3 devices", "2 ranks")):
        DeviceFunctor(["cpu"] * 3)
    with pytest.raises(PlacementError, match="'tpu:0'") as caught:
        DeviceFunctor(["tpu:0", "mps"])
    assert "'mps'" in str(caught.value)  # all at once
    with pytest.raises(PlacementError, match=r"rank 1: 'cuda:9' is not there") as caught:
        DeviceFunctor(["cpu", "cuda:9"])  # on every rank
    whole = torch.nn.Module()
    whole.weight = torch.nn.Parameter(torch.empty(2, device="meta"))
    meta = torch.nn.Sequential(whole)
    with (
        pytest.raises(PlacementError, match=r"modules \['0'\].*no reset_parameters")
        if rank in a.ranks
        else _fine()
    ):
        at(F, a, meta)
    pair = at(F, a, lambda x, n: x.split(2))
    first, second = pair(at(F, a, torch.zeros(4)), 2)
    assert (first.full().shape, second.full().shape) == ((2,), (2,))
    with (
        pytest.raises(PlacementError, match=r"gave 3 parts .*dynamic=True")
        if rank in a.ranks
        else _fine()
    ):
        len(pair(at(F, a, torch.zeros(6)), 2))
    loose = at(F, a, lambda x: x.split(2), dynamic=True)
    assert [len(loose(at(F, a, torch.zeros(n)))) for n in (2, 4, 6)] == [1, 2, 3]
    with pytest.raises(PlacementError, match=r"no part 7; .*\[0, 1\]"):
        loose(at(F, a, torch.zeros(4)))[7]
    with (
        pytest.raises(PlacementError, match="begins at one tensor") if rank in a.ranks else _fine()
    ):
        loose(at(F, a, torch.zeros(4, requires_grad=True))).backward()
    with pytest.raises(AttributeError, match=r"no 'shape' on every rank: .tensor.shape"):
        at(F, a, torch.zeros(2)).shape  # noqa: B018
    with pytest.raises(AttributeError, match=r"a part of an output is x\['logits'\]"):
        at(F, a, torch.zeros(2)).logits  # noqa: B018
    F.finish()


def _fine():
    import contextlib

    return contextlib.nullcontext()


def test_what_does_not_go_together_is_refused(ranks):
    ranks(2).run(mixed)


def another_path(how: str) -> str:
    import torch

    os.environ["TDP_PLACED_DEBUG"] = "1"
    F, (a, b, _), rank = functor()
    x = at(F, a, torch.ones(2))
    double, triple = at(F, b, lambda t: t * 2), at(F, b, torch.neg)
    with pytest.raises(PlacementError) as caught:
        if how == "other" and rank == 1:
            triple(x)
        elif how == "place" and rank == 1:
            at(F, a, torch.neg)(x)
        elif how != "fewer" or rank == 0:
            double(x)
        F.finish()
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "rank0", "rank1"),
    [
        ("other", "<lambda> on cpu of rank 1, which reads 1", "neg on cpu of rank 1"),
        ("place", "<lambda> on cpu of rank 1", "neg on cpu of rank 0"),
        ("fewer", "<lambda> on cpu of rank 1", "the end of the program"),
    ],
)
def test_the_debug_mode_names_the_first_operation_that_differs(ranks, how, rank0, rank1):
    first, second = ranks(2).run(another_path, how)
    assert first == second and "different paths at operation 2: " in first
    assert f"rank 0: {rank0}" in first and f"rank 1: {rank1}" in first
    assert first.count("test_refusals.py:") == 2


def out_of_step() -> None:
    """Without the debug mode what comes is known by its number."""
    import torch

    F, (a, b, _), rank = functor()
    x = at(F, a, torch.ones(2))
    if rank == 1:
        at(F, b, torch.ones(1))
    at(F, b, torch.neg)(x)
    F.finish()


def test_a_message_for_another_operation_is_refused(ranks):
    with pytest.raises(RankError, match=facts_pattern("operation 2", "3 waits")):
        ranks(2).run(out_of_step)


def unsendable() -> None:
    import torch

    F, (a, b, _), rank = functor()
    made = at(F, a, lambda: {"fine": torch.ones(1), "not": object()})()
    assert at(F, a, lambda d: d["fine"])(made).item() == 1  # on its place it may be anything
    assert at(F, b, torch.neg)(made["fine"]).item() == -1
    with (
        pytest.raises(PlacementError, match="a object is part of what moves")
        if rank == 0
        else _fine()
    ):
        if rank == 0:
            at(F, b, lambda d: d)(made)


def test_what_another_rank_could_not_make_does_not_move(ranks):
    ranks(2).run(unsendable)


def test_bad_lists_of_devices():
    from torchdistpackage.compat.placed.place import devices_by_rank

    for wrong in (None, "nowhere"):
        with pytest.raises(PlacementError, match=f"{wrong!r} is not a device"):
            devices_by_rank([wrong], 1)
    for wrong in ("cpu", [], None, 3):
        with pytest.raises(PlacementError, match="devices must be a list"):
            devices_by_rank(wrong, 1)
    with pytest.raises(PlacementError, match=r"ranks \[1\] have no device"):
        devices_by_rank([["cpu"], []], 2)
    assert [len(one) for one in devices_by_rank([["cpu"] * 2, "cpu"], 2)] == [2, 1]
    assert [len(one) for one in devices_by_rank(["cpu"] * 6, 2)] == [3, 3]


def call(what: str, F, one):
    """A mistake with the managed module `one`, whose weights are 3 x 3."""
    import torch

    from torchdistpackage.compat.placed import PlacedPipeline

    y = at(F, F.place(0), torch.sin)(at(F, F.place(0), torch.ones(3, requires_grad=True)))
    with F.under(F.place(0)):
        {
            "to_device": lambda: y.to_device("cpu"),
            "gradient": lambda: y.backward(1.0),
            "build": lambda: F.build(3),
            "made": lambda: F.build(dict),
            "optimizer": lambda: F.optimizer(torch.optim.SGD, "weights", lr=0.1),
            "parameters": lambda: F.optimizer(torch.optim.SGD, [one, 3], lr=0.1),
            "groups": lambda: F.optimizer(torch.optim.SGD, [{"lr": 0.1}]),
            "chain": lambda: PlacedPipeline(one, num_microbatches=2),
        }[what]()


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("to_device", "takes a place .* not 'cpu'"),
        ("gradient", r"is a tensor, not a float; give torch.tensor\(1.0\)"),
        ("build", "a function that makes a module, not 3"),
        ("made", "dict made a dict, not a module"),
        ("optimizer", "not 'w'"),
        ("parameters", "not 3"),
        ("groups", "not None"),
        ("chain", "takes a list of managed modules"),
    ],
)
def test_what_is_of_another_kind_is_refused(what, text):
    import torch

    from torchdistpackage.compat.placed import DeviceFunctor

    F = DeviceFunctor(["cpu"])
    with pytest.raises(PlacementError, match=text):
        call(what, F, at(F, F.place(0), torch.nn.Linear(3, 3)))
