"""Arguments of a model of one's own become smaller by their names, and their ratios stay.

No torch.
"""

import math

import pytest

from torchdistpackage.config.load import load, loads
from torchdistpackage.plan.parity_plan import parity_run
from torchdistpackage.plan.run_plan import make_plan, num_ranks
from torchdistpackage.plan.smaller_arguments import with_smaller_arguments

TARGETS = ["model.target=own:Net", "data.target=own:Data", "data.args={vocab_size: 50257}"]


def smaller(args: str, *more: str, **defaults: object) -> tuple[dict, dict]:
    config = loads("{}", overrides=[*TARGETS, f"model.args={args}", *more])
    found = with_smaller_arguments(config, defaults)
    return found.model.args, found.data.args


def test_widths_keep_their_ratios_and_data_follow():
    args = "{vocab_size: 50257, n_embd: 768, n_head: 12, n_layer: 12, d_ff: 3072, bias: true}"
    model, data = smaller(args)
    assert model == {
        "vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "d_ff": 128, "bias": True,
    }  # fmt: skip
    assert data == {"vocab_size": 64}


def test_heads_still_share_keys_and_layers_suffice_for_stages():
    args = "{dim: 4096, heads: 32, kv_heads: 8, depth: 48, config: {intermediate_size: 14336}}"
    model, _ = smaller(args, "parallel.pipe=2")
    assert model["heads"] == 4 and model["kv_heads"] == 2 and model["depth"] == 8
    assert model["dim"] == 32 and model["config"] == {"intermediate_size": 56 * 2}


@pytest.mark.parametrize(
    ("args", "defaults", "becomes"),
    [
        ("{width: 8, layers: 1}", {}, {"width": 8, "layers": 1}),  # small enough
        ("{tokens: 900, dim: 100}", {}, {"tokens": 900, "dim": 50}),  # an odd size ends it
        ("{vocab: 900}", {}, {"vocab": 900}),  # whose ids the data draw by themselves
        ("{}", {"num_layers": 12, "p": 0.1}, {"num_layers": 2}),
        ("{dim: 64, d_model: 512}", {}, {"dim": 64, "d_model": 512}),  # which one is meant?
        ("{dim: true, heads: '8'}", {}, {"dim": True, "heads": "8"}),
    ],
)
def test_only_what_is_known_changes(args: str, defaults: dict, becomes: dict):
    assert smaller(args, **defaults)[0] == becomes


@pytest.mark.parametrize("name", ["gpt_tiny", "moe_tiny", "gpt_zero"])
def test_each_layout_of_a_configuration_of_ours_is_a_run(name: str):
    words = ["launch.local.procs=null", "parallel.data=2", "parallel.context=2"]
    config = load(f"configs/{name}.yaml", words)
    run = parity_run(make_plan(config, num_ranks(config)))
    for axes, one in [({}, run.whole), *run.layouts]:
        make_plan(one, math.prod(axes.values()))
