"""All rules across sections at once, each violation as a problem.

One rule: every rule is tried and all violations are reported; only a rule whose own keys are
already wrong is left out, because what it would say is noise.
"""

import contextlib
from collections.abc import Collection, Iterator

from torchdistpackage.config.errors import Problem
from torchdistpackage.config.rules import DEGREES, LAYOUT_RULES, SIZE_RULES, Rule
from torchdistpackage.config.rules_pipeline import PIPELINE_RULES
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.slurm import Found, canonical_name, problems
from torchdistpackage.config.slurm_shape import GPUS, LAYOUT, JobGeometry, job_geometry
from torchdistpackage.errors import ConfigError

RULES = (*LAYOUT_RULES, *PIPELINE_RULES, *SIZE_RULES)
"""In the order in which they are reported."""
_SLURM = "launch.slurm"


def violations(
    config: RunConfig,
    world_size: int | None = None,
    bad: Collection[str] = (),
    *,
    job: bool = False,
) -> tuple[Problem, ...]:
    """Every rule across sections that `config` breaks.

    Args:
        world_size: number of ranks; None is not known yet, then `launch.local.procs` has to fit.
        bad: dotted paths already known to be wrong; rules that read them are left out.
        job: without a world_size the run is a Slurm job, and has to fit every world that
            `launch.slurm` allows.
    """
    found = failed_rules(config, world_size, bad, job=job)
    return tuple(Problem("", None, rule.fields[0], text) for rule, text in found)


def failed_rules(
    config: RunConfig,
    world_size: int | None = None,
    bad: Collection[str] = (),
    *,
    job: bool = False,
) -> Iterator[tuple[Rule, str]]:
    """Each broken rule with its text; arguments as in `violations`."""
    wrong = problems(config.launch.slurm)
    yield from _of_options(config, wrong, bad)
    if world_size or not job:
        yield from _on(config, world_size, bad)
        return
    bad = [*bad, *(f"{_SLURM}.{canonical_name(key)}" for key, _ in wrong)]
    if _touches((*DEGREES, *(f"{_SLURM}.{name}" for name in (*LAYOUT, *GPUS))), bad):
        yield from _on(config, config.launch.local.procs, bad)
        return
    shape, wrong = job_geometry(config)
    yield from _of_options(config, wrong, bad)
    if shape is None:
        yield from _on(config, config.launch.local.procs, bad)
    else:
        yield from _on_each(config, shape, bad)


def _of_options(
    config: RunConfig, wrong: Collection[Found], bad: Collection[str]
) -> Iterator[tuple[Rule, str]]:
    """Problems of `launch.slurm` as broken rules, each under its key as it is written."""
    written = {canonical_name(key): key for key in config.launch.slurm}
    for key, text in wrong:
        path = f"{_SLURM}.{written.get(key, key)}"
        if not _touches((path,), bad):
            yield Rule((path,), lambda config, world_size: None), text


def _on_each(
    config: RunConfig, shape: JobGeometry, bad: Collection[str]
) -> Iterator[tuple[Rule, str]]:
    """The rules on every world of a job; each once, with the numbers of nodes that break it."""
    texts: dict[tuple[str, ...], tuple[Rule, str, list[int]]] = {}
    for nodes, world_size in zip(shape.nodes, shape.world_sizes, strict=True):
        for rule, text in _on(config, world_size, bad):
            texts.setdefault(rule.fields, (rule, text, []))[2].append(nodes)
    for rule, text, nodes in texts.values():
        if len(shape.nodes) > 1:
            left = [n for n in shape.nodes if n not in nodes]
            text = f"not on {_some(nodes)} of nodes={shape.nodes_text}: {text}"
            text += f"; nodes={','.join(map(str, left))} would do" if left else ""
        elif rule.fields[0] in DEGREES:
            text += f" (the job has {shape})"
        yield rule, text


def _on(
    config: RunConfig, world_size: int | None, bad: Collection[str]
) -> Iterator[tuple[Rule, str]]:
    world = world_size or config.launch.local.procs
    if world and not _touches(DEGREES, bad):
        # If it fails a rule below says so, and the others take the degrees as they are written.
        with contextlib.suppress(ConfigError):
            config = config.resolve(world)
    for rule in RULES:
        if not _touches(rule.fields, bad) and (text := rule.message(config, world_size)):
            yield rule, text


def _touches(fields: tuple[str, ...], bad: Collection[str]) -> bool:
    return any(
        not b or field == b or field.startswith(f"{b}.") or b.startswith((f"{field}.", f"{field}["))
        for field in fields
        for b in bad
    )


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"
