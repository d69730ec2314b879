"""Any message as one flat dict that has room for more, and back.

Keys say what the message was: `=` a tensor, `(0`, `(1`, ... a tuple, `.name` a dict; `+name` is
what was added. So a receiver needs to be told nothing.
"""

from torch import Tensor

from torchdistpackage.comm.messages import Message

Members = dict[str, Tensor | None]


def pack_with_skips(message: Message, more: Members) -> Members:
    """`message` and `more` as one dict."""
    if isinstance(message, dict):
        sealed = {f".{key}": x for key, x in message.items()}
    elif isinstance(message, tuple | list):
        sealed = {f"({i}": x for i, x in enumerate(message)}
    else:
        sealed = {"=": message}
    for key, x in more.items():
        sealed[f"+{key}"] = x
    return sealed


def unpack_with_skips(sealed: Members) -> tuple[Message, Members]:
    """What `pack_with_skips` was given; a list comes back as a tuple."""
    more = {key[1:]: x for key, x in sealed.items() if key[0] == "+"}
    kept = [(key, x) for key, x in sealed.items() if key[0] != "+"]
    if not kept or kept[0][0][0] == "(":
        return tuple(x for _, x in kept), more
    if kept[0][0] == "=":
        return kept[0][1], more
    return {key[1:]: x for key, x in kept}, more
