"""Submissions are lines that are only added, and read whatever else is in the file."""

import json
import threading
from dataclasses import asdict, replace
from pathlib import Path

from torchdistpackage.launch.slurm.run_dir import Submission, append_record, read_records

ONE = Submission("12", 1700000000.25, "sbatch", "/r/job.sbatch", "/r/code/abc", "2-4", "login 'ü'")


def test_what_is_added_reads_back_in_order(tmp_path: Path):
    path = tmp_path / "run" / "job" / "submissions.jsonl"
    assert read_records(path) == ()
    records = tuple(replace(ONE, job=f"12_{i}") for i in range(3))
    for record in records:
        append_record(path, record)
    assert read_records(path) == records
    assert [json.loads(line)["job"] for line in path.read_text().splitlines()] == [
        "12_0",
        "12_1",
        "12_2",
    ]


def test_lines_that_are_none_are_passed_over(tmp_path: Path):
    path = tmp_path / "submissions.jsonl"
    later = json.dumps({**asdict(ONE), "from_a_later_version": 1})
    path.write_text(f'{later}\n\n[1]\n{{"job": "13"}}\n"x"\n{json.dumps(asdict(ONE))[:40]}')
    assert read_records(path) == (ONE,)
    append_record(path, replace(ONE, job="14"))
    assert [record.job for record in read_records(path)] == ["12", "14"], "on a line of its own"


def test_writers_at_once_do_not_mix(tmp_path: Path):
    path = tmp_path / "submissions.jsonl"

    def write(job: int) -> None:
        for _ in range(20):
            append_record(path, replace(ONE, job=str(job), script="x" * 3000))

    threads = [threading.Thread(target=write, args=(job,)) for job in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_records(path)
    # one that meets another's line half written begins a line of its own, so some may be empty
    assert len(found) == 80 == sum(map(bool, path.read_text().splitlines()))
    assert {record.job for record in found} == {"0", "1", "2", "3"}
