"""What stages may give each other, over the wire and in memory; headers."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.comm.test_twins import each_way, noted
from tests.parallel.pipeline.whole_model import DIM, batch, chain, same, same_gradients
from torchdistpackage.comm.debug_checks import checked_calls
from torchdistpackage.comm.group_state import state_of
from torchdistpackage.comm.groups import Groups, reverse_group
from torchdistpackage.comm.tensor_channel import TensorChannel
from torchdistpackage.errors import CommError
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.schedule.generators import build

CPU = torch.device("cpu")
ORDERS = ["1f1b", "interleaved", "zb-v"]
"""With neighbours on other ranks, in a ring, and on the same rank."""


def executor_of(name: str, m: int, **options) -> Executor:
    schedule = build(name, dist.get_world_size(), m)
    return Executor(schedule, dist.group.WORLD, device=CPU, timeout_s=30, **options)


def rich_messages() -> None:
    """Dicts with integers, bools, complex, None, empty, unused and no-grad members; a skip; a
    member that only some microbatches use; and a tuple."""
    x, y = batch(3)
    for name in ORDERS:
        for dynamic in (False, True):
            executor = executor_of(name, 3, dynamic_shapes=dynamic)
            last = executor.schedule.num_stages - 1
            whole, mine = chain(last + 1), chain(last + 1)

            def stage_of(s, i, given, model, last=last):
                if s == 0:
                    h, ids = model[0](x[i : i + 1]), torch.arange(DIM)
                    return {
                        "h": h,
                        "skip": h * 2,
                        "wave": torch.complex(h, h * 3),
                        "ids": ids,
                        "none": None,
                        "mask": ids > 0,
                        "empty": h[:0],
                        "unused": h.sum(1),
                        "fixed": h.detach() * 0.5,
                    }
                if isinstance(given, tuple):
                    given = dict(zip(("h", "skip", "wave", "ids", "fixed"), given, strict=True))
                else:
                    assert given["none"] is None and given["empty"].shape == (0, DIM)
                    assert given["mask"].tolist() == [False, True, True, True]
                assert not given["fixed"].requires_grad and given["ids"].dtype is torch.int64
                h = model[s](given["h"] + given["fixed"])
                if i != 1:  # its gradient is None for microbatch 1
                    h = h + given["wave"].abs()
                if s < last - 1:
                    return dict(given) | {"h": h}
                if s < last:
                    return h, given["skip"], given["wave"], given["ids"], given["fixed"]
                return ((h + given["skip"] * given["ids"] - y[i]) ** 2).sum()

            for i in range(3):
                given = None
                for s in range(last + 1):
                    given = stage_of(s, i, given, whole)
                given.backward()
            for _ in range(2):
                mine.zero_grad()
                executor.run(lambda s, i, given, of=stage_of, mine=mine: of(s, i, given, mine))
                same_gradients({s: mine[s] for s in executor.stages}, whole)


def test_messages_may_hold_anything(ranks):
    ranks(2).run(rich_messages)


def changing_shapes(name: str) -> None:
    """In every microbatch and run; in the debug mode that compares messages too."""
    x = batch(20)[0]
    executor = executor_of(name, 3, dynamic_shapes=True)
    last = executor.schedule.num_stages - 1
    for sizes in ([2, 3, 1], [5, 1, 4]):
        parts = x[: sum(sizes)].split(sizes)
        whole, mine = chain(last + 1), chain(last + 1)
        whole(x[: sum(sizes)]).square().sum().backward()

        def forward(s, i, received, mine=mine, parts=parts):
            out = mine[s](parts[i] if s == 0 else received)
            return out if s < last else out.square().sum()

        with checked_calls():
            executor.run(forward)
        same_gradients({s: mine[s] for s in executor.stages}, whole)


@pytest.mark.parametrize("name", ORDERS)
def test_shapes_may_change_with_every_microbatch_and_run(ranks, name):
    ranks(2).run(changing_shapes, name)


def headers_travel_once() -> None:
    x, seen = batch(4)[0], []
    with pytest.MonkeyPatch.context() as patch:
        receive = TensorChannel.receive_header
        patch.setattr(TensorChannel, "receive_header", lambda *a: seen.append(1) or receive(*a))
        for name, dynamic in (("interleaved", False), ("interleaved", True)):
            executor = executor_of(name, 4, dynamic_shapes=dynamic)
            last = executor.schedule.num_stages - 1
            model = chain(last + 1)

            def forward(s, i, received, model=model, last=last):
                out = model[s](x[i : i + 1] if s == 0 else received)
                return out if s < last else out.sum()

            expected = 4 * sum(s > 0 for s in executor.stages)
            for run in range(3):
                seen.clear()
                executor.run(forward)
                assert len(seen) == (expected if dynamic or run == 0 else 0)


def test_headers_travel_in_the_first_run_only_unless_shapes_may_change(ranks):
    ranks(2).run(headers_travel_once)


class InPlace(nn.Module):
    """Changes what it is given, as a ReLU(inplace=True) at the front of a stage does."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.mul_(2))


def stages_of_all_kinds(kind: str) -> None:
    """On a ring, and with a neighbour on the same rank; compiling takes long, and is tried once."""
    x = batch(4)[0]
    for name in ORDERS[:1] if kind == "compiled" else ORDERS:
        executor = executor_of(name, 4)
        last = executor.schedule.num_stages - 1
        whole, mine = chain(last + 1), chain(last + 1)
        dtype = None
        if kind == "in place":
            # a Tanh's result is what its backward needs, so it may not be changed
            for model in (whole, mine):
                for s in range(last + 1):
                    model[s] = InPlace(model[s][0]) if s else model[s][0]
        elif kind == "compiled":
            # torch hides this one itself, but where warnings are errors
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is no")
            mine = nn.Sequential(*(torch.compile(s, backend="aot_eager") for s in mine))
        elif kind == "autocast":
            dtype = torch.bfloat16
            whole, mine = whole.float(), mine.float()

        def stage(s, given, model, dtype=dtype):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                if kind == "checkpointed":
                    return checkpoint(model[s], given, use_reentrant=False)
                return model[s](given)

        for i in range(4):
            given = x[i : i + 1].to(whole[0].parameters().__next__().dtype)
            for s in range(last + 1):
                given = stage(s, given, whole)
            given.float().square().sum().mul(8.0).backward()  # a loss scale

        def forward(s, i, received, of=stage, mine=mine, last=last):
            first = x[i : i + 1].to(next(mine.parameters()).dtype)
            out = of(s, first if s == 0 else received, mine)
            return out if s < last else out.float().square().sum() * 8.0

        for _ in range(2):
            mine.zero_grad()
            executor.run(forward)
            for s in executor.stages:
                for p, truth in zip(mine[s].parameters(), whole[s].parameters(), strict=True):
                    if kind == "autocast":
                        assert torch.equal(p.grad, truth.grad)
                    else:
                        same(p.grad, truth.grad)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["in place", "checkpointed", "autocast", "compiled"])
def test_stages_may_be_of_all_kinds(ranks, kind):
    ranks(2).run(stages_of_all_kinds, kind, timeout_s=100)


def a_connection_for_each_way() -> None:
    """Gradients go down over the twin once forms are known, and nothing else does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group, (x, y) = Groups(rank).of(range(size), use="pipe"), batch(3)
    for dynamic in (True, False):
        schedule, mine = build("1f1b", size, 3), chain(size)
        executor = Executor(schedule, group, device=CPU, dynamic_shapes=dynamic)

        def forward(s, i, given, mine=mine):
            out = mine[s](x[i : i + 1] if s == 0 else given)
            return ((out - y[i]) ** 2).sum() if s == size - 1 else out

        with noted() as messages:
            executor.run(forward)
            twin = reverse_group(group)
            assert (twin is None) == dynamic
            messages.clear()
            executor.run(forward)
        neighbours = {rank - 1, rank + 1} & {*range(size)}
        assert messages == each_way(group, twin or group, neighbours)


@pytest.mark.own_transport("gloo's second connection")
@pytest.mark.parametrize("size", [2, 3])
def test_activations_and_gradients_have_a_connection_each(ranks, size):
    ranks(size).run(a_connection_for_each_way)


def member_elsewhere(when: int) -> str:
    """From its k-th run on, the first stage leaves a mask on another device: what its rank says.

    No header and no message leaves, so nothing is there that its peer would take for another.
    """
    group = Groups(dist.get_rank()).of(range(2), use="elsewhere")
    run, first = 0, dist.get_rank() == 0
    executor = Executor(build("gpipe", 2, 1), group, device=CPU, timeout_s=1)
    weight = torch.ones(DIM, requires_grad=True)

    def stage_of(s: int, i: int, given):
        if s == 0:
            place = "meta" if run == when else "cpu"
            return {"x": weight * 2, "mask": torch.ones(DIM, device=place)}
        return (given["x"] * given["mask"] * weight).sum()

    sent = 0
    while True:
        sent = sum(state_of(group).sent.values())
        try:
            executor.run(stage_of)
        except CommError as error:
            assert not first or sum(state_of(group).sent.values()) == sent
            return f"{run}: {error}" if first else str(run)
        run += 1


@pytest.mark.own_transport("a message of gloo has a limit of its own")
@pytest.mark.parametrize("when", [0, 2])
def test_a_member_on_another_device_is_named_before_its_header_leaves(ranks, when: int):
    said, peer = ranks(2).run(member_elsewhere, when)
    assert said.startswith(f"{when}: member 'mask' ") and "on meta" in said
    assert ".to('cpu')" in said and peer == str(when)
