"""docs/index.md leads to every page, and the site builds with every link in it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_index_names_every_page_once():
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    linked = [x for x in re.findall(r"\]\(([^)]+)\)", text) if "/" not in x]
    assert sorted(linked) == sorted(
        x.name for x in (ROOT / "docs").glob("*.md") if x.name != "index.md"
    )


def build(project: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, project / "scripts" / "site", out],
        env={**os.environ, "PYTHONPATH": str(project)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy that a test may break."""
    copy = tmp_path / "project"
    folders = ("docs", "scripts", "torchdistpackage", "examples", "benchmarks", "configs", "tests")
    for folder in folders:
        shutil.copytree(ROOT / folder, copy / folder)
    for page in (*ROOT.glob("*.md"), ROOT / "LICENSE", ROOT / "setup.py"):
        shutil.copy(page, copy)
    return copy


@pytest.mark.full
def test_the_site_has_every_page_and_the_api(project: Path, tmp_path: Path):
    done = build(project, tmp_path / "site")
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
    done = build(project, tmp_path / "site")
    assert done.returncode != 0 and link.lstrip("./") in done.stderr
