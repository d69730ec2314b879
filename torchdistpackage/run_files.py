"""The names of all files in a run folder; this module makes and reads none of them."""

from pathlib import Path

RESOLVED = "resolved.yaml"
METRICS, RANKS, EVENTS = "metrics.jsonl", "ranks.jsonl", "events.jsonl"
CHECKPOINTS = "checkpoints"
REPLICAS = "replicas"
PLOT, PICTURE, COSTS = "loss.png", "pipeline.svg", "costs.yaml"
REPORT = "report.html"


class RunDir:
    """The paths of one run folder."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.resolved = run / RESOLVED  # the configuration with all its keys
        self.metrics = run / METRICS  # a row for each step, over all ranks
        self.ranks = run / RANKS  # a row every few steps, with a number for each rank
        self.events = run / EVENTS  # a row for each submission, start, save and end
        self.checkpoints = run / CHECKPOINTS
        self.plot = run / PLOT  # the curve of the loss
        self.picture = run / PICTURE  # the pipeline's timeline, predicted and measured
        self.costs = run / COSTS  # the measured cost of each stage
        self.report = run / REPORT
        self.job = job = run / "job"
        self.config = job / "config.yaml"  # as submitted, every key filled in; what the job reads
        self.script = job / "job.sbatch"
        self.records = job / "submissions.jsonl"  # a `Submission` a line
        self.intent = job / "intent.json"  # one that sbatch was called for, until its job is noted
        self.starts = job / "starts.jsonl"  # a `Start` a line
        self.logs = run / "logs"
        self.main_log = self.logs / "main.log"  # rank 0's, every rank's errors; sbatch's --output
        self.suspects = run.parent / "suspects.jsonl"  # nodes that failed, of all runs there
        # next to the folder, which may be moved while its lock is held
        self.lock = run.parent / f".{run.name}.lock"  # held by a process that submits this run
        self.run_lock = run.parent / f".{run.name}.running"  # by one that trains it, to its end

    def decision(self, start: str) -> Path:
        """The decision on which the ranks agreed before they ended: `<word> <reason>` in one
        line.
        """
        return self.job / f"decision.{start}"

    def left_out(self, start: str) -> Path:
        """Names of nodes that the job does without from this start on, one a line; read by the
        batch script after the start has failed.
        """
        return self.job / f"left_out.{start}"

    def failures(self, start: str) -> Path:
        """Folder with one JSON file per rank that failed in this start."""
        return self.job / f"failures.{start}"

    def rank_log(self, rank: int, restart: int) -> Path:
        return self.logs / f"rank{rank}.restart{restart}.log"
