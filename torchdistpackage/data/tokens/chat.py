"""Chats that a tokenizer's chat template writes as one text, with the spans of the assistant.

A template marks a turn of the assistant with `{% generation %}`; for a template without these
marks `chat_turns` finds the turns. No torch.
"""

import json
import secrets
from collections.abc import Callable, Sequence
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from torchdistpackage.config.chat_templates import (
    DEFAULT,
    chat_templates,
    no_chat_template,
    template_name,
)
from torchdistpackage.config.hugging_face import read_tokenizer, special_tokens
from torchdistpackage.data.tokens.chat_jinja import chat_environment
from torchdistpackage.data.tokens.chat_rows import value_of_json
from torchdistpackage.data.tokens.chat_turns import Message, TurnFinder
from torchdistpackage.data.tokens.documents import (
    CHAT,
    RETRIEVED,
    TEMPLATE_OPTIONS,
    TOOLS,
    Document,
    is_unicode,
)
from torchdistpackage.data.tokens.row_notes import MARKED, PREFIXED, REWRITTEN, Tally, count_unused
from torchdistpackage.errors import DataError

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function")

Render = Callable[..., str]
"""Writes messages as one text; called with messages and add_generation_prompt."""


class ChatTemplate:
    """The chat templates of a tokenizer's folder, run in Jinja's sandbox.

    today: the date that templates write as today's. tally: counts how replies were found and
    which keys no template used, see `row_notes`.

    Raises:
        DataError: the folder has none, or `default` is not a Jinja template.
    """

    def __init__(self, folder: Path, today: date, tally: Tally | None = None):
        self._folder = folder
        self._sources = chat_templates(folder)
        if not self._sources:
            raise DataError(no_chat_template(folder))
        # random, so that no message can contain them
        self._begin, self._end = (f"\0{sign}{secrets.token_hex(8)}\0" for sign in "<>")
        self._compile, self._errors = chat_environment(self._begin, self._end, today)
        self._tokens = special_tokens(folder)
        self._renders: dict[str, Render] = {}
        self._tally = Tally() if tally is None else tally
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
                    f"the chat template{text} of {self._folder} is not a Jinja template: {error}; "
                    "correct it, or use the tokenizer of another folder"
                ) from error
        return self._renders[name]

    def _writer(self, variables: dict[str, Any], where: str) -> Render:
        """Return the function that writes messages of a row: its template with its variables."""
        name = self._name(variables)
        if name is None:
            raise DataError(
                f"{where}: {self._folder} has the chat templates {', '.join(self._sources)}, but "
                f"none for a chat without tools; add one named {DEFAULT}"
            )
        return partial(self._text, self._template(name), self._tokens | variables, where)

    def _name(self, variables: dict[str, Any]) -> str | None:
        return template_name(self._sources, has_tools=variables[TOOLS] is not None)

    def _count(self, messages: list[Message], variables: dict[str, Any]) -> None:
        """Count the keys of messages and the options of a row that its template does not use."""
        source = self._sources[self._name(variables) or DEFAULT]
        used_keys = (*_KNOWN, *(_REASONING if any(key in source for key in _REASONING) else ()))
        for message in messages:
            used = {key for key in message if key in used_keys or key in source}
            count_unused(self._tally, message, used, "messages")
        used = {TOOLS, RETRIEVED, *(key for key in variables if key in source)}
        count_unused(self._tally, variables, used, TEMPLATE_OPTIONS)

    def document(self, value: dict[str, Any], where: str, first: int = 0) -> Document:
        """Return the chat of one line as a text with the spans of the assistant.

        where: names the line in errors. first: the first message that may be learned; the messages
        before it are a prompt.

        Raises:
            DataError: the value is not a chat, no message of it would be learned, the template
                refuses it, or the assistant's text cannot be told from the rest.
        """
        messages = _messages(value, where)
        learned = [i for i in _learned(messages, where) if i >= first]
        variables = _variables(value, where)
        write = self._writer(variables, where)
        text = write(messages)
        self._count(messages, variables)
        if self._begin in text:
            self._tally[MARKED] += 1
            return self._marked(text, where, self._finder(write, messages, text), learned)
        turns = self._finder(write, messages, text).turns(learned)
        if isinstance(turns, int):
            raise DataError(
                f"{where}: in what the chat template writes for message {turns + 1}, the text of "
                "the assistant cannot be told from the rest; mark replies in the template with "
                f"{{% generation %}}"
            )
        self._tally[REWRITTEN if turns.rewritten else PREFIXED] += 1
        return Document(text, spans=_joined(turns.spans, where))

    def prompt(self, text: str, where: str) -> str:
        """Return the text before a reply to a user who says `text`.

        Raises:
            DataError: the template refuses it.
        """
        return self.before_reply([{"role": "user", "content": text}], where)

    def before_reply(
        self, messages: list[Message], where: str, *, continues_last: bool = False
    ) -> str:
        """Return the text before a reply to `messages`. continues_last: the last of them is the
        beginning of the reply, and the text ends with its content.

        Raises:
            DataError: the template refuses the messages, or does not write the last one.
        """
        write = self._writer(_variables({}, where), where)
        if not continues_last:
            return self._unmarked(write(messages, add_generation_prompt=True))
        mark = f"\0{secrets.token_hex(8)}"
        # as in transformers, the blank shows whether the template trims contents
        last = {**messages[-1], "content": f"{messages[-1]['content']}{mark} "}
        text, marker, rest = self._unmarked(write([*messages[:-1], last])).rpartition(mark)
        if not marker:
            raise DataError(
                f"{where}: the chat template does not write the content of the last of "
                f"{len(messages)} messages, so no reply can continue it; use another template"
            )
        return text if rest.startswith(" ") else text.rstrip()

    def behind_reply(self) -> str:
        """Return the text that the template writes behind a reply to end the turn.

        Raises:
            DataError: the template refuses a chat of one reply.
        """
        reply = secrets.token_hex(8)
        messages: list[Message] = [{"role": "user", "content": "-"}]
        messages.append({"role": ASSISTANT, "content": reply})
        text = self._writer(_variables({}, ""), "a chat of one reply")(messages)
        return self._unmarked(text.partition(reply)[2])

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
                f"{where}: the chat template fails at its first {len(messages)} messages: "
                f"{str(error) or type(error).__name__}"
            ) from error
        return is_unicode(text, f"{where}: the chat")

    def _unmarked(self, text: str) -> str:
        return text.replace(self._begin, "").replace(self._end, "")

    def _finder(self, write: Render, messages: list[Message], text: str) -> TurnFinder:
        def write_unmarked(chat: list[Message], *, add_generation_prompt: bool = False) -> str:
            return self._unmarked(write(chat, add_generation_prompt=add_generation_prompt))

        return TurnFinder(
            write_unmarked, messages, self._unmarked(text), lambda: self._added_tokens
        )

    @cached_property
    def _added_tokens(self) -> list[str]:
        file = self._folder / "tokenizer.json"
        added = read_tokenizer(file).get("added_tokens") if file.is_file() else None
        entries = [x for x in cast(list[Any], added or []) if isinstance(x, dict)]
        return [*self._tokens.values(), *(str(x.get("content") or "") for x in entries)]

    def _marked(
        self, text: str, where: str, finder: TurnFinder, learned: Sequence[int]
    ) -> Document:
        """Return the chat with those marked spans that belong to the messages `learned`."""
        plain = ""
        spans = list[tuple[int, int]]()
        for number, part in enumerate(text.split(self._begin)):
            inside, _, following = part.partition(self._end) if number else ("", "", part)
            spans.append((len(plain), len(plain) + len(inside)))
            plain += inside + following
        spans = [x for x in spans[1:] if x[0] < x[1]]
        replies = [i for i, x in enumerate(finder.messages) if x["role"] == ASSISTANT]
        left_out = [i for i in replies if i not in learned]
        if left_out and len(spans) == len(replies):
            spans = [x for i, x in zip(replies, spans, strict=True) if i in learned]
        elif left_out:
            turns = finder.turns(left_out)
            if isinstance(turns, int):
                raise DataError(
                    f"{where}: message {turns + 1} is not to be learned, but the chat template "
                    f"marks {len(spans)} parts in {len(replies)} replies, so it is not known which "
                    f"belong to it; mark each reply once with {{% generation %}}"
                )
            spans = [x for x in spans if not any(x[0] < b and a < x[1] for a, b in turns.spans)]
        return Document(plain, spans=_joined(spans, where))


_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning. Templates read the first, those of gpt-oss the second."""


def _with_reasoning(message: Message) -> Message:
    """Return the message with its reasoning under the names that templates read.

    transformers does the same.
    """
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {_REASONING[1]: reasoning, **message, _REASONING[0]: reasoning}


def _variables(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the variables that a row sets for its template, besides the messages."""
    tools = value.get(TOOLS)
    if isinstance(tools, str):
        tools = value_of_json(tools, f"{where}: {TOOLS}")
    if not (tools is None or isinstance(tools, list)):
        raise DataError(f"{where}: {TOOLS} is a {type(tools).__name__}; it has to be a list")
    for number, tool in enumerate(cast(list[Any], tools or []), 1):
        if not isinstance(tool, dict):
            kind = type(tool).__name__
            raise DataError(f"{where}: tool {number} is a {kind}; write a JSON schema")
    retrieved = value.get(RETRIEVED)
    is_list = isinstance(retrieved, list)
    if not is_list or not all(isinstance(x, dict) for x in cast(list[Any], retrieved)):
        retrieved = None  # a key of another meaning
    return {TOOLS: tools, RETRIEVED: retrieved, **_options(value, where)}


def _options(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the variables of the template that the row sets, such as enable_thinking."""
    field = value.get(TEMPLATE_OPTIONS)
    if isinstance(field, str):
        field = value_of_json(field, f"{where}: {TEMPLATE_OPTIONS}")
    if not (field is None or isinstance(field, dict)):
        kind = type(field).__name__
        raise DataError(f"{where}: {TEMPLATE_OPTIONS} is a {kind}; write a mapping")
    options = {key: x for key, x in cast(dict[str, Any], field or {}).items() if x is not None}
    if wrong := [key for key in options if key in _NOT_OPTIONS]:
        raise DataError(
            f"{where}: {TEMPLATE_OPTIONS} has {wrong[0]}, which a row may not set for a template; "
            "remove it"
        )
    return options


_NOT_OPTIONS = (
    "messages",
    TOOLS,
    RETRIEVED,
    "add_generation_prompt",
    "conversation",
    "chat_template",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)
"""Arguments of apply_chat_template that are not for the template, or that others set."""


_COUNTS: dict[str, tuple[object, ...]] = {
    "weight": (0, 1),
    "train": (False, True),
    "training": (False, True),
}
"""Keys of a message that say whether it is learned, as OpenAI and axolotl read them."""
_KNOWN = ("role", "content", *_COUNTS)


def _learned(messages: list[Message], where: str) -> list[int]:
    """Return the numbers of the assistant's messages that count in the loss."""
    learned: list[int] = []
    for i, message in enumerate(messages):
        flags = {key: message[key] for key in _COUNTS if message.get(key) is not None}
        for key, value in flags.items():
            if not isinstance(value, int | float) or value not in _COUNTS[key]:
                raise DataError(
                    f"{where}: {key} of message {i + 1} is {value!r}; write "
                    f"{' or '.join(map(json.dumps, _COUNTS[key]))}"
                )
        counts = all(flags.values())
        if counts and message["role"] == ASSISTANT:
            learned.append(i)
        elif counts and any(key in flags for key in ("train", "training")):
            raise DataError(
                f"{where}: message {i + 1} of the role {message['role']} is marked for learning "
                f"({', '.join(flags)}), but only messages of the {ASSISTANT} are learned; remove "
                "the mark"
            )
    if not learned:
        raise DataError(
            f"{where}: no message of the {ASSISTANT} counts ({', '.join(_COUNTS)}), so nothing "
            f"would be learned; remove it"
        )
    return learned


def _joined(spans: list[tuple[int, int]], where: str) -> tuple[tuple[int, int], ...]:
    if not any(begin < end for begin, end in spans):
        raise DataError(
            f"{where}: the chat template writes none of the assistant's text; use "
            "the template of a chat model"
        )
    return tuple(spans)


def _messages(value: dict[str, Any], where: str) -> list[Message]:
    """Return the messages of a line, without keys that are null."""
    if CHAT not in value:
        names = ", ".join(value) or "none"
        raise DataError(f"{where}: no field {CHAT!r}; there are {names} (data.field)")
    messages = value[CHAT]
    if not isinstance(messages, list):
        raise DataError(
            f"{where}: {CHAT} is a {type(messages).__name__}; it has to be a list of "
            f"{{role, content}}"
        )
    if not messages:
        raise DataError(f"{where}: {CHAT} is empty; remove this document")
    problems = [text for i, x in enumerate(messages, 1) if (text := _problem(x, f"message {i}"))]
    if not problems and all(x["role"] != ASSISTANT for x in messages):
        problems = [f"no message is of the {ASSISTANT}, so nothing would be learned; remove it"]
    if problems:
        raise DataError(f"{where}: {'; '.join(problems)}")
    return [{key: x for key, x in message.items() if x is not None} for message in messages]


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
