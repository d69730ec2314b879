"""All rules across sections at once, each violation as a problem.

One rule: every rule is tried and all violations are reported; only a rule whose own keys are
already wrong is left out, because what it would say is noise.
"""

import contextlib
from collections.abc import Collection, Iterator

from torchdistpackage.config.problem import Problem
from torchdistpackage.config.rules import DEGREES, RULES, Rule
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import ConfigError


def violations(
    config: RunConfig, world_size: int | None = None, bad: Collection[str] = ()
) -> tuple[Problem, ...]:
    """Every rule across sections that `config` breaks.

    Args:
        world_size: number of ranks; None is not known yet, then `launch.local.procs` has to fit.
        bad: dotted paths already known to be wrong; rules that read them are left out.
    """
    found = broken(config, world_size, bad)
    return tuple(Problem("", None, rule.fields[0], text) for rule, text in found)


def broken(
    config: RunConfig, world_size: int | None = None, bad: Collection[str] = ()
) -> Iterator[tuple[Rule, str]]:
    """Each broken rule with its text; arguments as in `violations`."""
    world = world_size or config.launch.local.procs
    if world and not _touches(DEGREES, bad):
        # If it fails a rule below says so, and the others take the degrees as they are written.
        with contextlib.suppress(ConfigError):
            config = config.resolve(world)
    for rule in RULES:
        if not _touches(rule.fields, bad) and (text := rule.says(config, world_size)):
            yield rule, text


def _touches(fields: tuple[str, ...], bad: Collection[str]) -> bool:
    return any(
        not b or field == b or field.startswith(f"{b}.") or b.startswith((f"{field}.", f"{field}["))
        for field in fields
        for b in bad
    )
