"""Check `launch.slurm`: options of a Slurm job under Slurm's own names, and a few of this package.

An impossible option is refused here, before it waits in a queue. OPTIONS go into the header of the
batch script as written, EXTRA changes what the script does around the ranks, and RESERVED is
refused with what to use instead. Dashes and underscores mean the same. job_geometry.py computes
nodes, tasks and GPUs from these options.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torchdistpackage.config.errors import MAX_PROBLEMS, nearest


@dataclass(frozen=True, slots=True)
class OptionType:
    """The type of an option's value.

    flag: the value true means the option without a value. many: a list is joined with commas.
    """

    expected: str
    fits: Callable[[str], bool]
    flag: bool = False
    many: bool = False


def _matching(pattern: str) -> Callable[[str], bool]:
    compiled = re.compile(pattern, re.ASCII)  # Slurm accepts ASCII digits only
    return lambda text: bool(compiled.fullmatch(text))


def _is_time(text: str) -> bool:
    days, _, clock = text.rpartition("-")
    small = [int(part) for part in re.findall(r"\d+", clock)]
    forms = r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|(?i:UNLIMITED|INFINITE)"
    is_time = re.fullmatch(forms, text, re.ASCII)
    return bool(is_time) and max(small[1:], default=0) < 60 and not (days and small[0] > 23)


def time_seconds(text: str) -> float | None:
    """Return the seconds of a time in sbatch's notation, where one number means minutes; None for
    no limit."""
    if not _is_time(text) or not text[0].isdigit():
        return None
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if days:  # D-HH[:MM[:SS]]
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) < 3:  # MM[:SS]
        hours, minutes, seconds = 0, parts[0], parts[1] if len(parts) > 1 else 0
    else:
        hours, minutes, seconds = parts
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


_SPAN = r"[1-9]\d{0,5}(-[1-9]\d{0,5}(:[1-9]\d{0,5})?)?"
MAX_CHOICES = 1024
"""Largest number of node counts that a job may choose from; the rules are checked for each."""
_MAX_TEXT = 4096
"""Longest option in characters; it is one line of the script."""


def node_counts(text: str) -> tuple[int, ...]:
    """Return every node count that `4`, `4-8`, `1-9:4` or `2,4` allows, or () if invalid."""
    counts: set[int] = set()
    if len(text) <= _MAX_TEXT and re.fullmatch(f"{_SPAN}(,{_SPAN})*", text, re.ASCII):
        for span in text.split(","):
            bounds, _, step = span.partition(":")
            first, _, last = bounds.partition("-")
            numbers = range(int(first), int(last or first) + 1, int(step or 1))
            if not 0 < len(numbers) <= MAX_CHOICES:
                return ()
            counts.update(numbers)
            if len(counts) > MAX_CHOICES:
                return ()
    return tuple(sorted(counts))


_TEXT = OptionType("a text", lambda text: bool(text.strip()))
_LIST = OptionType("a text or a list of texts", _TEXT.fits, many=True)
_COUNT = OptionType("a whole number, 1 or more", _matching(r"[1-9]\d{0,8}"))
_NUMBER = OptionType("a whole number", _matching(r"-?\d{1,10}"))
_FLAG = OptionType("true or false", lambda text: False, flag=True)
_MAYBE = OptionType("true or a text", _TEXT.fits, flag=True)
_TIME = OptionType("a time: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS or UNLIMITED", _is_time)
_MEMORY = OptionType("a number of MB, or a number with K, M, G or T", _matching(r"\d+[KMGTkmgt]?"))
_GPUS = OptionType("a number of GPUs, or type:number", _matching(r"([\w.-]+:)?[1-9]\d{0,5}"))
_NODES = OptionType(
    "a number, a range such as 4-8, or a list such as 2,4: up to 1,024 different ones",
    lambda t: bool(node_counts(t)),
)
_SIGNAL = OptionType(
    "a signal and how many seconds before the end it comes, such as USR1@120; it goes to the ranks",
    _matching(r"(R:)?(SIG)?([A-Z]+[12]?|\d{1,2})(@\d{1,5})?"),
)
_CONTIGUOUS = "block, or block: and more, because ranks that follow each other share a node"
_BLOCK = OptionType(_CONTIGUOUS, _matching(r"block(:.+)?"))


def _all(kind: OptionType, names: str) -> dict[str, OptionType]:
    return dict.fromkeys(names.split(), kind)


OPTIONS: dict[str, OptionType] = {
    **_all(_TEXT, "account qos reservation constraint prefer cluster-constraint comment extra"),
    **_all(_TEXT, "admin-comment mail-user mcs-label wckey begin network cpu-freq gpu-freq"),
    **_all(_TEXT, "acctg-freq gres-flags bb bbf hint mem-bind profile power switches priority"),
    **_all(_TEXT, "extra-node-info nodefile propagate kill-on-invalid-dep deadline oom-kill-step"),
    **_all(_LIST, "partition gres licenses dependency mail-type exclude nodelist"),
    **_all(_COUNT, "ntasks ntasks-per-node ntasks-per-core ntasks-per-socket cpus-per-task"),
    **_all(_COUNT, "mincpus threads-per-core cores-per-socket sockets-per-node segment"),
    **_all(_NUMBER, "core-spec thread-spec delay-boot wait-all-nodes"),
    **_all(_FLAG, "contiguous hold reboot spread-job use-min-nodes overcommit stepmgr"),
    **_all(_FLAG, "oversubscribe consolidate-segments spread-segments"),
    **_all(_MAYBE, "exclusive nice"),
    **_all(_TIME, "time time-min"),
    **_all(_MEMORY, "mem mem-per-cpu mem-per-gpu tmp"),
    **_all(_GPUS, "gpus gpus-per-node gpus-per-task"),
    "nodes": _NODES,
    "signal": _SIGNAL,
    "distribution": _BLOCK,
}
"""The long options of sbatch that a run may set; a site's Slurm may lack or forbid some."""

EXTRA: dict[str, str] = {
    "container": "words to put before the command of every task, such as apptainer exec --nv a.sif",
    "srun": "a list of more options for srun, such as [--container-image=train.sqsh]",
    "modules": "a list of environment modules to load",
    "conda": "the name or folder of a conda environment to activate",
    "python": "the interpreter of the ranks, such as python for that of a prologue's environment",
    "prologue": "a list of shell lines to run on the first node before the ranks start",
    "files": "a list of files or globs to copy into the snapshot of the code",
}
"""Keys of this package that are not options of sbatch."""

_LAYOUT = "every task sees all GPUs of its node"
_CLEAN = "the job gets a clean environment; set variables in launch.slurm.prologue"
RESERVED: dict[str, str] = {
    **dict.fromkeys(("output", "error"), "both go to logs/main.log in the run folder; set run.dir"),
    "input": "ranks read no standard input; use data.path",
    "open-mode": "the main log is always appended to, so that a requeue does not erase it",
    "job-name": "the job gets the name of the run; set run.name",
    "array": "use tdp submit --sweep key=value,value",
    "requeue": "set launch.requeue.mode to requeue",
    "no-requeue": "set launch.requeue.mode to never or chain",
    "no-kill": "a job that lost a node cannot go on; set launch.requeue.mode to requeue",
    "wrap": "tdp submit writes the script; put lines of your own into launch.slurm.prologue",
    **dict.fromkeys(("export", "export-file", "get-user-env"), _CLEAN),
    "chdir": "the job works in the folder that you submit from; cd to it first",
    "test-only": "use tdp submit --dry-run",
    "wait": "use tdp submit --follow",
    **dict.fromkeys(("parsable", "quiet", "verbose"), "this package parses sbatch's answer"),
    "clusters": "tdp jobs asks only the local cluster; submit on that cluster's login node",
    "cpus-per-gpu": "use launch.slurm.cpus-per-task",
    "ntasks-per-gpu": "use launch.slurm.ntasks-per-node",
    "gpus-per-socket": f"{_LAYOUT}; use launch.slurm.gpus-per-node",
    **dict.fromkeys(("gpu-bind", "tres-bind"), f"{_LAYOUT}, the fastest way; remove it"),
    "tres-per-task": "use launch.slurm.cpus-per-task and launch.slurm.gpus-per-node",
    **dict.fromkeys(("uid", "gid"), "the job is yours"),
}
"""Options of sbatch that this package sets, or that conflict with what it sets."""

_SRUN_STATED = {
    **dict.fromkeys(("nodes", "N", "ntasks", "n", "ntasks-per-node"), "layout of the tasks"),
    **dict.fromkeys(("cpus-per-task", "c"), "CPUs of a task"),
    **dict.fromkeys(("kill-on-bad-exit", "K"), "end of all ranks when one fails"),
    **dict.fromkeys(("output", "o", "error", "e", "open-mode", "input", "i"), "output"),
    **dict.fromkeys(("export", "chdir", "D", "multi-prog"), "environment of the ranks"),
    "mpi": "way the ranks meet, which needs no MPI",
}

Found = tuple[str, str]
"""A key as spelled in the file, and what is wrong with it."""


def canonical_name(key: str) -> str:
    """Return a key in Slurm's spelling: ntasks-per-node for ntasks_per_node."""
    return key.replace("_", "-")


def is_text(key: str, value: object) -> bool:
    """Return whether an option takes the text as written, such as 007, not a number or bool."""
    kind = OPTIONS.get(canonical_name(key))
    if kind is None:
        return canonical_name(key) in EXTRA
    return kind in (_TEXT, _LIST, _MAYBE, _SIGNAL, _BLOCK) and not (
        kind.flag and isinstance(value, bool)
    )


def problems(section: Mapping[str, object]) -> tuple[Found, ...]:
    """Return the problems of each key of `launch.slurm` on its own, in the order of the keys."""
    problems: list[Found] = []
    seen: dict[str, str] = {}
    for key, value in section.items():
        name = canonical_name(key)
        first = seen.setdefault(name, key)
        same = f"means the same as {first}; keep one of them"
        if text := _problem(name, value) if first == key else same:
            problems.append((key, text))
        if len(problems) >= MAX_PROBLEMS:  # looking for advice takes time for each
            break
    return tuple(problems)


def _problem(name: str, value: Any) -> str | None:
    if name in RESERVED:
        return f"cannot be set here: {RESERVED[name]}"
    if name in EXTRA:
        return None if value is None else _problem_of_extra(name, value)
    if name not in OPTIONS:
        valid = (*OPTIONS, *EXTRA)
        close = nearest(name, [*valid, *RESERVED])
        if close in RESERVED:
            return f"unknown option; {close} {_problem(close, None)}"
        suggestion = f"did you mean {close}? " if close else ""
        return f"unknown option; {suggestion}valid: {', '.join(sorted(valid))}"
    kind = OPTIONS[name]
    if value is None or (kind.flag and isinstance(value, bool)):
        return None
    text = _plain(value, kind.many)
    if text is None or len(text) > _MAX_TEXT or not kind.fits(text):
        return f"wants {kind.expected}, got {_shown(value)}"
    return None if text.isprintable() else _UNPRINTABLE.format(_shown(value))


_UNPRINTABLE = "cannot be a line of the script: {} has a character that is not printable"


def _problem_of_extra(name: str, value: Any) -> str | None:
    is_list, shown = type(value) is list, _shown(value)
    items: list[object] = value if is_list else [value]
    is_one = name in ("conda", "python")
    if (is_list and is_one) or not all(isinstance(x, str) and x for x in items):
        kind = "a text" if is_one else "texts in a list"
        return f"wants {kind} ({EXTRA[name]}), got {shown}"
    try:
        words = words_of(name, value)
    except ValueError as error:
        return f"is not a command: {error}; got {shown}"
    if bad := [argument for argument in words if not argument.replace("\t", " ").isprintable()]:
        return _UNPRINTABLE.format(repr(bad[0]))
    for argument in words if name == "srun" else ():
        option = argument.partition("=")[0]
        stated = option[2:] if option.startswith("--") else option[1:2]
        if not argument.startswith("-"):
            return f"wants options, each a text that begins with a dash, got {argument!r}"
        if stated in _SRUN_STATED:
            return f"must not change the {_SRUN_STATED[stated]}, as {argument} does; remove it"
    return None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _plain(value: Any, many: bool) -> str | None:
    if isinstance(value, list) and many:
        items = [_plain(item, False) for item in cast(list[object], value)]
        return ",".join(x for x in items if x) if items and all(items) else None
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None


def words_of(name: str, value: Any) -> tuple[str, ...]:
    """Return the value of a key of EXTRA as words; the prologue's as lines.

    Raises:
        ValueError: a command has a quote that is not closed.
    """
    if value is None:
        return ()
    is_list = type(value) is list
    texts = cast(list[str], value) if is_list else [str(value)]
    if name == "prologue":  # may be one text of several lines
        return tuple(line for text in texts for line in text.splitlines())
    if name in ("container", "srun") and not is_list:
        return tuple(shlex.split(texts[0]))
    return tuple(texts)


def header(section: Mapping[str, object]) -> dict[str, str | None]:
    """Return the options of sbatch and their values in Slurm's spelling; None for a bare option."""
    options = ((canonical_name(key), value) for key, value in section.items())
    return {
        name: None if value is True else _plain(value, OPTIONS[name].many)
        for name, value in options
        if name in OPTIONS and value is not None and value is not False
    }


def extra_of(section: Mapping[str, object], name: str) -> tuple[str, ...]:
    """Return the words or lines of a key of EXTRA; () if the section lacks it."""
    return words_of(name, next((v for k, v in section.items() if canonical_name(k) == name), None))
