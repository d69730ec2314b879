"""Write the tables of docs/config.md from the schema, and that of docs/collectives.md.

    scripts/docs             write what follows the marker
    scripts/docs --check     exit code 1 if it is out of date

One rule: what a key is stands in the schema alone, and what a collective is in its row of
comm/collective_table.py.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from torchdistpackage.comm.collective_table import page_rows
from torchdistpackage.config.data_section import ITEMS
from torchdistpackage.config.schema import RunConfig, Section
from torchdistpackage.config.types import expected_of

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "config.md"
COLLECTIVES = DOCS / "collectives.md"
MARKER = "<!-- scripts/docs writes everything below this line -->\n"
COLLECTIVES_MARKER = "<!-- scripts/docs writes this table from comm/collective_table.py -->\n\n"


def tables() -> str:
    parts = [MARKER]
    for name, section in RunConfig.model_fields.items():
        parts.append(f"\n## {name}\n\n{section.description}\n\n")
        parts.append("| key | default | takes | what it is |\n|---|---|---|---|\n")
        assert isinstance(section.annotation, type)
        parts += [f"| {' | '.join(row)} |\n" for row in rows(section.annotation, name)]
    return "".join(parts)


def rows(kind: type, top: str, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    assert issubclass(kind, Section)
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from rows(field.annotation, top, f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        yield (
            f"`{prefix}{name}`",
            f"`{shown(default)}`",
            expected_of(field).text,
            str(field.description),
        )
        if (item := ITEMS.get(f"{top}.{prefix}{name}")) is not None:
            yield from rows(item, top, f"{prefix}{name}[].")


def shown(value: object) -> str:
    """As one would write it in the file."""
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=1000)
    return text.removesuffix("...\n").strip()


def of_collectives(text: str) -> str:
    """Return the page with the table of today."""
    before, marker, after = text.partition(COLLECTIVES_MARKER)
    _, end, rest = after.partition("\n\n")
    return before + marker + page_rows().rstrip("\n") + end + rest


def main() -> int:
    code, is_check = 0, "--check" in sys.argv[1:]
    for page in (PAGE, COLLECTIVES):
        text = page.read_text(encoding="utf-8")
        is_config = page == PAGE
        fresh = text.partition(MARKER)[0] + tables() if is_config else of_collectives(text)
        if not is_check:
            page.write_text(fresh, encoding="utf-8")
        elif fresh != text:
            sys.stderr.write(f"{page} is out of date; run scripts/docs\n")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
