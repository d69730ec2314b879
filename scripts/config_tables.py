"""Write the tables of docs/config.md from the schema, and those of other pages from their rows.

    scripts/docs             write them
    scripts/docs --check     exit code 1 if a page is out of date

One rule: what a key, a collective or an optimizer is stands in its declaration alone.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from torchdistpackage.checkpoint.formats import table as checkpoint_formats
from torchdistpackage.comm import collective_table
from torchdistpackage.config import data_section, head_tasks, optimizers, preference_losses
from torchdistpackage.config.schema import ITEMS, RunConfig, Section
from torchdistpackage.config.types import expected_of
from torchdistpackage.layout import balances, exchanges
from torchdistpackage.plan import logged_values

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "config.md"
MARKER = "<!-- scripts/docs writes everything below this line -->\n"
TABLES = {
    "expert_parallel.md": ("layout/balances.py", balances.page_rows),
    "checkpoints.md": ("checkpoint/formats/table.py", checkpoint_formats.page_rows),
    "logging.md": ("plan/logged_values.py", logged_values.page_rows),
    "data.md": ("config/data_section.py", data_section.page_rows),
    "context_parallel.md": ("layout/exchanges.py", exchanges.page_rows),
    "collectives.md": ("comm/collective_table.py", collective_table.page_rows),
    "heads.md": ("config/head_tasks.py", head_tasks.page_rows),
    "preference.md": ("config/preference_losses.py", preference_losses.page_rows),
    "zero.md": ("config/optimizers.py", optimizers.page_rows),
}
"""Page -> the file whose rows make its table, and the table."""


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


def with_table(page: Path) -> str:
    """Return the text of the page with the table of today."""
    source, rows = TABLES[page.name]
    marker = f"<!-- scripts/docs writes this table from {source} -->\n\n"
    before, found, after = page.read_text(encoding="utf-8").partition(marker)
    assert found, f"{page} has no line {marker}"
    _, end, rest = after.partition("\n\n")
    return before + marker + rows().rstrip("\n") + end + rest


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    pages = {PAGE: text.partition(MARKER)[0] + tables()}
    pages |= {DOCS / name: with_table(DOCS / name) for name in TABLES}
    code = 0
    for page, fresh in pages.items():
        if "--check" not in sys.argv[1:]:
            page.write_text(fresh, encoding="utf-8")
        elif fresh != page.read_text(encoding="utf-8"):
            sys.stderr.write(f"{page} is out of date; run scripts/docs\n")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
