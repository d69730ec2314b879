"""The texts that a run trains on: where they and their ids are, and what is wrong with them.

No torch.
"""

from dataclasses import replace
from itertools import islice
from pathlib import Path

from torchdistpackage.config.chat_templates import folder_writes_date
from torchdistpackage.config.data_section import DataSection
from torchdistpackage.config.errors import Problem
from torchdistpackage.config.hugging_face import tokenizer_file
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.data.tokens.documents import (
    TextSource,
    column_names,
    documents_of,
    fields_of,
    files_of,
    pieces_of,
)
from torchdistpackage.data.tokens.pair_rows import pair_problems
from torchdistpackage.data.tokens.row_notes import Tally, unused_notes
from torchdistpackage.data.tokens.split import split_documents, split_pairs
from torchdistpackage.data.tokens.template_date import today
from torchdistpackage.data.tokens.token_bar import tokenizing
from torchdistpackage.data.tokens.token_cache import TokenizedText, is_tokenized, tokenized
from torchdistpackage.data.tokens.token_encoder import row_reader
from torchdistpackage.data.tokens.token_workers import Progress
from torchdistpackage.errors import DataError

_FIRST_ROWS = 100
"""Rows of a file that a plan reads."""


def text_source(data: DataSection) -> TextSource:
    """What a data section with a tokenizer has tokenized."""
    where = data.name or "", data.path or "", data.tokenizer or ""
    source = TextSource(*where, data.field, data.bos, data.eos)
    if not (source.may_be_chat and folder_writes_date(source.tokenizer)):
        return source
    return replace(source, today=data.template_date or today())


def token_cache_folder(config: RunConfig) -> Path:
    """Where tokenized texts are kept, for all runs of a folder."""
    return Path(config.data.cache or Path(config.run.dir) / "tokens")


def text_parts(config: RunConfig) -> dict[str, DataSection]:
    """By the key of its path, each part of the data that is tokenized."""
    return {key: x for key, x in config.data.all_parts.items() if x.tokenizer is not None}


def tokenized_part(
    config: RunConfig, data: DataSection, progress: Progress | None = None
) -> TokenizedText:
    """The ids of a part, made now if they are not there; raises DataError as `tokenized`."""
    return tokenized(text_source(data), token_cache_folder(config), progress)


def all_tokenized(config: RunConfig) -> bool:
    """Whether all texts that the run trains on are; no if one cannot be read."""
    cache = token_cache_folder(config)
    trains = (x for key, x in text_parts(config).items() if key in config.data.parts)
    try:
        return all(is_tokenized(text_source(data), cache) for data in trains)
    except DataError:
        return False


def _split_problems(found: TokenizedText, data: DataSection) -> list[str]:
    if data.is_preference:
        problems = split_pairs(found, data.val_fraction).problems(data.seq_len)
        return [*problems, *pair_problems(found, data.seq_len)]
    return list(split_documents(found, data.val_fraction).problems(data.seq_len))


def unused_keys(config: RunConfig) -> list[str]:
    """Return which keys of the first rows of each part nobody uses, for a plan: it reads no more.

    Of what cannot be read it says nothing: a start reads all of it and refuses.
    """
    notes: list[str] = []
    for key, data in text_parts(config).items():
        source, tally = text_source(data), Tally()
        folder = tokenizer_file(Path(source.tokenizer)).parent
        try:
            file = files_of(source.kind, Path(source.path))[0]
            reader = row_reader(source, folder, tally)
            rows = documents_of(
                source.kind, next(pieces_of(source.kind, file)), source.field, reader
            )
            num = len(list(islice(rows, _FIRST_ROWS)))
            if source.kind == "parquet":
                unread = {*column_names(file)} - {*fields_of(source)}
                tally.update({f"{name!r} of rows": num for name in sorted(unread)})
        except (DataError, OSError, LookupError):
            continue
        where = "its rows" if num < _FIRST_ROWS else f"its first {num} rows"
        notes += [f"{key}: {where} have {note}" for note in unused_notes(tally)]
    return notes


def wrong_texts(config: RunConfig) -> list[Problem]:
    """What is wrong with the texts of a run with data.tokenizer, which are tokenized for it, with
    a bar of progress."""
    problems: list[Problem] = []
    for key, data in text_parts(config).items():
        try:
            with tokenizing() as progress:
                found = tokenized_part(config, data, progress)
        except DataError as error:
            texts = str(error).splitlines()
        else:
            texts = _split_problems(found, data)
        problems += [config.problem(key, text.removeprefix("data.path ")) for text in texts]
    return problems
