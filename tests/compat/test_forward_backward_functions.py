"""forward_backward with several functions a rank, backwards of one's own, and parted messages."""

import pytest
import torch
import torch.distributed as dist

from tests.parallel.pipeline.whole_model import batch, chain, same, same_gradients, squares
from torchdistpackage import forward_backward, forward_eval
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError
from torchdistpackage.schedule.generators import build


def functions_of(schedule, model, x, y):
    """(functions, inputs, {number: stage}) of this rank."""
    last = schedule.num_stages - 1
    numbers = schedule.stages_of(tpc.get_pp_rank())

    def of(s):
        def fwd_fn(given):
            h, *targets = given if isinstance(given, list) else [given]
            return squares(model[s](h), *targets) if s == last else model[s](h)

        return fwd_fn

    inputs = [x if s == 0 else y if s == last else None for s in numbers]
    return [of(s) for s in numbers], inputs, {s: model[s] for s in numbers}


def several_functions(name: str, own_backward: bool) -> None:
    tpc.setup_process_groups([("pipe", 2)])
    schedule = build(name, 2, 3)
    x, y = batch(7)
    truth = chain(schedule.num_stages)
    expected = squares(truth(x), y)
    expected.backward()
    functions, inputs, mine = functions_of(schedule, chain(schedule.num_stages), x, y)
    optimizer = torch.optim.SGD([p for stage in mine.values() for p in stage.parameters()], 0.1)
    seen = []

    def bwd_fn(output, gradient):
        seen.append(gradient is None)
        torch.autograd.backward(output, gradient)

    last = schedule.num_stages - 1  # where the output alone will do
    alone = (lambda loss: bwd_fn(loss, None)) if name == "zb-v" else bwd_fn
    own = [alone if s == last else bwd_fn for s in mine] if own_backward else None
    for _ in range(2):
        loss = forward_backward(optimizer, functions, own, inputs, 3, schedule=name)
        same_gradients(mine, truth)
    has_last = schedule.num_stages - 1 in mine
    same(loss, expected.detach() if has_last else None) if has_last else None
    assert (loss is None) != has_last
    outputs = forward_eval(functions, inputs, schedule=name)
    assert len(outputs) == len(functions)
    if has_last:
        same(outputs[-1], expected.detach())
    if own_backward:
        assert len(seen) == 2 * 3 * len(functions) and sum(seen) == 6 * has_last


@pytest.mark.parametrize(
    ("name", "own_backward"),
    [
        ("zb-v", True),
        ("interleaved", False),
        pytest.param("zb-v", False, marks=pytest.mark.full),
        pytest.param("zb-h1", True, marks=pytest.mark.full),
        pytest.param("interleaved-zb", True, marks=pytest.mark.full),
    ],
)
def test_a_rank_may_have_several_functions_and_backwards_of_its_own(ranks, name, own_backward):
    ranks(2).run(several_functions, name, own_backward)


def unequal_functions() -> None:
    tpc.setup_process_groups([("pipe", 2)])
    rank = dist.get_rank()
    fn = lambda x: x  # noqa: E731
    x = torch.ones(4, 1)
    refused = [
        (
            ([fn] * (1 + rank), None, [x] * (1 + rank), 2),
            {},
            "1f1b of 2 stages, 2 microbatches, 1f1b~",
        ),
        (([fn, fn], None, [x] * (2 + rank), 2), {}, "rank 1: inputs has 3 entries for 2 functions"),
        ((fn, [fn] * (1 + rank), x, 2), {}, "rank 1: bwd_fn has 2 entries for 1 functions"),
        (
            (fn, None, x, 2),
            {"schedule": "gpipe" if rank else "gpope"},
            "rank 0: no schedule 'gpope'",
        ),
        ((fn, None, x[:0], 2), {}, "all pipe ranks: the batch has 0 samples"),
        ((fn, None, x, 2), {"schedule": "forward"}, "forward has no backwards"),
        ((fn, None, x, "2"), {}, "all pipe ranks: num_microbatches is '2'"),
        ((fn, fn, x, 2), {}, r"rank 0: bwd_fn takes 1 positional arguments \(x\), not 2; it is ca"),
        ((fn, lambda a, b, c: 0, x, 2), {}, "bwd_fn needs c; .* on the last stage with the output"),
        ((fn if rank else "fn", None, x, 2), {}, "^pipe rank 0: fwd_fn is 'fn'; give a function$"),
        ((fn, 3 if rank else None, x, 2), {}, "^pipe rank 1: bwd_fn is 3; give a function$"),
        ((fn, None, x, 2 + rank), {}, "2 microbatches, 1f1b of 2 stages, 3 microbatches"),
    ]
    for arguments, options, text in refused:
        with pytest.raises(CommError, match=text):
            forward_backward(None, *arguments, **options)


def test_functions_that_do_not_match_are_refused_on_every_rank(ranks):
    ranks(2).run(unequal_functions)


def parted(own_backward: bool) -> None:
    """tensor 2 x pipe 2: half of the bytes between stages, in both directions, and equal bits."""
    tpc.setup_process_groups([("pipe", 2), ("tensor", 2)])
    s = tpc.get_pp_rank()
    x = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0))
    bytes_of, found = [], []
    for scatter in (False, True):
        torch.manual_seed(s)
        weight = torch.randn(4, 4, requires_grad=True)

        def fwd_fn(given, weight=weight):
            if s == 0:
                h = given @ weight
                # of a microbatch of 2: numbers that divide, some that do not, a scalar, none
                return h, torch.arange(6), h[:1, :, 0].reshape(-1), h.sum(), None
            h, ids, odd, scalar, nothing = given
            assert h.shape == (2, 3, 4) and ids.tolist() == list(range(6)) and nothing is None
            return (h @ weight).square().mean() * scalar + odd.sum()

        def bwd_fn(output, gradient):
            if gradient is None:
                return output.backward()
            assert [g is None for g in gradient] == [False, True, False, False, True]
            pairs = [(o, g) for o, g in zip(output, gradient, strict=True) if g is not None]
            assert all(o.shape == g.shape for o, g in pairs)
            return torch.autograd.backward(*zip(*pairs, strict=True))

        begun = len(recorder.snapshot()["calls"])
        forward_backward(
            None, fwd_fn, bwd_fn if own_backward else None, [x][s:], 3,
            scatter_gather_tensors=scatter,
        )  # fmt: skip
        found.append(weight.grad)
        bytes_of.append(sent_bytes(begun))
    assert torch.equal(*found)
    # of a microbatch 24 float32 and 6 int64 go ahead, 24 float32 come back: in halves, now
    whole_bytes = 3 * (24 * 4 + (0 if s else 6 * 8))
    assert bytes_of[0] - bytes_of[1] == whole_bytes // 2


def sent_bytes(begun: int) -> int:
    peers = tpc.get_ranks_in_group("pipe")
    size = lambda call: getattr(torch, call["dtype"].removeprefix("torch.")).itemsize  # noqa: E731
    return sum(
        torch.Size(call["shape"]).numel() * size(call)
        for call in recorder.snapshot()["calls"][begun:]
        if call["operation"] == "send" and call["peer"] in peers and call["dtype"] != "uint8"
    )


@pytest.mark.parametrize("own_backward", [False, True])
def test_tensor_ranks_send_a_part_each(ranks, own_backward):
    ranks(4).run(parted, own_backward)
