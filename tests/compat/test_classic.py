"""The earlier package's names: parallel twins equal the serial ones, and old mistakes are gone."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.each import each
from tests.tells import facts_pattern
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.derive import blocks
from torchdistpackage.parallel import (
    Attention,
    Block,
    ColParallelLinear,
    Mlp,
    ParallelBlock,
    RowParallelLinear,
    TpAttention,
    TpLinear,
    TpMlp,
    Transformer,
    collect,
    gather_from_sequence_parallel_region,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    initialize,
    is_squence_parallel_tensor,
    maybe_gather_from_sequence_parallel,
    maybe_split_into_sequence_parallel,
    reduce_scatter_to_sequence_parallel_region,
    set_sequence_parallel_attr,
    set_tp_group,
)
from torchdistpackage.topology.mesh import Mesh

BATCH, N, DIM, HEADS = 4, 5, 16, 4
PAIR = (("tensor", 2),)
WORLDS = [PAIR, (("tensor", 1),), (("tensor", 2), ("data", 2)), (("tensor", 4),)]
CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def start(world) -> None:
    tpc.setup_process_groups(list(world))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


def randomize(module: nn.Module) -> None:
    """Biases and norms too, so that one counted twice or not copied shows."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0, 0.3)


def my_rows(sequence_parallel: bool) -> slice:
    if not sequence_parallel:
        return slice(0, BATCH)
    rows = BATCH // tpc.get_tp_size()
    return slice(rows * tpc.get_tp_rank(), rows * (tpc.get_tp_rank() + 1))


def check_gradients(parallel: nn.Module, serial: nn.Module) -> None:
    whole = {name: p.grad for name, p in serial.named_parameters()}
    layouts = collect(parallel)
    mesh = tpc.topology.dense
    assert {name.replace(".linear.", ".") for name in layouts} == whole.keys()
    for name, parameter in parallel.named_parameters():
        for at, local in blocks(layouts[name], mesh, tpc.rank):
            got, wanted = parameter.grad[local], whole[name.replace(".linear.", ".")][at]
            torch.testing.assert_close(got, wanted, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


def check_block(world, sequence_parallel: bool) -> None:
    start(world)
    serial = Block(DIM, num_heads=HEADS)
    parallel = ParallelBlock(DIM, num_heads=HEADS, sequence_parallel=sequence_parallel)
    randomize(serial)
    parallel.init_from_full(serial)

    x, factor = torch.randn(2, BATCH, N, DIM)
    x.requires_grad_()
    expected = serial(x)
    (expected * factor).sum().backward()
    rows = my_rows(sequence_parallel)
    mine = x[rows].detach().requires_grad_()
    y = parallel(mine)
    (y * factor[rows]).sum().backward()
    torch.testing.assert_close(y, expected[rows], **CLOSE)
    torch.testing.assert_close(mine.grad, x.grad[rows], **CLOSE)
    check_gradients(parallel, serial)


@pytest.mark.few(1)
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_parallel_block_equals_its_serial_twin(ranks, world):
    """With and without sequence parallelism."""
    ranks(Mesh(world).size).run(each, check_block, [(world, False), (world, True)])


def check_transformer(world, tensor_parallel: bool, sequence_parallel: bool) -> None:
    start(world)
    serial = Transformer(DIM, num_heads=HEADS, depth=2, tensor_parallel=False)
    parallel = Transformer(
        DIM,
        num_heads=HEADS,
        depth=2,
        tensor_parallel=tensor_parallel,
        sequence_parallel=sequence_parallel,
    )
    randomize(serial)
    for block, whole in zip(parallel.blocks, serial.blocks, strict=True):
        if tensor_parallel:
            block.init_from_full(whole)
        else:
            block.load_state_dict(whole.state_dict())
    x, factor = torch.randn(2, BATCH, N, DIM)
    x.requires_grad_()
    twin = x.detach().clone().requires_grad_()
    expected, y = serial(x), parallel(twin)
    assert y.shape == expected.shape
    torch.testing.assert_close(y, expected, **CLOSE)
    (expected * factor).sum().backward()
    (y * factor).sum().backward()
    torch.testing.assert_close(twin.grad, x.grad, **CLOSE)
    check_gradients(parallel, serial)


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [PAIR, WORLDS[2]], ids=str)
def test_a_transformer_takes_and_gives_the_whole(ranks, world):
    """Tensor parallel or not, with sequence parallelism or without."""
    cases = [(world, *case) for case in ((True, True), (True, False), (False, True))]
    ranks(Mesh(world).size).run(each, check_transformer, cases)


def check_mlp_and_attention() -> None:
    start(PAIR)
    pairs = [
        (Mlp(DIM, 24, 8, nn.ReLU), TpMlp(DIM, 24, 8, nn.ReLU)),
        (Attention(DIM, HEADS, qkv_bias=True), TpAttention(DIM, HEADS, qkv_bias=True)),
    ]
    x = torch.randn(BATCH, N, DIM)
    for serial, parallel in pairs:
        randomize(serial)
        whole = dict(serial.named_parameters())
        for name, layer in parallel.named_children():
            if isinstance(layer, ColParallelLinear | RowParallelLinear):
                take = layer.init_weight_from_full
                if name == "qkv":
                    take = layer.init_weight_from_full_attn
                take(whole[f"{name}.weight"], whole[f"{name}.bias"])
        torch.testing.assert_close(parallel(x), serial(x), **CLOSE)
    with pytest.raises(LayoutError, match=r"whole tensor has shape \(4, 4\).* \(16, 24\)"):
        pairs[0][1].fc1.init_weight_from_full(torch.ones(4, 4))
    with pytest.raises(LayoutError, match=facts_pattern("TpAttention", "1 heads", "2 tensor")):
        TpAttention(DIM, 1)


def test_mlp_and_attention_take_weights_from_their_twins(ranks):
    ranks(2).run(check_mlp_and_attention)


def check_initial_weights() -> list[float]:
    start(PAIR)
    torch.manual_seed(tpc.rank)
    net = TpMlp(DIM, 32)
    assert net.fc1.linear.weight.shape == (DIM, 16)
    assert net.fc2.linear.bias.abs().max() == 0
    bound = 32**-0.5
    assert net.fc2.linear.weight.abs().max() < bound
    assert net.fc2.linear.weight.min() < -0.9 * bound
    initialize(net, collect(net), tpc.topology.dense, tpc.rank, 1)
    gathered = gather_from_sequence_parallel_region(net.fc2.linear.weight)
    return gathered.flatten().tolist()


def test_initial_weights_are_centred_and_do_not_depend_on_the_layout(ranks):
    one, other = ranks(2).run(check_initial_weights)
    assert one == other


def check_regions() -> None:
    start((("data", 2), ("tensor", 2)))
    group = tpc.get_group("tensor")
    index = group.rank()
    x = torch.arange(8.0).view(4, 2).requires_grad_()

    part = maybe_split_into_sequence_parallel(x)
    assert torch.equal(part, x[2 * index : 2 * index + 2])
    assert is_squence_parallel_tensor(part)
    assert maybe_split_into_sequence_parallel(part) is part
    (grad,) = torch.autograd.grad((part * (index + 1)).sum(), x)
    assert torch.equal(grad[:, 0], torch.tensor([1.0, 1, 2, 2])), "rows of others have gradients"

    for summed in (True, False):
        mine = x.detach()[2 * index : 2 * index + 2].requires_grad_()
        whole = gather_from_sequence_parallel_region(mine, summed)
        assert torch.equal(whole, x)
        assert not is_squence_parallel_tensor(whole)
        (grad,) = torch.autograd.grad((whole * (index + 1)).sum(), mine)
        assert grad.unique().item() == (3 if summed else index + 1)

    summed = reduce_scatter_to_sequence_parallel_region(x)
    assert torch.equal(summed, 2 * x[2 * index : 2 * index + 2])
    assert is_squence_parallel_tensor(summed)
    assert not is_squence_parallel_tensor(summed + 0)
    assert torch.equal(maybe_gather_from_sequence_parallel(summed), 2 * x)
    assert maybe_gather_from_sequence_parallel(x) is x


def test_sequence_regions_and_their_gradients(ranks):
    ranks(4).run(check_regions)


def check_group_choice() -> None:
    assert get_tp_group() is dist.group.WORLD
    tpc.setup_process_groups([("data", 2), ("tensor", 2)])
    assert get_tp_group() is tpc.get_group("tensor")
    set_tp_group(tpc.get_group("data"))
    assert get_tp_group() is tpc.get_group("data")
    layer = ColParallelLinear(4, 4)
    set_tp_group(None)
    assert get_tp_group() is tpc.get_group("tensor")
    assert layer.group is tpc.get_group("data")
    mlp = TpMlp(4, 8, tp_group=tpc.get_group("data"))
    assert mlp.fc1.group is tpc.get_group("data")
    assert get_tp_group() is tpc.get_group("tensor"), "a layer's group is its own affair"
    assert get_tensor_model_parallel_world_size() == 2


def test_the_group_is_chosen_reset_and_held(ranks):
    ranks(4).run(check_group_choice)


def check_alone() -> None:
    x = torch.ones(2, 3)
    set_sequence_parallel_attr(x)
    whole = gather_from_sequence_parallel_region(x)
    assert is_squence_parallel_tensor(x), "the caller's tensor keeps its note"
    assert not is_squence_parallel_tensor(whole)
    assert not is_squence_parallel_tensor(set_sequence_parallel_attr(x, False))
    linear, y = TpLinear(3, 200).double(), x.detach().double()
    assert (
        linear.weight.shape == (3, 200) and -1 < linear.weight.min() < 0 < linear.weight.max() < 1
    )
    randomize(linear)
    torch.testing.assert_close(linear(y), y @ linear.weight + linear.bias, **CLOSE)
    assert TpLinear(3, 2, bias=False)(x).shape == (2, 2)
    by_hand = ColParallelLinear(3, 4)
    assert by_hand(x).shape == (2, 4)


def test_one_rank_is_a_group_like_any_other(ranks):
    ranks(1).run(check_alone)


def dropped(sequence_parallel: bool) -> list[bool]:
    start(PAIR)
    net = TpMlp(DIM, 32, drop=0.5, sequence_parallel=sequence_parallel)
    rows = 1 if sequence_parallel else 2
    return (net(torch.ones(rows, N, DIM)) == 0).flatten().tolist()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_of_the_output_is_alike_where_the_output_is(ranks, sequence_parallel):
    one, other = ranks(2).run(dropped, sequence_parallel)
    assert (one != other) == sequence_parallel
