"""Conversion of prompts to token ids, and of ids to a text that grows. No torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torchdistpackage.config.text_ends import TextEnds
from torchdistpackage.data.tokens.token_encoder import load_tokenizer

_BYTES = 256
_UNFINISHED = "\ufffd"
"""End of a decoded text whose last letter is incomplete."""

_BEFORE = ("\n", "x", "")
"""Texts to put before a token to test it; most tokenizers do not merge across them."""


class TokenCodec(Protocol):
    """Converts text to ids and back. stop: id of the end of text."""

    stop: int | None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, none for a text without a token."""
        ...

    def token(self, text: str) -> int | None:
        """Return the id of the one token that is this text, or None."""
        ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of ids, without ids that have no text. special: with special tokens."""
        ...


class ByteCodec:
    """A codec whose tokens are the bytes of the text in UTF-8."""

    stop = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token(self, text: str) -> int | None:
        encoded = text.encode()
        return encoded[0] if len(encoded) == 1 else None

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return bytes(i for i in ids if i < _BYTES).decode(errors="replace")


class TokenizerCodec:
    """A codec of a tokenizer.json. bos: ids before each text, see `text_ends`.

    Raises:
        DataError: the tokenizers library is missing, or the file is not in its format.
    """

    def __init__(self, path: str | Path, *, bos: tuple[int, ...] = ()):
        self._tokenizer: Any
        self._tokenizer, self.stop = load_tokenizer(Path(path))
        self._ends = TextEnds(bos)

    def encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._ends.around(ids) if ids else []

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special)

    def special(self, text: str) -> int | None:
        """Return the id of the special token that `text` begins with, or None."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids[0] if ids and not self.decode(ids[:1]) else None

    def token(self, text: str) -> int | None:
        # a tokenizer may add a space before a whole text, so look behind other text first
        for prefix in _BEFORE:
            encoding = self._tokenizer.encode(prefix + text, add_special_tokens=False)
            span = len(prefix), len(prefix) + len(text)
            ids = [
                x for x, at in zip(encoding.ids, encoding.offsets, strict=True) if at[1] > span[0]
            ]
            if len(ids) == 1 and (not prefix or encoding.offsets[-1] == span):
                return ids[0]
        return None


class GrowingText:
    """The text after a prompt, up to the last complete letter."""

    def __init__(self, codec: TokenCodec, prompt: Sequence[int]):
        self._codec = codec
        self._ids = list(prompt)
        self._shown = codec.decode(
            prompt
        )  # decoding depends on the ids before, so decode the prompt too

    def add(self, token: int) -> str:
        """Return the text that a token adds, "" while bytes of a letter are missing."""
        self._ids.append(token)
        text = self._codec.decode(self._ids)
        return "" if text.endswith(_UNFINISHED) else self._show(text)

    def end(self) -> str:
        """Return the rest of the text, with a replacement character for an incomplete letter."""
        return self._show(self._codec.decode(self._ids))

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._shown = text
        return new
