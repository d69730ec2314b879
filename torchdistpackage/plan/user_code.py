"""Find the modules that a configuration names by import path. No torch."""

import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

from torchdistpackage.config.errors import Problem
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.launch.entrypoint import EntryPoint, missing_module, missing_name


def user_object(path: str) -> Callable:
    """Return the object that `pkg.module:name` names."""
    return EntryPoint.of(path).resolve()


def code_folder(env: Mapping[str, str]) -> str:
    """Return the working folder, or the snapshot of it that a job runs (TDP_CODE)."""
    return env.get("TDP_CODE") or str(Path.cwd())


def add_user_code(env: Mapping[str, str]) -> str:
    """Put the folder of your own modules on sys.path, if it is not there; returns it.

    It comes after the standard library, of which no file in it takes the place, and before what is
    installed.
    """
    folder, library = code_folder(env), Path(sysconfig.get_path("stdlib"))
    if folder not in sys.path:
        entries = list(enumerate(map(Path, sys.path), 1))
        ends = [i for i, entry in entries if entry == library or entry.name == "lib-dynload"]
        sys.path.insert(max(ends, default=len(sys.path)), folder)
    return folder


def user_targets(config: RunConfig) -> dict[str, tuple[str, Mapping[str, object]]]:
    """Return import path and keyword arguments of the user's own code, by key."""
    model, data, optim = config.model, config.data, config.optim
    targets = {
        "model.target": (model.target, model.args),
        "model.loss": (model.loss, {}),
        "data.target": (data.target, data.args),
        "optim.target": (optim.target, optim.args),
    }
    targets |= {f"log.callbacks[{i}]": (path, {}) for i, path in enumerate(config.log.callbacks)}
    return {key: (path, args) for key, (path, args) in targets.items() if path is not None}


def unknown_modules(config: RunConfig, folder: str) -> list[Problem]:
    """Return a problem for each import path of the file that leads nowhere from `folder`, as far
    as it shows without running the modules.
    """
    where, problems = [folder, *sys.path], list[Problem]()
    for key, (path, _) in user_targets(config).items():
        if missing := missing_module(path, where):
            text = f"there is no module {missing} here or on the import path"
        elif missing := missing_name(path, where):
            text = f"there is no {missing}"
        else:
            continue
        problems.append(config.problem(key, f"{path}: {text}"))
    return problems
