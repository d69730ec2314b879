"""One rank of a run: join, prepare, announce, build, record the start, run, conclude.

`worker_main` is this sequence; each function below it is one of these steps.
"""

import os
import re
import socket
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, cast

import torch

from torchdistpackage.checkpoint.local_copies import LocalCopies
from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import end_processes
from torchdistpackage.comm.keepalive import keep_alive
from torchdistpackage.comm.runtime import JoinResult, join, leave, libraries, make_deterministic
from torchdistpackage.config.elastic import goes_on_without_nodes
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.data.tokens.data_fingerprint import data_fingerprints, edited_data
from torchdistpackage.data.tokens.template_date import with_template_date
from torchdistpackage.environment.failure import only_returns
from torchdistpackage.environment.rendezvous import Rendezvous, detect
from torchdistpackage.environment.slurm_env import node_name
from torchdistpackage.errors import LaunchError
from torchdistpackage.files import append_text, atomic_write, make_folder
from torchdistpackage.harness.hang.dump import remove_traces
from torchdistpackage.harness.watchdog import HangWatchdog, agree_on_start
from torchdistpackage.launch.process import SignalFlag, name_thread
from torchdistpackage.launch.run_events import END, flat, note_event, note_start
from torchdistpackage.launch.run_folder import only_writer, prepare_folder
from torchdistpackage.launch.slurm.node_blocklist import record_bad_node
from torchdistpackage.launch.slurm.requeue import EXIT_TEMPFAIL, Decision, RequeueDecision
from torchdistpackage.launch.slurm.run_dir import amend_start, append_start, attempt_id, this_start
from torchdistpackage.lazy import resolve
from torchdistpackage.plan.certificate import proof_of
from torchdistpackage.plan.resume_check import StartChanges, start_changes
from torchdistpackage.plan.run_plan import Plan, make_plan, too_long
from torchdistpackage.plan.user_code import add_user_code
from torchdistpackage.run_files import RunDir
from torchdistpackage.topology.mesh import adjacent_on_a_host
from torchdistpackage.train.build import (
    build,
    make_local_copies,
    make_loop,
    retention_of,
    world_options,
)
from torchdistpackage.train.compiled import end_compile_workers, use_cache, warm_up
from torchdistpackage.train.data_build import agreed_date, notes_of, with_steps
from torchdistpackage.train.export import export_run
from torchdistpackage.train.finish import ended_line, finish, sample_text
from torchdistpackage.train.learning_rate import warmup_notes
from torchdistpackage.train.log import print_line
from torchdistpackage.train.loop import Loop
from torchdistpackage.train.memory_note import noting_memory
from torchdistpackage.train.model_notes import model_notes
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.stop import StopController, begin, end, write_decision
from torchdistpackage.train.trackers.feed import Trackers
from torchdistpackage.train.train_state import TrainState
from torchdistpackage.train.train_state import resume as resume_state
from torchdistpackage.train.wind_up import Export, wind_up

if TYPE_CHECKING:
    from torchdistpackage.harness.node_check import NodeCheck

_CHECK_NODES = "torchdistpackage.harness.node_check:check_nodes"


def worker_main(config: RunConfig, resume: str, signals: SignalFlag | None = None) -> int:
    """Join the other ranks, train, and leave; return 0, or EXIT_TEMPFAIL if the run ended early and
    is saved.

    signals: is already listening, if this process was made for the rank.

    Raises:
        TorchDistError: what stopped this rank; its launcher reports it and ends the others.
    """
    with only_returns():
        rank = _join(config, resume, signals)
        with only_writer(rank.folder) if rank.leads else nullcontext():
            changes = _prepare(rank)
            _announce(rank)
            # what reads data and checkpoints can hang as a step can
            with _watch(rank) as watch:
                with watch.allow_slow():
                    _check_nodes(rank)
                    prepared = _build(rank)
                    stop = _note_start(rank, prepared.state, changes)
                    if goes_on_without_nodes(rank.config):
                        keep_alive()
                ended = _run(rank, prepared, stop, watch)
            return _conclude(rank, ended, stop)


@dataclass(frozen=True)
class RunRank:
    """The inputs of a rank of a run: its plan, its rendezvous, and its signals."""

    plan: Plan
    rendezvous: Rendezvous
    joined: JoinResult
    resume: str
    signals: SignalFlag

    @property
    def config(self) -> RunConfig:
        return self.plan.config

    @property
    def folder(self) -> Path:
        return self.config.run.folder

    @property
    def files(self) -> RunDir:
        return RunDir(self.folder)

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which alone writes files of the run and prints for it."""
        return self.rendezvous.rank == 0

    @property
    def leads(self) -> bool:
        """Return whether only this rank changes the run folder: rank 0, unless one of our processes
        watches.
        """
        unwatched = self.rendezvous.store is None and self.rendezvous.source != "slurm"
        return unwatched and self.is_main

    def say(self, *lines: str) -> None:
        """Print lines, on rank 0 only."""
        for line in lines if self.is_main else ():
            print_line(line)


class PreparedRun(NamedTuple):
    """The objects a rank trains with, and the state it resumes from."""

    trainer: Trainer
    state: TrainState
    local: LocalCopies | None


class EndedRun(NamedTuple):
    """A finished run. loss: of the final validation; None if the run was asked to end before."""

    loop: Loop
    loss: float | None
    trackers: Trackers


def _join(config: RunConfig, resume: str, signals: SignalFlag | None) -> RunRank:
    """Meet the other ranks, and agree with them on values that the plan left open."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the ranks of a node would otherwise each take all its cores
    add_user_code(os.environ)
    if signals is None:
        signals = SignalFlag()
        signals.listen(config.launch.requeue.signals)
    end_processes()
    if config.train.deterministic:
        make_deterministic()
    rendezvous = detect(os.environ)
    name_thread(f"tdp-rank-{rendezvous.rank}")
    per_node = rendezvous.ranks_per_node
    plan = make_plan(config, rendezvous.world_size, ranks_per_node=per_node)
    joined = join(
        rendezvous,
        init_timeout_s=config.launch.init_timeout_s,
        same_versions=config.launch.same_versions,
        share_gpus=config.launch.share_gpus,
        dump_folder=RunDir(config.run.folder).logs,
        options=world_options(plan),
    )
    agreed = with_steps(agreed_date(with_template_date(config, resume)))
    by_node = config.parallel.zero_group == "node"
    if by_node:  # a launcher may place ranks otherwise than their numbers say
        per_node = cast(int, primitives.reduce_objects(socket.gethostname(), adjacent_on_a_host))
    if by_node or agreed is not config:
        plan = make_plan(agreed, rendezvous.world_size, ranks_per_node=per_node)
    return RunRank(plan, rendezvous, joined, resume, signals)


def _prepare(rank: RunRank) -> StartChanges:
    """Make the run folder and open the rank's log; return the changes since the last start."""
    config, folder, changes = rank.config, rank.folder, StartChanges()
    if rank.is_main:
        if rank.leads:
            prepare_folder(config, rank.resume)
        changes = start_changes(rank.files.resolved, config)
        atomic_write(rank.files.resolved, config.to_yaml())
        remove_traces(folder)
    # rank 0 has made the folder, or moved an earlier one aside, before others write into it
    primitives.barrier()
    source = rank.rendezvous.source
    if source != "slurm" and (rank.is_main or source != "local"):
        # of the others a parent keeps the output; not before rank 0 has made room
        log = rank.files.rank_log(rank.rendezvous.rank, int(os.environ.get("TDP_RESTART", "0")))
        sys.stdout, sys.stderr = (cast(TextIO, Tee(x, log)) for x in (sys.stdout, sys.stderr))
    return changes


def _announce(rank: RunRank) -> None:
    """Print the facts known about the run before its objects are made."""
    config = rank.config
    rank.say(*rank.joined.notes)
    if rank.joined.backend == "nccl":
        rank.say(", ".join(f"{name} {value}" for name, value in libraries().items()))
    if warning := too_long(rank.plan):
        rank.say(f"warning: {warning}")
    if config.precision.reduce_dtype == "bf16":
        rank.say("gradients travel in bf16 (precision.reduce_dtype)")
    if config.train.compile != "off":
        rank.say(f"compiling blocks with {config.train.compile_backend}")


def _check_nodes(rank: RunRank) -> None:
    """Measure the nodes if the file asks for it.

    Raises:
        LaunchError: names the nodes that are slow or compute wrong results. They are recorded, so
            that the job, or the next submission, leaves them out.
    """
    if rank.config.launch.node_check == "off":
        return
    # its imports take time that a run without the check does not spend
    check: NodeCheck = resolve(_CHECK_NODES)(node_name(os.environ), rank.joined.device)
    rank.say(*(f"note: {note}" for note in check.notes))
    if not check.bad:
        return
    if rank.is_main:
        for node in check.bad:
            record_bad_node(rank.files, os.environ, node.host, node.rank, node.reason)
    raise LaunchError(check.problem)


def _build(rank: RunRank) -> PreparedRun:
    """Make the objects of this rank, and load the state from which the run continues."""
    config, folder = rank.config, rank.folder
    if config.train.compile != "off":
        rendezvous = rank.rendezvous
        several = rendezvous.local_world_size < rendezvous.world_size
        use_cache(folder, rendezvous.rank, several_nodes=several)
    trainer = build(rank.plan, rank.rendezvous.rank, rank.joined.device)
    notes = (*notes_of(trainer.data), *model_notes(trainer))
    notes += warmup_notes(config.optim, config.train.steps)
    rank.say(*(f"note: {note}" for note in notes))
    if config.train.recompute == "offload":
        names = ", ".join(trainer.offloaded) or "nothing"
        rank.say(f"activations in host memory on rank 0: {names}")
        if trainer.device.type == "cpu":
            rank.say("note: train.recompute=offload saves no memory on the CPU")
    elif config.train.recompute != "none":
        # a chain of your own may have no blocks, and a limit may be large enough
        names = ", ".join(trainer.recomputed) or "nothing"
        rank.say(f"recomputed in the backward on rank 0: {names}")
    local = make_local_copies(rank.plan, folder)
    state = resume_state(trainer, folder, rank.resume, local, retention_of(config))
    rank.say(*(f"note: {note}" for note in (() if local is None else local.notes)))
    if config.train.compile != "off":
        rank.say(warm_up(trainer, min(state.step + 1, trainer.num_steps)))
    return PreparedRun(trainer, state, local)


def _note_start(rank: RunRank, state: TrainState, changes: StartChanges) -> StopController:
    """Record in the run folder that it continues now; from here on this rank can be asked to
    stop.
    """
    config, folder = rank.config, rank.folder
    if rank.is_main:
        now = data_fingerprints(config)
        rank.say(*(f"note: {x}" for x in edited_data(config, state.step, state.data, now)))
        state.data = now
        rank.say(*(f"note: {x}" for x in changes.notes() if state.step))
        if rank.leads and attempt_id(os.environ) != "local":
            append_start(rank.files, this_start(rank.files, os.environ, state.step))
        amend_start(rank.files, os.environ, state.step)
    stop = begin(folder, config.launch.requeue, rank.signals, rank.rendezvous.rank, os.environ)
    if rank.is_main:
        device = rank.joined.device
        note_start(
            folder,
            config,
            state.step,
            attempt=attempt_id(os.environ),
            world_size=rank.rendezvous.world_size,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            job_end_s=stop.end_s,
            libraries=libraries(),
            proof=proof_of(config, rank.plan.config),
        )
    return stop


def _watch(rank: RunRank) -> HangWatchdog:
    """Return the watch for hangs; all ranks make it together."""
    config, folder = rank.config, rank.folder
    rank_number, world_size = rank.rendezvous.rank, rank.rendezvous.world_size
    return HangWatchdog(
        folder,
        rank=rank_number,
        world_size=world_size,
        topology=rank.plan.topology,
        timeout_s=config.train.step_timeout_s,
        first_timeout_s=max(config.launch.init_timeout_s, config.train.step_timeout_s),
        start=agree_on_start(folder, rank=rank_number, world_size=world_size),
    )


def _run(
    rank: RunRank, prepared: PreparedRun, stop: StopController, watch: HangWatchdog
) -> EndedRun:
    """Train to the last step, or until a rank asks for the end."""
    config, folder, plan = rank.config, rank.folder, rank.plan
    rank_number = rank.rendezvous.rank
    trackers = Trackers(
        config.log.to,
        folder,
        rank=rank_number,
        name=config.run.name,
        config=dict(flat(config.model_dump(mode="json"))),
        step=prepared.state.step,
    )
    with trackers, only_returns():
        more = [trackers] if config.log.to else []
        loop = make_loop(
            prepared.trainer, prepared.state, folder, stop, watch, more, prepared.local
        )
        with noting_memory(prepared.trainer):
            loss = loop.run()
        num_tokens = 0 if loss is None else _num_tokens(plan)
        text = sample_text(loop, num_tokens) if num_tokens else None
        with watch.allow_slow():
            if loss is not None:
                finish(loop, loss, text=text, plot=config.log.plot)
            # no rank leaves before all are done, or its end would look like a failure to the others
            primitives.barrier()
    return EndedRun(loop, loss, trackers)


def _conclude(rank: RunRank, ended: EndedRun, stop: StopController) -> int:
    """Record how the run ended, leave the others, and write rank 0's own files."""
    config, folder = rank.config, rank.folder
    loop, loss, trackers = ended
    outcome = RequeueDecision.FINISHED
    if rank.is_main:
        if loss is None:
            decision = end(stop, folder, loop.state.step, os.environ)
            outcome = decision.word
            note_event(folder, END, loop.state.step, word=outcome, reason=decision.reason)
            rank.say(ended_line(folder, loop.state.step, decision))
        else:
            note_event(folder, END, loop.state.step, word=outcome, reason=loop.early_end)
        if loss is not None and attempt_id(os.environ) != "local":
            write_decision(rank.files, Decision(RequeueDecision.FINISHED, f"{folder}"), os.environ)
    if config.train.compile != "off":
        end_compile_workers()
    leave()  # before the report and the export, for which no other rank waits
    is_complete = loss is not None
    if rank.is_main and not wind_up(
        folder,
        trackers,
        outcome,
        rank.signals,
        timeout_s=config.train.step_timeout_s,
        report=config.log.report,
        export=_export(rank.plan, folder) if is_complete else None,
    ):
        is_complete = False
        stop.should_stop()  # notes the signal as the reason
        decision = end(stop, folder, loop.state.step, os.environ)
        rank.say(f"ended {decision.reason} [{decision.word}]")
    return 0 if is_complete else EXIT_TEMPFAIL


def _num_tokens(plan: Plan) -> int:
    """Return how many tokens a byte-level model writes at the end; 0 for other models."""
    config, model = plan.config, plan.model
    writes = model is not None and model.has_own_text and config.data.has_bytes
    return config.train.generate_tokens if writes else 0


def _export(plan: Plan, run: Path) -> Export | None:
    """Return the function that writes the finished run's model; None if the file does not ask for
    it.
    """
    section, model = plan.config.model, plan.model
    if plan.config.checkpoint.export is None or model is None:
        return None
    like = section.hf or section.weights
    return lambda beat: export_run(run, model, plan.config, like, beat)


_TERMINAL = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z^-~\\])"
)
"""Pattern of control sequences (colours, cursor), those with a text (titles, links), and single
escapes.
"""
_LINE_LETTERS = 1 << 16


class Tee:
    """A stream that is also written to a file, without what only a terminal can show.

    A broken stream does not end the run. The file has only the final state of a line that is
    overwritten repeatedly, such as a progress bar.
    """

    def __init__(self, stream: TextIO, path: Path):
        make_folder(path.parent)
        self._stream, self._file = stream, append_text(path)
        self._line = ""  # of a line that began with a carriage return: its state so far

    def write(self, text: str) -> int:
        with suppress(OSError):  # a full disk
            self._keep(text)
        with suppress(OSError):  # a terminal or a pipe that was closed
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def close(self) -> None:
        """Close the file; the stream belongs to its owner."""
        with suppress(OSError):
            self._file.write(_last_state(self._line))
        self._file.close()

    def _keep(self, text: str) -> None:
        """Write plain text at once, even without the end of its line; hold redrawn lines back until
        they end.
        """
        if not self._line and "\r" not in text and "\x1b" not in text:
            self._file.write(text)
            return
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._file.write(_last_state(line) + "\n")
        # of an endless line the last state will do
        if len(self._line) > _LINE_LETTERS:
            self._line = self._line.rpartition("\r")[2][-_LINE_LETTERS:]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _last_state(line: str) -> str:
    """Return the text that a terminal shows in the end, without colours."""
    states = _TERMINAL.sub("", line).split("\r")
    return next((state for state in reversed(states) if state), "")
