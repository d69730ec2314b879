"""The tokenized texts of a run: their files, their cache, and their problems.

No torch.
"""

from dataclasses import replace
from itertools import islice
from pathlib import Path

from torchdistpackage.config.chat_templates import folder_writes_date
from torchdistpackage.config.data_section import DataSection
from torchdistpackage.config.errors import Problem
from torchdistpackage.config.head_of_run import class_labels
from torchdistpackage.config.hugging_face import tokenizer_file
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.data.tokens.documents import (
    TextSource,
    documents_of,
    fields_of,
    files_of,
    reader_of,
    streamed_pieces_of,
)
from torchdistpackage.data.tokens.pair_rows import pair_problems
from torchdistpackage.data.tokens.row_notes import Tally, unused_notes
from torchdistpackage.data.tokens.split import (
    split_answers,
    split_documents,
    split_groups,
    split_pairs,
    split_rows,
)
from torchdistpackage.data.tokens.template_date import today
from torchdistpackage.data.tokens.token_bar import tokenizing
from torchdistpackage.data.tokens.token_cache import TokenizedText, is_tokenized, tokenized
from torchdistpackage.data.tokens.token_encoder import row_reader
from torchdistpackage.data.tokens.token_workers import Progress
from torchdistpackage.data.tokens.unpaired_rows import answer_problems
from torchdistpackage.errors import DataError

_FIRST_ROWS = 100
"""Number of rows of a file that a plan reads."""


def text_source(config: RunConfig, data: DataSection) -> TextSource:
    """Return the texts that a data section with a tokenizer, of this run, has tokenized."""
    source = TextSource(
        data.name or "",
        data.path or "",
        data.tokenizer or "",
        data.field,
        data.bos,
        data.eos,
        num_negatives=data.num_negatives,
    )
    if data.head is not None:
        source = replace(
            source,
            labels=class_labels(config) if data.head.has_classes else (),
            label_field="" if data.head.is_pairs else data.label_field,
            multi_label=data.multi_label,
        )
    if not (source.may_be_chat and folder_writes_date(source.tokenizer)):
        return source
    return replace(source, today=data.template_date or today())


def token_cache_folder(config: RunConfig) -> Path:
    """Return the folder of tokenized texts, which all runs in one run.dir share."""
    return Path(config.data.cache or Path(config.run.dir) / "tokens")


def text_parts(config: RunConfig) -> dict[str, DataSection]:
    """Return the parts of the data that have a tokenizer, by the key of their path."""
    return {key: x for key, x in config.data.all_parts.items() if x.tokenizer is not None}


def read_at_start(config: RunConfig) -> dict[str, DataSection]:
    """Return `text_parts` except those that are tokenized during training."""
    return {key: x for key, x in text_parts(config).items() if not x.streaming}


def tokenized_part(
    config: RunConfig, data: DataSection, progress: Progress | None = None
) -> TokenizedText:
    """Return the ids of a part, made now if they are missing; raises DataError as `tokenized`."""
    return tokenized(text_source(config, data), token_cache_folder(config), progress)


def all_tokenized(config: RunConfig) -> bool:
    """Return whether all texts of training are tokenized; False if one cannot be read."""
    cache = token_cache_folder(config)
    training_parts = (x for key, x in text_parts(config).items() if key in config.data.parts)
    try:
        return all(is_tokenized(text_source(config, data), cache) for data in training_parts)
    except DataError:
        return False


def _split_problems(text: TokenizedText, data: DataSection) -> list[str]:
    if data.is_unpaired:
        problems = split_answers(text, data.val_fraction).problems(data.seq_len)
        return [*problems, *answer_problems(text, data.seq_len)]
    if data.head is not None and not data.is_pairs:
        return list(split_rows(text, data.val_fraction).problems(data.seq_len))
    if data.is_pairs:
        problems = split_pairs(text, data.val_fraction).problems(data.seq_len)
        return [*problems, *pair_problems(text, data.seq_len, ahead=int(data.is_preference))]
    if data.is_embedding:
        return list(split_groups(text, data.val_fraction).problems(data.seq_len))
    return list(split_documents(text, data.val_fraction).problems(data.seq_len))


def unused_keys(config: RunConfig) -> list[str]:
    """Return notes on the keys that nobody uses in the first rows of each part, for a plan.

    A plan reads no more than these rows. It skips what cannot be read: a start reads all of it and
    refuses.
    """
    notes: list[str] = []
    for key, data in text_parts(config).items():
        source = text_source(config, data)
        tally = Tally()
        folder = tokenizer_file(Path(source.tokenizer)).parent
        try:
            file = files_of(source.kind, Path(source.path))[0]
            reader = row_reader(source, folder, tally)
            rows = documents_of(
                source.kind, next(streamed_pieces_of(source.kind, file)), source.field, reader
            )
            num = len(list(islice(rows, _FIRST_ROWS)))
            unread = {*reader_of(source.kind).columns(file)} - {*fields_of(source)}
            tally.update({f"{name!r} of rows": num for name in sorted(unread)})
        except (DataError, OSError, LookupError):
            continue
        where = "its rows" if num < _FIRST_ROWS else f"its first {num} rows"
        notes += [f"{key}: {where} have {note}" for note in unused_notes(tally)]
    return notes


def wrong_texts(config: RunConfig) -> list[Problem]:
    """Tokenize the texts of a run, with a progress bar, and return their problems."""
    problems: list[Problem] = []
    for key, data in read_at_start(config).items():
        try:
            with tokenizing() as progress:
                text = tokenized_part(config, data, progress)
        except DataError as error:
            messages = str(error).splitlines()
        else:
            messages = _split_problems(text, data)
        problems += [config.problem(key, x.removeprefix("data.path ")) for x in messages]
    return problems
