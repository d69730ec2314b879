"""Preference pairs in the lines of a file: two answers to one prompt, of which one is preferred.

A line is `{prompt, chosen, rejected}`: three texts, or three lists of messages. Chats may leave out
the prompt; it is then what both answers begin with. No torch.
"""

from collections.abc import Callable
from datetime import date
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from torchdistpackage.data.tokens.chat import ChatTemplate
from torchdistpackage.data.tokens.chat_rows import (
    CONVERSATIONS,
    alpaca_texts,
    chat_row,
    is_alpaca,
    message_list,
)
from torchdistpackage.data.tokens.documents import (
    CHAT,
    CHAT_EXTRAS,
    TOOLS,
    AnswerPair,
    Document,
    is_unicode,
)
from torchdistpackage.data.tokens.row_notes import Tally
from torchdistpackage.errors import DataError

PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
ANSWERS = (CHOSEN, REJECTED)


class PairReader:
    """Reads lines of preference pairs.

    folder: folder of the tokenizer, whose chat template writes chats. today: the date that the
    template writes. tally: see `ChatTemplate`.
    """

    def __init__(self, folder: Path, today: date, tally: Tally | None = None):
        self._folder = folder
        self._today = today
        self._tally = tally

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._folder, self._today, self._tally)

    def __call__(self, value: dict[str, Any], where: str) -> AnswerPair:
        """Return the pair of one line. where: names the line in errors.

        Raises:
            DataError: keys are missing or of mixed kinds, an answer is empty, both answers are
                equal, or the template refuses a chat; it names all that is wrong with the line.
        """
        value = _normalized(value, where)
        is_chat = any(isinstance(value.get(key), list) for key in ANSWERS)
        needed = ANSWERS if is_chat else (PROMPT, *ANSWERS)
        problems = [f"no key {key!r}" for key in needed if key not in value]
        if problems:
            problems[-1] += f"; there are {', '.join(value) or 'none'}"
        kind, name = (list, "list of messages") if is_chat else (str, "text")
        for key in (PROMPT, *ANSWERS):
            if key in value and not isinstance(value[key], kind):
                type_name = type(value[key]).__name__
                problems.append(
                    f"{key} is a {type_name}; it has to be a {name}, as the answers are"
                )
            elif key in ANSWERS and key in value and not value[key]:
                problems.append(f"{key} is empty")
        if not problems and value[CHOSEN] == value[REJECTED]:
            problems.append(
                "chosen and rejected are equal, so neither is preferred; remove this row"
            )
        if problems:
            raise DataError(f"{where}: {'; '.join(problems)}")
        return self._of_chats(value, where) if is_chat else _of_texts(value, where)

    def _of_chats(self, value: dict[str, Any], where: str) -> AnswerPair:
        chosen, rejected = (value[key] for key in ANSWERS)
        if (prompt := value.get(PROMPT)) is None:
            common = takewhile(lambda x: x[0] == x[1], zip(chosen, rejected, strict=False))
            prompt = [message for message, _ in common]
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        if not prompt:
            raise DataError(
                f"{where}: prompt is empty, and the answers do not begin with a common message; "
                "give the prompt or a common beginning"
            )
        if empty := [k for k, x in zip(ANSWERS, (chosen, rejected), strict=True) if not x]:
            raise DataError(
                f"{where}: {empty[0]} has nothing behind the messages that both "
                "answers begin with; "
                f"give each answer a message of its own"
            )
        extras = {key: value[key] for key in CHAT_EXTRAS if key in value}

        def document(key: str, answer: list[Any]) -> Document:
            chat = {CHAT: [*prompt, *answer], **extras}
            return self._template.document(chat, f"{where}: {key}", len(prompt))

        answers = zip(ANSWERS, (chosen, rejected), strict=True)
        return AnswerPair(*_each([lambda key=k, x=x: document(key, x) for k, x in answers]))


def _normalized(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a line with its chats as lists of messages.

    ShareGPT's prompt is `conversations`, and an answer may be one message; Alpaca's prompt is an
    instruction.
    """
    row = dict(value)
    if row.get(CONVERSATIONS) is not None and row.get(PROMPT) is None:
        row[PROMPT] = chat_row(row, where)[CHAT]
    elif is_alpaca(row) and row.get(PROMPT) is None:
        row[PROMPT], _ = alpaca_texts(row, where)
    for key in (PROMPT, *ANSWERS):
        messages = [row[key]] if isinstance(row.get(key), dict) else row.get(key)
        if isinstance(messages, list):
            row[key] = message_list(messages, f"{where}: {key}")
    if TOOLS in row:
        row[TOOLS] = chat_row({TOOLS: row[TOOLS]}, where)[TOOLS]
    return row


def _of_texts(value: dict[str, Any], where: str) -> AnswerPair:
    for key in (PROMPT, *ANSWERS):
        is_unicode(value[key], f"{where}: {key}")
    return AnswerPair(*(Document(value[key], value[PROMPT]) for key in ANSWERS))


def _each(makers: list[Callable[[], Document]]) -> list[Document]:
    """Return the makers' results; raise one DataError with all the errors they raise."""
    documents = list[Document]()
    problems = list[str]()
    for make in makers:
        try:
            documents.append(make())
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("; ".join(problems))
    return documents
