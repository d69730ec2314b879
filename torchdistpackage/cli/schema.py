"""`tdp schema`: print the JSON schema with which editors complete and check the YAML file."""

import json

import typer

from torchdistpackage.config.schema import RunConfig


def schema() -> None:
    """Print the JSON schema of the YAML file."""
    typer.echo(json.dumps(RunConfig.json_schema(), indent=2))
