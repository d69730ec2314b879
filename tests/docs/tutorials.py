"""A tutorial as a reader has it: its files, its commands in order, and what it shows."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("configs", "examples")
"""What a reader finds in the clone that the commands name."""


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text("utf-8")


def script(name: str) -> str:
    """Return every line of the shell blocks, but for those that install."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page(name), re.M | re.S)
    lines = "".join(blocks).splitlines()
    return "\n".join(line for line in lines if not line.startswith("pip ")) + "\n"


def commands(name: str) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in script(name).splitlines()]


def shown(name: str) -> list[str]:
    """Return the blocks without a language: outputs."""
    return re.findall(r"(?<=\n\n)```\n(.*?)^```$", page(name), re.M | re.S)


def prepare(name: str, folder: Path) -> None:
    """Write what the page tells to save, beside the folders of the clone."""
    for each in FOLDERS:
        (folder / each).symlink_to(ROOT / each)
    text = page(name)
    for file, body in re.findall(
        r"Save this as `([\w.]+)`:\n\n```\w+\n(.*?)^```$", text, re.M | re.S
    ):
        (folder / file).write_text(body, "utf-8")
