"""What is written in torch's format is read back, and what is no schedule is refused by line.

That torch reads it, and we what torch writes: tests/parallel/pipeline/test_torch_csv.py.
"""

import os
from pathlib import Path

import pytest

from tests.tells import facts_pattern
from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Program, Schedule, flatten
from torchdistpackage.schedule.generators import GENERATORS, build
from torchdistpackage.schedule.resolve import MAX_BYTES, csv_text, from_csv, to_csv


def computed(schedule: Schedule) -> list[list[str]]:
    def of(program: Program) -> list[str]:
        return [str(a) for a in flatten(program) if not a.kind.is_message]

    return [of(program) for program in schedule.programs]


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("options", [{}, {"messages": True}, {"messages": True, "waits": True}])
def test_what_is_written_is_read_here(name, options):
    ours = build(name, 3, 5)
    text = to_csv(ours, **options)
    assert from_csv(text, ours.name) == ours
    assert text.count("WAIT_SEND") == (text.count("SEND") // 2 if "waits" in options else 0)


def test_cells_may_be_empty_and_lines_may_end_with_them():
    assert computed(from_csv("0F0,,0F1, ,0B0,0B1,,\n\n")) == [["0F0", "0F1", "0B0", "0B1"]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0B0\n1F0,1X0", "line 2, cell 2: '1X0' is not an action; write stage, kind"),
        ("0F0,(1F0;0Q0)OVERLAP_F_B", "line 1, cell 2: '0Q0' is not an action"),
        ("0F0,0B0\n0F1,0B1", "line 2: 0F1 belongs to stage 0, which line 1 runs"),
        ("0F0,0B0\n2F0,2B0", "highest stage is 2 but no line runs stage 1"),
        ("0F0,0B0\n\n1F0,1B0", "line 2 has no action"),
        ("", "is empty; write a line"),
        ("0F0,0B0,0F1", "missing: 0B1"),
        ("0F0,0I0", "missing: 0W0"),
        (
            "0F0,0B0\n1F0,1F99999999999,1B0",
            "line 2, cell 2: 1F99999999999 has microbatch 99999999999, but stage 1 has 2",
        ),
        ("0F0,99999999999F0", "highest stage is 99999999999 but no line runs stage 1, 2, 3"),
        ("0B0,0F0", "runs 0B0 at step 0 but 0F0, which it uses, only at step 1"),
        ("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1", "1B0 at step 0 but 1F0"),
        ("0F1,0F0,0B0,0B1\n1F0,1B0,1F1,1B1,1F1", "listed twice: 1F1"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused_where_it_goes_wrong(text, said):
    with pytest.raises(ScheduleError) as caught:
        from_csv(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "is a pipe"),
        (Path("/dev/zero"), "is a device"),
        (Path("/"), "is a folder"),
        (10 << 30, rf"has {10 << 30:,} bytes, more than the {MAX_BYTES:,} allowed"),
        (b"\xb3\xff,0F0\n", "utf-8"),
    ],
)
def test_a_file_that_is_no_text_of_bounded_size_is_refused_unread(content, why, tmp_path):
    path = tmp_path / "a.csv"
    if content is None:
        os.mkfifo(path)
    elif isinstance(content, Path):
        path.symlink_to(content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        with path.open("wb") as file:
            file.truncate(content)
    with pytest.raises(ScheduleError, match=f"^{path} cannot be read: .*{why}"):
        csv_text(path)


def test_orders_that_wait_for_each_other_are_refused():
    """Each rank's own order is possible; together they are not."""
    with pytest.raises(ScheduleError, match=facts_pattern("rank 0", "0B1", "rank 1", "1F2")):
        from_csv("0F0,0F1,0B1,0F2,0B0,0B2\n1F0,1F2,1B0,1B2,1F1,1B1")


def test_a_line_is_a_rank_and_a_cell_a_computation():
    text = to_csv(build("1f1b", 3, 2))
    assert text == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n2F0,2B0,2F1,2B1\n"


def test_lines_may_come_in_any_order_of_stages():
    """The line of the first stage need not be the first line."""
    found = from_csv("1F0,1B0\n0F0,0B0\n2F0,2B0\n")
    assert found.placement == (1, 0, 2)
    assert computed(found) == [["1F0", "1B0"], ["0F0", "0B0"], ["2F0", "2B0"]]
