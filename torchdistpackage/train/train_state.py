"""The state that a run needs to resume exactly: weights, optimizer, random state, counters."""

import logging
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torchdistpackage.checkpoint.commit import folder_name, retain_before, set_aside
from torchdistpackage.checkpoint.load import latest_together, load
from torchdistpackage.checkpoint.local_copies import LocalCopies
from torchdistpackage.checkpoint.manifest import Fact
from torchdistpackage.checkpoint.parts import TopologyRank
from torchdistpackage.checkpoint.retention import BEST_STEP, Retention
from torchdistpackage.checkpoint.save import (
    PendingSave,
    SaveTarget,
    SharedFolder,
    degrees_of,
    fail_together,
    start_save,
)
from torchdistpackage.checkpoint.snapshot import HostCopies, take_snapshot
from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.config.hugging_face import TRAINER_STATE
from torchdistpackage.config.schema import VAL_LOSS
from torchdistpackage.data.tokens.data_fingerprint import DataFingerprints
from torchdistpackage.errors import CheckpointError, LaunchError
from torchdistpackage.files import LATE_S, appears
from torchdistpackage.launch.run_events import SAVE, START, RunEvent, read_events
from torchdistpackage.run_files import CHECKPOINTS
from torchdistpackage.topology.mesh import describe
from torchdistpackage.train.hf_trainer import import_hf_trainer
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.weight_averages import AVERAGE

log = logging.getLogger(__name__)

OWES = "owes_validation"
SKIPPED = "skipped_steps"
DATA, EVAL_DATA = "data_fingerprint", "eval_data_fingerprint"
LOSS = "loss"
_BEST = {
    "metric": "best_metric",
    "value": "best_value",
    "step": BEST_STEP,
    "num_unimproved": "best_num_unimproved",
    "validated_step": "best_validated_step",
}
"""Field of `BestSoFar` -> fact of a checkpoint that holds it."""


@dataclass(frozen=True)
class BestSoFar:
    """The best value of `metric` in the validations so far, at `step`; None before the first.

    num_unimproved: validations since the last sufficient improvement. validated_step: the last
    validated step.
    """

    metric: str
    value: float | None = None
    step: int = 0
    num_unimproved: int = 0
    validated_step: int = 0


@dataclass
class TrainState:
    """The progress of a run: optimizer steps done and tokens seen. The data position follows from
    the step.

    owes_validation: the validation that belongs to `step` was cut short. skipped: steps that were
    left out because a number was not finite. loss, val_loss: of `step`, None where not known.
    set_losses: as val_loss, of each set of data.eval. data: of the files that it reads. best: of
    the value that may end the run early.
    """

    step: int = 0
    tokens: int = 0
    owes_validation: bool = False
    skipped: int = 0
    loss: float | None = None
    val_loss: float | None = None
    data: DataFingerprints = field(default_factory=DataFingerprints)
    set_losses: Mapping[str, float] = field(default_factory=dict[str, float])
    best: BestSoFar | None = None


def save_state(trainer: Trainer, state: TrainState, run_folder: Path, keep_last: int) -> Path:
    """Write a complete checkpoint, all ranks together, and keep the last `keep_last`.

    Raises:
        CheckpointError: on all ranks if any could not write.
    """
    target = SharedFolder(run_folder / CHECKPOINTS, Retention(keep_last))
    return begin_save(trainer, state, target).finish()


def begin_save(
    trainer: Trainer, state: TrainState, target: SaveTarget, copies: HostCopies | None = None
) -> PendingSave:
    """Begin a checkpoint, all ranks together; copies, errors: as `start_save`."""
    losses = {name: getattr(state, name) for name in (LOSS, VAL_LOSS)}
    losses |= {f"{VAL_LOSS}/{name}": x for name, x in state.set_losses.items()}
    return start_save(
        target,
        step=state.step,
        tokens=state.tokens,
        params=trainer.saved(),
        topology=tpc.topology,
        rank=trainer.rank,
        optimizer=trainer.optimizer,
        extras=_random_state(trainer),
        facts={
            "seed": trainer.seed,
            "name": trainer.name,
            OWES: state.owes_validation,
            SKIPPED: state.skipped,
            DATA: state.data.training,
            EVAL_DATA: state.data.evaluation,
            **(
                {}
                if state.best is None
                else {fact: getattr(state.best, name) for name, fact in _BEST.items()}
            ),
            **{name: x for name, x in losses.items() if x is not None and math.isfinite(x)},
        },
        copies=copies,
    )


def saved_bytes(trainer: Trainer) -> int:
    """Return the bytes that this rank writes in a save, and the bytes copied for an asynchronous
    one.
    """
    location = TopologyRank(tpc.topology, trainer.rank)
    return take_snapshot("", trainer.saved(), location, trainer.optimizer, {}).num_bytes


def resume(
    trainer: Trainer,
    run_folder: Path,
    resume_from: str,
    local: LocalCopies | None = None,
    keep: Retention | None = None,
) -> TrainState:
    """Load the state named by `resume_from` into the trainer: auto, never, or a checkpoint path.

    local: copies of an earlier start: auto takes a newer one from there, and the copies then start
        again.
    keep: what stays of the run's older checkpoints, of which starts may have left more; None: all.

    It may be of other degrees or another ZeRO stage. Weights, optimizer and data go on exactly;
    only dropout then draws anew.

    Raises:
        CheckpointError: the named one is missing or damaged, or of another model.
    """
    state = _resume(trainer, run_folder / CHECKPOINTS, resume_from, local, keep)
    if local is not None:
        local.begin()
    return state


def _newest(own_folder: Path, rank: int, local: LocalCopies | None) -> Path | None:
    """Return the newest complete checkpoint among the run's own and the local ones."""
    newest, damaged = None, None
    try:
        saved = _await_last_save(own_folder.parent) if rank == 0 else ()
        newest = latest_together(own_folder, rank=rank, saved=saved)
    except CheckpointError as error:
        damaged = error
    if local is not None:
        newest = local.recover(newest)
    if newest is None and damaged is not None:
        raise damaged
    return newest


def _await_last_save(run_folder: Path) -> list[int]:
    """Return the step of the last save, as the run's record has it; of a recent one wait until its
    checkpoint is seen here. Without a record, or where a start went on from an earlier step: none.

    A save of a rank 0 on this host is seen here at once, or was removed.
    """
    try:
        events, _ = read_events(run_folder)
    except LaunchError:  # the record is for people, and no resume depends on it
        return []
    last: RunEvent | None = None
    host = saved_on = ""
    for event in events:
        if event.kind == SAVE:
            last, saved_on = event, host
        elif event.kind == START:
            host = str(event.values.get("host", ""))
            if last is not None and event.step < last.step:
                last = None
    if last is None:
        return []
    path = run_folder / CHECKPOINTS / folder_name(last.step)
    left_s = last.at_s + LATE_S - time.time()
    if not path.exists() and left_s > 0 and saved_on != socket.gethostname():
        log.info("waiting for %s, which was saved a moment ago and is not seen here yet", path)
        appears(path, min(left_s, LATE_S))
    return [last.step]


def _imported(path: Path, own_folder: Path, rank: int) -> Path:
    """Return our checkpoint that rank 0 converts from one of transformers' Trainer."""
    group = tpc.get_group("global")
    imported = ""
    with fail_together(group, f"reading {path}"):
        if rank == 0:
            imported = str(import_hf_trainer(path, own_folder))
    return Path(str(primitives.broadcast_object(imported, group)))


def _resume(
    trainer: Trainer,
    own_folder: Path,
    resume_from: str,
    local: LocalCopies | None,
    keep: Retention | None,
) -> TrainState:
    if resume_from == "never":
        return TrainState()
    if resume_from == "auto":
        path = _newest(own_folder, trainer.rank, local)
        if path is None:
            return TrainState()
    else:
        path = Path(resume_from)
        if not path.is_dir():
            raise CheckpointError(
                f"--resume {resume_from}: there is no such folder; name a step_NNNNNN"
            )
        if (path / TRAINER_STATE).is_file():
            path = _imported(path, own_folder, trainer.rank)
    loaded = load(
        path,
        params=trainer.saved(),
        topology=tpc.topology,
        rank=trainer.rank,
        optimizer=trainer.optimizer,
        checksums=resume_from != "auto",  # they have been read
    )
    if trainer.update.averages is None and trainer.optimizer is not None:
        for tensor_state in trainer.optimizer.state.values():
            tensor_state.pop(AVERAGE, None)  # they would be saved again, and follow nothing
    if (
        resume_from != "auto"
        and trainer.rank == 0
        and path.resolve().parent == own_folder.resolve()
    ):
        set_aside(own_folder, loaded.step)
    if keep is not None and trainer.rank == 0 and path.resolve().parent == own_folder.resolve():
        try:
            retain_before(own_folder, keep, path)
        except (OSError, CheckpointError) as error:  # the next save tries again
            log.warning("cannot remove older checkpoints of %s: %s", own_folder, error)
    if isinstance(cpu := loaded.extras.get("rng_cpu"), torch.Tensor):
        try:
            torch.set_rng_state(cpu)
        except (RuntimeError, TypeError) as error:
            raise CheckpointError(
                f"{path}: its random state cannot be loaded: {error}; resume from another "
                "checkpoint"
            ) from error
    elif trainer.rank == 0:
        now = describe(degrees_of(tpc.topology))
        log.info(
            "%s was written under %s and goes on under %s", path, describe(loaded.degrees), now
        )
    cuda = loaded.extras.get("rng_cuda")
    if trainer.device.type == "cuda" and isinstance(cuda, torch.Tensor):
        torch.cuda.set_rng_state(cuda, trainer.device)
    skipped = loaded.facts.get(SKIPPED) or 0
    if not isinstance(skipped, int):
        raise CheckpointError(
            f"{path}: {SKIPPED} is {str(skipped)[:40]!r}, which is not a number; name another "
            "checkpoint"
        )
    return TrainState(
        loaded.step,
        loaded.tokens,
        bool(loaded.facts.get(OWES)),
        skipped,
        data=DataFingerprints(*(str(loaded.facts.get(x) or "") for x in (DATA, EVAL_DATA))),
        best=_best(loaded.facts, path),
    )


def _best(facts: Mapping[str, Fact], path: Path) -> BestSoFar | None:
    values = {name: facts.get(fact) for name, fact in _BEST.items()}
    metric, value = values.pop("metric"), values.pop("value")
    if metric is None:
        return None
    counts = {name: x for name, x in values.items() if isinstance(x, int)}
    number = float(value) if isinstance(value, int | float) else None
    if len(counts) < len(values) or (value is not None and number is None):
        raise CheckpointError(
            f"{path}: {', '.join(_BEST.values())} are {[metric, value, *values.values()]}, which "
            "are not a name and numbers"
        )
    return BestSoFar(str(metric), number, **counts)


def _random_state(trainer: Trainer) -> dict[str, int | torch.Tensor]:
    state: dict[str, int | torch.Tensor] = {"rng_cpu": torch.get_rng_state()}
    if trainer.device.type == "cuda":
        state["rng_cuda"] = torch.cuda.get_rng_state(trainer.device)
    return state
