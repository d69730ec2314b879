"""A run as processes: start them on this machine, or be one of those a launcher started. No torch.

Under torchrun or srun this process is a rank already, and a task of srun watches over it. Alone, it
starts the ranks and watches them.
"""

import importlib
import os
import sys

from torchdistpackage.checkpoint.commit import latest
from torchdistpackage.config.load import load
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.durable import write_whole
from torchdistpackage.launch.local import run_local
from torchdistpackage.launch.rendezvous import Rendezvous, detect
from torchdistpackage.launch.requeue import STOPPED, Decision, Word
from torchdistpackage.launch.signals import Noted
from torchdistpackage.launch.slurm.again import come_back
from torchdistpackage.launch.slurm.files import JobFiles, start_id
from torchdistpackage.launch.slurm.starts import Start, note, refusal_of, series_of, this_start
from torchdistpackage.launch.slurm.suspects import note_failed_nodes
from torchdistpackage.launch.supervise import Place, supervise
from torchdistpackage.train.folder import prepare_folder, run_folder
from torchdistpackage.train.life import limits_of
from torchdistpackage.train.plan import local_procs, make_plan

RANK = "torchdistpackage.train.rank"
CHECKPOINTS = "checkpoints"
# torch._dynamo: the first optimizer of a process imports it, which takes seconds
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "numpy", "safetensors.torch", RANK)


def launch(path: str, overrides: list[str], resume: str = "auto") -> int:
    """Run the configuration at `path`; the exit code, STOPPED if the run ended early and is saved.

    Under a launcher an early end is 0 as well: what follows was decided and written down.

    Raises:
        ConfigError: it is wrong, for any rank; nothing has been started.
        RankError: a rank failed; names the first culprit.
        LaunchError: this start may not be, or its requeue failed.
    """
    rendezvous = detect(os.environ)
    if rendezvous.source == "alone":
        return _start_ranks(path, overrides, resume)
    config = load(path, overrides, rendezvous.world_size)
    if rendezvous.source == "slurm":
        return watched(config, rendezvous, resume)
    return _be_rank(config, resume)


def watched(config: RunConfig, rendezvous: Rendezvous, resume: str = "auto") -> int:
    """Be the task of srun that watches over a rank; its exit code, 0 if the run ended early."""
    noted = Noted()
    noted.listen(config.launch.requeue.signals)
    rank = rendezvous.rank
    files = JobFiles(run_folder(config).absolute())
    start = _this_start(files, rank)
    resume = _resume(files, start, resume)
    if resume == "never" and latest(files.run / CHECKPOINTS):
        raise LaunchError(
            f"--resume never: {files.run} holds checkpoints, and the ranks of a launcher cannot "
            f"move it away under each other; move it, or name another run with run.name=..."
        )
    decision = files.decision(start.start)
    place = Place(rank, files.rank_log(rank, start.restart), files.failures(start.start), decision)
    place.report.unlink(missing_ok=True)
    os.environ["TDP_RESTART"] = str(start.restart)

    if rank == 0:
        decision.unlink(missing_ok=True)
        note_failed_nodes(files, os.environ)
        if refused := refusal_of(files, start, limits_of(config.launch.requeue)):
            write_whole(decision, f"{Decision(Word.STOP, refused)}\n")
            sys.stdout.write(f"{refused}\n")
            return STOPPED
        note(files, start)
    code = supervise(lambda: _be_rank(config, resume, noted), place, noted)
    if code == 0 and rank == 0 and come_back(files, os.environ) is Word.STOP:
        return STOPPED
    return code


def _be_rank(config: RunConfig, resume: str, noted: Noted | None = None) -> int:
    # only a rank pays for torch; the parent of local ones and the watcher do without
    code = importlib.import_module(RANK).rank_main(config, resume, noted)
    return 0 if code == STOPPED else code


def _start_ranks(path: str, overrides: list[str], resume: str) -> int:
    config = load(path, overrides)
    num_procs = local_procs(config)
    make_plan(config, num_procs, path)
    files = JobFiles(run_folder(config).absolute())
    in_job = start_id(os.environ) != "local"
    if in_job:
        resume = _resume(files, _this_start(files, 0), resume)
    folder = prepare_folder(config, resume)
    env: dict[str, str] = {}
    if in_job:
        start = _this_start(files, 0)
        if refused := refusal_of(files, start, limits_of(config.launch.requeue)):
            raise LaunchError(refused)
        note(files, start)
        env["TDP_RESTART"] = str(start.restart)
    codes = run_local(
        f"{RANK}:rank_main",
        (config, resume),
        num_procs=num_procs,
        preload=PRELOAD,
        log_dir=folder / "logs",
        env=env,
        handled=config.launch.requeue.signals,
    )
    if STOPPED in codes and env:
        come_back(files, os.environ)
    return STOPPED if STOPPED in codes else 0


def _this_start(files: JobFiles, rank: int) -> Start:
    step = 0
    if rank == 0 and (path := latest(files.run / CHECKPOINTS)):
        step = int(path.name.partition("_")[2].partition(".")[0])
    return this_start(files, os.environ, step)


def _resume(files: JobFiles, start: Start, how: str) -> str:
    """What the user said holds for the first start of a job; its requeues go on from there."""
    return "auto" if len(series_of(files, start)) > 1 else how
