"""Labelled answers, each good or bad, in the lines of a file: trl calls them unpaired preferences.

A line is `{prompt, completion, label}`: two texts, or two lists of messages, and true or false. No
torch.
"""

from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from torchdistpackage.data.tokens.chat import ChatTemplate
from torchdistpackage.data.tokens.chat_rows import message_list
from torchdistpackage.data.tokens.documents import CHAT, CHAT_EXTRAS, Document, is_unicode
from torchdistpackage.data.tokens.row_notes import Tally
from torchdistpackage.errors import DataError

PROMPT, COMPLETION, LABEL = "prompt", "completion", "label"


class AnswerReader:
    """Reads lines of labelled answers; its arguments are those of `PairReader`."""

    def __init__(self, folder: Path, today: date, tally: Tally | None = None):
        self._folder, self._today, self._tally = folder, today, tally

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._folder, self._today, self._tally)

    def __call__(self, value: dict[str, Any], where: str) -> Document:
        """Return the answer of one line. where: names the line in errors.

        Raises:
            DataError: keys are missing or of mixed kinds, the answer is empty, the label is neither
                true nor false, or the template refuses a chat; it names all that is wrong.
        """
        row = dict(value)
        for key in (PROMPT, COMPLETION):
            messages = [row[key]] if isinstance(row.get(key), dict) else row.get(key)
            if isinstance(messages, list):
                row[key] = message_list(messages, f"{where}: {key}")
        problems = [f"no key {key!r}" for key in (PROMPT, COMPLETION, LABEL) if key not in row]
        if problems:
            problems[-1] += f"; there are {', '.join(row) or 'none'}"
        is_chat = isinstance(row.get(COMPLETION), list)
        kind, name = (list, "list of messages") if is_chat else (str, "text")
        for key in (PROMPT, COMPLETION):
            if key in row and not isinstance(row[key], kind):
                is_as = ", as the completion is" if key == PROMPT else " or a list of messages"
                problems.append(
                    f"{key} is a {type(row[key]).__name__}; it has to be a {name}{is_as}"
                )
        if row.get(COMPLETION) in ("", []):
            problems.append(f"{COMPLETION} is empty")
        if LABEL in row and not isinstance(row[LABEL], bool):
            problems.append(
                f"{LABEL} is {str(row[LABEL])[:40]!r}; write true for a good answer, else false"
            )
        if problems:
            raise DataError(f"{where}: {'; '.join(problems)}")
        if not is_chat:
            for key in (PROMPT, COMPLETION):
                is_unicode(row[key], f"{where}: {key}")
            return Document(row[COMPLETION], row[PROMPT], is_desirable=row[LABEL])
        if not row[PROMPT]:
            raise DataError(f"{where}: {PROMPT} is empty; give the messages before the answer")
        extras = {key: row[key] for key in CHAT_EXTRAS if key in row}
        chat = {CHAT: [*row[PROMPT], *row[COMPLETION]], **extras}
        document = self._template.document(chat, where, len(row[PROMPT]))
        return document._replace(is_desirable=row[LABEL])
