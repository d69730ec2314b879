"""`tdp schema`: the keys of the YAML file for an editor that completes and checks them."""

import json

import typer

from torchdistpackage.config.schema import RunConfig


def schema() -> None:
    """Print the JSON schema of the YAML file."""
    typer.echo(json.dumps(RunConfig.json_schema(), indent=2))
