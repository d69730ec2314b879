"""A run as processes: start them on this machine, or be one that a launcher started. No torch.

A process has one role, and each role is one function: `start_ranks` is the parent on this machine,
`watch_rank` a task of srun (`lead_start` of rank 0, `follow_start` of the others), `be_rank` and
`be_rank_in_job` a rank of torchrun. plan/refusals.py has the refusals and their order.
"""

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torchdistpackage.checkpoint.commit import latest, step_of
from torchdistpackage.config.all_problems import ProblemCollector
from torchdistpackage.config.elastic import goes_on_without_nodes
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.load import Draft, load_draft
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.types import MAX_PROCS
from torchdistpackage.data.tokens.template_date import with_template_date
from torchdistpackage.data.tokens.texts import read_at_start
from torchdistpackage.environment.rendezvous import Rendezvous, detect
from torchdistpackage.errors import LaunchError, RankError
from torchdistpackage.files import appears, atomic_write
from torchdistpackage.launch.fork_server_client import ForkServer
from torchdistpackage.launch.lock import Lock
from torchdistpackage.launch.process import SignalFlag, name_thread
from torchdistpackage.launch.run_events import END, note_event
from torchdistpackage.launch.run_folder import cannot_write, only_writer, prepare_folder
from torchdistpackage.launch.run_rows import last_rows
from torchdistpackage.launch.slurm.node_blocklist import record_failed_nodes
from torchdistpackage.launch.slurm.query import limited
from torchdistpackage.launch.slurm.requeue import (
    EXIT_TEMPFAIL,
    Decision,
    RequeueDecision,
    decide_in_job,
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
from torchdistpackage.launch.workers import SignalledError, run_local
from torchdistpackage.lazy import resolve
from torchdistpackage.plan.elastic import fitted
from torchdistpackage.plan.refusals import (
    check_files,
    refuse_checkpoint,
    refuse_moving_aside,
    refuse_texts,
    refuse_unplanned_checkpoint,
)
from torchdistpackage.plan.resume_check import named_folder
from torchdistpackage.plan.run_plan import Plan, local_procs, make_plan, plan_keys
from torchdistpackage.plan.user_code import code_folder
from torchdistpackage.run_files import CHECKPOINTS, METRICS, RunDir

WORKER = "torchdistpackage.train.worker"
WORKER_MAIN = f"{WORKER}:worker_main"
SLURM_S = 5.0
"""Time limit in seconds for all queries of Slurm before rank 0 starts; the other ranks wait for
it.
"""
_LOOK_S = 0.1
# torch._dynamo: the first optimizer of a process imports it, which takes seconds
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "numpy", "safetensors.torch", WORKER)


def launch(path: str, overrides: list[str], resume: str = "auto") -> int:
    """Run the configuration at `path`; return the exit code.

    It is EXIT_TEMPFAIL if the run ended early and is saved.

    Under a launcher an early end is 0 as well, because the next action is already decided and
    recorded.

    Raises:
        ConfigError: it is wrong, for any rank, or `resume` is not a folder; nothing has been
            started.
        CheckpointError: what it would resume from is damaged or of another model; the same.
        RankError: a rank failed; names the first culprit.
        LaunchError: this start may not be, or its requeue failed.
    """
    rendezvous = detect(os.environ)
    if rendezvous.source == "alone":
        return start_ranks(path, overrides, resume)
    if os.environ.get("TDP_BATCH"):
        appears(Path(path))  # `tdp submit` wrote it on another node, perhaps just now
    config = _checked_rank(path, overrides, rendezvous, resume)
    if rendezvous.source == "slurm":
        return watch_rank(config, rendezvous, resume)
    if attempt_id(os.environ) != "local":
        return be_rank_in_job(config, rendezvous, resume)
    return be_rank(config, rendezvous, resume)


def how_to_go_on(checkpoints: Path, step: int) -> str:
    """Return where a run that failed after `step` continues, and how many steps that costs."""
    saved = latest(checkpoints)
    if saved is None:
        return "no checkpoint was saved: the same command starts again at step 0"
    lost = max(step - step_of(saved), 0)
    return (
        f"the same command goes on after step {step_of(saved)}, which is saved; {lost} "
        f"step{'s' if lost != 1 else ''} will be done again"
    )


# -- the parent of all ranks, where no launcher is ----------------------------------------------


def start_ranks(path: str, overrides: list[str], resume: str) -> int:
    """Start all ranks of the run on this machine, wait for them, and return the exit code."""
    name_thread("tdp-launcher")
    config, plan, resume = _checked(path, overrides, resume)
    num_procs = plan.world_size
    files = RunDir(config.run.folder.absolute())
    in_job = attempt_id(os.environ) != "local"
    # from here on the folder is this process's alone, and what is found in it stays as it is
    with only_writer(files.run):
        refuse_checkpoint(config, resume, lambda: plan)
        prepare_folder(config, resume)
        env: dict[str, str] = {}
        if in_job:
            start = _this_start(files, 0)
            if reason := restart_denied(files, start, config.launch.requeue):
                raise LaunchError(reason)
            append_start(files, start)
            env["TDP_RESTART"] = str(start.restart)
        codes = _codes_of_ranks(config, resume, num_procs, files, env)
    if EXIT_TEMPFAIL not in codes:
        return 0
    return (requeue_self(files, os.environ) if in_job else 0) or EXIT_TEMPFAIL


def _codes_of_ranks(
    config: RunConfig, resume: str, num_procs: int, files: RunDir, env: dict[str, str]
) -> list[object]:
    """Return the exit codes of the ranks, which are started again as often as the file allows.

    The server that forks them stays, so none of them waits for imports.
    """
    # what starts again in a job has a number of its own, which its script gives
    restarts_left = 0 if "TDP_RESTART" in env else config.launch.requeue.in_job_restarts
    last_decision: Decision | None = None
    with ForkServer(PRELOAD) as server:
        while True:
            try:
                return run_local(
                    WORKER_MAIN,
                    (config, resume),
                    num_procs=num_procs,
                    log_dir=files.logs,
                    env=env,
                    handled=config.launch.requeue.signals,
                    server=server,
                )
            except RankError as error:
                step = next((row["step"] for row in last_rows(files.run / METRICS)), 0)
                reason = str(error).partition("\n")[0]
                note_event(files.run, END, step, word="failed", reason=reason)
                restarts_left = 0 if isinstance(error, SignalledError) else restarts_left
                decided = decide_in_job(
                    f"after step {step}: {reason}", last_decision, starts_left=restarts_left
                )
                if decided.word is not RequeueDecision.AGAIN:
                    error.add_note(how_to_go_on(files.run / CHECKPOINTS, step))
                    raise
                sys.stdout.write(f"{error}\n{decided}\n")
            last_decision, restarts_left, resume = decided, restarts_left - 1, "auto"
            env["TDP_RESTART"] = str(int(env.get("TDP_RESTART", "0")) + 1)


def _checked(path: str, overrides: list[str], resume: str) -> tuple[RunConfig, Plan, str]:
    """Return the run on this machine, its plan and the meaning of `resume`.

    Raises:
        ConfigError: lists all that is wrong with the file, the plan and the files that it names.
    """
    draft = load_draft(path, overrides)

    def planned() -> Plan:
        num_procs = local_procs(draft.config)
        config = fitted(draft.config, num_procs, path)
        if num_procs > MAX_PROCS:
            text = f"{num_procs:,} processes on this machine, where {MAX_PROCS:,} are allowed; "
            raise ConfigErrors(path, [config.problem("parallel", text + "submit a job instead")])
        return make_plan(config, num_procs, path, bad=draft.bad)

    plan, resume_from = _all_checked(draft, path, resume, planned)
    config = with_template_date(fitted(draft.config, plan.world_size, path), resume_from)
    refuse_texts(config, path)
    return config, plan, resume_from


def _checked_rank(
    path: str, overrides: list[str], rendezvous: Rendezvous, resume: str
) -> RunConfig:
    """Return the run of a rank that a launcher started.

    Rank 0 makes all checks before it imports torch; the others only those of the file, and all of
    them if the file is wrong, so that each rank reports the same.

    Raises:
        ConfigError: lists all that is wrong with the file, the plan and the files that it names.
    """
    num_ranks = rendezvous.world_size
    draft = load_draft(path, overrides, num_ranks)

    def planned() -> Plan:
        config, per_node = fitted(draft.config, num_ranks, path), rendezvous.ranks_per_node
        return make_plan(config, num_ranks, path, ranks_per_node=per_node, bad=draft.bad)

    if rendezvous.rank == 0 or draft.problems:
        _all_checked(draft, path, resume, planned)
    return fitted(draft.config, num_ranks, path)


def _all_checked(
    draft: Draft, path: str, resume: str, planned: Callable[[], Plan]
) -> tuple[Plan, str]:
    """Return the plan that `planned` makes of a run, and the meaning of `resume`.

    Raises:
        ConfigError: lists all that is wrong with the file, the plan and the files that it names.
    """
    collector = ProblemCollector(draft, path)

    def resumed() -> str:
        files = RunDir(draft.config.run.folder.absolute())
        return resume_of(files, _this_start(files, 0), resume)

    plan = collector.run("the plan", plan_keys(draft.config), planned)
    resume_from = collector.run("--resume", ("run.dir", "run.name"), resumed)
    check_files(collector, draft.config, path, code_folder(os.environ))
    if read_at_start(draft.config):  # it takes long, so it waits for all that takes little
        collector.note("not read until this is mended: the texts")
    collector.finish()
    assert plan is not None and resume_from is not None, "finish raises what they refuse"
    return plan, resume_from


# -- a task of srun, which forks its rank and watches over it ------------------------------------


def watch_rank(config: RunConfig, rendezvous: Rendezvous, resume: str = "auto") -> int:
    """Watch the rank of this srun task and return its exit code, 0 if the run ended early."""
    name_thread(f"tdp-watch-{rendezvous.rank}")
    signals = SignalFlag()
    signals.listen(config.launch.requeue.signals)
    files = RunDir(config.run.folder.absolute())
    watch = lead_start if rendezvous.rank == 0 else follow_start
    try:
        return watch(config, rendezvous, resume, files, signals)
    except OSError as error:
        inside = error.filename is not None and Path(error.filename).is_relative_to(files.run)
        if not inside and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise cannot_write(files.run, error) from error


def lead_start(
    config: RunConfig, rendezvous: Rendezvous, resume: str, files: RunDir, signals: SignalFlag
) -> int:
    """Watch rank 0. Only this task refuses, and changes files of an earlier start."""
    with only_writer(files.run, forks=True) as lock:
        resume = resume_of(files, _this_start(files, 0), resume)
        refuse_moving_aside(files, resume)
        refuse_unplanned_checkpoint(config, resume, rendezvous.world_size)
        prepare_folder(config, resume)
        start = _this_start(files, 0)
        decision = files.decision(start.start)
        decision.unlink(missing_ok=True)
        if reason := restart_denied(files, start, config.launch.requeue):
            atomic_write(decision, f"{Decision(RequeueDecision.STOP, reason)}\n")
            sys.stdout.write(f"{reason}\n")
            return EXIT_TEMPFAIL
        append_start(files, start)
        record_failed_nodes(files, os.environ, limited(SLURM_S))
        _say_if_it_stays_away(config)
        code = _supervise(config, rendezvous, resume, files, signals, lock)
        return code or requeue_self(files, os.environ)


def follow_start(
    config: RunConfig, rendezvous: Rendezvous, resume: str, files: RunDir, signals: SignalFlag
) -> int:
    """Watch another rank, after rank 0 has moved an earlier run aside if necessary."""
    if resume_of(files, _this_start(files, rendezvous.rank), resume) == "never":
        _wait_for_room(files, signals, config.launch.init_timeout_s)
    resume = resume_of(files, _this_start(files, rendezvous.rank), resume)
    return _supervise(config, rendezvous, resume, files, signals)


def _supervise(
    config: RunConfig,
    rendezvous: Rendezvous,
    resume: str,
    files: RunDir,
    signals: SignalFlag,
    lock: Lock | None = None,
) -> int:
    """Fork the rank and watch it; the rank keeps the lock alive, if there is one."""
    start = _this_start(files, rendezvous.rank)
    failures, decision = files.failures(start.start), files.decision(start.start)
    log = files.rank_log(rendezvous.rank, start.restart)
    # where the script restarts the ranks on other nodes, it need not wait for Slurm's word
    waits_for = 0 if goes_on_without_nodes(config) else rendezvous.world_size
    watched = WatchedRank(rendezvous.rank, log, failures, decision, waits_for)
    watched.report.unlink(missing_ok=True)
    os.environ["TDP_RESTART"] = str(start.restart)

    def forked_rank() -> int:
        if lock is not None:
            lock.keep()
        code = _worker_main(config, resume, signals)
        return 0 if code == EXIT_TEMPFAIL else code

    return supervise(forked_rank, watched, signals)


def _wait_for_room(files: RunDir, signals: SignalFlag, limit_s: float) -> None:
    """Wait until rank 0 has moved an earlier run aside, which its record of this start shows."""
    until_s, attempt = time.monotonic() + limit_s, attempt_id(os.environ)
    while attempt not in (start.start for start in read_starts(files.starts)):
        if signals.all_received or time.monotonic() > until_s:
            why = signals.received or f"{limit_s:g} s (launch.init_timeout_s) are over"
            raise LaunchError(
                f"{why}, and rank 0 has not yet moved an earlier run out of {files.run}; see the "
                "log of rank 0"
            )
        # polls, as a shared file system does not tell of a new line
        time.sleep(_LOOK_S)


# -- a rank, where torchrun started it ----------------------------------------------------------


def be_rank(config: RunConfig, rendezvous: Rendezvous, resume: str) -> int:
    """Run as a rank that torchrun started outside of a job."""
    files = RunDir(config.run.folder.absolute())
    resume = resume_of(files, _this_start(files, 0), resume)
    if rendezvous.rank == 0:
        refuse_unplanned_checkpoint(config, resume, rendezvous.world_size)
    code = _worker_main(config, resume)
    return 0 if code == EXIT_TEMPFAIL else code


def be_rank_in_job(config: RunConfig, rendezvous: Rendezvous, resume: str) -> int:
    """Run as a rank that torchrun started in a Slurm job whose script does not read decisions.

    All ranks read the same files, so they agree whether to train.
    """
    files = RunDir(config.run.folder.absolute())
    start = _this_start(files, 0)
    resume = resume_of(files, start, resume)
    is_main = rendezvous.rank == 0
    if is_main:
        refuse_unplanned_checkpoint(config, resume, rendezvous.world_size)
    reason = restart_denied(files, start, config.launch.requeue)
    ended = read_decision(files, os.environ)
    if ended is not None and ended.word is not RequeueDecision.FINISHED:
        reason = f"start {start.start} has ended: {ended}"  # torchrun starts ranks anew after it
    if reason:
        if is_main:
            sys.stdout.write(f"{reason}\n")
            if ended is None:
                decision = Decision(RequeueDecision.STOP, reason)
                atomic_write(files.decision(start.start), f"{decision}\n")
        return EXIT_TEMPFAIL
    if is_main:
        _say_if_it_stays_away(config)
    os.environ["TDP_RESTART"] = str(start.restart if resume != "never" else 0)
    code = _worker_main(config, resume)
    if code != EXIT_TEMPFAIL:
        return code
    return requeue_self(files, os.environ) if is_main else 0


# -- what these share ---------------------------------------------------------------------------


def _worker_main(config: RunConfig, resume: str, signals: SignalFlag | None = None) -> int:
    # only a rank pays for torch; the parent of local ones and the watcher do without
    return resolve(WORKER_MAIN)(config, resume, signals)


def _this_start(files: RunDir, rank: int) -> Start:
    step = 0
    if rank == 0 and (path := latest(files.run / CHECKPOINTS)):
        step = step_of(path)
    return this_start(files, os.environ, step)


def resume_of(files: RunDir, start: Start, resume: str) -> str:
    """Return the meaning of `--resume` for `start`.

    The user's choice applies to the first start of a job; its requeues, and ranks that torchrun
    restarts by itself, continue from the newest checkpoint.

    Raises:
        ConfigError: it means a folder, and there is none.
    """
    in_job = start.start != "local"
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if again or (in_job and len(series_of(files, start)) > 1):
        return "auto"
    if resume not in ("auto", "never"):
        named_folder(resume)
    return resume


def _say_if_it_stays_away(config: RunConfig) -> None:
    if reason := why_not(config.launch.requeue.mode, os.environ, limited(SLURM_S)):
        sys.stdout.write(f"{reason}\n")
        sys.stdout.flush()
