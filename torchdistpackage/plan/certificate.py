"""The certificate of `tdp prove`: the proved configuration, versions and layouts.

It says nothing about sizes: the proof is of a reduced copy, and of which axes have several ranks.
So a certificate holds for any number of ranks along the axes that were proved together. No torch.
"""

import hashlib
import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torchdistpackage.bounded import parse_json, read_regular
from torchdistpackage.config.errors import Problem
from torchdistpackage.config.hugging_face import FILE
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.files import atomic_write, make_folder
from torchdistpackage.plan.parity_plan import AXES
from torchdistpackage.plan.user_code import code_folder, user_targets

FORMAT = 1
_MOST_BYTES = 1 << 20
_PACKAGES = ("torchdistpackage", "torch", "transformers", "numpy")
_OTHER_SECTIONS = ("launch", "log", "checkpoint", "run")
"""Sections that do not change what a step computes."""
_OTHER_KEYS = {
    "parallel": (*AXES, "zero_group", "high_priority", "max_ctas"),
    "train": (
        *("steps", "epochs", "step_timeout_s", "straggler_every", "profile"),
        *("eval_every", "eval_batches", "generate_tokens", "check_calls"),
        *("check_replicas_every", "on_replicas_differ"),
    ),
    "data": ("template_date",),
}
"""Keys that do not change it either, or that have their own entry in a certificate."""


@dataclass(frozen=True)
class Certificate:
    """A record of what was proved. config: its hash. code: that of the files of the user's own
    modules.

    versions: of the packages that compute. layouts: axes with their numbers of ranks, each the same
    as one process.
    """

    config: str
    code: str
    versions: Mapping[str, str]
    layouts: Sequence[Mapping[str, int]]
    format: int = FORMAT

    def write(self, path: Path) -> None:
        """Write the certificate as JSON."""
        make_folder(path.parent)
        atomic_write(path, json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")


def certificate(config: RunConfig, layouts: Sequence[Mapping[str, int]]) -> Certificate:
    """Return the certificate of a run whose layouts are the same as one process.

    It also has the layouts that were proved before, for the same code and versions.
    """
    found = Certificate(config_hash(config), code_hash(config), versions(), [*map(dict, layouts)])
    try:
        before = read_certificate(certificate_path(config))
    except (OSError, ValueError):
        return found
    if replace(before, layouts=()) != replace(found, layouts=()):
        return found
    earlier = [x for x in before.layouts if x not in found.layouts]
    return replace(found, layouts=[*earlier, *found.layouts])


def certificate_path(config: RunConfig) -> Path:
    """Return the place of a run's certificate, in the folder of all runs."""
    return Path(config.run.dir) / "proofs" / f"{config_hash(config)[:16]}.json"


def config_hash(config: RunConfig) -> str:
    """Return a hash of all keys that change what a step computes, except numbers of ranks."""
    values: dict[str, Any] = config.model_dump(mode="json", exclude=set(_OTHER_SECTIONS))
    for section, keys in _OTHER_KEYS.items():
        for key in keys:
            values.get(section, {}).pop(key, None)
    if config.model.hf is not None:
        folder = Path(config.model.hf)
        values["model.hf"] = _file_hash(folder / FILE if folder.is_dir() else folder)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def code_hash(config: RunConfig) -> str:
    """Return a hash of the files of the user's own modules, or "" without any."""
    folder = Path(code_folder(os.environ))
    parts = []
    for key, (path, _) in sorted(user_targets(config).items()):
        module = folder.joinpath(*path.partition(":")[0].split("."))
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if file.is_file():
                parts.append(f"{key} {_file_hash(file)}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest() if parts else ""


def _file_hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that compute."""
    versions_of = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions_of[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions_of


def read_certificate(path: Path) -> Certificate:
    """Return the certificate in a file.

    Raises:
        OSError: it cannot be read. ValueError: it is not a certificate of this format.
    """
    values: Any = parse_json(read_regular(path, _MOST_BYTES).decode())
    try:
        if values["format"] != FORMAT:
            raise ValueError(f"it has format {values['format']!r}, not {FORMAT}")
        return Certificate(
            str(values["config"]),
            str(values["code"]),
            {str(name): str(x) for name, x in values["versions"].items()},
            [{str(axis): int(n) for axis, n in x.items()} for x in values["layouts"]],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is not a certificate of tdp prove ({error!r})") from error


def unproved(
    config: RunConfig, planned: RunConfig, file: str, overrides: Sequence[str] = ()
) -> list[Problem]:
    """Return why a run is not proved: no certificate, or one for other code, versions or axes.

    planned: the run with its number of data ranks. file, overrides: of the run, for the command
    that proves it.
    """
    path = certificate_path(config)
    command = f"run {shlex.join(['tdp', 'prove', file, *overrides, '--layouts', 'this'])}"
    try:
        proof = read_certificate(path)
    except FileNotFoundError:
        return [_problem(f"the run is not proved: there is no {path}; {command}")]
    except (OSError, ValueError) as error:
        return [_problem(f"{path} cannot be read: {error}; {command}")]
    reasons: list[str] = []
    if proof.config != config_hash(config):
        reasons.append("it is of another configuration")
    if proof.code != code_hash(config):
        reasons.append("your own modules have changed since")
    now = versions()
    reasons += [
        f"it was made with {name} {proof.versions.get(name, '(none)')}, and here is {number}"
        for name, number in now.items()
        if proof.versions.get(name) != number
    ]
    own_layout = _several(planned)
    if own_layout and not any(set(layout) == own_layout for layout in proof.layouts):
        proved = "; ".join(" and ".join(sorted(x)) for x in proof.layouts) or "none"
        reasons.append(
            f"it proves layouts with {proved}, and the run has {' and '.join(sorted(own_layout))}"
        )
    return [_problem(f"the run is not proved by {path}: {x}; {command}") for x in reasons]


def proof_of(config: RunConfig, planned: RunConfig) -> str | None:
    """Return the file of the certificate that holds for a run, or None."""
    return None if unproved(config, planned, "") else str(certificate_path(config))


def _several(config: RunConfig) -> set[str]:
    """Return the axes along which a run has several ranks."""
    parallel = config.parallel
    axes = {axis for axis in AXES if getattr(parallel, axis) != 1}
    if parallel.data == parallel.expert:  # all data ranks hold experts of their own
        axes.discard("data")
    return axes


def _problem(text: str) -> Problem:
    return Problem("", None, "", text)
