"""The kinds of rows that hold a chat, each as {messages, tools}: OpenAI's, ShareGPT's, Alpaca's.

What is none of these is left as it is, for the reader of messages to name. No torch.
"""

from typing import Any, cast

from torchdistpackage.bounded import parse_json
from torchdistpackage.errors import DataError

MESSAGES, CONVERSATIONS, TOOLS, SYSTEM = "messages", "conversations", "tools", "system"
INSTRUCTION, INPUT, OUTPUT, HISTORY = "instruction", "input", "output", "history"
ALPACA = (INSTRUCTION, INPUT, OUTPUT, SYSTEM, HISTORY)
CALL = "function_call"
ROLE_OF = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_response": "tool",
    "observation": "tool",
}
"""Roles that ShareGPT's rows call otherwise."""
_BELOW = "Below is an instruction that describes a task"
_WRITE = "Write a response that appropriately completes the request."
_WITH_INPUT = (
    f"{_BELOW}, paired with an input that provides further context. {_WRITE}\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
_WITHOUT_INPUT = f"{_BELOW}. {_WRITE}\n\n### Instruction:\n{{instruction}}\n\n### Response:"


def chat_row(value: dict[str, Any], where: str) -> dict[str, Any]:
    """`value` with its chat as a list of messages under `messages`, and its tools as a list.

    where: of errors.

    Raises:
        DataError: a part of it is of no known form.
    """
    row = dict(value)
    if TOOLS in row:
        row[TOOLS] = _json_list(row[TOOLS], f"{where}: {TOOLS}")
    if value.get(MESSAGES) is not None:
        return {**row, MESSAGES: message_list(value[MESSAGES], f"{where}: {MESSAGES}")}
    if value.get(CONVERSATIONS) is not None:
        found = message_list(value[CONVERSATIONS], f"{where}: {CONVERSATIONS}")
    elif is_alpaca(value):
        found = _alpaca_messages(value, where)
    else:
        return row
    if isinstance(found, list) and found and (text := _text(value, SYSTEM, where)):
        first = found[0]
        if not (isinstance(first, dict) and first.get("role") == SYSTEM):
            found = [{"role": SYSTEM, "content": text}, *found]
    return {**row, MESSAGES: found}


def message_list(value: Any, where: str) -> Any:
    """The messages of a list or of its JSON text, with role and content as a text.

    Raises:
        DataError: a part of a content is no text, or JSON within is none.
    """
    found = _json_list(value, where)
    if not isinstance(found, list):
        return value
    return [
        _message(x, f"{where[: where.rfind(': ') + 2]}message {number}")
        for number, x in enumerate(cast(list[Any], found), 1)
    ]


def is_alpaca(value: dict[str, Any]) -> bool:
    """Whether a row has an instruction."""
    return value.get(INSTRUCTION) is not None


def alpaca_texts(value: dict[str, Any], where: str) -> tuple[str, Any]:
    """The prompt of stanford_alpaca, and the output as it is, which has to be checked.

    Raises:
        DataError: the row has more than such a prompt has room for, or a part that is no text.
    """
    instruction, further = _text(value, INSTRUCTION, where), _text(value, INPUT, where)
    if extra := [key for key in (SYSTEM, HISTORY) if value.get(key)]:
        raise DataError(
            f"{where}: {extra[0]} has no place in Alpaca's prompts; set data.field to {MESSAGES}"
        )
    form = _WITH_INPUT if further else _WITHOUT_INPUT
    return form.format(instruction=instruction, input=further), value.get(OUTPUT)


def _alpaca_messages(value: dict[str, Any], where: str) -> list[dict[str, Any]]:
    history = _json_list(value.get(HISTORY), f"{where}: {HISTORY}") or []
    turns: list[tuple[Any, Any]] = []
    for turn in cast(list[Any], history if isinstance(history, list) else [history]):
        if not (isinstance(turn, list) and len(cast(list[Any], turn)) == 2):
            raise DataError(f"{where}: {HISTORY} has to be a list of [question, answer]")
        turns.append((turn[0], turn[1]))
    asked = [x for key in (INSTRUCTION, INPUT) if (x := _text(value, key, where))]
    turns.append(("\n".join(asked), value.get(OUTPUT)))
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def _text(value: dict[str, Any], key: str, where: str) -> str:
    """That of a key, which may be absent."""
    text = value.get(key)
    if not (text is None or isinstance(text, str)):
        raise DataError(f"{where}: {key} is a {type(text).__name__}; it has to be a text")
    return text or ""


def _message(message: Any, where: str) -> Any:
    if isinstance(message, str):
        message = value_of_json(message, where)
    if not isinstance(message, dict):
        return message
    found = dict(cast(dict[str, Any], message))
    if "from" in found and "value" in found:
        found = {"role": found.pop("from"), "content": found.pop("value"), **found}
    role = found.get("role")
    if isinstance(role, str):
        found["role"] = ROLE_OF.get(role, role)
    if isinstance(content := found.get("content"), list):
        found["content"] = _joined(cast(list[Any], content), where)
    if found.get("role") == CALL:
        calls = value_of_json(str(found["content"]), f"{where}, a {CALL},")
        each = cast(list[Any], calls if isinstance(calls, list) else [calls])
        calls = [{"type": "function", "function": x} for x in each]
        return {**found, "role": "assistant", "content": "", "tool_calls": calls}
    if "tool_calls" in found:
        found["tool_calls"] = _json_list(found["tool_calls"], f"{where}: tool_calls")
    return found


def _joined(parts: list[Any], where: str) -> Any:
    """The text of a content in parts; what has none is left, to be named as no text."""
    if not parts or not all(isinstance(x, dict) and "type" in x for x in parts):
        return parts
    texts: list[str] = []
    for part in cast(list[dict[str, Any]], parts):
        if part["type"] != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"{where} has a content with a part of type {part['type']!r}; here only parts "
                f"{{type: text, text}} can be learned"
            )
        texts.append(part["text"])
    return "".join(texts)


def _json_list(value: Any, where: str) -> Any:
    """A list that may be written as a text of JSON, as may each of its items."""
    if isinstance(value, str):
        if not value.strip():
            return None
        if value.lstrip()[0] not in "[{n":  # of a list, of one of its items, or null
            return value
        value = value_of_json(value, where)
    if isinstance(value, list):
        items = cast(list[Any], value)
        return [value_of_json(x, where) if isinstance(x, str) else x for x in items]
    return value


def value_of_json(text: str, what: str) -> Any:
    """Return the value that a text of JSON stands for: schemas differ, so a table may hold one.

    what: names the text in errors.

    Raises:
        DataError: it is not JSON.
    """
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{what} is a text that is not JSON: {error}") from error
