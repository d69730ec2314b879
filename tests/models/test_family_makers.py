"""A family is one thing: what makes its table, by hand or from modules, nobody else can ask.

No torch.
"""

import ast
from dataclasses import fields

from tests import package_files
from tests.package_files import files, name_of
from torchdistpackage.families.table import Family

MAKERS = {
    "families/found.py",
    "models/transformers_cuts.py",
    "models/transformers_found.py",
    "models/transformers_trial.py",
    "models/transformers_writer.py",
}
"""What writes a table from modules, and tries it."""


def test_only_its_makers_know_what_a_table_was_made_of():
    """No other file names a `FoundModel`, and a `Family` holds none."""
    knows = {
        name_of(path)
        for path in files()
        for node in package_files.nodes(path)
        if (isinstance(node, ast.alias) and node.name == "FoundModel")
        or (isinstance(node, ast.Name) and node.id == "FoundModel")
    }
    assert knows == MAKERS
    assert not [x.name for x in fields(Family) if "Found" in str(x.type) and x.name != "buffers"]
