"""Chats written as one text by a tokenizer's chat template, with what the assistant says in it.

A turn of the assistant is what the template marks with `{% generation %}`; of a template without
these marks it is what the message adds to the text: the chat up to it, with the generation prompt,
has to be the beginning of the chat with it, and that the beginning of the whole. No torch.
"""

import json
import re
import secrets
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torchdistpackage.config.hugging_face import (
    chat_template,
    no_chat_template,
    special_tokens,
)
from torchdistpackage.errors import DataError
from torchdistpackage.train.documents import CHAT, TOOLS, Document, is_unicode

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function")

Message = dict[str, Any]
Render = Callable[..., str]
"""Called with messages, tools and add_generation_prompt."""


class ChatTemplate:
    """The chat template of a tokenizer's folder, run in Jinja's sandbox.

    Raises:
        DataError: the folder has none, or it is no Jinja template.
    """

    def __init__(self, folder: Path):
        source = chat_template(folder)
        if source is None:
            raise DataError(no_chat_template(folder))
        # no message can contain what is drawn here
        self._begin, self._end = (f"\0{word}{secrets.token_hex(8)}\0" for word in "<>")
        make, errors = _environment(self._begin, self._end)
        try:
            self._render: Render = partial(make(source).render, **special_tokens(folder))
        except errors as error:
            raise DataError(
                f"the chat template of {folder} is no Jinja template: {error}"
            ) from error

    def document(self, value: dict[str, Any], where: str, first: int = 0) -> Document:
        """The chat of one line, as text with the spans of the assistant. where: of errors. first:
        of the messages that are learned; those before it are a prompt.

        Raises:
            DataError: it is no chat, says nothing that would be learned, or the template does not
                take it or does not show what the assistant says.
        """
        messages = _messages(value, where)
        tools = value.get(TOOLS)
        if not (tools is None or isinstance(tools, list)):
            raise DataError(f"{where}: tools is a {type(tools).__name__}; it has to be a list")
        render = partial(self._text, tools=tools, where=where)
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
        return self._text(said, tools=None, where=where, add_generation_prompt=True)

    def behind_reply(self) -> str:
        """What the template writes behind a reply, by which a turn ends.

        Raises:
            DataError: the template does not take a chat of one reply.
        """
        reply = secrets.token_hex(8)
        said: list[Message] = [{"role": "user", "content": "-"}]
        said.append({"role": ASSISTANT, "content": reply})
        text = self._text(said, tools=None, where="a chat of one reply")
        return text.partition(reply)[2].replace(self._begin, "").replace(self._end, "")

    def _text(self, messages: list[Message], *, tools: object, where: str, **options: bool) -> str:
        try:
            text = self._render(messages=messages, tools=tools, **options)
        except Exception as error:  # a template may do anything, such as adding a text to a number
            why = str(error) or type(error).__name__
            if "strftime_now" in why:
                why += " (ids would change from day to day: write a date into the template)"
            raise DataError(
                f"{where}: the chat template does not take its first {len(messages)} messages: "
                f"{why}"
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


def _environment(begin: str, end: str) -> tuple[Callable[[str], Any], type[Exception]]:
    """What compiles a template, with the names that transformers gives to chat templates but for
    today's date; and what it raises. begin, end: are written around a block `generation`.
    """
    try:
        from jinja2 import TemplateError, ext, nodes
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from jinja2.utils import Namespace
    except ImportError as error:
        raise DataError(
            f"chat templates need jinja2 3.1.6 or later ({error}); pip install jinja2"
        ) from error
    found = version("jinja2")
    if [int(x) for x in re.findall(r"\d+", found)[:3]] < [
        3,
        1,
        6,
    ]:  # before, sandboxes had ways out
        raise DataError(f"chat templates need jinja2 3.1.6 or later, not {found}; upgrade it")

    class GenerationTag(ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            around = [nodes.Output([nodes.TemplateData(x)], lineno=line) for x in (begin, end)]
            return [around[0], *body, around[1]]

    class PublicNamespace(Namespace):
        """Names of Python's own, which begin with an underscore, are no attributes."""

        def __init__(self, **values: object):
            for name in values:
                refuse_private(name)
            super().__init__(values)

        def __setitem__(self, name: str, value: object) -> None:
            refuse_private(name)
            super().__setitem__(name, value)

    def refuse_private(name: str) -> None:
        if name.startswith("_"):
            raise TemplateError(f"a namespace has no {name}")

    def refuse(text: str) -> None:
        raise TemplateError(text)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, GenerationTag]
    )
    # Jinja's own writes < and & as HTML does
    made.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    made.globals.update(
        raise_exception=refuse, namespace=PublicNamespace, dict=lambda **values: values
    )
    return made.from_string, TemplateError
