"""`tdp data`: the data of a run, made ready ahead of it."""

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from torchdistpackage.cli._common import Config, Overrides
from torchdistpackage.config.load import load
from torchdistpackage.errors import ConfigError, DataError
from torchdistpackage.train.job import text_source, token_cache_folder
from torchdistpackage.train.token_cache import cut_documents, tokenized

data = typer.Typer(no_args_is_help=True)


@data.callback()
def main() -> None:
    """Prepare the training data of a run."""


@data.command()
def tokenize(config: Config, overrides: Overrides = None) -> None:
    """Tokenize the texts of a run into a cache for all such runs.

    A run does this itself at its start. This command needs no GPU and shows its progress. Of the
    configuration it checks the sections run and data alone.
    """
    run = load(config, list(overrides or []), only=("run", "data"))
    if run.data.tokenizer is None:
        raise ConfigError(f"{config}: there is no data.tokenizer, so there is nothing to tokenize")
    columns = TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        try:
            found = tokenized(text_source(run), token_cache_folder(run), show)
        except DataError as error:
            raise ConfigError(str(error)) from error
    typer.echo(
        f"{len(found.tokens):,} tokens of {len(found.ends):,} documents, vocabulary "
        f"{found.vocab:,}, in {found.folder}"
    )
    if note := cut_documents(found, run.data.seq_len):
        typer.echo(f"note: {note}")
