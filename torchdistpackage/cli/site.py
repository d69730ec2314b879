"""`tdp site`: ask the Slurm site once, and write a file that `launch.site` of runs names.

The one rule: it changes nothing at the site, and only `--probe` submits a job.
"""

from pathlib import Path
from typing import Annotated

import typer

from torchdistpackage.files import atomic_write
from torchdistpackage.launch.slurm.site_query import (
    probe_node,
    query_site,
    sbatch_words,
    summary,
)


def site(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="File to write.")
    ] = Path("site.yaml"),
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Run a job of some seconds that looks at a node, too."),
    ] = False,
    wait: Annotated[
        float, typer.Option(metavar="S", min=1, help="Longest wait for that job, in seconds.")
    ] = 300.0,
) -> None:
    """Ask the Slurm site once what it has, demands and forbids.

    Runs that name the file in launch.site get the options that the site wants, and are refused
    before they wait in the queue if it cannot give them what they ask for.
    """
    site_facts = query_site()
    if probe:
        node = probe_node(site_facts, Path.cwd(), wait)
        site_facts = site_facts.model_copy(update={"node": node})
    atomic_write(output, _HEAD + site_facts.to_yaml())
    for line in summary(site_facts):
        typer.echo(line)
    typer.echo(f"\nwritten to {output}; in the YAML file of a run:")
    typer.echo(f"    launch: {{site: {output}}}")
    if words := sbatch_words(site_facts):
        typer.echo("for a script of your own:")
        typer.echo(f"    sbatch {words} scripts/sbatch_example.sh")


_HEAD = "# Written by tdp site; runs name it in launch.site. Values may be changed by hand.\n"
