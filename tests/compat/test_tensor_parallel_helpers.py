"""What tensor_parallel's modules use among themselves computes here what it did."""

from __future__ import annotations

import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torchdistpackage.compat.tensor_parallel.tensor_parallel import (
    TensorParallel,
    get_a_var,
    parallel_apply_simple,
)

import torchdistpackage.compat.tensor_parallel as tp
from torchdistpackage.compat.tensor_parallel import (
    config,
    cross_device_ops,
    dispatch,
    imports,
    shard,
    utils,
    wrapper,
)
from torchdistpackage.errors import LayoutError

CPU = torch.device("cpu")


def test_the_module_of_the_functions_name_leaves_the_function():
    module = sys.modules["torchdistpackage.compat.tensor_parallel.tensor_parallel"]
    assert module.TensorParallel is TensorParallel is tp.TensorParallel
    assert callable(tp.tensor_parallel) and tp.tensor_parallel is not module


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda xs: cross_device_ops.broadcast_coalesced(xs, [CPU, CPU])[1], lambda xs: xs),
        (lambda xs: [cross_device_ops.gather(xs, dim=1)], lambda xs: [torch.cat(xs, 1)]),
        (lambda xs: [cross_device_ops.reduce_add(xs, CPU)], lambda xs: [xs[0] + xs[1]]),
        (cross_device_ops.all_gather, lambda xs: [torch.stack(xs)] * 2),
        (
            lambda xs: cross_device_ops.NCCLAllReduceFunction.apply(*xs),
            lambda xs: [xs[0] + xs[1]] * 2,
        ),
        (
            lambda xs: cross_device_ops.NCCLAllGatherFunction.apply(*xs),
            lambda xs: [torch.stack(xs)] * 2,
        ),
    ],
    ids=["broadcast", "gather", "sum", "gather to all", "nccl sum", "nccl gather"],
)
def test_tensors_of_several_devices_and_their_gradients(operation, expected):
    """Exactly: the same numbers are added, in the same order."""

    def run(function: object) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        xs = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        out = list(function(xs))
        sum((x * torch.rand_like(x)).sum() for x in out).backward()
        return out, [x.grad for x in xs]

    torch.testing.assert_close(run(operation), run(expected), rtol=0, atol=0)


def plan() -> tuple[nn.Module, config.Config]:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4, bias=False))
    rules = {r"^0\.": tp.state_actions.Split(2, 0), r"^2\.weight$": tp.state_actions.Split(2, 1)}
    return model, config.Config(rules, {}, {"^2$": {0: "sum"}}, {})


def test_a_state_is_converted_a_step_or_a_shard_at_a_time():
    model, chosen = plan()
    source = model.state_dict()
    whole = tp.convert_state_dict(source, chosen, 2)
    parts = [dispatch.convert_state_dict_single_shard(source, chosen, 2, r) for r in range(2)]
    parts += [{f"_sanity_check_params.{rank}": torch.empty(0)} for rank in range(2)]
    joined = {name: tensor for part in parts for name, tensor in part.items()}
    assert joined.keys() == whole.keys()
    assert all(torch.equal(joined[name], whole[name]) for name in whole)
    assert "module_shards.1.2.tp_wrapped_module.weight" in joined
    assert set(source) == set(model.state_dict())  # the steps work on states of their own
    ids = {name: dispatch.infer_sharded_data_device_id(f"wrapped_model.{name}") for name in whole}
    assert all(str(rank) in name.split(".") for name, rank in ids.items())
    with pytest.raises(KeyError, match="names no shard"):
        dispatch.infer_sharded_data_device_id("0.weight")


def test_a_shard_is_filled_and_changed_a_step_at_a_time():
    model, chosen = plan()
    parts = [nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1, False)) for _ in range(2)]
    for rank, part in enumerate(parts):
        source = dict(model.named_parameters())
        cut = shard.process_state_(part, source, chosen, rank=rank, world_size=2)
        assert cut == {"0.weight", "0.bias", "2.weight"}
        shard.fix_general_attributes(part)
        assert (part[0].out_features, part[2].in_features) == (3, 3)
        shard.process_attrs_(part[0], {"out_features": lambda n, rank: n + rank}, rank, 2)
        assert part[0].out_features == 3 + rank
    x = torch.randn(5, 4)
    outs = parallel_apply_simple(parts, [x, (x,)], None, [CPU, CPU])
    # the sum of two halves of six products, in float32
    torch.testing.assert_close(outs[0] + outs[1], model(x), rtol=1e-5, atol=1e-6)
    (named,) = parallel_apply_simple([parts[1]], [()], [{"input": x}], [CPU])
    assert torch.equal(named, outs[1])
    with pytest.raises(TypeError):
        parallel_apply_simple(parts, [x, 3], None, [CPU, CPU])


def test_actions_on_inputs_and_outputs():
    x = torch.arange(8.0).view(2, 4)
    args, kwargs = wrapper.process_input({0: "split -1", "y": "scale", "z": "scale"}, 1, 2, x, y=x)
    assert torch.equal(args[0], x[:, 2:]) and torch.equal(kwargs["y"], x / 2) and len(kwargs) == 1
    actions = {0: lambda value, rank: value + rank}
    Pair = namedtuple("Pair", "a b")
    for given in (x, (x, x), [x, x], Pair(x, x), {"a": x}):
        out = wrapper.process_output(given, actions, rank=1, world_size=2)
        assert type(out) is type(given)
        first, *rest = utils.nested_flatten(out)
        assert torch.equal(first, x + 1) and all(torch.equal(other, x) for other in rest)
    assert utils.is_namedtuple(Pair(1, 2)) and not utils.is_namedtuple((1, 2))
    assert get_a_var({"a": [1, (None, x)], "b": 2}) is x and get_a_var([1, {}]) is None


def test_rules_in_earlier_forms():
    made = config.convert_legacy_state_action(lambda tensor, rank: tensor[rank])
    assert isinstance(made, tp.StateAction)
    assert made(torch.arange(3), rank=2) == 2
    with pytest.raises(LayoutError, match="which is not an action"):
        config.convert_legacy_state_action("split 0")
    _, chosen = plan()
    (actions,) = config.create_collective_ops(chosen.output_rules, [CPU, CPU]).values()
    assert isinstance(actions[0], tp.communications.AllReduce)


def test_which_peft_and_which_layers_of_it(monkeypatch):
    version = "torchdistpackage.compat.tensor_parallel.helpers.version"
    monkeypatch.setattr(version, lambda library: "0.13.1")
    imports.verify_peft_version()
    monkeypatch.setattr(version, lambda library: "0.2.9")
    with pytest.raises(ImportError, match=r"peft is 0\.2\.9; use 0\.3"):
        imports.verify_peft_version()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ImportError, match="peft is not installed"):
        imports.verify_peft_version()
    layer = nn.Linear(2, 2)
    adapted = SimpleNamespace(base_layer=layer, lora_A={})
    assert utils.check_lora(adapted) and not utils.check_lora(layer)
    assert not utils.check_lora(SimpleNamespace(base_layer=nn.Embedding(2, 2), lora_A={}))
