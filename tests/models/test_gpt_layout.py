"""A GPT as numbers: names, stages, parameters and costs, without torch. No torch."""

import math
from dataclasses import replace

import pytest

from torchdistpackage.errors import ConfigError, LayoutError
from torchdistpackage.layout.derive import num_elements, owns
from torchdistpackage.models.gpt_layout import (
    GPTShape,
    layouts,
    module_of,
    piece_layouts,
    piece_parameters,
    pieces,
)
from torchdistpackage.models.gpt_numbers import flops_per_token, piece_costs
from torchdistpackage.models.gpt_spec import GPTSpec
from torchdistpackage.models.registry import MODELS, model
from torchdistpackage.topology.mesh import Mesh

SHAPE = GPTShape(layers=3, dim=8, heads=2, vocab=13, seq_len=16)
SHAPES = [
    SHAPE,
    replace(SHAPE, tied=False, position="learned"),
    replace(SHAPE, sequence_parallel=True, mlp_ratio=2.5),
    replace(SHAPE, heads=4, kv_heads=2, head_width=6, mlp="swiglu", norm="rms", mlp_bias=False),
]


def test_pieces_are_embed_halves_of_blocks_head():
    short = replace(SHAPE, layers=2)
    assert pieces(short) == (
        *("embed", "blocks.0.attention", "blocks.0.mlp", "blocks.1.attention", "blocks.1.mlp"),
        "head",
    )
    assert list(dict.fromkeys(map(module_of, pieces(short)))) == [
        *("embed", "blocks.0", "blocks.1", "head")
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=range(4))
def test_names_and_cuts_do_not_depend_on_the_stages(shape: GPTShape):
    alone = layouts(shape)
    staged = layouts(shape, [0, 0, 1, 1, 1, 1, 2, 2])
    assert {name: replace(layout, stages=()) for name, layout in staged.items()} == alone
    assert all(name == layout.name for name, layout in alone.items())
    assert staged["blocks.0.attention.out.weight"].stages == (0,)
    assert staged["blocks.0.mlp.down.weight"].stages == (1,)
    assert staged["blocks.0.norm2.weight"].stages == (1,)
    assert staged["head.norm.weight"].stages == (2,)


def test_halves_hold_each_parameter_of_a_block_once():
    attention, mlp = (piece_layouts(SHAPE, f"blocks.0.{half}") for half in ("attention", "mlp"))
    whole = {n.removeprefix("blocks.0.") for n in layouts(SHAPE) if n.startswith("blocks.0.")}
    assert attention.keys() | mlp.keys() == whole and not attention.keys() & mlp.keys()


def test_a_tied_weight_is_listed_once_on_both_stages():
    staged = layouts(SHAPE, [0, 0, 1, 1, 1, 2, 2, 3])
    assert staged["embed.weight"].stages == (0, 3)
    assert "head.weight" not in staged
    assert layouts(SHAPE, [0, 1, 1, 1, 1, 1, 1, 0])["embed.weight"].stages == (0,)
    apart = layouts(replace(SHAPE, tied=False), [0, 0, 1, 1, 1, 2, 2, 3])
    assert (apart["embed.weight"].stages, apart["head.weight"].stages) == ((0,), (3,))


@pytest.mark.parametrize("shape", SHAPES, ids=range(4))
def test_pieces_count_every_parameter_once(shape: GPTShape):
    total = sum(math.prod(layout.shape) for layout in layouts(shape).values())
    assert sum(piece_parameters(shape)) == total
    mesh = Mesh((("data", 2), ("pipe", 2), ("tensor", 2)))
    owned = sum(
        num_elements(layout, mesh, rank)
        for layout in layouts(shape, [0, 0, 0, 0, 1, 1, 1, 1]).values()
        for rank in range(mesh.size)
        if owns(layout, mesh, rank)
    )
    assert owned == total


def test_known_sizes_of_a_small_gpt():
    small = GPTShape(12, 768, 12, 50257, 1024, position="learned")
    assert sum(piece_parameters(small)) == 124_439_808  # GPT-2, 124M
    # 6 N + 12 L H Q T per token, N without norms, biases and look-ups (PaLM, appendix B)
    products = 12 * 12 * 768**2 + 50257 * 768
    assert flops_per_token(small) == 6 * products + 12 * 12 * 768 * 1024


def test_known_sizes_of_a_small_llama():
    """Llama 3.2 1B: heads of 64 channels share 8 of keys and values, and the head is tied."""
    shape = GPTShape(
        layers=16,
        dim=2048,
        heads=32,
        vocab=128256,
        seq_len=8192,
        kv_heads=8,
        mlp_hidden=8192,
        norm="rms",
        mlp="swiglu",
        attention_bias=False,
        mlp_bias=False,
    )
    assert sum(piece_parameters(shape)) == 1_235_814_400
    block = 2048 * (2 * 2048 + 2 * 512) + 3 * 2048 * 8192
    products = 16 * block + 128256 * 2048
    assert flops_per_token(shape) == 6 * products + 12 * 16 * 2048 * 8192


def test_costs_follow_the_blocks():
    costs = piece_costs(SHAPE)
    assert costs[0] == 0
    assert costs[1:3] == costs[3:5] == costs[5:7]
    assert costs[2] == 2 * 2 * 8 * SHAPE.hidden and costs[7] == 2 * 8 * 13
    longer = piece_costs(replace(SHAPE, seq_len=32))
    assert longer[1] - costs[1] == 4 * 16 * 8 and longer[2] == costs[2]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: replace(SHAPE, heads=3), r"gpt: dim 8 cannot be cut into 3 heads"),
        (lambda: replace(SHAPE, heads=8), r"8 heads of dim 8 are 1 wide, but rotary"),
        (
            lambda: replace(SHAPE, dim=9, heads=4, kv_heads=3, mlp_hidden=0, position="learned"),
            r"(?s)gpt: 2 problems.*dim 9 cannot be cut into 4 heads.*4 query heads cannot share 3",
        ),
        (lambda: layouts(SHAPE, [0, 1]), r"gives 2 stages for the 8 pieces"),
    ],
)
def test_what_does_not_fit_is_refused(make, text):
    with pytest.raises(LayoutError, match=text):
        make()
    assert replace(SHAPE, heads=8, position="learned").head_dim == 1


def test_the_registry_names_what_there_is():
    assert model("gpt") is MODELS["gpt"]
    assert GPTSpec(SHAPE).pieces() == pieces(SHAPE)
    with pytest.raises(ConfigError, match="no model 'gtp'; the names are gpt"):
        model("gtp")
