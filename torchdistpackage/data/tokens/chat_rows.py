"""Chats of OpenAI's, ShareGPT's and Alpaca's rows, converted to {messages, tools}.

Other values are left as they are, for the reader of messages to name. No torch.
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
"""Our role for each of ShareGPT's role names that differ from it."""
_BELOW = "Below is an instruction that describes a task"
_WRITE = "Write a response that appropriately completes the request."
_WITH_INPUT = (
    f"{_BELOW}, paired with an input that provides further context. {_WRITE}\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
_WITHOUT_INPUT = f"{_BELOW}. {_WRITE}\n\n### Instruction:\n{{instruction}}\n\n### Response:"


def chat_row(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Return `value` with its chat as a list under `messages`, and its tools as a list.

    where: names the row in errors.

    Raises:
        DataError: a field of it has no known form.
    """
    row = dict(value)
    if TOOLS in row:
        row[TOOLS] = _json_list(row[TOOLS], f"{where}: {TOOLS}")
    if value.get(MESSAGES) is not None:
        return {**row, MESSAGES: message_list(value[MESSAGES], f"{where}: {MESSAGES}")}
    if value.get(CONVERSATIONS) is not None:
        messages = message_list(value[CONVERSATIONS], f"{where}: {CONVERSATIONS}")
    elif is_alpaca(value):
        messages = _alpaca_messages(value, where)
    else:
        return row
    if isinstance(messages, list) and messages and (text := _text(value, SYSTEM, where)):
        first = messages[0]
        if not (isinstance(first, dict) and first.get("role") == SYSTEM):
            messages = [{"role": SYSTEM, "content": text}, *messages]
    return {**row, MESSAGES: messages}


def message_list(value: Any, where: str) -> Any:
    """Return the messages of a list or of its JSON text, each with role and content as text.

    Raises:
        DataError: a part of a content is not text, or a text within is not valid JSON.
    """
    messages = _json_list(value, where)
    if not isinstance(messages, list):
        return value
    return [
        _message(x, f"{where[: where.rfind(': ') + 2]}message {number}")
        for number, x in enumerate(cast(list[Any], messages), 1)
    ]


def is_alpaca(value: dict[str, Any]) -> bool:
    """Return whether a row has an instruction."""
    return value.get(INSTRUCTION) is not None


def alpaca_texts(value: dict[str, Any], where: str) -> tuple[str, Any]:
    """Return the prompt of stanford_alpaca, and the output as it is; the caller checks it.

    Raises:
        DataError: the row has a field that such a prompt has no room for, or that is not text.
    """
    instruction = _text(value, INSTRUCTION, where)
    further = _text(value, INPUT, where)
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
    questions = [x for key in (INSTRUCTION, INPUT) if (x := _text(value, key, where))]
    turns.append(("\n".join(questions), value.get(OUTPUT)))
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def _text(value: dict[str, Any], key: str, where: str) -> str:
    """Return the text of a key, or an empty one where the key is absent."""
    text = value.get(key)
    if not (text is None or isinstance(text, str)):
        raise DataError(f"{where}: {key} is a {type(text).__name__}; write a text")
    return text or ""


def _message(message: Any, where: str) -> Any:
    if isinstance(message, str):
        message = value_of_json(message, where)
    if not isinstance(message, dict):
        return message
    renamed = dict(cast(dict[str, Any], message))
    if "from" in renamed and "value" in renamed:
        renamed = {"role": renamed.pop("from"), "content": renamed.pop("value"), **renamed}
    role = renamed.get("role")
    if isinstance(role, str):
        renamed["role"] = ROLE_OF.get(role, role)
    if isinstance(content := renamed.get("content"), list):
        renamed["content"] = _joined(cast(list[Any], content), where)
    if renamed.get("role") == CALL:
        calls = value_of_json(str(renamed["content"]), f"{where}, a {CALL},")
        call_list = cast(list[Any], calls if isinstance(calls, list) else [calls])
        calls = [{"type": "function", "function": x} for x in call_list]
        return {**renamed, "role": "assistant", "content": "", "tool_calls": calls}
    if "tool_calls" in renamed:
        renamed["tool_calls"] = _json_list(renamed["tool_calls"], f"{where}: tool_calls")
    return renamed


def _joined(parts: list[Any], where: str) -> Any:
    """Return the text of a content in parts; other contents pass unchanged, to be refused later."""
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
    """Return a list; it, or each of its items, may be given as a JSON text."""
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


def value_of_json(text: str, label: str) -> Any:
    """Return the value of a JSON text: a table with one column type may hold such texts.

    label: names the text in errors.

    Raises:
        DataError: it is not JSON.
    """
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{label} is a text that is not JSON: {error}; write it as JSON") from error
