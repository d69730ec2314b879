"""Types of keys about the nodes of a job; types.py has all others."""

import re
from typing import Annotated, cast

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter

from torchdistpackage.config.types import Count, Expected, Path

_NODE_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})", re.ASCII)
_PATH = TypeAdapter[str](Path)


def _node_path(value: str) -> str:
    """Check a path that may contain variables, which have values only on the node."""
    _PATH.validate_python(_NODE_VARIABLE.sub("_", value))
    return value


def _pair(value: object) -> object:
    return tuple(cast(list[object], value)) if isinstance(value, list) else value


def _span(value: tuple[int, int]) -> tuple[int, int]:
    if not 0 <= value[1] - value[0] < 1024:  # a plan is made for each number in the span
        raise ValueError("no span of nodes")
    return value


NodePathOrNull = (
    Annotated[
        str,
        Field(min_length=1, pattern=r"^(/|\$\w|\$\{\w)"),
        AfterValidator(_node_path),
        Expected("an absolute path, in which $NAME stands for a variable of the node"),
    ]
    | None
)
NodeSpanOrNull = (
    Annotated[
        tuple[Count, Count],
        BeforeValidator(_pair),
        AfterValidator(_span),
        Expected("the fewest and the most nodes, such as [1, 4], at most 1,024 numbers"),
    ]
    | None
)
