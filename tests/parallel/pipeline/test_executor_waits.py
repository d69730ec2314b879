"""Messages go as the schedule says, batched where they must be, and each handle is waited on."""

import pytest
import torch
import torch.distributed as dist

from tests.parallel.pipeline.whole_model import batch, chain
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.group_state import state_of
from torchdistpackage.parallel.pipeline.executor import Executor, autograd
from torchdistpackage.schedule.actions import Batch, flatten
from torchdistpackage.schedule.generators import build


class Handle:
    """A work that remembers whether somebody waited on it."""

    def __init__(self, work):
        self.work, self.waited = work, False

    def wait(self, *limit):
        self.waited = True
        return self.work.wait(*limit)


def recorded(name: str, direct: bool, own_backward: bool) -> None:
    """direct: as on gloo; else as on NCCL, in batches (here torch's, over gloo)."""
    rank, p, m = dist.get_rank(), dist.get_world_size(), 4
    handles: list[Handle] = []
    batches: list[list[str]] = []
    group = dist.group.WORLD
    state_of(group).direct = direct
    schedule = build(name, p, m)
    last = schedule.num_stages - 1
    x, model = batch(m)[0], chain(last + 1)

    def forward(s, i, received):
        out = model[s](x[i : i + 1] if s == 0 else received)
        return out if s < last else out.sum()

    def issuing(issue):
        def issued(*args):
            handles.append(Handle(issue(*args)))
            return handles[-1]

        return issued

    def batching(issue):
        def issued(operations):
            batches.append([o.op.__name__ for o in operations])
            return issue(operations)

        return issued

    with pytest.MonkeyPatch.context() as patch:
        for what in ("send", "recv"):
            patch.setattr(dist.ProcessGroup, what, issuing(getattr(dist.ProcessGroup, what)))
        patch.setattr(dist, "batch_isend_irecv", batching(dist.batch_isend_irecv))
        executor = Executor(schedule, group, device=torch.device("cpu"), timeout_s=60)
        for _ in range(2):
            handles.clear()
            batches.clear()
            executor.run(forward, autograd if own_backward else None)
            assert handles and all(handle.waited for handle in handles)
    program = schedule.programs[rank]
    messages = [a for a in flatten(program) if a.kind.is_message]
    assert len(handles) == len(messages)
    last_calls = recorder.snapshot(num=len(messages))["calls"]
    assert {call["action"] for call in last_calls} == set(map(str, messages))
    if not direct:
        # gloo's record says done where the wait returned; a device queue's only that it was issued
        assert sorted(map(len, batches)) == sorted(
            len(step.actions) if isinstance(step, Batch) else 1
            for step in program
            if isinstance(step, Batch) or step.kind.is_message
        )
        assert ["irecv", "isend"] in map(sorted, batches)
    else:
        assert {call["state"] for call in last_calls} == {"done"}
    state_of(group).direct = True


@pytest.mark.own_transport("sets the transport itself")
@pytest.mark.parametrize("direct", [True, False], ids=["one by one", "batched"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_every_handle_is_waited_on(ranks, name, direct):
    ranks(2).run(recorded, name, direct, False)


@pytest.mark.own_transport("sets the transport itself")
def test_every_handle_is_waited_on_where_outputs_are_kept_for_a_backward(ranks):
    ranks(2).run(recorded, "1f1b", True, True)
