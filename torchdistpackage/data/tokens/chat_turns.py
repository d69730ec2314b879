"""Finds the assistant's turns in a chat that a template has written without marks.

A turn begins behind the generation prompt and ends where the next message begins. The finder writes
the chat again to find both: up to a message, or with a sentinel behind one. It takes nothing about
the template for granted: without the sentinel, such a text must equal the chat. No torch.
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
"""Writes messages as one text; raises DataError if the template refuses them. Called with messages
and add_generation_prompt."""


class Turns(NamedTuple):
    """The turns of a chat. spans: characters of each turn. rewritten: sentinels were needed."""

    spans: list[tuple[int, int]]
    rewritten: bool


class _Anchor(NamedTuple):
    """A position in the chat behind some text of a message.

    put: the message with a sentinel there. is_single: the template writes that text once.
    """

    put: Message
    position: int
    is_single: bool


class TurnFinder:
    """Finds turns in `text`, which `write` makes of `messages`.

    tokens: texts of the tokenizer that must not be split, such as <|im_end|>.
    """

    def __init__(
        self, write: Write, messages: list[Message], text: str, tokens: Callable[[], Sequence[str]]
    ):
        self._write = write
        self.messages = messages
        self._text = text
        self._tokens = tokens
        self._sentinel = f"Zq{secrets.token_hex(8)}qZ"
        self._anchors: dict[int, _Anchor | None] = {}
        self._beginnings: dict[tuple[int, bool], str | None] = {}

    def turns(self, numbers: Sequence[int]) -> Turns | int:
        """Return the turns of the messages `numbers`, or the first one whose turn is unproved."""
        spans = list[tuple[int, int]]()
        rewritten = False
        for i in numbers:
            is_last = i + 1 == len(self.messages)
            # a template that needed a sentinel once needs it again
            span = None if rewritten and not is_last else self._by_prefixes(i)
            if span is None:
                begin, end = self._begin(i), self._end(i)
                if begin is None or end is None or begin > end:
                    return i
                span = (begin, end)
                rewritten = True
            if spans and span[0] < spans[-1][1]:
                return i
            spans.append((self._behind_own_header(i, span[0]), span[1]))
        return Turns(spans, rewritten)

    def _behind_own_header(self, i: int, begin: int) -> int:
        """Return where turn `i` begins, behind a header that is not a generation prompt.

        After a tool's reply the model goes on with its turn, so some templates write no generation
        prompt there, yet begin the message with a header.
        """
        if not i or self.messages[i - 1]["role"] in ("user", "assistant") or self._prompt(i):
            return begin
        content = str(self.messages[i].get("content") or "")
        for header in self._headers:
            if self._text.startswith(header, begin) and not content.startswith(header):
                return begin + len(header)
        return begin

    def _by_prefixes(self, i: int) -> tuple[int, int] | None:
        """Return the turn if the template writes each message the same, whatever follows it."""
        head = self._before(i)
        if head is None or not self._text.startswith(head):
            return None
        if i + 1 == len(self.messages):
            return len(head), len(self._text)
        upto = self._upto(i + 1)
        if upto is None or not (upto.startswith(head) and self._text.startswith(upto)):
            return None
        return len(head), len(upto)

    def _before(self, i: int) -> str | None:
        """Return the chat before message `i`, with the generation prompt if there is one."""
        head = self._upto(i, add_generation_prompt=True)
        follows_user = i and self.messages[i - 1]["role"] != "assistant"
        if head is None or follows_user or any(map(head.endswith, self._prompts)):
            return head
        return None if any(self._prompts) else head

    def _begin(self, i: int) -> int | None:
        """Return where a turn begins: after the text it shares with the generation prompt."""
        prompted = self._before(i)
        if prompted is not None and self._text.startswith(prompted):
            return len(prompted)
        # with a sentinel for content, the beginning shared with a prompt ends before the content
        bare = {**self.messages[i], "content": self._sentinel}
        prompt = self._prompt(i)
        anchor = self._anchor(i - 1) if i else None
        if anchor is not None and anchor.is_single:
            chat_before = [*self.messages[: i - 1], anchor.put]
            marked = self._behind(self._try(chat_before, add_generation_prompt=True))
            written = self._try([*chat_before, bare, *self.messages[i + 1 :]])
            shared = self._shared(marked, self._behind(written), prompt) if prompted else None
            if shared is not None and self._text.startswith(shared, anchor.position):
                return anchor.position + len(shared)
        written = self._try([*self.messages[:i], bare, *self.messages[i + 1 :]])
        shared = self._shared(prompted, written, prompt)
        if shared is not None and self._text.startswith(shared):
            return len(shared)
        behind = self._behind_header((written or "").partition(self._sentinel)[0], anchor)
        if behind is not None:
            return behind
        # a content that includes the reasoning, where the prompt has an empty one
        shared = self._shared(prompted, self._text, prompt)
        return None if shared is None else len(shared)

    def _behind_header(self, head: str, anchor: _Anchor | None) -> int | None:
        """Return where a turn begins: behind the last header in `head`; its content follows."""
        first = 0 if anchor is None else anchor.position
        for header in self._headers:
            at = head.rfind(header)
            if at >= first and self._text.startswith(head[: at + len(header)]):
                return at + len(header)
        return None

    def _shared(self, prompted: str | None, chat: str | None, prompt: str) -> str | None:
        """Return the common beginning of `prompted` and `chat`, or None if it is too short.

        prompted: a text that ends with `prompt`, the generation prompt. The beginning has to hold
        all of it but for an end of the prompt.
        """
        if prompted is None or chat is None:
            return None
        shared = self._common(prompted, chat)
        is_all = len(shared) == len(prompted)
        return shared if is_all or len(shared) > len(prompted) - len(prompt) else None

    def _prompt(self, i: int) -> str:
        """Return the generation prompt behind the messages before `i`."""
        plain, prompted = self._upto(i), self._upto(i, add_generation_prompt=True)
        return self._added(plain, prompted)

    def _prompt_of(self, chat: list[Message]) -> str:
        return self._added(self._try(chat), self._try(chat, add_generation_prompt=True))

    def _added(self, plain: str | None, prompted: str | None) -> str:
        if plain is None or prompted is None:
            return ""
        return prompted[len(self._common(plain, prompted)) :]

    @cached_property
    def _after_users(self) -> list[list[Message]]:
        """Beginnings of the chat that end with a user, or a user alone if there is none."""
        users = [j for j, x in enumerate(self.messages) if x["role"] == "user"]
        chats = [self.messages[: j + 1] for j in users[:2]]
        return chats or [[{"role": "user", "content": "-"}]]

    @cached_property
    def _prompts(self) -> list[str]:
        """All generation prompts behind users, the longest first."""
        return sorted({self._prompt_of(x) for x in self._after_users} - {""}, key=len)[::-1]

    @cached_property
    def _headers(self) -> list[str]:
        """Texts before a reply to a user: generation prompts, or what replies share with them."""
        headers = {*self._prompts}
        for chat in self._after_users:
            prompt = self._prompt_of(chat)
            prompted = self._try(chat, add_generation_prompt=True)
            replied = self._try([*chat, {"role": "assistant", "content": self._sentinel}])
            if (
                shared := self._shared(prompted, replied, prompt)
            ) is not None and prompted is not None:
                headers.add(shared[len(prompted) - len(prompt) :])
        return sorted(headers - {""}, key=len, reverse=True)

    def _end(self, i: int) -> int | None:
        """Return where a turn ends: where the template would write a generation prompt."""
        if i + 1 == len(self.messages):
            return len(self._text)
        if (anchor := self._anchor(i)) is None:
            return None
        chat = [*self.messages[:i], anchor.put]
        if (ending := self._behind(self._try(chat, add_generation_prompt=True))) is None:
            return None
        ending = ending.replace(self._sentinel, "")
        for prompt in chain(self._prompts, self._own_prompt(i), [""]):
            end = ending.removesuffix(prompt)
            if ending.endswith(prompt) and self._text.startswith(end, anchor.position):
                return anchor.position + len(end)
        return None

    def _own_prompt(self, i: int) -> Iterator[str]:
        if i and self.messages[i - 1]["role"] != "assistant":
            yield self._prompt(i)

    def _anchor(self, i: int) -> _Anchor | None:
        """Return a position in message `i` where a sentinel changes nothing else of the chat."""
        if not self._anchors:
            self._anchors |= self._replies()
        if i not in self._anchors:
            candidates = (self._proved(i, put) for put in self._with_sentinel(self.messages[i]))
            self._anchors[i] = next((x for x in candidates if x is not None), None)
        return self._anchors[i]

    def _replies(self) -> dict[int, _Anchor]:
        """Return anchors behind all replies at once, if the template takes sentinels there."""
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
        """Yield the message with a sentinel behind its content or behind the name of its last call.

        A template may trim a content, so the trimmed one is tried too.
        """
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
        """Return the text behind the first sentinel, or None without one."""
        if text is None or self._sentinel not in text:
            return None
        return text.partition(self._sentinel)[2]

    def _common(self, one: str, other: str) -> str:
        """Return the longest common beginning of both texts that splits no token."""
        lengths = range(1, min(len(one), len(other)) + 1)
        shared = one[: bisect_left(lengths, True, key=lambda n: one[:n] != other[:n])]
        cut = len(shared)
        tokens = [x for x in self._tokens() if len(x) > 1]
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
        """Return the template's text for the messages before `i`."""
        key = i, add_generation_prompt
        if key not in self._beginnings:
            self._beginnings[key] = self._try(
                self.messages[:i], add_generation_prompt=add_generation_prompt
            )
        return self._beginnings[key]

    def _try(self, messages: list[Message], *, add_generation_prompt: bool = False) -> str | None:
        """Return the template's text, or None if it refuses the chat."""
        try:
            return self._write(messages, add_generation_prompt=add_generation_prompt)
        except DataError:
            return None
