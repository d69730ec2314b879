"""Plants a mistake in a function of the package: a line of it is replaced while a test runs."""

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def planted(owner: Any, name: str, right: str, wrong: str) -> Iterator[None]:
    """Inside, `owner.name` has `wrong` where its text has `right`, once.

    owner: a module or a class of the package. Other modules that have imported the function by
    name get the wrong one too.
    """
    function = getattr(owner, name)
    plain: Callable[..., Any] = inspect.unwrap(function)
    text = textwrap.dedent(inspect.getsource(plain))
    assert text.count(right) == 1, f"{name} has {text.count(right)} of {right!r}"
    lines = "\n" * (plain.__code__.co_firstlineno - 1)
    made: dict[str, Any] = {}
    code = compile(lines + text.replace(right, wrong), plain.__code__.co_filename, "exec")
    exec(code, plain.__globals__, made)  # noqa: S102
    holders = [(owner, name)]
    if inspect.ismodule(owner):
        package = [m for key, m in sys.modules.items() if key.startswith("torchdistpackage")]
        holders += [(m, name) for m in package if vars(m).get(name) is function and m is not owner]
    for holder, word in holders:
        setattr(holder, word, made[name])
    try:
        yield
    finally:
        for holder, word in holders:
            setattr(holder, word, function)
