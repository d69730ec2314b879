"""When nodes could start, from the answers of sinfo and squeue."""

import pytest

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm.query import CompletedCommand
from torchdistpackage.launch.slurm.queue import QueueState, query_queue

NODES = "\n".join(
    [
        "n1|gpu*|idle",
        "n2|gpu*|idle~",
        "n3|gpu*|alloc",
        "n4|gpu*|mix",
        "n5|gpu*|down*",
        "n6|cpu|idle",
    ]
)


def answering(*, nodes=NODES, running="", waiting="", code=0):
    def run(args, env=None):
        text = nodes if args[0] == "sinfo" else waiting if "--start" in args else running
        return CompletedCommand(code, text, "no controller" if code else "")

    return run


def test_nodes_come_free_when_jobs_end_and_go_when_waiting_ones_start():
    runner = answering(
        running="gpu|1|2000\ngpu|1|3000\ncpu|1|1500\n",
        waiting="gpu|2|2500|0:10:00\ngpu|4|N/A|1:00:00\n",
    )
    state = query_queue("gpu", runner)
    assert (state.total, state.idle) == (4, 2)
    assert state.start_s(1, 1000.0) == 1000.0
    # 2 are idle and one comes at 2000, of which a waiting job takes 2 from 2500 to 3100
    assert state.start_s(2, 1000.0) == 3000.0
    assert state.start_s(4, 1000.0) == 3100.0
    assert state.start_s(5, 1000.0) is None


def test_a_short_job_starts_before_waiting_ones_and_planned_nodes_are_free():
    # what Slurm 22.05 answered with jobs of 2 + 2 nodes running and one of 5 waiting
    nodes = "n1|main*|alloc\nn2|main*|alloc\nn3|main*|alloc\nn4|main*|alloc\n"
    state = query_queue(
        "main",
        answering(
            nodes=f"{nodes}n5|main*|plnd\nn6|main*|idle\n",
            running="main|2|1795970405\nmain|2|1795974005\n",
            waiting="main|5|1795974005|30:00\n",
        ),
    )
    now_s = 1795966815.0
    assert (state.total, state.idle) == (6, 2)
    # the job that waits leaves one of the six free
    assert state.start_s(1, now_s) == now_s
    assert state.start_s(2, now_s) == 1795974005 + 1800
    # in two hours that job starts: one of an hour ends before
    assert state.start_s(2, now_s, 3600.0) == now_s
    assert state.start_s(4, now_s, 3600.0) == 1795970405
    assert state.start_s(4, now_s, 3601.0) == 1795974005 + 1800
    assert state.start_s(6, now_s) == 1795974005 + 1800


def test_a_job_that_was_to_end_already_frees_its_nodes_now():
    assert QueueState("gpu", 2, 0, ((500.0, 2),)).start_s(2, 1000.0) == 1000.0
    assert QueueState("gpu", 2, 1, ()).start_s(2, 1000.0) is None


def test_the_default_partition_is_asked_where_none_is_named():
    assert query_queue(None, answering()).partition == "gpu"


def test_an_unknown_partition_and_a_silent_slurm_are_refused():
    with pytest.raises(LaunchError, match="no partition big; its partitions are cpu, gpu"):
        query_queue("big", answering())
    with pytest.raises(LaunchError, match="sinfo does not say how the queue is: no controller"):
        query_queue("gpu", answering(code=1))
