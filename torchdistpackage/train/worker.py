"""One rank of a run, from its environment to its last word."""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TextIO, cast

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import end_processes
from torchdistpackage.comm.runtime import JoinResult, join, leave
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.harness.hang.dump import remove_traces
from torchdistpackage.harness.watch_start import agree_on_start
from torchdistpackage.harness.watchdog import HangWatchdog
from torchdistpackage.launch.rendezvous import Rendezvous, detect
from torchdistpackage.launch.signals import SignalFlag
from torchdistpackage.launch.slurm.requeue import EXIT_TEMPFAIL, Decision, RequeueDecision
from torchdistpackage.launch.slurm.run_dir import (
    RunDir,
    amend_start,
    append_start,
    attempt_id,
    this_start,
)
from torchdistpackage.train.build import build, make_loop
from torchdistpackage.train.finish import finish, sample_text
from torchdistpackage.train.job import (
    RESOLVED,
    add_user_code,
    only_writer,
    prepare_folder,
    run_folder,
)
from torchdistpackage.train.log import Tee, print_line
from torchdistpackage.train.plan import Plan, make_plan
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.stop import begin, end, write_decision
from torchdistpackage.train.train_state import resume as resume_state


def worker_main(config: RunConfig, resume: str, signals: SignalFlag | None = None) -> int:
    """Join the others, train, and leave; 0, or STOPPED if the run ended early and is saved.

    signals: listens already, if this process was made for the rank.

    Raises:
        TorchDistError: whatever stopped this rank; whoever started it reports and ends the others.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the ranks of a node would otherwise each take all its cores
    add_user_code(os.environ)
    if signals is None:
        signals = SignalFlag()
        signals.listen(config.launch.requeue.signals)
    end_processes()
    rendezvous = detect(os.environ)
    plan = make_plan(config, rendezvous.world_size)
    folder = run_folder(plan.config)
    joined = join(
        rendezvous,
        init_timeout_s=config.launch.init_timeout_s,
        dump_folder=RunDir(folder).logs,
    )
    with _sole_writer(rendezvous, folder):
        return _train(plan, rendezvous, joined, resume, signals)


def _leads(rendezvous: Rendezvous) -> bool:
    """Whether this rank alone changes the run folder: rank 0, if no process of ours watches it."""
    unwatched = rendezvous.store is None and rendezvous.source != "slurm"
    return unwatched and rendezvous.rank == 0


def _sole_writer(rendezvous: Rendezvous, folder: Path) -> AbstractContextManager[object]:
    return only_writer(folder) if _leads(rendezvous) else nullcontext()


def _train(
    plan: Plan, rendezvous: Rendezvous, joined: JoinResult, resume: str, noted: SignalFlag
) -> int:
    config, folder = plan.config, run_folder(plan.config)
    if rendezvous.rank == 0:
        if _leads(rendezvous):
            prepare_folder(config, resume)
        (folder / RESOLVED).write_text(config.to_yaml())
        remove_traces(folder)
    primitives.barrier()
    if rendezvous.source != "slurm" and (rendezvous.rank == 0 or rendezvous.source != "local"):
        # of the others a parent keeps the output; not before rank 0 has made room
        log = RunDir(folder).rank_log(rendezvous.rank, int(os.environ.get("TDP_RESTART", "0")))
        sys.stdout, sys.stderr = (cast(TextIO, Tee(x, log)) for x in (sys.stdout, sys.stderr))
    if rendezvous.rank == 0:
        for note in joined.notes:
            print_line(note)
    trainer = build(plan, rendezvous.rank, joined.device)
    state = resume_state(trainer, folder, resume)
    if rendezvous.rank == 0:
        if _leads(rendezvous) and attempt_id(os.environ) != "local":
            append_start(RunDir(folder), this_start(RunDir(folder), os.environ, state.step))
        amend_start(RunDir(folder), os.environ, state.step)
    section = config.launch.requeue
    life = begin(folder, section, noted, rendezvous.rank, os.environ)
    watch = HangWatchdog(
        folder,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        topology=plan.topology,
        timeout_s=config.train.step_timeout_s,
        first_timeout_s=max(config.launch.init_timeout_s, config.train.step_timeout_s),
        start=agree_on_start(folder, rank=rendezvous.rank, world_size=rendezvous.world_size),
    )
    with watch:
        loop = make_loop(trainer, state, folder, life, watch)
        loss = loop.run()
        with watch.allow_slow():
            if loss is not None:
                finish(loop, loss, text=_sample(trainer), plot=config.log.plot)
            primitives.barrier()
    if rendezvous.rank == 0:
        if loss is None:
            decision = end(life, folder, loop.state.step, os.environ)
            print_line(f"saved and ended {decision.reason} [{decision.word}]")
        elif attempt_id(os.environ) != "local":
            write_decision(
                RunDir(folder), Decision(RequeueDecision.FINISHED, f"{folder}"), os.environ
            )
    leave()
    return EXIT_TEMPFAIL if loss is None else 0


def _sample(trainer: Trainer) -> str | None:
    """What a language model of bytes writes at the end; None if it is none, or need not."""
    config, shape = trainer.plan.config, trainer.plan.shape
    num_tokens = config.train.generate_tokens
    if not num_tokens or shape is None or config.data.name not in ("python_stdlib", "text"):
        return None
    # from stage 3 on no replica has weights of its own
    return sample_text(trainer, num_tokens, every_replica=config.parallel.zero == 3)
