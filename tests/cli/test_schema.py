"""The schema that editors complete from says what every key is for. No torch."""

import json
from collections.abc import Iterator
from typing import Any

from torchdistpackage.cli.main import main
from torchdistpackage.config.load import KEYS


def properties(schema: dict[str, Any], top: dict[str, Any], at: str = "") -> Iterator[tuple]:
    """(dotted path, property) of every section and key."""
    for name, entry in schema.get("properties", {}).items():
        section = top["$defs"].get(entry.get("$ref", "").rpartition("/")[2], {})
        yield f"{at}{name}", section | entry
        yield from properties(section, top, f"{at}{name}.")


def test_every_key_is_there_with_a_description(capsys):
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    found = dict(properties(schema, schema))
    assert set(KEYS) <= set(found)
    assert [path for path, entry in found.items() if not entry.get("description")] == []
