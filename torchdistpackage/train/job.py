"""A run as processes: start them on this machine, or be one of those a launcher started. No torch.

Under torchrun or srun this process is a rank already, and a task of srun watches over it.
"""

import errno
import os
import sys
import time
from pathlib import Path

from torchdistpackage.checkpoint.commit import latest, step_of
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.load import load
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.types import MAX_PROCS
from torchdistpackage.data.tokens.template_date import with_template_date
from torchdistpackage.environment.rendezvous import Rendezvous, detect
from torchdistpackage.errors import LaunchError, RankError
from torchdistpackage.files import atomic_write
from torchdistpackage.launch.lock import Lock
from torchdistpackage.launch.process import SignalFlag
from torchdistpackage.launch.run_events import END, note_event
from torchdistpackage.launch.run_folder import cannot_write, only_writer, prepare_folder, run_folder
from torchdistpackage.launch.run_rows import last_rows
from torchdistpackage.launch.slurm.node_blocklist import record_failed_nodes
from torchdistpackage.launch.slurm.query import limited
from torchdistpackage.launch.slurm.requeue import (
    EXIT_TEMPFAIL,
    Decision,
    RequeueDecision,
    read_decision,
    requeue_self,
    restart_denied,
    why_not,
)
from torchdistpackage.launch.slurm.run_dir import (
    Start,
    append_start,
    attempt_id,
    read_starts,
    series_of,
    this_start,
)
from torchdistpackage.launch.supervisor import WatchedRank, supervise
from torchdistpackage.launch.workers import run_local
from torchdistpackage.lazy import resolve
from torchdistpackage.plan.elastic import fitted
from torchdistpackage.plan.refusals import check_checkpoint, refuse_checkpoint, refuse_here
from torchdistpackage.plan.resume_check import named_folder
from torchdistpackage.plan.run_plan import local_procs, make_plan
from torchdistpackage.plan.user_code import code_folder
from torchdistpackage.run_files import CHECKPOINTS, METRICS, RunDir

WORKER = "torchdistpackage.train.worker"
WORKER_MAIN = f"{WORKER}:worker_main"
SLURM_S = 5.0
"""For all that Slurm is asked before rank 0 is started, for whom the other ranks wait."""
_LOOK_S = 0.1
# torch._dynamo: the first optimizer of a process imports it, which takes seconds
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "numpy", "safetensors.torch", WORKER)


def launch(path: str, overrides: list[str], resume: str = "auto") -> int:
    """Run the configuration at `path`; return the exit code.

    It is EXIT_TEMPFAIL if the run ended early and is saved.

    Under a launcher an early end is 0 as well: what follows was decided and written down.

    Raises:
        ConfigError: it is wrong, for any rank, or `resume` is no folder; nothing has been started.
        CheckpointError: what it would resume from is damaged or of another model; the same.
        RankError: a rank failed; names the first culprit.
        LaunchError: this start may not be, or its requeue failed.
    """
    rendezvous = detect(os.environ)
    if resume not in ("auto", "never"):
        named_folder(resume)
    if rendezvous.source == "alone":
        return _start_ranks(path, overrides, resume)
    config = load(path, overrides, rendezvous.world_size)
    config = fitted(config, rendezvous.world_size, path)
    if rendezvous.source == "slurm":
        return watched(config, rendezvous, resume)
    # torchrun starts the ranks anew by itself, and these go on
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    resume = "auto" if again else resume
    if rendezvous.rank == 0:
        check_checkpoint(config, resume, rendezvous.world_size)
    if attempt_id(os.environ) != "local":
        return _be_rank_in_job(config, rendezvous.rank, resume)
    return _be_rank(config, resume)


def watched(config: RunConfig, rendezvous: Rendezvous, resume: str = "auto") -> int:
    """Be the task of srun that watches over a rank; its exit code, 0 if the run ended early."""
    signals = SignalFlag()
    signals.listen(config.launch.requeue.signals)
    files = RunDir(run_folder(config).absolute())
    try:
        if rendezvous.rank == 0:
            with only_writer(files.run, forks=True) as lock:
                return _lead(config, resume, files, signals, lock, rendezvous.world_size)
        if _resume(files, _this_start(files, rendezvous.rank), resume) == "never":
            _wait_for_room(files, signals, config.launch.init_timeout_s)
        return _follow(config, resume, files, signals, rendezvous.rank, rendezvous.world_size)
    except OSError as error:
        inside = error.filename is not None and Path(error.filename).is_relative_to(files.run)
        if not inside and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise cannot_write(files.run, error) from error


def _lead(
    config: RunConfig,
    resume: str,
    files: RunDir,
    signals: SignalFlag,
    lock: Lock | None,
    num_ranks: int,
) -> int:
    """Be the watcher of rank 0, the only one that changes what an earlier start has left."""
    resume = _resume(files, _this_start(files, 0), resume)
    if resume == "never" and files.script.exists():
        raise LaunchError(
            f"--resume never: {files.run} was made by tdp submit, whose script, logs and code are "
            f"there, and a job cannot move them away under itself; use tdp submit --fresh, or name "
            f"another run with run.name=..."
        )
    check_checkpoint(config, resume, num_ranks)
    prepare_folder(config, resume)
    start = _this_start(files, 0)
    decision = files.decision(start.start)
    decision.unlink(missing_ok=True)
    if refused := restart_denied(files, start, config.launch.requeue):
        atomic_write(decision, f"{Decision(RequeueDecision.STOP, refused)}\n")
        sys.stdout.write(f"{refused}\n")
        return EXIT_TEMPFAIL
    append_start(files, start)
    record_failed_nodes(files, os.environ, limited(SLURM_S))

    _say_if_it_stays_away(config)
    code = _follow(config, resume, files, signals, 0, num_ranks, lock)
    return code or requeue_self(files, os.environ)


def _say_if_it_stays_away(config: RunConfig) -> None:
    if said := why_not(config.launch.requeue.mode, os.environ, limited(SLURM_S)):
        sys.stdout.write(f"{said}\n")
        sys.stdout.flush()


def _follow(
    config: RunConfig,
    resume: str,
    files: RunDir,
    signals: SignalFlag,
    rank: int,
    num_ranks: int,
    lock: Lock | None = None,
) -> int:
    """Watch over a rank, which keeps the lock, if any, alive."""
    start = _this_start(files, rank)
    resume = _resume(files, start, resume)
    failures, decision = files.failures(start.start), files.decision(start.start)
    log = files.rank_log(rank, start.restart)
    watched_rank = WatchedRank(rank, log, failures, decision, num_ranks)
    watched_rank.report.unlink(missing_ok=True)
    os.environ["TDP_RESTART"] = str(start.restart)

    def be_rank() -> int:
        if lock is not None:
            lock.keep()
        return _be_rank(config, resume, signals)

    return supervise(be_rank, watched_rank, signals)


def _wait_for_room(files: RunDir, signals: SignalFlag, limit_s: float) -> None:
    """Until rank 0 has moved an earlier run aside, which it says by noting this start."""
    until_s, own = time.monotonic() + limit_s, attempt_id(os.environ)
    while own not in (start.start for start in read_starts(files.starts)):
        if signals.all_received or time.monotonic() > until_s:
            why = signals.received or f"{limit_s:g} s (launch.init_timeout_s) are over"
            raise LaunchError(f"{why}, and rank 0 has not made room in {files.run}")
        time.sleep(_LOOK_S)


def _worker_main(config: RunConfig, resume: str, signals: SignalFlag | None = None) -> int:
    # only a rank pays for torch; the parent of local ones and the watcher do without
    return resolve(WORKER_MAIN)(config, resume, signals)


def _be_rank(config: RunConfig, resume: str, signals: SignalFlag | None = None) -> int:
    code = _worker_main(config, resume, signals)
    return 0 if code == EXIT_TEMPFAIL else code


def _be_rank_in_job(config: RunConfig, rank: int, resume: str) -> int:
    """Be a rank that torchrun started in a Slurm job, whose script does not hear of decisions.

    All ranks read the same files, so they agree whether to train.
    """
    files = RunDir(run_folder(config).absolute())
    start = _this_start(files, 0)
    resume = _resume(files, start, resume)
    refused = restart_denied(files, start, config.launch.requeue)
    ended = read_decision(files, os.environ)
    if ended is not None and ended.word is not RequeueDecision.FINISHED:
        refused = f"start {start.start} has ended: {ended}"  # torchrun starts ranks anew after it
    if refused:
        if rank == 0:
            sys.stdout.write(f"{refused}\n")
            if ended is None:
                atomic_write(
                    files.decision(start.start), f"{Decision(RequeueDecision.STOP, refused)}\n"
                )
        return EXIT_TEMPFAIL
    if rank == 0:
        _say_if_it_stays_away(config)
    os.environ["TDP_RESTART"] = str(start.restart if resume != "never" else 0)
    code = _worker_main(config, resume)
    if code != EXIT_TEMPFAIL:
        return code
    return requeue_self(files, os.environ) if rank == 0 else 0


def _start_ranks(path: str, overrides: list[str], resume: str) -> int:
    config = load(path, overrides)
    num_procs = local_procs(config)
    config = fitted(config, num_procs, path)
    if num_procs > MAX_PROCS:
        text = f"{num_procs:,} processes on this machine, where {MAX_PROCS:,} are allowed; "
        raise ConfigErrors(path, [config.problem("parallel", text + "submit a job instead")])
    plan = make_plan(config, num_procs, path)
    files = RunDir(run_folder(config).absolute())
    in_job = attempt_id(os.environ) != "local"
    again = _resume(files, _this_start(files, 0), resume) if in_job else resume
    config = with_template_date(config, again)
    refuse_here(config, path, code_folder(os.environ))
    with only_writer(files.run):
        refuse_checkpoint(config, resume, lambda: plan)
        return _run_ranks(config, num_procs, resume, files)


def _run_ranks(config: RunConfig, num_procs: int, resume: str, files: RunDir) -> int:
    in_job = attempt_id(os.environ) != "local"
    if in_job:
        resume = _resume(files, _this_start(files, 0), resume)
    folder = prepare_folder(config, resume)
    env: dict[str, str] = {}
    if in_job:
        start = _this_start(files, 0)
        if refused := restart_denied(files, start, config.launch.requeue):
            raise LaunchError(refused)
        append_start(files, start)
        env["TDP_RESTART"] = str(start.restart)
    try:
        codes = run_local(
            WORKER_MAIN,
            (config, resume),
            num_procs=num_procs,
            preload=PRELOAD,
            log_dir=folder / "logs",
            env=env,
            handled=config.launch.requeue.signals,
        )
    except RankError as error:
        step = next((row["step"] for row in last_rows(folder / METRICS)), 0)
        note_event(folder, END, step, word="failed", reason=str(error).partition("\n")[0])
        raise
    if EXIT_TEMPFAIL not in codes:
        return 0
    return (requeue_self(files, os.environ) if env else 0) or EXIT_TEMPFAIL


def _this_start(files: RunDir, rank: int) -> Start:
    step = 0
    if rank == 0 and (path := latest(files.run / CHECKPOINTS)):
        step = step_of(path)
    return this_start(files, os.environ, step)


def _resume(files: RunDir, start: Start, how: str) -> str:
    """What the user said holds for the first start of a job; its requeues go on from there."""
    return "auto" if len(series_of(files, start)) > 1 else how
