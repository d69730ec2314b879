"""The progress output of tokenizing. No torch."""

import io

from torchdistpackage.data.tokens import token_bar
from torchdistpackage.data.tokens.token_bar import tokenizing


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_now_and_then_has_how_much_and_how_fast(monkeypatch):
    now, stream = [100.0], io.StringIO()
    monkeypatch.setattr(token_bar.time, "monotonic", lambda: now[0])
    with tokenizing(stream) as show:
        for second, done in ((1, 5), (11, 50), (12, 60), (25, 100)):
            now[0] = 100.0 + second
            show(done * 10**6, 100 * 10**6)
    assert stream.getvalue().splitlines() == [
        "tokenizing: 50 of 100 MB, 4.5 MB/s",
        "tokenizing: 100 of 100 MB, 4.0 MB/s",
    ]


def test_a_terminal_has_a_bar_which_is_gone_afterwards(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with tokenizing(stream) as show:
        show(50 * 10**6, 100 * 10**6)
    assert "50.0/100.0 MB" in stream.getvalue()
    quiet = Terminal()
    with tokenizing(quiet):
        pass
    assert "MB" not in quiet.getvalue(), "what is in the cache shows no bar"
