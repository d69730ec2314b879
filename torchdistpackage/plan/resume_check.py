"""Check the checkpoint that a run would resume from, before any rank starts. No torch.

Only manifests and sizes are read here. Ranks check the rest, each once it has made its part of the
model; a rank that refuses it fails.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchdistpackage.checkpoint.commit import candidates, damage, newest_complete, none_complete
from torchdistpackage.checkpoint.manifest import read_manifest
from torchdistpackage.config.data_section import changed_shares, share_text
from torchdistpackage.config.hugging_face import TRAINER_STATE
from torchdistpackage.config.load import load
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import CheckpointError, ConfigError
from torchdistpackage.plan.run_plan import Plan

_DECIDES = ("run.seed", "model.", "data.", "optim.", "precision.", "train.steps", "train.compile")
"""Keys that determine the numbers; results do not depend on the others."""
_LAYOUT = tuple(f"parallel.{axis}" for axis in ("data", "pipe", "context", "tensor", "expert"))
_PLACES = ("data.cache",)
_SOURCES = "data.sources"
_SHOWN = 6


def named_folder(resume: str) -> Path:
    """Return the folder that `--resume` names; raise ConfigError if it does not exist."""
    if not resume or not Path(resume).is_dir():
        raise ConfigError(
            f"--resume {resume or repr('')}: there is no such folder; name a step_NNNNNN"
        )
    return Path(resume)


def resumed_from(resume: str, own_folder: Path, *, has_copies: bool = False) -> Path | None:
    """Return the checkpoint that `--resume` names, or with auto the newest one in `own_folder`;
    None: there is none, or it is one of transformers' Trainer.

    has_copies: nodes keep copies, so ranks may find a complete one on their node.

    Raises:
        CheckpointError: it is not a complete checkpoint, or `own_folder` has some and none is
            complete.
    """
    if resume == "never":
        return None
    if resume == "auto":
        newest, damaged = newest_complete(own_folder)
        if newest is None and damaged and not has_copies:
            raise none_complete(own_folder, len(damaged), damaged[-1][1])
        return newest
    path = Path(resume)
    if inside := candidates(path) or candidates(path / own_folder.name):
        raise CheckpointError(
            f"--resume {resume}: it is not a checkpoint, but has some; name one, such as "
            f"{inside[0]}"
        )
    if (path / TRAINER_STATE).is_file():  # the ranks make a checkpoint of it, and check that
        return None
    if problem := damage(path):
        raise CheckpointError(f"--resume {resume}: {problem}")
    return path


def refuse_other_model(path: Path, plan: Plan) -> None:
    """Raise CheckpointError if the checkpoint is of another model or precision than the plan.

    Nothing is known here about a model of your own.
    """
    shapes = {x.name: x.shape for x in plan.layouts.values() if plan.is_trained(x.name)}
    if plan.model is None:
        return
    buffers = {name: x.shape for name, x in plan.model.buffers().items() if plan.is_trained(name)}
    manifest, weights = read_manifest(path), plan.numbers.weights.dtype
    if differences := manifest.differences(shapes | buffers):
        raise CheckpointError(
            f"{path} is of another model than this run: {differences}. Go on with the model it was "
            f"written with, begin anew with --resume never (tdp submit --fresh), or change run.name"
        )
    dtypes = {manifest.tensors[name].dtype for name in shapes}
    if ("float64" in dtypes) != (weights == "float64"):
        raise CheckpointError(
            f"{path} has weights of {' and '.join(sorted(dtypes))}, which a run with weights of "
            f"{weights} does not read. Go on with the precision.dtype it was written with, "
            f"begin anew with --resume never (tdp submit --fresh), or change run.name"
        )


def refuse_other_optimizer(path: Path, config: RunConfig) -> None:
    """Raise CheckpointError if the checkpoint has the state of an optimizer that this run's cannot
    continue.
    """
    state_keys = {
        key for name in read_manifest(path).tensors if (key := name.rpartition("#")[2]) != name
    }
    state_keys -= {"step", "master"}
    name, expected_keys = config.optim.name, config.optim.spec.state_keys
    if state_keys and state_keys.isdisjoint(expected_keys or state_keys):
        raise CheckpointError(
            f"{path} has the state of another optimizer ({', '.join(sorted(state_keys))}), which "
            f"optim.name={name} does not read. Go on with the optimizer it was written with, begin "
            f"anew with --resume never (tdp submit --fresh), or change run.name"
        )


class StartChanges(NamedTuple):
    """The keys that a start changes compared with an earlier start, among those that affect
    results.

    keys: such as "model.heads=2 (was 4)". shares: by label, the shares of the samples before and
    now, of sources whose share changed.
    """

    keys: tuple[str, ...] = ()
    shares: Mapping[str, tuple[float, float]] = {}

    def notes(self) -> list[str]:
        """Return the notes for the log."""
        notes: list[str] = []
        if self.keys:
            more = [f"{len(self.keys) - _SHOWN} more"] if len(self.keys) > _SHOWN else []
            shown = ", ".join([*self.keys[:_SHOWN], *more])
            notes.append(f"changed since the last start: {shown}")
        if self.shares:
            changes = ", ".join(
                f"{label} {old:.1%} -> {share_text(new)}"
                for label, (old, new) in self.shares.items()
            )
            notes.append(
                f"weights of data.sources changed since the last start: {changes}; samples from "
                f"here on are those of a run that had these weights from step 1"
            )
        return notes


def start_changes(resolved: Path, config: RunConfig) -> StartChanges:
    """Return what `config` changes against the file of an earlier start, among the keys that
    numbers follow from and the degrees of the layout; nothing if the earlier file no longer loads.
    """
    try:
        before_config = load(resolved)
    except (ConfigError, OSError):
        return StartChanges()
    old_values = _flat(before_config.model_dump())
    now = _flat(config.model_dump())
    decides = [key for key in now if key.startswith(_DECIDES) and not key.startswith(_PLACES)]
    sources = before_config.data.sources, config.data.sources
    shares = changed_shares(*sources) if all(sources) else {}
    only_weights = [[x.model_copy(update={"weight": 1.0}) for x in each] for each in sources]
    keys = [*_LAYOUT, *decides]
    if only_weights[0] == only_weights[1]:
        keys.remove(_SOURCES)
    changes = [
        f"{k}={now[k]} (was {old_values.get(k)})" for k in keys if now[k] != old_values.get(k)
    ]
    return StartChanges(tuple(changes), shares)


def _flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else None
        flat.update(inner if inner is not None else {f"{prefix}{key}": value})
    return flat
