"""Where a job's files lie in the run folder, and which start of the job they belong to.

One rule: what one start of a job leaves behind carries that start's name, so nothing that an
earlier start wrote is ever taken for the word of this one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


def attempt_id(env: Mapping[str, str]) -> str:
    """`<job id>.<restart count>` of the Slurm job in `env`; "local" outside of one.

    A requeued job keeps its id, and Slurm counts its restarts; the tasks of an array have ids of
    their own. Where the batch script starts the ranks anew, their number follows: `7.0.1`. A batch
    script can put the same name together.
    """
    job, attempt = env.get("SLURM_JOB_ID"), env.get("TDP_ATTEMPT", "0")
    start = f"{job}.{env.get('SLURM_RESTART_COUNT') or 0}" if job else "local"
    return f"{start}.{attempt}" if job and attempt != "0" else start


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run folder; nothing is made or read here."""

    run: Path

    @property
    def job(self) -> Path:
        """Folder of all that follows, but for logs and suspects."""
        return self.run / "job"

    @property
    def config(self) -> Path:
        """The configuration as submitted, every key filled in; what the job reads."""
        return self.job / "config.yaml"

    @property
    def script(self) -> Path:
        """The batch script."""
        return self.job / "job.sbatch"

    @property
    def records(self) -> Path:
        """One JSON object per submission of this run (`records.Record`)."""
        return self.job / "submissions.jsonl"

    @property
    def intent(self) -> Path:
        """A submission that sbatch was called for, until its job is noted (`intent`)."""
        return self.job / "intent.json"

    @property
    def starts(self) -> Path:
        """One JSON object per start of a job of this run (`starts.Start`)."""
        return self.job / "starts.jsonl"

    def decision(self, start: str) -> Path:
        """What the ranks agreed on before they ended: `<word> <reason>` in one line."""
        return self.job / f"decision.{start}"

    def failures(self, start: str) -> Path:
        """Folder with one JSON file per rank that failed in this start."""
        return self.job / f"failures.{start}"

    @property
    def lock(self) -> Path:
        """Held by whoever submits this run; beside the folder, which may be moved meanwhile."""
        return self.run.parent / f".{self.run.name}.lock"

    @property
    def run_lock(self) -> Path:
        """Held by whoever trains this run, from before it writes until it has ended."""
        return self.run.parent / f".{self.run.name}.running"

    @property
    def logs(self) -> Path:
        return self.run / "logs"

    @property
    def main_log(self) -> Path:
        """Rank 0 and every rank's errors over all starts; sbatch's --output."""
        return self.logs / "main.log"

    def rank_log(self, rank: int, restart: int) -> Path:
        return self.logs / f"rank{rank}.restart{restart}.log"

    @property
    def suspects(self) -> Path:
        """Nodes that failed, shared by all runs of the folder that this run lies in."""
        return self.run.parent / "suspects.jsonl"
