"""Tables that the finder writes: families/written.json holds them, and they hold for any sizes."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from tests.models.coverage import settings
from torchdistpackage.config.packages import is_before
from torchdistpackage.errors import NotAvailableError
from torchdistpackage.families.registry import FAMILIES, SPLIT_ALONE
from torchdistpackage.families.written import FILE
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.partition import share_heads_evenly
from torchdistpackage.layout.table import LayerCut
from torchdistpackage.models.transformers_found import found_model
from torchdistpackage.models.transformers_layout import (
    TransformersShape,
    global_name,
    layouts,
    setting_problems,
    split_table,
)
from torchdistpackage.models.transformers_meta import on_meta
from torchdistpackage.models.transformers_writer import WRITTEN, _Probe, as_text, symbolic_table

pytestmark = pytest.mark.skipif(
    is_before("transformers", "5"), reason="the defaults of classes are read of transformers 5"
)
TABLES = {**FAMILIES, **SPLIT_ALONE}
TRAINED = [name for name in WRITTEN if name in FAMILIES]


def test_the_finder_writes_what_the_file_holds():
    tables = {family: symbolic_table(family) for family in WRITTEN}
    assert json.loads(FILE.read_text()) == tables
    assert FILE.read_text() == as_text(tables)


def stated(cut: LayerCut) -> LayerCut:
    """Return it without what no build reads: a layout's name, and the entrance of a row layer."""
    entrance = cut.entrance if cut.kind in ("column", "joined") else ""
    return replace(cut, weight=cut.weight.named(""), entrance=entrance)


def without_experts(layout: Layout) -> Layout:
    """Return it as it is where no ranks share experts, whom a written table does not know."""
    split = tuple(tuple(axis for axis in axes if axis != "expert") for axes in layout.split)
    return replace(layout, split=split, view="dense")


DRAWN = range(25)
"""Seeds of the random settings of a family."""


def drawn_settings(
    family: str, seed: int, counts: tuple[int, ...] = (1, 2, 3, 4)
) -> tuple[dict[str, Any], int]:
    """Return a random config.json that is valid, and a number of tensor ranks that can share it.

    counts: of key-value heads, of query heads for each of them, and of ranks.
    """
    draw = random.Random(f"{family} {seed}")
    table = TABLES[family]
    keys = draw.choice(counts)
    heads = keys * draw.choice([n for n in counts if keys * n > 1])
    head_dim = draw.choice((None, 4, 6, 10))
    # some classes refuse a width that is no multiple of the heads, whatever the heads' own is
    dim = heads * draw.choice((2, 4, 8))
    given = {
        "vocab_size": draw.randint(30, 300),
        "hidden_size": dim,
        "intermediate_size": draw.randint(6, 90),
        "num_hidden_layers": draw.randint(1, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": head_dim,
        "max_position_embeddings": draw.randint(16, 99),
        "initializer_range": draw.choice((0.01, 0.3)),
        "pad_token_id": draw.choice((None, 5)),
        "num_local_experts": draw.randint(2, 5),
    }
    given |= {key: draw.random() < 0.5 for key, x in table.defaults.items() if type(x) is bool}
    given = {key: x for key, x in given.items() if key in table.defaults}
    if head_dim is None:
        del given["head_dim"]
    tensor = [n for n in counts if n > 1 and share_heads_evenly(heads, keys, n)]
    return {"model_type": family, **given}, draw.choice(tensor)


def written_shape(given: dict[str, Any], tensor: int) -> TransformersShape:
    """Return the shape whose table is the written one, also where runs ask the finder."""
    shape = TransformersShape(given["model_type"], given, 8, tensor=tensor)
    vars(shape)["kind"] = TABLES[shape.family]
    return shape


@pytest.mark.parametrize("seed", [0, *(pytest.param(x, marks=pytest.mark.full) for x in DRAWN[1:])])
@pytest.mark.parametrize("family", WRITTEN)
def test_random_settings_have_the_parameters_of_transformers(family, seed):
    given, _ = drawn_settings(family, seed)
    shape = written_shape(given, 1)
    assert setting_problems(shape) == []
    named = on_meta(given).named_parameters(remove_duplicate=False)
    expected = {global_name(shape, name): tuple(p.shape) for name, p in named}
    assert {name: layout.shape for name, layout in layouts(shape).items()} == expected


def expect_cuts_of_the_finder(given: dict[str, Any], tensor: int) -> None:
    """Compare each parameter, layer and attention."""
    model = found_model(given, tensor)
    assert model.refused is None and model.uncut is None
    shape = written_shape(given, tensor)
    table, written = split_table(shape), layouts(shape)
    assert {name: without_experts(model.layouts[name]) for name in written} == written
    assert {path: stated(cut) for path, cut in model.table.layers.items()} == {
        path: stated(cut) for path, cut in table.layers.items()
    }
    assert model.table.partial == table.partial
    assert model.table.attention.keys() == table.attention.keys()
    for path, theirs in table.attention.items():
        ours = model.table.attention[path]
        assert (ours.queries, ours.keys) == (theirs.queries, theirs.keys)
        assert ours.head_dim == theirs.head_dim
        assert theirs.counts.items() <= ours.counts.items()


@pytest.mark.few(2)
@pytest.mark.parametrize("family", TRAINED)
@pytest.mark.parametrize("tensor", [2, 4])
def test_a_written_table_cuts_as_the_finder_cuts(family, tensor):
    """At sizes that the writer has not seen."""
    expect_cuts_of_the_finder(settings(family, tie_word_embeddings=tensor == 4), tensor)


@pytest.mark.full
@pytest.mark.parametrize("seed", DRAWN)
@pytest.mark.parametrize("family", WRITTEN)
def test_a_written_table_cuts_random_settings_as_the_finder_cuts(family, seed):
    # the finder tries a copy of at most 4 heads, which 3 ranks cannot share though the model's do
    expect_cuts_of_the_finder(*drawn_settings(family, seed, counts=(1, 2, 4)))


def test_weights_that_are_drawn_as_no_table_states_are_refused():
    probe, name = _Probe("llama"), "model.layers.0.mlp.up_proj.weight"
    assert probe._start(name) == "normal"
    probe.model.get_parameter(name).data.mul_(1.5)
    with pytest.raises(NotAvailableError, match=name):
        probe._start(name)
