"""Choose the suspect nodes that a submission excludes: all, unless the job could then never run.

`sbatch --test-only` says whether a job could run on the nodes that are up, however busy they are.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchdistpackage.environment.slurm_env import scrub_slurm_env
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm import node_blocklist
from torchdistpackage.launch.slurm.query import Runner

_EXCLUDE = re.compile(r"^#SBATCH\s+(?:--exclude[=\s]|-x\s*)\s*(\S+)", re.MULTILINE)
_NO_NODES = re.compile(r"allocation failure: .*node", re.IGNORECASE)
"""sbatch's error if too few nodes are left. Other refusals, such as an invalid account, are not
about nodes."""


def exclusion(script: Path, nodes: Sequence[str]) -> list[str]:
    """Return the option that excludes `nodes` in addition to those that the script excludes.

    An option on the command line replaces the script's own.
    """
    if not nodes:
        return []
    excluded = _EXCLUDE.findall(script.read_text(encoding="utf-8")) if script.is_file() else []
    return [f"--exclude={','.join([*excluded, *nodes])}"]


def leave_out(
    script: Path,
    suspects: Path,
    env: Mapping[str, str],
    runner: Runner,
    now_s: float,
    options: Sequence[str] = (),
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the nodes to exclude from this job, and lines to print about them.

    As few suspects as possible are readmitted: nodes that merely went down before those with
    hardware errors, oldest evidence first. If the job could not run even on all nodes that are up,
    none is excluded, and the job waits for any nodes.
    """
    reasons = node_blocklist.reasons(suspects, now_s)
    worst_last = sorted(
        reasons,
        key=lambda node: (
            any(e.weight < node_blocklist.THRESHOLD for e in reasons[node]),
            max(e.time_s for e in reasons[node]),
        ),
    )

    def could_run(num_forgiven: int) -> bool:
        excluded = exclusion(script, sorted(worst_last[num_forgiven:]))
        try:
            ran = runner(
                ["sbatch", "--test-only", *options, *excluded, str(script)],
                env=scrub_slurm_env(env),
            )
        except LaunchError:
            return True
        return ran.code == 0 or not _NO_NODES.search(ran.err)

    fewest, most = 0, len(worst_last)
    if reasons and could_run(0):
        most = 0
    while fewest + 1 < most:
        middle = (fewest + most) // 2
        fewest, most = (fewest, middle) if could_run(middle) else (middle, most)
    forgiven, excluded = worst_last[:most], tuple(sorted(worst_last[most:]))
    notes = [node_blocklist.explain(suspects, now_s, excluded)] if excluded else []
    notes += [
        f"not leaving out {'; '.join(map(str, reasons[node]))}: the job could not run without it"
        for node in sorted(forgiven)
    ]
    return excluded, tuple(notes)
