"""Schedules go to torch.distributed.pipelining and come back from it, action by action."""

import csv
from types import SimpleNamespace

import pytest
import torch.distributed.pipelining.schedules as theirs

from tests.tells import facts_pattern
from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Program, Schedule, flatten
from torchdistpackage.schedule.generators import GENERATORS, build
from torchdistpackage.schedule.passes import add_messages
from torchdistpackage.schedule.resolve import from_csv, to_csv

MULTI = {
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "looped-bfs": theirs.ScheduleLoopedBFS,
    "interleaved-zb": theirs.ScheduleInterleavedZeroBubble,
    "zb-v": theirs.ScheduleZBVZeroBubble,
    "dualpipe-v": theirs.ScheduleDualPipeV,
}

WAITS = hasattr(theirs._ComputationType, "WAIT_SEND_F")
"""Whether torch waits for sends by name, as it does from 2.15 on."""


def stages_of(num_ranks: int, chunks: int) -> list:
    """Rank 0's stages, as far as torch's schedules ask them before they run."""
    return [
        SimpleNamespace(
            stage_index=i * num_ranks,
            num_stages=num_ranks * chunks,
            group_size=num_ranks,
            group_rank=0,
            is_first=i == 0,
            is_last=False,
            submod=None,
            has_backward=True,
        )
        for i in range(chunks)
    ]


def cells(rows) -> list[list[str]]:
    return [[str(a) for a in row if a is not None] for row in rows]


def computed(schedule: Schedule) -> list[list[str]]:
    def of(program: Program) -> list[str]:
        return [str(a) for a in flatten(program) if not a.kind.is_message]

    return [of(program) for program in schedule.programs]


def runtime(num_ranks: int, chunks: int, num_microbatches: int):
    return theirs._PipelineScheduleRuntime(stages_of(num_ranks, chunks), num_microbatches, print)


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize("layout", ["compute_only", "compute_comms"])
def test_what_torch_writes_is_read(name, layout, tmp_path):
    """Overlapped pairs count as their parts; parameters and messages are passed over."""
    schedule = MULTI[name](stages_of(4, 2), 8, print)
    schedule._dump_csv(tmp_path / "a.csv", layout)
    text = (tmp_path / "a.csv").read_text()
    read = from_csv(text)
    order = [
        [part for action in row if action is not None for part in action.sub_actions or (action,)]
        for row in schedule.pipeline_order.values()
    ]
    assert computed(read) == cells(order)
    assert (read.num_stages, read.num_microbatches) == (8, 8)
    assert dict(enumerate(read.placement)) == schedule.stage_index_to_group_rank
    if layout == "compute_comms":
        assert "UNSHARD" in text and "SEND_B" in text


@pytest.mark.parametrize(
    ("single", "name"), [(theirs.ScheduleGPipe, "gpipe"), (theirs.Schedule1F1B, "1f1b")]
)
def test_torchs_orders_with_one_stage_a_rank_are_read(single, name, tmp_path):
    order = list(single(stages_of(4, 1)[0], 8, print)._get_pipeline_order().values())
    if "3F8" in map(str, order[-1]):
        # 2.13 lists the forwards of 1F1B's last rank as 1 to 8, though it runs 0 to 7.
        with pytest.raises(
            ScheduleError, match=facts_pattern("3F8", "microbatch 8", "stage 3", "8 forwards")
        ):
            from_csv("\n".join(",".join(row) for row in cells(order)))
        order[-1] = [
            a._replace(microbatch_index=a.microbatch_index - 1) if a and str(a)[1] == "F" else a
            for a in order[-1]
        ]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows(order)
    read = from_csv((tmp_path / "a.csv").read_text(), name)
    assert read == build(name, 4, 8)


@pytest.mark.parametrize("name", [name for name in GENERATORS if name != "forward"])
def test_what_is_written_is_read_by_torch(name, tmp_path):
    """It finds our order valid, and its own simulation with our messages comes to its end."""
    ours = build(name, 3, 6)
    chunks = ours.num_stages // 3
    for layout in ("compute_only", "compute_comms"):
        path = tmp_path / f"{layout}.csv"
        messages = layout == "compute_comms"
        path.write_text(to_csv(ours, messages=messages, waits=messages and WAITS))
        loaded = runtime(3, chunks, 6)
        loaded._load_csv(path, layout)
        assert dict(enumerate(ours.placement)) == loaded.stage_index_to_group_rank
        if layout == "compute_only":
            assert cells(loaded.pipeline_order.values()) == computed(ours)
        else:
            kept = [
                [text for text in row if "WAIT" not in text]
                for row in cells(loaded.pipeline_order_with_comms.values())
            ]
            assert kept == [list(map(str, program)) for program in add_messages(ours).programs]
            assert loaded._simulate()
