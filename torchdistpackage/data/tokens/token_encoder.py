"""An encoder of documents to token ids, in the arrays that a cache entry keeps. No torch.

The ids of a document depend on its text and the tokenizer alone, so any process can tokenize any
piece of a file, in any order.
"""

import hashlib
from collections.abc import Iterator, Sequence
from datetime import date
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchdistpackage.config.data_section import EMBEDDING, UNPAIRED
from torchdistpackage.config.hugging_face import special_tokens, tokenizer_file, vocabulary_size
from torchdistpackage.config.text_ends import TextEnds, end_of_text
from torchdistpackage.data.tokens.chat import ChatTemplate
from torchdistpackage.data.tokens.chat_rows import chat_row
from torchdistpackage.data.tokens.documents import (
    AnswerPair,
    Document,
    Piece,
    Reader,
    TextGroup,
    TextSource,
    documents_of,
    fields_of,
    fields_of_row,
    reader_of,
    text_document,
)
from torchdistpackage.data.tokens.labelled_answers import AnswerReader
from torchdistpackage.data.tokens.labelled_rows import IGNORE, LabelReader
from torchdistpackage.data.tokens.preference_pairs import PairReader
from torchdistpackage.data.tokens.row_notes import Tally, count_unused
from torchdistpackage.data.tokens.text_groups import TextGroupReader
from torchdistpackage.errors import DataError

UNDESIRABLE = np.uint8(2)
"""Mark, instead of 1, of a token that counts in an answer that was called bad."""
_MOST_LINES = 512
"""Largest number of lines tokenized at once."""
_MOST_LETTERS = 1 << 20
"""Letters tokenized at once: a token takes some 100 bytes until its id is copied."""


class EncodedBatch(NamedTuple):
    """Encoded documents as a cache entry has them, or the problems of their lines.

    With problems there are no documents. num_letters: letters of all texts. lines: for each
    document, the lines of the batch before its own. lengths: tokens of each. counted, prompts:
    None where every token counts. labels: one of each document or, where words have them, of each
    token; None without labels. tally: see `row_notes`.
    """

    num_lines: int
    num_letters: int
    problems: list[str]
    lines: npt.NDArray[np.int64]
    ids: npt.NDArray[np.unsignedinteger]
    lengths: npt.NDArray[np.int64]
    places: npt.NDArray[np.float64]
    counted: npt.NDArray[np.uint8] | None
    prompts: npt.NDArray[np.int64] | None
    labels: npt.NDArray[np.int64] | None
    tally: dict[str, int]


def load_tokenizer(path: Path) -> tuple[Any, int | None]:
    """Load (tokenizer, id of its end-of-text token or None) from a folder or a file.

    Raises:
        DataError: the tokenizers library is missing, or the file is not in its format.
    """
    try:
        from tokenizers import AddedToken, Tokenizer
    except ImportError as error:
        raise DataError(
            f"data.tokenizer needs the tokenizers library ({error}); pip install tokenizers"
        ) from error
    file = tokenizer_file(path)
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8-sig"))
    except Exception as error:  # the library raises plain Exceptions
        raise DataError(
            f"{file} is not a tokenizer of the tokenizers library: {error}; name a folder with a "
            "tokenizer.json that it reads"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    # we encode without special tokens, so a post-processor would only cut spaces off offsets
    tokenizer.post_processor = None
    # as transformers, add the tokens that the settings name, or their text would be several tokens
    added = {x.content for x in tokenizer.get_added_tokens_decoder().values()}
    names = {*special_tokens(file.parent).values()} - added
    tokenizer.add_special_tokens(
        [
            AddedToken(x, normalized=False)
            for x in sorted(names)
            if tokenizer.token_to_id(x) is not None
        ]
    )
    return tokenizer, end_of_text(file)


class DocumentEncoder:
    """Makes ids of the documents of a source, in the smallest of uint16 and uint32 that holds them.

    Raises:
        DataError: the tokenizer is missing or wrong, or lacks what the source asks of it.
    """

    def __init__(self, source: TextSource):
        file = tokenizer_file(Path(source.tokenizer))
        self._source = source
        self._ends = source.ends
        self._tokenizer, self.eos = load_tokenizer(file)
        self._tally = Tally()
        self._reader = row_reader(source, file.parent, self._tally)
        self.vocab = vocabulary_size(file)
        self.dtype = np.dtype(np.uint16 if self.vocab <= 1 << 16 else np.uint32)

    def batches(
        self, piece: Piece, number: int = 0, *, encode: bool = True
    ) -> Iterator[EncodedBatch]:
        """Yield the documents of a piece in batches. number: lines of the file before the piece.

        encode: False only checks the lines, as does the rest of a piece after a wrong line.

        Raises:
            DataError: the piece cannot be read or tokenized.
        """
        source = self._source
        # columns that nobody asks for are not even read, so count them here
        columns, fields = reader_of(source.kind).columns(piece.path), fields_of(source)
        unread = [f"{x!r} of rows" for x in columns if x not in fields]
        documents = documents_of(source.kind, piece, source.field, self._reader, number)
        for lines in _some_at_a_time(documents):
            problems = [str(x) for x in lines if isinstance(x, DataError)]
            encode = encode and not problems
            numbered = [
                (i, y)
                for i, x in enumerate(lines)
                if not (x is None or isinstance(x, DataError))
                for y in (x if isinstance(x, AnswerPair | TextGroup) else (x,))
            ]
            batch = [document for _, document in numbered]
            where = f"{piece.path}: documents {number + 1} to {number + len(lines)}"
            arrays = self._encoded(batch if encode else [], where)
            tally = {**self._tally, **dict.fromkeys(unread, len(lines))}
            self._tally.clear()
            at = np.asarray([i for i, _ in numbered if encode], np.int64)
            yield EncodedBatch(len(lines), sum(map(_letters, batch)), problems, at, *arrays, tally)
            number += len(lines)

    def _encoded(self, documents: list[Document], where: str):
        """Return the arrays of an `EncodedBatch`, with bos and eos around each document."""
        spans = [x.learned for x in documents]
        head = self._source.head
        has_words = head is not None and head.is_of_tokens
        has_spans = has_words or any(x is not None for x in spans)
        texts = self._tokens([x.prompt + x.text for x in documents], where, offsets=has_spans)
        ids: list[list[int]] = []
        counted: list[npt.NDArray[np.uint8]] = []
        labels: list[int] = []
        for document, span, text in zip(documents, spans, texts, strict=True):
            # a template has written the special tokens already
            ends = self._ends.lacking(text.ids) if document.spans is None else TextEnds()
            ends = TextEnds(ends.bos * document.is_begun, ends.eos * document.is_ended)
            ids.append([*ends.bos, *text.ids, *ends.eos])
            if self._source.has_prompts:
                counts = _counted(text, span, ends)
                counted.append(counts if document.is_desirable else counts * UNDESIRABLE)
            if has_words:
                labels += [IGNORE] * len(ends.bos)
                labels += labels_of_tokens(text.offsets, document.words, document.labels)
                labels += [IGNORE] * len(ends.eos)
            else:
                labels += document.labels
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = np.fromiter(chain.from_iterable(ids), self.dtype, int(lengths.sum()))
        per_line = self._source.documents_per_line
        # both answers of a pair have the place of the first, so a split keeps them together
        hashes = [_place(documents[i - i % per_line]) for i in range(len(documents))]
        places = np.asarray(hashes, np.float64)
        all_labels = None if head is None else np.asarray(labels, np.int64)
        if not self._source.has_prompts:
            return flat, lengths, places, None, None, all_labels
        firsts = [int(x.argmax()) if x.any() else len(x) for x in counted]
        mask = np.concatenate([np.zeros(0, np.uint8), *counted])
        return flat, lengths, places, mask, np.asarray(firsts, np.int64), all_labels

    def _tokens(self, texts: list[str], where: str, *, offsets: bool) -> Sequence[Any]:
        """Encode texts with the library; leaving out offsets saves a tenth of the time."""
        tokenizer = self._tokenizer
        encode = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
        try:
            return encode(texts, add_special_tokens=False)
        except Exception as error:  # the library raises plain Exceptions
            raise DataError(f"{where} cannot be tokenized: {error}") from error


def row_reader(source: TextSource, folder: Path, tally: Tally) -> Reader:
    """Return the function that reads a line of the source; it counts unused keys in `tally`.

    folder: folder of the tokenizer.

    Raises:
        DataError: the folder has no chat template for chats.
    """
    today = date.fromisoformat(source.today) if source.today else date.today()
    if source.is_pairs:
        reader: Reader = PairReader(folder, today, tally)
    elif source.kind == UNPAIRED:
        reader = AnswerReader(folder, today, tally)
    elif source.kind == EMBEDDING:
        reader = TextGroupReader(source.num_negatives)
    elif source.may_be_chat:
        template = ChatTemplate(folder, today, tally)

        def read_chat(value: dict[str, Any], where: str) -> Document:
            return template.document(chat_row(value, where), where)

        reader = read_chat
    else:
        reader = partial(text_document, field=source.field)
    if source.head is not None:
        reader = LabelReader(source, reader)

    def counting_reader(value: dict[str, Any], where: str) -> Document | AnswerPair | TextGroup:
        documents = reader(value, where)
        count_unused(tally, value, fields_of_row(source, value), "rows")
        return documents

    return counting_reader


_Line = Document | AnswerPair | TextGroup | DataError | None


def _some_at_a_time(documents: Iterator[_Line]) -> Iterator[list[_Line]]:
    """Yield lists of documents, each as many as may be tokenized at once."""
    lines = list[_Line]()
    letters = 0
    for document in documents:
        lines.append(document)
        letters += _letters(document)
        if len(lines) >= _MOST_LINES or letters >= _MOST_LETTERS:
            yield lines
            lines = []
            letters = 0
    if lines:
        yield lines


def _letters(line: _Line) -> int:
    if line is None or isinstance(line, DataError):
        return 0
    documents = line if isinstance(line, AnswerPair | TextGroup) else (line,)
    return sum(len(x.prompt) + len(x.text) for x in documents)


def _counted(
    text: Any, spans: tuple[tuple[int, int], ...] | None, ends: TextEnds
) -> npt.NDArray[np.uint8]:
    """Return 1 for each token of a document that counts in the loss, else 0. spans: ranges of
    characters that count; None: all do.
    """
    if spans is None:
        return np.ones(len(ends.bos) + len(text.ids) + len(ends.eos), np.uint8)
    inner = _within(text.offsets, spans).astype(np.uint8)
    return np.concatenate(
        [np.zeros(len(ends.bos), np.uint8), inner, np.ones(len(ends.eos), np.uint8)]
    )


def _within(
    offsets: list[tuple[int, int]], spans: tuple[tuple[int, int], ...]
) -> npt.NDArray[np.bool_]:
    """Return which tokens, given as ranges of characters, overlap a span."""
    begin, end = np.asarray(offsets, np.int64).reshape(-1, 2).T
    inside = np.zeros(len(begin), bool)
    for first, last in spans:
        inside |= (begin < last) & (np.maximum(end, begin + 1) > first)
    return inside


def labels_of_tokens(
    offsets: Sequence[tuple[int, int]],
    words: Sequence[tuple[int, int]],
    labels: Sequence[int],
) -> list[int]:
    """Return the label of each token: the first one of a word has the word's, all others `IGNORE`.

    offsets: characters of each token, in order. words: those of each word.
    """
    of_tokens, token = [IGNORE] * len(offsets), 0
    for (first, last), label in zip(words, labels, strict=True):
        # a token that lies before the word, or has the end of the one before it
        while token < len(offsets) and max(offsets[token][1], offsets[token][0] + 1) <= first:
            token += 1
        if token < len(offsets) and offsets[token][0] < last:
            of_tokens[token] = label
            token += 1
    return of_tokens


def _place(document: Document) -> float:
    """Return a hash in [0, 1): equal texts have equal ones, so a split never separates them."""
    digest = hashlib.blake2b(document.prompt.encode(), digest_size=7)
    digest.update(b"\0" + document.text.encode())
    return int.from_bytes(digest.digest(), "big") / 2**56
