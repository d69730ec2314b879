"""`tdp data`: prepare the data of a run before it starts."""

import typer

from torchdistpackage.cli._common import Config, Overrides
from torchdistpackage.config.data_section import DataSection
from torchdistpackage.config.load import load
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.data.tokens.row_notes import row_notes
from torchdistpackage.data.tokens.split import split_documents
from torchdistpackage.data.tokens.template_date import with_template_date
from torchdistpackage.data.tokens.texts import text_parts, tokenized_part
from torchdistpackage.data.tokens.token_bar import tokenizing
from torchdistpackage.data.tokens.token_cache import TokenizedText, cut_documents
from torchdistpackage.errors import ConfigError, DataError

data = typer.Typer(no_args_is_help=True)


@data.callback()
def main() -> None:
    """Prepare the training data of a run."""


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


def _tokenize(run: RunConfig, part: DataSection) -> TokenizedText:
    try:
        with tokenizing() as progress:
            return tokenized_part(run, part, progress)
    except DataError as error:
        raise ConfigError(str(error)) from error
