"""Run folders as a submitted run leaves them."""

import json
from dataclasses import asdict
from pathlib import Path

from torchdistpackage.environment.failure import Failure, to_json
from torchdistpackage.launch.slurm.run_dir import Start, Submission, append_record
from torchdistpackage.launch.slurm.runs import SubmittedRun, read_run
from torchdistpackage.run_files import RunDir

SCRIPT = "#!/bin/bash\n#SBATCH --nodes=2\nexit 0\n"


def submitted(folder: Path, job: str, time_s: float = 1000.0) -> SubmittedRun:
    """The run in `folder`, submitted (once more) as `job`."""
    files = RunDir(folder)
    files.logs.mkdir(parents=True, exist_ok=True)
    files.job.mkdir(exist_ok=True)
    files.script.write_text(SCRIPT)
    record = Submission(
        job, time_s, "sbatch", str(files.script), str(folder / "code"), "2", "login1"
    )
    append_record(files.records, record)
    run = read_run(folder)
    assert run is not None
    return run


def started(
    run: SubmittedRun,
    start: str,
    time_s: float,
    *,
    step: int = 0,
    decision: str = "",
    failures: tuple[Failure, ...] = (),
    nodes: str = "n[1-2]",
) -> Start:
    """One more start, with what its ranks left behind."""
    files, job = run.files, start.partition(".")[0]
    number = len(files.starts.read_text().splitlines()) if files.starts.exists() else 0
    entry = Start(start, number, job, job, time_s, nodes, "n1", step)
    with files.starts.open("a") as file:
        file.write(json.dumps(asdict(entry)) + "\n")
    if decision:
        files.decision(start).write_text(decision + "\n")
    for failure in failures:
        files.failures(start).mkdir(exist_ok=True)
        (files.failures(start) / f"rank{failure.rank}.json").write_text(to_json(failure))
    return entry


def measured(run: SubmittedRun, *losses: float, num_steps: int = 10) -> None:
    """Metrics of the steps 1, 2, ... and the resolved configuration."""
    rows = [{"step": number, "loss": loss} for number, loss in enumerate(losses, 1)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f"data:\n  steps: 3\n\ntrain:\n  # how long\n  accumulate: 1\n  steps: {num_steps}\n"
    (run.folder / "resolved.yaml").write_text(text)
