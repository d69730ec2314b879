"""Where the assistant's turns are in a chat that a template has written without marks of them.

A turn begins behind the generation prompt and ends where the next message begins. Both are found by
writing the chat again: up to a message, or with a sentinel behind one. Nothing is taken for granted
of the template: what it writes with a sentinel has to be the chat but for the sentinel. No torch.
"""

import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

from torchdistpackage.errors import DataError

Message = dict[str, Any]
Write = Callable[..., str]
"""Called with messages and add_generation_prompt; raises DataError if the template refuses them."""


class Turns(NamedTuple):
    """spans: the characters of each turn. rewritten: whether sentinels were needed."""

    spans: list[tuple[int, int]]
    rewritten: bool


class _Anchor(NamedTuple):
    """A place in the chat behind some text of a message. put: the message with a sentinel there.
    is_single: the template writes it once."""

    put: Message
    position: int
    is_single: bool


class TurnFinder:
    """Finds turns in `text`, which `write` makes of `messages`.

    tokens: of the tokenizer, no part of which is a text of its own, such as <|im_end|>.
    """

    def __init__(
        self, write: Write, messages: list[Message], text: str, tokens: Callable[[], Sequence[str]]
    ):
        self._write, self.messages, self._text = write, messages, text
        self._tokens = tokens
        self._sentinel = f"Zq{secrets.token_hex(8)}qZ"
        self._anchors: dict[int, _Anchor | None] = {}
        self._beginnings: dict[tuple[int, bool], str | None] = {}

    def turns(self, wanted: Sequence[int]) -> Turns | int:
        """Return the turns that are the messages of these numbers, or the first of these numbers
        whose turn cannot be proved."""
        spans, rewritten = list[tuple[int, int]](), False
        for i in wanted:
            is_last = i + 1 == len(self.messages)
            # a template that needed a sentinel once needs it again
            span = None if rewritten and not is_last else self._by_prefixes(i)
            if span is None:
                begin, end = self._begin(i), self._end(i)
                if begin is None or end is None or begin > end:
                    return i
                span, rewritten = (begin, end), True
            if spans and span[0] < spans[-1][1]:
                return i
            spans.append((self._behind_own_header(i, span[0]), span[1]))
        return Turns(spans, rewritten)

    def _behind_own_header(self, i: int, begin: int) -> int:
        """Where a turn begins that the template begins with a header, though its generation prompt
        is empty there: behind a tool's reply, where the model goes on with its turn."""
        if not i or self.messages[i - 1]["role"] in ("user", "assistant") or self._prompt(i):
            return begin
        content = str(self.messages[i].get("content") or "")
        for header in self._headers:
            if self._text.startswith(header, begin) and not content.startswith(header):
                return begin + len(header)
        return begin

    def _by_prefixes(self, i: int) -> tuple[int, int] | None:
        """The turn of a template that writes each message alike, whatever follows."""
        before = self._before(i)
        if before is None or not self._text.startswith(before):
            return None
        if i + 1 == len(self.messages):
            return len(before), len(self._text)
        upto = self._upto(i + 1)
        if upto is None or not (upto.startswith(before) and self._text.startswith(upto)):
            return None
        return len(before), len(upto)

    def _before(self, i: int) -> str | None:
        """The chat before a message with the generation prompt, where the template writes that."""
        before = self._upto(i, add_generation_prompt=True)
        follows_user = i and self.messages[i - 1]["role"] != "assistant"
        if before is None or follows_user or any(map(before.endswith, self._prompts)):
            return before
        return None if any(self._prompts) else before

    def _begin(self, i: int) -> int | None:
        """Where a turn begins: behind what it has in common with the generation prompt."""
        before = self._before(i)
        if before is not None and self._text.startswith(before):
            return len(before)
        # its content begins with no letter of a prompt, and what precedes it is what it is
        bare = {**self.messages[i], "content": self._sentinel}
        prompt = self._prompt(i)
        anchor = self._anchor(i - 1) if i else None
        if anchor is not None and anchor.is_single:
            head = [*self.messages[: i - 1], anchor.put]
            marked = self._behind(self._try(head, add_generation_prompt=True))
            whole = self._try([*head, bare, *self.messages[i + 1 :]])
            shared = self._shared(marked, self._behind(whole), prompt) if before else None
            if shared is not None and self._text.startswith(shared, anchor.position):
                return anchor.position + len(shared)
        whole = self._try([*self.messages[:i], bare, *self.messages[i + 1 :]])
        shared = self._shared(before, whole, prompt)
        if shared is not None and self._text.startswith(shared):
            return len(shared)
        behind = self._behind_header((whole or "").partition(self._sentinel)[0], anchor)
        if behind is not None:
            return behind
        # content that holds the reasoning, where the prompt has an empty one
        shared = self._shared(before, self._text, prompt)
        return None if shared is None else len(shared)

    def _behind_header(self, head: str, anchor: _Anchor | None) -> int | None:
        """Where a turn begins: behind the last header in `head`, what is before its content."""
        first = 0 if anchor is None else anchor.position
        for header in self._headers:
            at = head.rfind(header)
            if at >= first and self._text.startswith(head[: at + len(header)]):
                return at + len(header)
        return None

    def _shared(self, before: str | None, whole: str | None, prompt: str) -> str | None:
        """What a text that ends with the generation prompt shares with the chat, if that is all of
        the text but for an end of the prompt."""
        if before is None or whole is None:
            return None
        shared = self._common(before, whole)
        is_whole = len(shared) == len(before)
        return shared if is_whole or len(shared) > len(before) - len(prompt) else None

    def _prompt(self, i: int) -> str:
        """The generation prompt behind the messages before `i`."""
        plain, asked = self._upto(i), self._upto(i, add_generation_prompt=True)
        return self._added(plain, asked)

    def _prompt_of(self, chat: list[Message]) -> str:
        return self._added(self._try(chat), self._try(chat, add_generation_prompt=True))

    def _added(self, plain: str | None, asked: str | None) -> str:
        if plain is None or asked is None:
            return ""
        return asked[len(self._common(plain, asked)) :]

    @cached_property
    def _after_users(self) -> list[list[Message]]:
        """Beginnings of the chat that end with a user, or else a user alone."""
        users = [j for j, x in enumerate(self.messages) if x["role"] == "user"]
        chats = [self.messages[: j + 1] for j in users[:2]]
        return chats or [[{"role": "user", "content": "-"}]]

    @cached_property
    def _prompts(self) -> list[str]:
        """All generation prompts behind users, the longest first."""
        return sorted({self._prompt_of(x) for x in self._after_users} - {""}, key=len)[::-1]

    @cached_property
    def _headers(self) -> list[str]:
        """What stands before a reply to a user: generation prompts, or what of them a reply has."""
        found = {*self._prompts}
        for chat in self._after_users:
            prompt, before = self._prompt_of(chat), self._try(chat, add_generation_prompt=True)
            whole = self._try([*chat, {"role": "assistant", "content": self._sentinel}])
            if (shared := self._shared(before, whole, prompt)) is not None and before is not None:
                found.add(shared[len(before) - len(prompt) :])
        return sorted(found - {""}, key=len, reverse=True)

    def _end(self, i: int) -> int | None:
        """Where a turn ends: behind what the template writes before a generation prompt."""
        if i + 1 == len(self.messages):
            return len(self._text)
        if (anchor := self._anchor(i)) is None:
            return None
        chat = [*self.messages[:i], anchor.put]
        if (rest := self._behind(self._try(chat, add_generation_prompt=True))) is None:
            return None
        rest = rest.replace(self._sentinel, "")
        for prompt in chain(self._prompts, self._own_prompt(i), [""]):
            end = rest.removesuffix(prompt)
            if rest.endswith(prompt) and self._text.startswith(end, anchor.position):
                return anchor.position + len(end)
        return None

    def _own_prompt(self, i: int) -> Iterator[str]:
        if i and self.messages[i - 1]["role"] != "assistant":
            yield self._prompt(i)

    def _anchor(self, i: int) -> _Anchor | None:
        """A place in message `i` where a sentinel changes nothing else of the chat."""
        if not self._anchors:
            self._anchors |= self._replies()
        if i not in self._anchors:
            found = (self._proved(i, put) for put in self._with_sentinel(self.messages[i]))
            self._anchors[i] = next((x for x in found if x is not None), None)
        return self._anchors[i]

    def _replies(self) -> dict[int, _Anchor]:
        """The anchors behind all replies at once, if the template takes sentinels there."""
        texts = {
            i: text
            for i, x in enumerate(self.messages)
            if x["role"] == "assistant" and isinstance(text := x.get("content"), str) and text
        }
        for strip in (str, str.rstrip):
            puts = {i: strip(text) + self._sentinel for i, text in texts.items()}
            chat = self._try(
                [
                    {**x, "content": f"{puts[i]}{i:06}"} if i in puts else x
                    for i, x in enumerate(self.messages)
                ]
            )
            pieces = (chat or "").split(self._sentinel)
            numbers = [piece[:6] for piece in pieces[1:]]
            plain = [pieces[0], *(piece[6:] for piece in pieces[1:])]
            if numbers == [f"{i:06}" for i in puts] and "".join(plain) == self._text:
                positions = accumulate(map(len, plain))
                return {
                    i: _Anchor({**self.messages[i], "content": put}, at, True)
                    for (i, put), at in zip(puts.items(), positions, strict=False)
                }
        return {}

    def _proved(self, i: int, put: Message) -> _Anchor | None:
        chat = self._try([*self.messages[:i], put, *self.messages[i + 1 :]])
        if chat is None or self._sentinel not in chat:
            return None
        if chat.replace(self._sentinel, "") != self._text:
            return None
        return _Anchor(put, chat.index(self._sentinel), chat.count(self._sentinel) == 1)

    def _with_sentinel(self, message: Message) -> Iterator[Message]:
        """The message with a sentinel behind its content, which a template may trim, or behind the
        name of its last call."""
        content = message.get("content")
        for text in dict.fromkeys((content, content.rstrip())) if isinstance(content, str) else ():
            yield {**message, "content": text + self._sentinel}
        if isinstance(content, list) and content and isinstance(content[-1], dict):
            last = content[-1]
            if isinstance(text := last.get("text"), str):
                for x in dict.fromkeys((text, text.rstrip())):
                    put = {**last, "text": x + self._sentinel}
                    yield {**message, "content": [*content[:-1], put]}
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls and isinstance(calls[-1], dict):
            for key in ("function", None):
                inner = calls[-1].get(key) if key else calls[-1]
                if isinstance(inner, dict) and isinstance(name := inner.get("name"), str):
                    named = {**inner, "name": name + self._sentinel}
                    put = {**calls[-1], key: named} if key else named
                    yield {**message, "tool_calls": [*calls[:-1], put]}

    def _behind(self, text: str | None) -> str | None:
        """What follows the first of the sentinels of a text."""
        if text is None or self._sentinel not in text:
            return None
        return text.partition(self._sentinel)[2]

    def _common(self, one: str, other: str) -> str:
        """What both texts begin with, without a part of a token."""
        lengths = range(1, min(len(one), len(other)) + 1)
        shared = one[: bisect_left(lengths, True, key=lambda n: one[:n] != other[:n])]
        cut, tokens = len(shared), [x for x in self._tokens() if len(x) > 1]
        while True:
            inside = [
                start
                for token in tokens
                for start in range(max(cut - len(token) + 1, 0), cut)
                if one.startswith(token, start) or other.startswith(token, start)
            ]
            if not inside:
                return shared[:cut]
            cut = min(inside)

    def _upto(self, i: int, *, add_generation_prompt: bool = False) -> str | None:
        """What the template writes of the messages before `i`."""
        key = i, add_generation_prompt
        if key not in self._beginnings:
            self._beginnings[key] = self._try(
                self.messages[:i], add_generation_prompt=add_generation_prompt
            )
        return self._beginnings[key]

    def _try(self, messages: list[Message], *, add_generation_prompt: bool = False) -> str | None:
        """What the template writes; None if it takes no such chat."""
        try:
            return self._write(messages, add_generation_prompt=add_generation_prompt)
        except DataError:
            return None
