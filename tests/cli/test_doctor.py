"""`tdp doctor`: the report about a machine, what it never prints, and what it warns of.

No torch.
"""

import resource
from pathlib import Path

import pytest

from torchdistpackage.cli import doctor
from torchdistpackage.cli.main import main
from torchdistpackage.errors import LaunchError

TITLES = [
    "Versions", "Machine", "Devices", "Limits", "Network", "Slurm", "File systems",
    "Environment variables",
]  # fmt: skip


def test_the_report_has_its_sections_and_no_secrets(monkeypatch, capsys, tmp_path: Path):
    monkeypatch.setenv("NCCL_PROXY", "http://me:abc123@host")
    monkeypatch.setenv("TDP_API_KEY", "abc123")
    monkeypatch.setenv("MY_DATABASE", "abc123")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setattr(doctor, "_devices", lambda: iter(()))  # torch, and perhaps a GPU
    assert main(["doctor", "--folder", str(tmp_path / "new")]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if line in TITLES] == TITLES
    assert "abc123" not in text and "MY_DATABASE" not in text
    assert "  NCCL_DEBUG: WARN" in text and "  TDP_API_KEY: (not shown)" in text
    assert f"  runs: {tmp_path} on " in text


def test_a_section_that_cannot_be_read_says_why_and_keeps_what_it_has(monkeypatch, tmp_path: Path):
    def refuse(*_: object, **__: object):
        raise LaunchError("there is no sinfo here")

    monkeypatch.setattr(doctor, "run_command", refuse)
    monkeypatch.setattr(doctor, "_devices", lambda: iter(()))
    sections = dict(doctor.report({}, tmp_path))
    assert sections["Slurm"] == [("not read", "there is no sinfo here")]
    assert dict(sections["Versions"])["torchdistpackage"]


@pytest.mark.parametrize(("most", "warned"), [(1024, 1), (8192, 0), (resource.RLIM_INFINITY, 0)])
def test_few_open_files_are_warned_of(monkeypatch, most: int, warned: int):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))
    monkeypatch.setattr(doctor.Path, "exists", lambda _: False)
    warnings = [value for name, value in doctor._limits() if name == "!"]
    assert len(warnings) == warned and all("1,024 open files" in x for x in warnings)
