"""Tables that the finder writes: what it writes today is what families/written.json holds."""

import json
from dataclasses import replace

import pytest

from tests.models.coverage import settings
from torchdistpackage.config.packages import is_before
from torchdistpackage.families.registry import FAMILIES
from torchdistpackage.families.written import FILE
from torchdistpackage.layout.table import LayerCut
from torchdistpackage.models.transformers_found import found_model
from torchdistpackage.models.transformers_layout import TransformersShape, layouts, split_table
from torchdistpackage.models.transformers_writer import WRITTEN, as_text, symbolic_table

pytestmark = pytest.mark.skipif(
    is_before("transformers", "5"), reason="the defaults of classes are read of transformers 5"
)
TRAINED = [name for name in WRITTEN if name in FAMILIES]


def test_the_finder_writes_what_the_file_holds():
    tables = {family: symbolic_table(family) for family in WRITTEN}
    assert json.loads(FILE.read_text()) == tables
    assert FILE.read_text() == as_text(tables)


def stated(cut: LayerCut) -> LayerCut:
    """Return it without what no build reads: a layout's name, and the entrance of a row layer."""
    entrance = cut.entrance if cut.kind in ("column", "joined") else ""
    return replace(cut, weight=cut.weight.named(""), entrance=entrance)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", TRAINED)
@pytest.mark.parametrize("tensor", [2, 4])
def test_a_written_table_cuts_as_the_finder_cuts(family, tensor):
    """Each parameter, layer and attention, at sizes that the writer has not seen."""
    given = settings(family, tie_word_embeddings=tensor == 4)
    model = found_model(given, tensor)
    found, by_finder = model.table, model.layouts
    shape = TransformersShape(family, given, 8, tensor=tensor)
    table = split_table(shape)
    written = layouts(shape)
    assert {n: x for n, x in by_finder.items() if n in written} == written
    assert {path: stated(cut) for path, cut in found.layers.items()} == {
        path: stated(cut) for path, cut in table.layers.items()
    }
    assert found.partial == table.partial
    for path, cut in table.attention.items():
        ours, theirs = found.attention[path], cut
        assert (ours.queries, ours.keys, ours.head_dim) == (
            theirs.queries,
            theirs.keys,
            theirs.head_dim,
        )
        assert theirs.counts.items() <= ours.counts.items()
