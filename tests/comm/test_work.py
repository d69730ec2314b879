"""The failure of a call says which call it was and what the back end said of it."""

from types import SimpleNamespace

from torchdistpackage.comm.flight_recorder import (
    FAILED,
    GROUP,
    OPERATION,
    PEER,
    SEQUENCE,
    STATE,
)
from torchdistpackage.comm.work import failed


def test_a_lost_peer_is_named_without_the_general_advice_of_gloo() -> None:
    fields = {GROUP: SimpleNamespace(axis="data", ranks=(0, 1)), OPERATION: "all_reduce"}
    call = [fields.get(i) for i in range(16)]
    call[SEQUENCE], call[PEER] = 34, None
    said = (
        "[pair.cc:537] Read error [127.0.0.1]:43196: Connection reset by peer. This is typically "
        "caused by a remote worker hanging or bugs in the application. GLHF!"
    )
    text = str(failed(call, RuntimeError(said)))
    assert call[STATE] == FAILED
    assert "all_reduce" in text and "(0, 1)" in text and "number 34" in text
    assert text.endswith("Connection reset by peer.")
