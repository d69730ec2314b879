"""Prompts as token ids, and ids as a text that grows. No torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torchdistpackage.config.text_ends import TextEnds
from torchdistpackage.data.tokens.token_encoder import load_tokenizer

_BYTES = 256
_UNFINISHED = "\ufffd"
"""What stands at the end of a text whose last letter has not all its bytes."""

_BEFORE = ("\n", "x", "")
"""Texts behind which one token may stand without growing together with them."""


class TokenCodec(Protocol):
    """Text to ids and back. stop: the end of text."""

    stop: int | None

    def encode(self, text: str) -> list[int]:
        """None of a text without a token."""
        ...

    def token(self, text: str) -> int | None:
        """The id of the token that this text is; None: it is none, or several."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Without special tokens, and without ids that stand for nothing."""
        ...


class ByteCodec:
    """Tokens are the bytes of the text in UTF-8."""

    stop = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token(self, text: str) -> int | None:
        found = text.encode()
        return found[0] if len(found) == 1 else None

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < _BYTES).decode(errors="replace")


class TokenizerCodec:
    """A tokenizer.json. bos: ids that stand before each text, see `text_ends`.

    Raises:
        DataError: the tokenizers library is missing, or the file is none of its.
    """

    def __init__(self, path: str | Path, *, bos: tuple[int, ...] = ()):
        self._tokenizer: Any
        self._tokenizer, self.stop = load_tokenizer(Path(path))
        self._ends = TextEnds(bos)

    def encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._ends.around(ids) if ids else []

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def special(self, text: str) -> int | None:
        """The id of a special token that `text` begins with."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids[0] if ids and not self.decode(ids[:1]) else None

    def token(self, text: str) -> int | None:
        # a tokenizer may put a space before a text of its own, so look amid others first
        for before in _BEFORE:
            found = self._tokenizer.encode(before + text, add_special_tokens=False)
            span = len(before), len(before) + len(text)
            ids = [x for x, at in zip(found.ids, found.offsets, strict=True) if at[1] > span[0]]
            if len(ids) == 1 and (not before or found.offsets[-1] == span):
                return ids[0]
        return None


class GrowingText:
    """The text behind a prompt, as far as its letters are certain."""

    def __init__(self, codec: TokenCodec, prompt: Sequence[int]):
        self._codec, self._ids = codec, list(prompt)
        self._shown = codec.decode(prompt)  # a decoder may look at what stands before

    def add(self, token: int) -> str:
        """What one more token adds; nothing while the bytes of a letter are missing."""
        self._ids.append(token)
        text = self._codec.decode(self._ids)
        return "" if text.endswith(_UNFINISHED) else self._show(text)

    def end(self) -> str:
        """What is left, with a sign for what is no letter."""
        return self._show(self._codec.decode(self._ids))

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._shown = text
        return new
