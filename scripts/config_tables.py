"""Write the tables of docs/config.md from the schema.

    scripts/docs             write what follows the marker
    scripts/docs --check     exit code 1 if it is out of date

One rule: what a key is stands in the schema alone.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from torchdistpackage.config.data_section import ITEMS
from torchdistpackage.config.schema import RunConfig, Section
from torchdistpackage.config.types import expected_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
MARKER = "<!-- scripts/docs writes everything below this line -->\n"


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


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    fresh = text.partition(MARKER)[0] + tables()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(fresh, encoding="utf-8")
        return 0
    if fresh != text:
        sys.stderr.write(f"{PAGE} is out of date; run scripts/docs\n")
    return int(fresh != text)


if __name__ == "__main__":
    sys.exit(main())
