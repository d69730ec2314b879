"""A real headless Chromium, installed from Debian where it is missing and this user may."""

import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[2]
_INSTALL = (
    "import sys; sys.path.insert(0, 'scripts'); from slurm.packages import install_quietly; "
    "install_quietly(['chromium'])"
)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the program. Where it must be there (TDP_REQUIRE_SLURM), its absence fails."""
    if not shutil.which("chromium") and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run([sys.executable, "-c", _INSTALL], cwd=ROOT, timeout=900, check=False)
    if found := shutil.which("chromium"):
        return found
    reason = "no chromium, and apt-get cannot install it here"
    if os.environ.get("TDP_REQUIRE_SLURM") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def browser(chromium: str) -> Generator["Browser"]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()
