"""Chats written as one text by a tokenizer's chat template, with what the assistant says in it.

A turn of the assistant is what the template marks with `{% generation %}`; of a template without
these marks it is what the message adds to the text: the chat up to it, with the generation prompt,
has to be the beginning of the chat with it, and that the beginning of the whole. No torch.
"""

import secrets
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, cast

from torchdistpackage.bounded import parse_json
from torchdistpackage.config.chat_templates import (
    DEFAULT,
    chat_templates,
    no_chat_template,
    template_name,
)
from torchdistpackage.config.hugging_face import special_tokens
from torchdistpackage.errors import DataError
from torchdistpackage.train.chat_jinja import chat_environment
from torchdistpackage.train.documents import CHAT, TOOLS, Document, is_unicode

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function")

Message = dict[str, Any]
Render = Callable[..., str]
"""Called with messages and add_generation_prompt."""


class ChatTemplate:
    """The chat templates of a tokenizer's folder, run in Jinja's sandbox.

    today: the date that templates write as today's.

    Raises:
        DataError: the folder has none, or `default` is no Jinja template.
    """

    def __init__(self, folder: Path, today: date):
        self._folder, self._sources = folder, chat_templates(folder)
        if not self._sources:
            raise DataError(no_chat_template(folder))
        # no message can contain what is drawn here
        self._begin, self._end = (f"\0{word}{secrets.token_hex(8)}\0" for word in "<>")
        self._compile, self._errors = chat_environment(self._begin, self._end, today)
        self._tokens = special_tokens(folder)
        self._renders: dict[str, Render] = {}
        if DEFAULT in self._sources:
            self._template(DEFAULT)

    def _template(self, name: str) -> Render:
        """Return the template of this name, compiled at its first use."""
        if name not in self._renders:
            try:
                self._renders[name] = self._compile(self._sources[name]).render
            except self._errors as error:
                text = "" if name == DEFAULT else f" {name}"
                raise DataError(
                    f"the chat template{text} of {self._folder} is no Jinja template: {error}"
                ) from error
        return self._renders[name]

    def _writer(self, value: dict[str, Any], where: str) -> Render:
        """Return what writes messages of this row: its template with the row's variables."""
        variables = _variables(value, where)
        name = template_name(self._sources, has_tools=variables[TOOLS] is not None)
        if name is None:
            raise DataError(
                f"{where}: of the chat templates {', '.join(self._sources)} of {self._folder} none "
                f"is for a chat without tools; add one named {DEFAULT}"
            )
        return partial(self._text, self._template(name), self._tokens | variables, where)

    def document(self, value: dict[str, Any], where: str, first: int = 0) -> Document:
        """The chat of one line, as text with the spans of the assistant. where: of errors. first:
        of the messages that are learned; those before it are a prompt.

        Raises:
            DataError: it is no chat, says nothing that would be learned, or the template does not
                take it or does not show what the assistant says.
        """
        messages = _messages(value, where)
        render = self._writer(value, where)
        text = render(messages)
        if self._begin in text:
            return self._marked(text, where, self._begins(render(messages[:first])) if first else 0)
        spans: list[tuple[int, int]] = []
        for i, message in enumerate(messages):
            if message["role"] == ASSISTANT and i >= first:
                before = render(messages[:i], add_generation_prompt=True)
                upto = text if i + 1 == len(messages) else render(messages[: i + 1])
                if not (upto.startswith(before) and text.startswith(upto)):
                    raise DataError(
                        f"{where}: the chat template writes message {i + 1}, or what is before it, "
                        f"in another way when more follows, so what the assistant says is not "
                        f"known; give chats of one reply, or mark replies in the template with "
                        f"{{% generation %}}"
                    )
                spans.append((len(before), len(upto)))
        return Document(text, spans=_joined(spans, where))

    def prompt(self, text: str, where: str) -> str:
        """What stands before a reply to a user who says `text`.

        Raises:
            DataError: the template does not take it.
        """
        said: list[Message] = [{"role": "user", "content": text}]
        return self._writer({}, where)(said, add_generation_prompt=True)

    def behind_reply(self) -> str:
        """What the template writes behind a reply, by which a turn ends.

        Raises:
            DataError: the template does not take a chat of one reply.
        """
        reply = secrets.token_hex(8)
        said: list[Message] = [{"role": "user", "content": "-"}]
        said.append({"role": ASSISTANT, "content": reply})
        text = self._writer({}, "a chat of one reply")(said)
        return text.partition(reply)[2].replace(self._begin, "").replace(self._end, "")

    def _text(
        self,
        template: Render,
        variables: dict[str, Any],
        where: str,
        messages: list[Message],
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        names = {**variables, "add_generation_prompt": add_generation_prompt}
        try:
            text = template(messages=[_with_reasoning(x) for x in messages], **names)
        except Exception as error:  # a template may do anything, such as adding a text to a number
            raise DataError(
                f"{where}: the chat template does not take its first {len(messages)} messages: "
                f"{str(error) or type(error).__name__}"
            ) from error
        return is_unicode(text, f"{where}: the chat")

    def _begins(self, text: str) -> int:
        """How many turns are marked in it."""
        return text.count(self._begin)

    def _marked(self, text: str, where: str, first: int) -> Document:
        """first: of the marked turns that are learned."""
        plain, spans = "", list[tuple[int, int]]()
        for number, part in enumerate(text.split(self._begin)):
            inside, _, after = part.partition(self._end) if number else ("", "", part)
            spans.append((len(plain), len(plain) + len(inside)))
            plain += inside + after
        learned = [x for x in spans[first + 1 :] if x[0] < x[1]]
        return Document(plain, spans=_joined(learned, where))


_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning. Templates read the first, those of gpt-oss the second."""


def _with_reasoning(message: Message) -> Message:
    """Return a message whose reasoning has the names that templates read, as in transformers."""
    found = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if found is None:
        return message
    return {_REASONING[1]: found, **message, _REASONING[0]: found}


def _variables(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Return what a template is given of a row besides its messages."""
    tools = value.get(TOOLS)
    if isinstance(tools, str):  # schemas differ, so a table may hold them as JSON
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise DataError(f"{where}: {TOOLS} is a text that is not JSON: {error}") from error
    if not (tools is None or isinstance(tools, list)):
        raise DataError(f"{where}: {TOOLS} is a {type(tools).__name__}; it has to be a list")
    for number, tool in enumerate(cast(list[Any], tools or []), 1):
        if not isinstance(tool, dict):
            kind = type(tool).__name__
            raise DataError(f"{where}: tool {number} is a {kind}; it has to be a JSON schema")
    return {TOOLS: tools, "documents": None}


def _joined(spans: list[tuple[int, int]], where: str) -> tuple[tuple[int, int], ...]:
    if not any(begin < end for begin, end in spans):
        raise DataError(f"{where}: the chat template writes nothing of what the assistant says")
    return tuple(spans)


def _messages(value: dict[str, Any], where: str) -> list[Message]:
    """The messages of a line, without keys that are null."""
    if CHAT not in value:
        names = ", ".join(value) or "none"
        raise DataError(f"{where}: no field {CHAT!r}; there are {names} (data.field)")
    found = value[CHAT]
    if not isinstance(found, list):
        raise DataError(
            f"{where}: {CHAT} is a {type(found).__name__}; it has to be a list of {{role, content}}"
        )
    if not found:
        raise DataError(f"{where}: {CHAT} is empty; remove this document")
    problems = [text for i, x in enumerate(found, 1) if (text := _problem(x, f"message {i}"))]
    if not problems and all(x["role"] != ASSISTANT for x in found):
        problems = [f"no message is of the {ASSISTANT}, so nothing would be learned; remove it"]
    if problems:
        raise DataError(f"{where}: {'; '.join(problems)}")
    return [{key: x for key, x in message.items() if x is not None} for message in found]


def _problem(message: object, name: str) -> str | None:
    if not isinstance(message, dict):
        return f"{name} is a {type(message).__name__}; it has to be {{role, content}}"
    if missing := [key for key in ("role", "content") if key not in message]:
        if missing == ["content"] and message.get("tool_calls"):
            return None
        return f"{name} has no {' and no '.join(missing)}; there are {', '.join(message) or 'none'}"
    role, content = message["role"], message["content"]
    if role not in ROLES:
        return f"{name} has the role {role!r}; the roles are {', '.join(ROLES)}"
    if content is None and message.get("tool_calls"):
        return None
    if not isinstance(content, str):
        return f"content of {name} is a {type(content).__name__}; it has to be a text"
    if role == ASSISTANT and not content and not message.get("tool_calls"):
        return f"{name}, of the {ASSISTANT}, is empty"
    return None
