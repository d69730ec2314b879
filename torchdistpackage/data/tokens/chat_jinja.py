"""The Jinja environment of chat templates: a sandbox with the names that transformers gives them.

Only the date is not today's: it is one for a run, so that its ids stay as they are. No torch.
"""

import json
import re
from collections.abc import Callable
from datetime import date, datetime, time
from importlib.metadata import version
from typing import Any

from torchdistpackage.errors import DataError

_OLDEST = (3, 1, 6)
"""Before it, sandboxes had ways out."""


def chat_environment(
    begin: str, end: str, today: date
) -> tuple[Callable[[str], Any], type[Exception]]:
    """Return what compiles a template, and what that raises.

    begin, end: are written around a block `generation`. today: what `strftime_now` writes.

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
    found = version("jinja2")
    if tuple(int(x) for x in re.findall(r"\d+", found)[:3]) < _OLDEST:
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

        def __init__(*args: Any, **values: Any):
            # as Jinja's own, so that an attribute may be called self
            self, *given = args
            attributes = dict(*given, **values)
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
    """`dict` of templates, without what else a class gives access to."""

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
    """Jinja's own writes < and & as HTML does."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
