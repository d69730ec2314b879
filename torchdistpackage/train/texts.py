"""The texts that a run trains on: where they and their ids are, and what is wrong with them.

No torch.
"""

from pathlib import Path

from torchdistpackage.config.errors import Problem
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import DataError
from torchdistpackage.train.documents import TextSource
from torchdistpackage.train.split import split_documents
from torchdistpackage.train.token_cache import tokenized


def text_source(config: RunConfig) -> TextSource:
    """What a run with data.tokenizer has tokenized."""
    data = config.data
    where = data.name or "", data.path or "", data.tokenizer or ""
    return TextSource(*where, data.field, data.bos, data.eos)


def token_cache_folder(config: RunConfig) -> Path:
    """Where tokenized texts are kept, for all runs of a folder."""
    return Path(config.data.cache or Path(config.run.dir) / "tokens")


def wrong_texts(config: RunConfig) -> list[Problem]:
    """What is wrong with the texts of a run with data.tokenizer, which are tokenized for it."""
    if config.data.tokenizer is None:
        return []
    try:
        found = tokenized(text_source(config), token_cache_folder(config))
    except DataError as error:
        texts = str(error).splitlines()
    else:
        split = split_documents(found, config.data.val_fraction)
        texts = list(split.problems(config.data.seq_len))
    return [config.problem("data.path", text.removeprefix("data.path ")) for text in texts]
