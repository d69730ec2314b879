"""Find the modules that a configuration names by import path. No torch."""

import difflib
import importlib.util
import re
import symtable
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchdistpackage.config.errors import Problem
from torchdistpackage.config.schema import RunConfig

_STAR_IMPORT = re.compile(r"^\s*from\s.+\simport\s+\*", re.MULTILINE)


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


def missing_module(target: str, folders: Sequence[str]) -> str:
    """Return the part of "pkg.module:name" that is not a module under `folders`, or "" if all parts
    exist.

    Nothing is imported, so a missing function is not noticed. Modules without a file (built in, or
    found by an import hook) count as existing.
    """
    parts = target.partition(":")[0].split(".")
    search = [Path(folder) for folder in folders]
    for number, part in enumerate(parts, 1):
        name = ".".join(parts[:number])
        packages = [folder / part for folder in search if (folder / part).is_dir()]
        if packages:  # with __init__.py or, as a namespace, without
            search = packages
            continue
        is_file = any(
            (folder / f"{part}.py").is_file() or any(folder.glob(f"{part}.*.so"))
            for folder in search
        )
        if is_file and number == len(parts):
            return ""
        elsewhere = number == 1 and not is_file and importlib.util.find_spec(part)
        return "" if elsewhere else name if not is_file else ".".join(parts[: number + 1])
    return ""


def missing_name(target: str, folders: Sequence[str]) -> str:
    """Return the name that the file of "pkg.module:name" under `folders` lacks, with similar names.

    "" if the file defines the name or may define it. The file is read and not run. A star import, a
    module's `__getattr__`, a name set in another way and a file that is not Python may all hide the
    name, so they count as defining it.
    """
    module, _, dotted = target.partition(":")
    inner, package = Path(*module.split(".")), dotted.partition(".")[0]
    paths = (Path(x) / y for x in folders for y in (inner / "__init__.py", f"{inner}.py"))
    file = next((path for path in paths if path.is_file()), None)
    if file is None or not package:
        return ""
    try:
        text = file.read_text()
        names = set(symtable.symtable(text, str(file), "exec").get_identifiers())
    except (OSError, SyntaxError, ValueError):  # what the import says of it is better
        return ""
    if not names.isdisjoint({package, "__getattr__", "globals", "setattr", "exec"}) or (
        _STAR_IMPORT.search(text)
    ):
        return ""
    near = difflib.get_close_matches(package, names, n=1)
    return f"{package} in {file}" + (f"; did you mean {near[0]}?" if near else "")
