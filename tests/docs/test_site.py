"""docs/index.md leads to every page, and the site builds with every link in it, by the call that
CONTRIBUTING.md has.

No torch.
"""

import ast
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchdistpackage.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]


def test_the_index_names_every_page_once():
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    linked = [x for x in re.findall(r"\]\(([^)]+)\)", text) if "/" not in x]
    assert sorted(linked) == sorted(
        x.name for x in (ROOT / "docs").glob("*.md") if x.name != "index.md"
    )


def test_a_link_of_the_index_is_a_page_of_the_menu():
    """The menu of the site takes no heading of a page."""
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    assert [x for x in re.findall(r"\]\(([^)]+)\)", text) if "#" in x] == []


def test_the_index_has_four_parts():
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    parts = ["Start", "How-to", "Reference", "Explanation"]
    assert re.findall(r"^## (.*)$", text, re.M) == parts


def test_no_page_is_too_short_to_stand_alone():
    pages = [x for x in (ROOT / "docs").glob("*.md") if x.name != "index.md"]
    assert [x.name for x in pages if len(x.read_text("utf-8").splitlines()) < 40] == []


def test_a_how_to_page_begins_with_its_command():
    """The command is in a block before the first heading or table; a page for users of another
    library may begin with an import."""
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    part = text.partition("\n## How-to\n")[2].partition("\n## ")[0]
    names = re.findall(r"\]\((\w+)\.md\)", part)
    assert len(names) > 15
    for name in names:
        body = (ROOT / "docs" / f"{name}.md").read_text("utf-8").partition("\n")[2]
        start = re.split(r"^(?:## |\|)", body, maxsplit=1, flags=re.M)[0]
        blocks = re.findall(r"^```\w*\n(.*?)^```$", start, re.M | re.S)
        assert blocks, name
        command = re.search(r"^(?:\$ )?(?:.* )?tdp (\w+)|^import ", blocks[0], re.M)
        assert command, name
        assert command[1] is None or command[1] in COMMANDS, name


def call(project: Path, script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Where python3 is no Python that could run it."""
    path = f"{project.parent / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        [project / "scripts" / script, *arguments],
        env={**os.environ, "PYTHONPATH": str(project), "PATH": path},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy that a test may break; its environment is the one that runs the tests."""
    copy = tmp_path / "project"
    folders = ("docs", "scripts", "torchdistpackage", "examples", "benchmarks", "configs", "tests")
    for folder in folders:
        shutil.copytree(ROOT / folder, copy / folder)
    for page in (*ROOT.glob("*.md"), ROOT / "LICENSE", ROOT / "setup.py"):
        shutil.copy(page, copy)
    write_program(copy / ".venv" / "bin" / "python", f'exec "{sys.executable}" "$@"')
    made_from = (copy / "setup.py", copy / "scripts" / "requirements.lock")
    known = hashlib.sha256(b"".join(path.read_bytes() for path in made_from)).hexdigest()
    (copy / ".venv" / "stamp").write_text(f"{known} {platform.python_version()} {copy}\n")
    write_program(tmp_path / "bin" / "python3", "exit 1")
    return copy


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("script", "arguments", "code", "says"),
    [
        ("docs_site", (), 2, "scripts/docs_site FOLDER"),
        ("docs", ("--check",), 0, ""),
    ],
)
def test_a_script_runs_in_the_environment(project: Path, script, arguments, code, says):
    done = call(project, script, *arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert says in done.stderr


def imported(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def test_a_script_for_any_python_needs_nothing_but_python():
    """The others begin with the environment of scripts/env."""
    texts = {x.name: x.read_text("utf-8") for x in (ROOT / "scripts").iterdir() if x.is_file()}
    found = [name for name, text in texts.items() if text.startswith("#!/usr/bin/env python3")]
    assert "slurm_cluster" in found
    known = {*sys.stdlib_module_names, "slurm"}
    parts = [x.read_text("utf-8") for x in (ROOT / "scripts" / "slurm").glob("*.py")]
    for text in [*(texts[name] for name in found), *parts]:
        assert {*imported(text)} <= known


@pytest.mark.full
def test_the_site_has_every_page_and_the_api(project: Path, tmp_path: Path):
    done = call(project, "site", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = {x.stem for x in (project / "docs").glob("*.md")} - {"index"}
    assert all((tmp_path / "site" / name / "index.html").exists() for name in pages)
    api = (tmp_path / "site" / "api" / "ddp" / "index.html").read_text("utf-8")
    assert "torchdistpackage.ddp.naive_ddp.NaiveDDP" in api


@pytest.mark.full
@pytest.mark.parametrize("link", ["gone.md", "zero.md#no-such-heading", "../gone.py"])
def test_a_link_that_leads_nowhere_is_refused(project: Path, tmp_path: Path, link: str):
    page = project / "docs" / "ema.md"
    page.write_text(f"{page.read_text('utf-8')}\n[x]({link})\n", "utf-8")
    done = call(project, "site", tmp_path / "site")
    assert done.returncode != 0 and link.lstrip("./") in done.stderr
