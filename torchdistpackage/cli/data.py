"""`tdp data`: prepare the data of a run before it starts, and look at its samples."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from torchdistpackage.cli._common import Config, Overrides
from torchdistpackage.config.data_section import DataSection
from torchdistpackage.config.load import load
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.data.tokens.row_notes import row_notes
from torchdistpackage.data.tokens.split import split_documents
from torchdistpackage.data.tokens.template_date import with_template_date
from torchdistpackage.data.tokens.text_blocks import TextBlocks
from torchdistpackage.data.tokens.texts import (
    read_at_start,
    text_parts,
    text_source,
    token_cache_folder,
    tokenized_part,
)
from torchdistpackage.data.tokens.token_bar import tokenizing
from torchdistpackage.data.tokens.token_cache import TokenizedText, cut_documents
from torchdistpackage.errors import ConfigError, DataError
from torchdistpackage.lazy import resolve

SHOW = "torchdistpackage.train.data_show:show_samples"

data = typer.Typer(no_args_is_help=True)


@data.callback()
def main() -> None:
    """Prepare the training data of a run, and look at its samples."""


@data.command()
def tokenize(config: Config, overrides: Overrides = None) -> None:
    """Tokenize the texts of a run and store the tokens for all runs.

    A run does this itself when it starts. This command needs no GPU and shows its progress. It
    checks only the sections run and data of the configuration.
    """
    run = load(config, list(overrides or []), only=("run", "data"))
    if run.data.tokenizer is None:
        raise ConfigError(f"{config}: nothing to tokenize without data.tokenizer; set it")
    run = with_template_date(run)
    labels = {x.section.path: f"{x.label}: " for x in run.data.blend}
    for part in text_parts(run).values():
        if part.streaming:
            typer.echo(f"{labels.get(part.path, '')}{_tokenize_blocks(run, part)}")
            continue
        text = _tokenize(run, part)
        typer.echo(
            f"{labels.get(part.path, '')}{len(text.tokens):,} tokens of {len(text.ends):,} "
            f"documents, vocabulary {text.vocab:,}, in {text.folder}"
        )
        split = split_documents(text, part.val_fraction)
        for note in filter(None, (split.note, cut_documents(text, part.seq_len))):
            typer.echo(f"note: {note}")
        for note in row_notes(text.tally):
            typer.echo(note)


@data.command()
def show(
    config: Config,
    overrides: Overrides = None,
    number: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of samples to print.")
    ] = 4,
    step: Annotated[int, typer.Option(metavar="N", min=1, help="Step that trains on them.")] = 1,
) -> None:
    """Print samples of a step, with trained tokens marked.

    Trained tokens are green, and the others dim; without a terminal, or with NO_COLOR, trained
    tokens are written as {+text+}. A table has the samples and trained tokens of the whole step by
    source. It starts no ranks.
    """
    run = with_template_date(load(config, list(overrides or [])))
    for part in read_at_start(run).values():
        _tokenize(run, part)
    coloured = (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
    show_samples: Callable[..., Iterator[str]] = resolve(SHOW)
    try:
        for line in show_samples(run, config, step, number, coloured=coloured):
            typer.echo(line)
    except DataError as error:
        raise ConfigError(str(error)) from error


def _tokenize(run: RunConfig, part: DataSection) -> TokenizedText:
    try:
        with tokenizing() as progress:
            return tokenized_part(run, part, progress)
    except DataError as error:
        raise ConfigError(str(error)) from error


def _tokenize_blocks(run: RunConfig, part: DataSection) -> str:
    """Tokenize all blocks of a part that is streamed, and return their sum."""
    num_tokens = num_documents = 0
    try:
        blocks = TextBlocks(text_source(run, part), token_cache_folder(run))
        for number in range(len(blocks)):
            text = blocks.read(number)
            num_tokens += len(text.tokens)
            num_documents += len(text.ends)
    except DataError as error:
        raise ConfigError(str(error)) from error
    return f"{num_tokens:,} tokens of {num_documents:,} documents, in {len(blocks)} blocks"
