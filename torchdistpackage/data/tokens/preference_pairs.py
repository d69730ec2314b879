"""Pairs of answers to one prompt, of which one is preferred, as the lines of a file hold them.

A line is `{prompt, chosen, rejected}`: three texts, or three lists of messages. Of chats the prompt
may be left out; it is then what both answers begin with. No torch.
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
    """Reads lines of pairs. folder: of the tokenizer, whose chat template writes chats; today: the
    date that it writes; tally: see `ChatTemplate`."""

    def __init__(self, folder: Path, today: date, tally: Tally | None = None):
        self._folder, self._today, self._tally = folder, today, tally

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._folder, self._today, self._tally)

    def __call__(self, value: dict[str, Any], where: str) -> AnswerPair:
        """The pair of one line. where: of errors.

        Raises:
            DataError: keys are missing or of mixed kinds, an answer is empty, both answers are
                equal, or the template does not take a chat; all that is wrong with the line.
        """
        value = _read(value, where)
        is_chat = any(isinstance(value.get(key), list) for key in ANSWERS)
        needed = ANSWERS if is_chat else (PROMPT, *ANSWERS)
        problems = [f"no key {key!r}" for key in needed if key not in value]
        if problems:
            problems[-1] += f"; there are {', '.join(value) or 'none'}"
        kind, name = (list, "list of messages") if is_chat else (str, "text")
        for key in (PROMPT, *ANSWERS):
            if key in value and not isinstance(value[key], kind):
                found = type(value[key]).__name__
                problems.append(f"{key} is a {found}; it has to be a {name}, as the answers are")
            elif key in ANSWERS and key in value and not value[key]:
                problems.append(f"{key} is empty")
        if not problems and value[CHOSEN] == value[REJECTED]:
            problems.append("chosen and rejected are equal, so neither is preferred")
        if problems:
            raise DataError(f"{where}: {'; '.join(problems)}")
        return self._of_chats(value, where) if is_chat else _of_texts(value, where)

    def _of_chats(self, value: dict[str, Any], where: str) -> AnswerPair:
        chosen, rejected = (value[key] for key in ANSWERS)
        if (prompt := value.get(PROMPT)) is None:
            alike = takewhile(lambda x: x[0] == x[1], zip(chosen, rejected, strict=False))
            prompt = [message for message, _ in alike]
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        if not prompt:
            raise DataError(
                f"{where}: prompt is empty, and the answers begin with no message alike"
            )
        if empty := [k for k, x in zip(ANSWERS, (chosen, rejected), strict=True) if not x]:
            raise DataError(f"{where}: {empty[0]} is empty behind what both begin with")
        extras = {key: value[key] for key in CHAT_EXTRAS if key in value}

        def document(key: str, answer: list[Any]) -> Document:
            chat = {CHAT: [*prompt, *answer], **extras}
            return self._template.document(chat, f"{where}: {key}", len(prompt))

        answers = zip(ANSWERS, (chosen, rejected), strict=True)
        return AnswerPair(*_each([lambda key=k, x=x: document(key, x) for k, x in answers]))


def _read(value: dict[str, Any], where: str) -> dict[str, Any]:
    """A line with its chats as lists of messages. ShareGPT's prompt is `conversations`, and an
    answer may be one message; Alpaca's prompt is an instruction."""
    found = dict(value)
    if found.get(CONVERSATIONS) is not None and found.get(PROMPT) is None:
        found[PROMPT] = chat_row(found, where)[CHAT]
    elif is_alpaca(found) and found.get(PROMPT) is None:
        found[PROMPT], _ = alpaca_texts(found, where)
    for key in (PROMPT, *ANSWERS):
        part = [found[key]] if isinstance(found.get(key), dict) else found.get(key)
        if isinstance(part, list):
            found[key] = message_list(part, f"{where}: {key}")
    if TOOLS in found:
        found[TOOLS] = chat_row({TOOLS: found[TOOLS]}, where)[TOOLS]
    return found


def _of_texts(value: dict[str, Any], where: str) -> AnswerPair:
    for key in (PROMPT, *ANSWERS):
        is_unicode(value[key], f"{where}: {key}")
    return AnswerPair(*(Document(value[key], value[PROMPT]) for key in ANSWERS))


def _each(makers: list[Callable[[], Document]]) -> list[Document]:
    """What they make; raises one DataError of all that they raise."""
    found, problems = list[Document](), list[str]()
    for make in makers:
        try:
            found.append(make())
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("; ".join(problems))
    return found
