"""One rank of a run, from its environment to its last word."""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TextIO, cast

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation_limit import end_processes
from torchdistpackage.comm.runtime import Joined, join, leave
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.harness.hang.dump import remove_traces
from torchdistpackage.harness.watch import Watch
from torchdistpackage.harness.watch_start import agree_on_start
from torchdistpackage.launch.rendezvous import Rendezvous, detect
from torchdistpackage.launch.requeue import STOPPED, Decision, Word
from torchdistpackage.launch.signals import Noted
from torchdistpackage.launch.slurm.files import JobFiles, start_id
from torchdistpackage.launch.slurm.starts import correct, this_start
from torchdistpackage.launch.slurm.starts import note as note_start
from torchdistpackage.train.build import build
from torchdistpackage.train.ending import finish
from torchdistpackage.train.folder import RESOLVED, only_writer, prepare_folder, run_folder
from torchdistpackage.train.life import begin, end, leave_word
from torchdistpackage.train.log import say
from torchdistpackage.train.loop import Loop
from torchdistpackage.train.own_code import add_own_code
from torchdistpackage.train.plan import Plan, make_plan
from torchdistpackage.train.rank_log import Both
from torchdistpackage.train.state import resume as resume_state


def rank_main(config: RunConfig, resume: str, noted: Noted | None = None) -> int:
    """Join the others, train, and leave; 0, or STOPPED if the run ended early and is saved.

    noted: listens already, if this process was made for the rank.

    Raises:
        TorchDistError: whatever stopped this rank; whoever started it reports and ends the others.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the ranks of a node would otherwise each take all its cores
    add_own_code(os.environ)
    if noted is None:
        noted = Noted()
        noted.listen(config.launch.requeue.signals)
    end_processes()
    rendezvous = detect(os.environ)
    plan = make_plan(config, rendezvous.world_size)
    folder = run_folder(plan.config)
    joined = join(
        rendezvous,
        init_timeout_s=config.launch.init_timeout_s,
        dump_folder=JobFiles(folder).logs,
    )
    with _sole_writer(rendezvous, folder):
        return _train(plan, rendezvous, joined, resume, noted)


def _leads(rendezvous: Rendezvous) -> bool:
    """Whether this rank alone changes the run folder: rank 0, if no process of ours watches it."""
    unwatched = rendezvous.store is None and rendezvous.source != "slurm"
    return unwatched and rendezvous.rank == 0


def _sole_writer(rendezvous: Rendezvous, folder: Path) -> AbstractContextManager[object]:
    return only_writer(folder) if _leads(rendezvous) else nullcontext()


def _train(plan: Plan, rendezvous: Rendezvous, joined: Joined, resume: str, noted: Noted) -> int:
    config, folder = plan.config, run_folder(plan.config)
    if rendezvous.rank == 0:
        if _leads(rendezvous):
            prepare_folder(config, resume)
        (folder / RESOLVED).write_text(config.to_yaml())
        remove_traces(folder)
    primitives.barrier()
    if rendezvous.source != "slurm" and (rendezvous.rank == 0 or rendezvous.source != "local"):
        # of the others a parent keeps the output; not before rank 0 has made room
        log = JobFiles(folder).rank_log(rendezvous.rank, int(os.environ.get("TDP_RESTART", "0")))
        sys.stdout, sys.stderr = (cast(TextIO, Both(x, log)) for x in (sys.stdout, sys.stderr))
    if rendezvous.rank == 0:
        for note in joined.notes:
            say(note)
    trainer = build(plan, rendezvous.rank, joined.device)
    state = resume_state(trainer, folder, resume)
    if rendezvous.rank == 0:
        if _leads(rendezvous) and start_id(os.environ) != "local":
            note_start(JobFiles(folder), this_start(JobFiles(folder), os.environ, state.step))
        correct(JobFiles(folder), os.environ, state.step)
    section = config.launch.requeue
    life = begin(folder, section, noted, rendezvous.rank, os.environ)
    watch = Watch(
        folder,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        topology=plan.topology,
        timeout_s=config.train.step_timeout_s,
        first_timeout_s=max(config.launch.init_timeout_s, config.train.step_timeout_s),
        start=agree_on_start(folder, rank=rendezvous.rank, world_size=rendezvous.world_size),
    )
    with watch:
        loop = Loop(trainer, state, folder, life, watch)
        loss = loop.run()
        with watch.slow():
            if loss is not None:
                finish(loop, loss)
            primitives.barrier()
    if rendezvous.rank == 0:
        if loss is None:
            decision = end(life, folder, loop.state.step, os.environ)
            say(f"saved and ended {decision.reason} [{decision.word}]")
        elif start_id(os.environ) != "local":
            leave_word(JobFiles(folder), Decision(Word.FINISHED, f"{folder}"), os.environ)
    leave()
    return STOPPED if loss is None else 0
