"""The submissions of a run, one line each: which job, when, which script and code.

One rule: lines are only appended, each in one write, by whoever called sbatch: `tdp submit`, or the
batch script that chains a job behind its own.
"""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from torchdistpackage.bounded import parse_json
from torchdistpackage.launch.slurm.lines import read_lines


@dataclass(frozen=True, slots=True)
class Submission:
    """One submission.

    job: Slurm's id, `123`, or `123_4` of a task of an array. time_s: seconds since 1970. via:
    "sbatch" or "submitit". script: what sbatch takes to submit this run again. code: the snapshot.
    nodes: as asked for. host: where it was submitted.
    """

    job: str
    time_s: float
    via: str
    script: str
    code: str
    nodes: str
    host: str


def to_json(record: Submission) -> str:
    """One line, without its end."""
    return json.dumps(asdict(record))


def append_record(path: Path, record: Submission) -> None:
    """Add a line; its folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, f"{to_json(record)}\n".encode())
        os.fsync(file)
    finally:
        os.close(file)


def read_records(path: Path) -> tuple[Submission, ...]:
    """All submissions in order; a line that is none is passed over.

    Raises:
        LaunchError: it is no file that can be read.
    """
    found = (_record(line) for line in read_lines(path))
    return tuple(record for record in found if record is not None)


def _record(line: str) -> Submission | None:
    try:
        values = cast(dict[str, Any], parse_json(line))
        return Submission(**{field.name: values[field.name] for field in fields(Submission)})
    except (ValueError, TypeError, KeyError):
        return None
