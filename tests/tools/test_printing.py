"""print() on one rank of many."""

from __future__ import annotations

import builtins
import io

import pytest

from torchdistpackage.tools.printing import disable_non_master_print, emit

PRINT = builtins.print


def test_only_the_master_prints_unless_forced(capsys: pytest.CaptureFixture[str]):
    try:
        restore = disable_non_master_print(False)
        print("silent")
        emit("silent too")
        print("forced", force=True)
        disable_non_master_print(True)
        print("of the", "master", sep="-", force=False)
        file = io.StringIO()
        print("kept", file=file, end="")
        assert file.getvalue() == "kept"
        emit("said")
        restore()
        assert builtins.print is PRINT
    finally:
        builtins.print = PRINT
    assert capsys.readouterr().out == "forced\nof the-master\nsaid\n"
