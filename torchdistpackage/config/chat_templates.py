"""Find the chat templates of a tokenizer's folder where transformers finds them. No torch.

Template files win over the entry in tokenizer_config.json. A tokenizer with neither uses the
template of its processor, if there is one.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from torchdistpackage.config.hugging_face import SETTINGS, read_mapping, read_text
from torchdistpackage.errors import DataError

TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
"""File of the template `default`, and folder of the template files with other names."""
PROCESSORS = ("chat_template.json", "processor_config.json")
DEFAULT, WITH_TOOLS = "default", "tool_use"
_DATE = "strftime_now"
"""The function that a template calls to write today's date."""


def chat_templates(folder: Path) -> dict[str, str]:
    """Return the Jinja source of each chat template by name; an unnamed template is `default`.

    Raises:
        DataError: a file that could have one cannot be read.
    """
    files = {x.stem: x for x in _more_files(folder)}
    if (file := folder / TEMPLATE).is_file():
        files[DEFAULT] = file
    if files:
        return {name: read_text(file) for name, file in files.items()}
    for name in (SETTINGS[-1], *PROCESSORS):
        if (file := folder / name).is_file():
            templates = dict(_entries(read_mapping(file).get("chat_template")))
            if templates:
                return templates
    return {}


def template_name(names: Iterable[str], *, has_tools: bool) -> str | None:
    """Return the name of the template for a chat, or None if there is none."""
    order = (WITH_TOOLS, DEFAULT) if has_tools else (DEFAULT,)
    return next((name for name in order if name in names), None)


def writes_date(templates: Mapping[str, str]) -> bool:
    """Return whether a template that writes chats asks for today's date."""
    return any(_DATE in templates.get(name, "") for name in (WITH_TOOLS, DEFAULT))


def folder_writes_date(tokenizer: str | Path) -> bool:
    """Return whether a template of a tokenizer's folder writes today's date; False if its files
    cannot be read.
    """
    path = Path(tokenizer)
    try:
        return writes_date(chat_templates(path if path.is_dir() else path.parent))
    except DataError:  # the code that reads the chats reports it
        return False


def template_files(folder: Path) -> list[Path]:
    """Return the files next to tokenizer.json that may hold templates, except token settings."""
    named = [folder / name for name in (TEMPLATE, *PROCESSORS)]
    return [*(file for file in named if file.is_file()), *_more_files(folder)]


def no_chat_template(folder: Path) -> str:
    """Return the message for a folder without a chat template."""
    return (
        f"chats need a chat template, and {folder} has none, neither as {TEMPLATE} nor as "
        f"chat_template in {SETTINGS[-1]}; use the tokenizer of a chat model, or add a template"
    )


def _more_files(folder: Path) -> list[Path]:
    more = folder / MORE_TEMPLATES
    return sorted(x for x in more.glob("*.jinja") if x.is_file()) if more.is_dir() else []


def _entries(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and source of each template in an entry: a text, or a list of {name,
    template}.
    """
    if isinstance(value, str):
        yield DEFAULT, value
    entries = cast(list[Any], value) if isinstance(value, list) else []
    for entry in (cast(dict[str, Any], x) for x in entries if isinstance(x, dict)):
        name, source = entry.get("name"), entry.get("template")
        if isinstance(name, str) and isinstance(source, str):
            yield name, source
