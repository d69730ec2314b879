"""What the pages say is so: tables follow the schema, links lead somewhere, the tour runs."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchdistpackage
from tests.package_files import HAS_WING
from tests.slurm import sites
from torchdistpackage.config.schema import RunConfig

ROOT = Path(__file__).parents[2]
FOLDERS = ("", "docs", "benchmarks", "benchmarks/gpu", "benchmarks/results", "examples")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))
PAGES.append(ROOT / "llms.txt")


def test_the_tables_of_the_yaml_follow_the_schema():
    command = [sys.executable, str(ROOT / "scripts" / "config_tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_tour_prints_what_it_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    failed, tried = doctest.testfile(str(ROOT / "Intro.md"), module_relative=False)
    assert tried > 10
    assert not failed, "the differences are in the output above"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_to_one(page: Path):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    lost = [x for x in links if "://" not in x and not (page.parent / x).exists()]
    assert not lost


def test_what_is_to_be_touched_for_something_new_is_there():
    """Each file, folder and constant that CONTRIBUTING.md names."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    text = text[text.index("## Where something new goes") : text.index("## Habits")]
    files = [x for x in re.findall(r"`([^`<>]+)`", text) if "/" in x and " " not in x]
    assert len(files) > 12
    homes = (ROOT, ROOT / "torchdistpackage")
    of_wing = () if HAS_WING else ("compat/", "tests/compat/")
    files = [x for x in files if not x.startswith(of_wing)]
    assert [x for x in files if not any((home / x).exists() for home in homes)] == []
    tables = 0
    for row in text.splitlines():
        named = [x for x in re.findall(r"`([^`<>]+\.py)`", row) if not x.startswith(of_wing)]
        paths = [
            p for x in named for home in (*homes, *homes[1].iterdir()) if (p := home / x).is_file()
        ]
        code = "\n".join(path.read_text("utf-8") for path in paths)
        for name in re.findall(r"`([A-Z_]{4,})`", row):
            tables += 1
            assert re.search(rf"^{name}\b", code, re.MULTILINE), f"{name} is in no file of its row"
    assert tables > 20


def test_what_frameworks_are_translated_to_is_there():
    text = (ROOT / "docs" / "coming_from_frameworks.md").read_text(encoding="utf-8")
    sections = "|".join(RunConfig.model_fields)
    # of a table the last column is ours: frameworks have sections of the same names
    ours = [x.rsplit("|", 2)[-2] if x.startswith("|") else x for x in text.splitlines()]
    keys = set(re.findall(rf"`((?:{sections})\.\w+)", "\n".join(ours)))
    assert len(keys) > 12
    for key in keys:
        section, _, name = key.partition(".")
        assert name in RunConfig.model_fields[section].annotation.model_fields, key
    here = [row.split("|")[2] for row in text.splitlines() if row.startswith("| ")]
    calls = {x for cell in here for x in re.findall(r"\b([A-Z]\w+|\w+_\w+)\(", cell)}
    assert calls >= {"NaiveDDP", "ZeroOptimizer", "setup_distributed", "data_parallel"}
    assert calls - {"AdamW", "state_dict", "no_sync", "get_group"} <= set(torchdistpackage.NAMES)


def test_the_page_of_odd_sites_follows_its_table_and_stored_result():
    assert sites.PAGE.read_text(encoding="utf-8") == sites.page()
