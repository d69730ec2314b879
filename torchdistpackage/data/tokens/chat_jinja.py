"""The Jinja environment of chat templates: a sandbox with the names that transformers gives them.

One difference: a run has one date instead of today's, so that its ids stay the same. No torch.
"""

import json
import re
from collections.abc import Callable
from datetime import date, datetime, time
from importlib.metadata import version
from typing import Any

from torchdistpackage.errors import DataError

_OLDEST = (3, 1, 6)
"""Oldest accepted jinja2: templates can break out of the sandboxes of earlier versions."""


def chat_environment(
    begin: str, end: str, today: date
) -> tuple[Callable[[str], Any], type[Exception]]:
    """Return the function that compiles a template, and the class of its errors.

    begin, end: written around a block `generation`. today: the date that `strftime_now` formats.

    Raises:
        DataError: jinja2 is missing or too old.
    """
    try:
        from jinja2 import TemplateError, ext, nodes
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from jinja2.utils import Namespace
    except ImportError as error:
        raise DataError(
            f"chat templates need jinja2 3.1.6 or later ({error}); pip install jinja2"
        ) from error
    installed = version("jinja2")
    if tuple(int(x) for x in re.findall(r"\d+", installed)[:3]) < _OLDEST:
        raise DataError(f"chat templates need jinja2 3.1.6 or later, not {installed}; upgrade it")

    class GenerationTag(ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            lineno = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            around = [nodes.Output([nodes.TemplateData(x)], lineno=lineno) for x in (begin, end)]
            return [around[0], *body, around[1]]

    class PublicNamespace(Namespace):
        """A namespace that refuses attributes with a leading underscore, such as `__class__`."""

        def __init__(*args: Any, **values: Any):
            # self is taken from args, as Jinja does, so that an attribute may be called self
            self, *mappings = args
            attributes = dict(*mappings, **values)
            for name in attributes:
                refuse_private(name)
            Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: object) -> None:
            refuse_private(name)
            super().__setitem__(name, value)

    def refuse_private(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise TemplateError(f"a namespace has no {name}")

    def refuse(text: str) -> None:
        raise TemplateError(text)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=refuse,
        namespace=PublicNamespace,
        dict=TemplateDict(),
        strftime_now=datetime.combine(today, time()).strftime,
    )
    return environment.from_string, TemplateError


class TemplateDict:
    """The `dict` of templates: it gives no access to the attributes of a class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write a value as JSON; Jinja's own filter would escape < and & for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
