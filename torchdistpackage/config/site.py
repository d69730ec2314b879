"""A Slurm site as `tdp site` recorded it, and the options of a job in the form the site takes them.

A YAML file requests what a run needs: nodes, GPUs, a time. The site's file says how to request it
there. Options that the run leaves out come from the site, options that the site refuses are dropped
with a note, and GPUs are requested in the site's form. Anything that would change the run is
reported as a problem, with the YAML to write.
"""

import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue, ValidationError

from torchdistpackage.bounded import read_regular
from torchdistpackage.config.slurm import Found, canonical_name, header, node_counts, time_seconds
from torchdistpackage.config.slurm import problems as option_problems
from torchdistpackage.config.types import Section
from torchdistpackage.config.yaml_loader import MAX_BYTES, read, write
from torchdistpackage.errors import ConfigError

GPU_OPTIONS = ("gpus-per-node", "gres")
"""Options with which a site may expect GPU requests."""
_SAME = {"mem": ("mem", "mem-per-cpu", "mem-per-gpu")}
"""Option -> all options with the same meaning, for sites that require or forbid one of them."""


class SitePartition(Section):
    """A partition. Memory is in MiB, time in seconds; null means no limit or unknown.

    gres: the devices of a node, such as [gpu:h100:8]. preempt: what happens to a preempted job.
    """

    default: bool = False
    nodes: int = 0
    max_nodes: int | None = None
    cpus: int = 0
    memory_mb: int = 0
    gres: list[str] = Field(default_factory=list)
    max_time_s: int | None = None
    accounts: list[str] | None = None
    qos: list[str] | None = None
    preempt: str = "OFF"
    grace_s: int = 0

    @property
    def gpus(self) -> int:
        """Return the largest number of GPUs in a node; the kinds may belong to different nodes."""
        return sum(count for _, count in map(_gpu_of, self.gres) if count)


class SiteNode(Section):
    """Facts about a node, as the job of `tdp site --probe` saw them.

    pythons: interpreters, each with whether it starts there and finds torch. found: other facts,
    for people.
    """

    arch: str
    pythons: dict[str, bool] = Field(default_factory=dict)
    found: dict[str, str] = Field(default_factory=dict)


class Site(Section):
    """A Slurm site.

    options: defaults for `launch.slurm`. forbidden: options that Slurm refused there, with its
    message. gpu_option: the option that requests GPUs; none if the nodes have no GRES. gpu_type:
    the type required before the number. qos: time limit of each in seconds.
    """

    cluster: str = ""
    slurm: str = ""
    partitions: dict[str, SitePartition] = Field(default_factory=dict)
    part_limits: Literal["no", "any", "all"] = "no"
    accounts: list[str] = Field(default_factory=list)
    qos: dict[str, int | None] = Field(default_factory=dict)
    options: dict[str, JsonValue] = Field(default_factory=dict)
    forbidden: dict[str, str] = Field(default_factory=dict)
    gpu_option: Literal["gpus-per-node", "gres", "none"] | None = None
    gpu_type: str | None = None
    interfaces: list[str] = Field(default_factory=list)
    shared: list[str] = Field(default_factory=list)
    containers: list[str] = Field(default_factory=list)
    settings: dict[str, str] = Field(default_factory=dict)
    node: SiteNode | None = None

    def to_yaml(self) -> str:
        """Return the file, without keys that have their defaults."""
        return write(self.model_dump(mode="python", exclude_defaults=True))


@dataclass(frozen=True, slots=True)
class FittedOptions:
    """Options of sbatch in a site's form; notes list the differences from the request."""

    options: dict[str, str | None]
    notes: tuple[str, ...]


def read_site(path: str | os.PathLike[str]) -> Site:
    """Read the file of a site.

    Raises:
        ConfigError: it is not there, or not a file of `tdp site`; says what is wrong.
    """
    again = "write it anew with tdp site"
    try:
        text = read_regular(Path(path), MAX_BYTES).decode("utf-8")
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"{path} cannot be read: {why}; {again}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8; {again}") from None
    document = read(text, os.fspath(path))
    if document.problems:
        raise ConfigError(f"{document.problems[0]}; {again}")
    try:
        site = Site.model_validate(document.value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {key}: {first['msg']}; {again}") from None
    if wrong := option_problems(site.options):
        raise ConfigError(f"{path}: options.{wrong[0][0]}: {wrong[0][1]}")
    return site


def to_write(section: Mapping[str, Any]) -> str:
    """Return the keys of `launch` as one line of YAML."""
    return f"write launch: {json.dumps(section)}"


def site_problems(site: Site, options: Mapping[str, Any], mode: str) -> Iterator[Found]:
    """Yield the options of launch.slurm that this site cannot satisfy, each with what to write.

    mode: launch.requeue.mode; its problem has the key `launch.requeue.mode`.
    """
    requested = header(site.options) | header(options)
    yield from _partition_problems(site, requested)
    yield from _time_problems(site, requested)
    yield from _size_problems(site, requested)
    if mode == "requeue" and "requeue" in site.forbidden:
        advice = to_write({"requeue": {"mode": "chain"}})
        yield (
            "launch.requeue.mode",
            f"this site refuses --requeue ({site.forbidden['requeue']}); {advice}",
        )
    if not {canonical_name(key) for key in options} & {"container", "conda", "python"} and (
        text := _python_problem(site)
    ):
        yield "python", text


def _partition_problems(site: Site, requested: Mapping[str, str | None]) -> Iterator[Found]:
    names = (requested.get("partition") or "").split(",") if "partition" in requested else []
    if site.partitions and (absent := [x for x in names if x not in site.partitions]):
        partitions = [x for x in names if x in site.partitions] or [*site.partitions][:1]
        advice = to_write({"slurm": {"partition": ",".join(partitions)}})
        shown = ", ".join(site.partitions)
        name = ", ".join(absent)
        yield "partition", f"{name} is not a partition of this site ({shown}); {advice}"
    for option, values in (("account", site.accounts), ("qos", [*site.qos])):
        value = requested.get(option)
        if values and value is not None and value not in values:
            advice = to_write({"slurm": {option: values[0]}})
            yield option, f"{value} is not among yours here ({', '.join(values)}); {advice}"


def _time_problems(site: Site, requested: Mapping[str, str | None]) -> Iterator[Found]:
    text = requested.get("time")
    seconds = None if text is None else time_seconds(text)
    if text is None:
        return
    limits = {
        f"partition {name}": site.partitions[name].max_time_s
        for name in _partitions_of(site, requested)
    }
    some = [x for x in limits.values() if x is not None]
    most: dict[str, int] = {}
    if some and (site.part_limits == "all" or len(some) == len(limits)):
        pick = min if site.part_limits == "all" else max
        name = next(x for x in limits if limits[x] == pick(some))
        most[name] = pick(some)
    qos = requested.get("qos")
    if qos and (limit_s := site.qos.get(qos)) is not None:
        most[f"QOS {qos}"] = limit_s
    if not most:
        return
    where, limit_s = min(most.items(), key=lambda item: item[1])
    if seconds is None or seconds > limit_s:
        advice = to_write({"slurm": {"time": time_text(limit_s)}})
        yield "time", f"{text} is above the {time_text(limit_s)} of {where}; {advice}"


def _size_problems(site: Site, requested: Mapping[str, str | None]) -> Iterator[Found]:
    """Yield node counts, or GPUs of a node, that no partition of the job has."""
    partitions = {name: site.partitions[name] for name in _partitions_of(site, requested)}
    counts = node_counts(requested.get("nodes") or "1")
    of_nodes = {
        name: min(x.nodes, x.max_nodes or x.nodes) for name, x in partitions.items() if x.nodes
    }
    kind, gpus = requested.get("gpus-per-node"), 0
    if kind is not None:
        gpus = _gpu_of(f"gpu:{kind}")[1]
    of_gpus = {name: x.gpus for name, x in partitions.items() if x.gpus}
    sizes = (("nodes", counts[0] if counts else 0, of_nodes), ("gpus-per-node", gpus, of_gpus))
    for option, number, limits in sizes:
        if limits and number > (most := max(limits.values())):
            name = next(x for x in limits if limits[x] == most)
            advice = to_write({"slurm": {option: most}})
            yield option, f"{number} is above the {most} of partition {name}; {advice}"


def _partitions_of(site: Site, requested: Mapping[str, str | None]) -> list[str]:
    """Return the partitions of the site that the job names, else the default one."""
    if names := requested.get("partition"):
        return [x for x in names.split(",") if x in site.partitions]
    return [name for name, partition in site.partitions.items() if partition.default]


def _python_problem(site: Site) -> str:
    """Return why the ranks cannot use the interpreter of this process, or "" if they can."""
    node = site.node
    if node is None or node.pythons.get(sys.executable):
        return ""
    machine = platform.machine()
    if node.arch != machine:
        why = f"nodes are {node.arch}, and {sys.executable} here is for {machine}"
    elif sys.executable in node.pythons:
        why = f"{sys.executable} does not start on the nodes, or finds no torch there"
    else:
        return ""
    working = [path for path, works in node.pythons.items() if works]
    advice = (
        to_write({"slurm": {"python": working[0]}})
        if working
        else "set launch.slurm.python to an interpreter there that has torch"
    )
    return f"is not set, and {why}; {advice}"


def fitted(
    site: Site, requested: Mapping[str, str | None], gpu_option: str | None = None
) -> FittedOptions:
    """Return the options of a job in this site's form.

    requested: options of sbatch, complete except for what the site adds. gpu_option: the one that
    requests GPUs of a node, if any.
    """
    options = dict(requested)
    notes: list[str] = []
    if gpu_option is not None:
        notes += _fit_gpus(site, options, gpu_option)
    for name, value in header(site.options).items():
        if not options.keys() & {*_SAME.get(_kind(name), (name,))}:
            options[name] = value
            notes.append(f"{_shown(name, value)}, which the file of the site adds")
    for name, words in site.forbidden.items():
        for same in _SAME.get(name, (name,)):
            if same in options and name != "requeue":
                notes.append(f"without {_shown(same, options.pop(same))}: the site says {words!r}")
    return FittedOptions(options, tuple(notes))


def _fit_gpus(site: Site, options: dict[str, str | None], name: str) -> Iterator[str]:
    if site.gpu_option is None:
        return
    value = options[name] or ""
    first = next((x for x in value.split(",") if name != "gres" or x.startswith("gpu")), "")
    kind, count = _gpu_of(first if name == "gres" else f"gpu:{first}")
    if not count:
        return
    others = [x for x in value.split(",") if x != first] if name == "gres" else []
    types = {
        gpu_type
        for partition in site.partitions.values()
        for gpu_type, _ in map(_gpu_of, partition.gres)
    }
    fitting_type = kind if kind in types else site.gpu_type
    target = site.gpu_option if not others else "gres"
    requested = _shown(name, options.pop(name))
    if target == "none":
        if "exclusive" not in site.forbidden:
            options.setdefault("exclusive", None)
        yield f"without {requested}: the nodes of this site have no GRES, and are taken whole"
        return
    text = ":".join(
        [*(["gpu"] if target == "gres" else []), *([fitting_type] if fitting_type else [])]
    )
    options[target] = ",".join([f"{text}:{count}".removeprefix(":"), *others])
    if (now := _shown(target, options[target])) != requested:
        yield f"{now} in place of {requested}, as this site wants it"


def _gpu_of(gres: str) -> tuple[str | None, int]:
    """Return type and number of `gpu:h100:8`; (None, 0) of another GRES."""
    match = re.fullmatch(r"gpu(?::([A-Za-z_][^:(]*))?(?::(\d+))?(\(.*\))?", gres)
    return (match[1], int(match[2] or 1)) if match else (None, 0)


def _kind(name: str) -> str:
    return next((kind for kind, names in _SAME.items() if name in names), name)


def _shown(name: str, value: str | None) -> str:
    return f"--{name}" if value is None else f"--{name}={value}"


def time_text(seconds: int) -> str:
    """Return seconds as sbatch reads a time: D-HH:MM:SS."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02}:{minute:02}:{second:02}"


def partition_order(site: Site) -> Sequence[str]:
    """Return the partitions with the default one first, then those with the most GPUs."""
    order = site.partitions
    return sorted(order, key=lambda name: (not order[name].default, -order[name].gpus))
