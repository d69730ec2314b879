"""State dicts: experts by their numbers, on any ranks, and as transformers fuses them."""

import copy
import pickle

import pytest
import torch

from tests.parallel.expert.one_process import DIM, HIDDEN, drawn, whole_weights
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.layout.moe import MoEShape
from torchdistpackage.parallel import MoELayer

OPTIONS = {"num_experts": 5, "top_k": 2, "hidden": HIDDEN, "bias": True}


def from_and_into_one_process(axes, expert: int) -> dict[str, torch.Tensor]:
    """This rank's own state dict, of a layer that was loaded from that of one process."""
    tpc.setup_process_groups(list(axes), expert=expert)
    layer = MoELayer(DIM, dtype=torch.float64, **OPTIONS)
    whole = whole_weights(MoEShape(**OPTIONS), 3)
    layer.load_state_dict(whole)
    full = layer.to_full()
    assert full.keys() == whole.keys()
    assert all(torch.equal(full[name], x) for name, x in whole.items())
    twin = copy.deepcopy(layer)
    x = drawn(tpc.get_dp_rank(), 4, 2, DIM)
    assert torch.equal(twin(x), layer(x))
    again = pickle.loads(pickle.dumps(layer))  # noqa: S301
    assert torch.equal(again(x), layer(x))
    broken = dict(whole) | {"experts.9.up.weight": x, "experts.0.up.weight": x}
    with pytest.raises(RuntimeError, match=r"experts.9.up.weight") as raised:
        layer.load_state_dict(broken)
    assert tpc.get_group("expert").rank() or "experts.0.up.weight has shape" in str(raised.value)
    return layer.state_dict()


@pytest.mark.parametrize("axes", [(("data", 2),), (("data", 1), ("tensor", 2))], ids=str)
def test_state_dicts_have_whole_names(ranks, axes):
    found = ranks(2).run(from_and_into_one_process, axes, dict(axes)["data"])
    whole = whole_weights(MoEShape(**OPTIONS), 3)
    assert {name for state in found for name in state} == whole.keys()
    if len(axes) == 1:
        assert [n for n in found[1] if "up.weight" in n] == [
            "experts.3.up.weight",
            "experts.4.up.weight",
        ]
        assert all(torch.equal(x, whole[n]) for state in found for n, x in state.items())


RANKS_IMPORT = ("transformers.models.mixtral.modeling_mixtral",)


def beside_mixtral() -> None:
    """transformers' own layer, from and into its fused form, on two expert ranks."""
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    tpc.setup_process_groups([("data", 2)], expert=2)
    sizes = {"hidden_size": DIM, "intermediate_size": HIDDEN, "num_local_experts": 4}
    torch.manual_seed(3)
    theirs = MixtralSparseMoeBlock(MixtralConfig(**sizes, experts_implementation="eager")).double()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0, 0.3)
    state = {
        name.replace("gate.weight", "router.weight"): x for name, x in theirs.state_dict().items()
    }
    layer = MoELayer(DIM, HIDDEN, 4, balance="none", dtype=torch.float64)
    layer.load_state_dict(state)
    x = drawn(5, 6, 2, DIM)
    torch.testing.assert_close(
        layer(x), theirs(x.transpose(0, 1).contiguous()).transpose(0, 1), rtol=1e-5, atol=1e-6
    )
    fused = layer.to_full(fused=True)
    assert fused.keys() == state.keys()
    assert all(torch.equal(fused[name], x) for name, x in state.items())


def test_fused_experts_of_transformers_come_and_go(ranks):
    pytest.importorskip("transformers", minversion="5", reason="transformers 4 stacks no experts")
    ranks(2).run(beside_mixtral)
