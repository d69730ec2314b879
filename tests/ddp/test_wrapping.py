"""What wrapping keeps and sets: sums, dtypes, strides, buffers, names, groups."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ddp.one_process import DIM, build
from tests.tells import facts_pattern
from torchdistpackage.comm import primitives
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.param_sync import MESSAGE_BYTES, check_replicas
from torchdistpackage.errors import CommError


def sums_and_dtypes() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.ModuleDict(
        {"a": nn.Linear(2, 2).double(), "b": nn.Linear(2, 2).bfloat16(), "skip": nn.Linear(2, 2)}
    )
    with torch.no_grad():
        model["skip"].weight.fill_(rank)
    model._ddp_params_and_buffers_to_ignore = ["skip.weight"]
    model.forward = lambda scale: sum((p * scale).float().sum() for p in model.parameters())
    ddp = NaiveDDP(model, reduce_op="SUM")
    for _ in range(2):
        ddp.zero_grad()
        ddp(rank + 1.0).backward()
    total = size * (size + 1) / 2
    for name, p in model.named_parameters():
        expected = rank + 1.0 if name == "skip.weight" else total
        assert torch.equal(p.grad, torch.full_like(p, expected)), name
        assert p.grad.dtype == p.dtype
    assert float(model["skip"].weight.detach()[0, 0]) == rank


def test_sum_is_honoured_dtypes_are_kept_and_ignored_names_left_alone(ranks):
    ranks(3).run(sums_and_dtypes)


def strides_are_kept() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    ddp = NaiveDDP(model)
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        ddp(x).sum().backward()
        assert model.weight.grad.stride() == model.weight.stride()


def test_gradients_keep_the_strides_of_their_parameters(ranks):
    ranks(2).run(strides_are_kept)


def buffers_follow() -> None:
    rank = dist.get_rank()
    ddp = NaiveDDP(nn.BatchNorm1d(DIM))
    for step in range(3):
        ddp(torch.randn(4, DIM) + rank + step)
    means = primitives.gather_objects(ddp.module.running_mean)
    ddp.train()
    ddp(torch.zeros(4, DIM))
    after = primitives.gather_objects(ddp.module.running_mean)
    assert not torch.equal(means[0], means[1]), "each forward moves the buffers by its own data"
    assert torch.equal(after[0], means[0] * 0.9) and torch.equal(after[1], means[0] * 0.9)


def test_buffers_follow_the_first_rank_before_each_training_forward(ranks):
    ranks(2).run(buffers_follow)


class Sent:
    """Stands for `primitives.broadcast`; notes what it sends."""

    def __init__(self):
        self.send, self.sizes = primitives.broadcast, []

    def __call__(self, x: torch.Tensor, *args: object) -> torch.Tensor:
        self.sizes.append(x.numel())
        return self.send(x, *args)


def many_at_a_time() -> None:
    torch.manual_seed(dist.get_rank())
    norms = [nn.BatchNorm1d(DIM) for _ in range(9)]
    net = nn.Sequential(*norms, nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last))
    net.register_buffer("none", torch.empty(0))
    net.register_buffer("turned", torch.randn(2, 5).t())
    net.register_buffer("large", torch.randn(MESSAGE_BYTES // 4 - 1))
    net.forward = nn.Sequential(*norms).forward
    sent = Sent()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitives, "broadcast", sent)
        ddp = NaiveDDP(net)
        first = sum(p.numel() for p in net.parameters()) + net.turned.numel()
        assert sorted(sent.sizes) == [9, 9 * 2 * DIM, first, net.large.numel()]
        check_replicas(ddp.replicas())
        sent.sizes.clear()
        net.large = None
        out = ddp(torch.randn(4, DIM))
        assert sorted(sent.sizes) == [9, 9 * 2 * DIM + 10]
    (out + ddp(torch.randn(4, DIM))).sum().backward()  # whose graph knows the buffers


def test_what_is_equalised_travels_many_tensors_at_a_time(ranks):
    ranks(2).run(many_at_a_time)


class Versioned(nn.Linear):
    """Has extra state, and a version that its states must bring."""

    _version = 3
    loaded: object = None

    def get_extra_state(self) -> object:
        return self.loaded

    def set_extra_state(self, state: object) -> None:
        self.loaded = state

    def _load_from_state_dict(self, state, prefix, local, *rest):
        assert local.get("version") == 3
        super()._load_from_state_dict(state, prefix, local, *rest)


class Outer(nn.Module):
    """A child has the name that the wrapper's has."""

    def __init__(self):
        super().__init__()
        self.module, self.other = Versioned(2, 2), Versioned(2, 2)


def extra_state() -> None:
    for build_one in (lambda: Versioned(2, 2), lambda: nn.Sequential(Versioned(2, 2)), Outer):
        plain = build_one()
        for number, part in enumerate(m for m in plain.modules() if isinstance(m, Versioned)):
            part.loaded = number + 1
        saved = NaiveDDP(plain).state_dict()
        assert saved.keys() == plain.state_dict().keys()
        for target in (build_one(), NaiveDDP(build_one())):
            for state in (saved, plain.state_dict()):
                target.load_state_dict(state)
                parts = [m for m in target.modules() if isinstance(m, Versioned)]
                assert [m.loaded for m in parts] == [n + 1 for n in range(len(parts))]
                assert torch.equal(parts[-1].weight, list(plain.modules())[-1].weight)


def test_extra_state_and_versions_load_into_wrappers_and_plain_modules(ranks):
    ranks(1).run(extra_state)


def names_are_the_modules() -> None:
    plain = build("plain")
    ddp = NaiveDDP(copy.deepcopy(plain))
    assert ddp.state_dict().keys() == plain.state_dict().keys()
    outer = nn.ModuleDict({"net": ddp})
    state = outer.state_dict()
    assert set(state) == {f"net.{name}" for name in plain.state_dict()}
    changed = {name: torch.full_like(x, 2.0) for name, x in state.items()}
    outer.load_state_dict(changed)
    assert all(bool((p == 2).all()) for p in ddp.module.parameters())


def test_state_dict_has_the_names_of_the_module(ranks):
    ranks(1).run(names_are_the_modules)


def fewer_microbatches() -> None:
    """Six with num_grad_acc_iter=4: two are left over, and four come after them."""
    layer = nn.Linear(1, 1, bias=False).double()
    ddp, x = NaiveDDP(layer, num_grad_acc_iter=4), torch.ones(1, 1, dtype=torch.float64)
    for number, total in ((4, 4), (2, 2), (4, 4)):
        ddp.zero_grad()
        for _ in range(number):
            ddp(x * dist.get_rank()).sum().backward()
        if number < 4:
            assert layer.weight.grad.item() == total * dist.get_rank()
            ddp.reduce_gradients()
        assert layer.weight.grad.item() == total * (dist.get_world_size() - 1) / 2


def test_microbatches_left_over_are_reduced_by_hand(ranks):
    ranks(2).run(fewer_microbatches)


def wrapped_again() -> None:
    net = nn.Sequential(nn.Embedding(64, 2), nn.Linear(2, 2))
    for _ in range(2):
        ddp = NaiveDDP(net)
        ddp(torch.tensor([dist.get_rank()])).sum().backward()
        gone = weakref.ref(ddp), weakref.ref(ddp.reducer)
        del ddp
        gc.collect()
        assert [ref() for ref in gone] == [None, None]
        assert not net[1].weight._post_accumulate_grad_hooks


def test_a_wrapper_that_is_dropped_goes_with_its_hooks(ranks):
    ranks(2).run(wrapped_again)


def group_not_at_zero() -> None:
    """Two data groups of two, {0, 2} and {1, 3}: sources and means are those of the group."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    layer = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        layer.weight.fill_(rank)
    ddp = NaiveDDP(layer, process_group=group)
    assert float(layer.weight.detach()[0, 0]) == rank % 2
    ddp(torch.full((1, 2), float(rank), dtype=torch.float64)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((1, 2), rank % 2 + 1.0, dtype=torch.float64))
    with pytest.raises(CommError, match="which is not in the group of ranks"):
        NaiveDDP(layer, process_group=group, dp_rank0=(rank + 1) % 2)


def test_groups_need_not_start_at_rank_0(ranks):
    ranks(4).run(group_not_at_zero)


def first_ranks_values() -> None:
    """Frozen parameters, buffers, and modules that have nothing else."""
    rank = dist.get_rank()
    frozen = nn.Linear(DIM, DIM).requires_grad_(False)
    for net in (frozen, nn.BatchNorm1d(DIM, affine=False), nn.Sequential(nn.ReLU())):
        with torch.no_grad():
            for tensor in [*net.parameters(), *net.buffers()]:
                tensor.fill_(rank + 1)
        ddp = NaiveDDP(net)
        assert all(bool((t == 1).all()) for t in [*net.parameters(), *net.buffers()])
        ddp(torch.ones(2, DIM))
        ddp.reduce_gradients()


def test_all_start_with_the_first_ranks_values_frozen_or_buffers_only(ranks):
    ranks(2).run(first_ranks_values)


def unlike_modules() -> None:
    rank = dist.get_rank()
    text = r"weight is \(2, 3\) float32 on rank 0 and \(3, 3\) float32 on rank 1"
    with pytest.raises(CommError, match=text):
        NaiveDDP(nn.Linear(3, 2 + rank % 2))
    with pytest.raises(CommError, match=facts_pattern("1.weight", "rank 0", "(2, 2)", "float32")):
        NaiveDDP(nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + rank))))


def test_modules_that_differ_between_ranks_are_refused_on_all_of_them(ranks):
    ranks(3).run(unlike_modules)


def not_to_be_sent() -> None:
    with pytest.raises(CommError, match=r"0\.weight is not yet initialised: run one forward"):
        NaiveDDP(nn.Sequential(nn.LazyLinear(3)))
    net = nn.Linear(2, 2)
    net.register_buffer("ones", torch.ones(1).expand(3))
    with pytest.raises(CommError, match=r"ones, \(3,\) float32 expanded, .* ones\.clone\(\)"):
        NaiveDDP(net)


def test_lazy_parameters_and_expanded_buffers_are_refused_by_name(ranks):
    ranks(2).run(not_to_be_sent)


def bit_flipped() -> None:
    net = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM))
    net[0].requires_grad_(False)
    net._ddp_params_and_buffers_to_ignore = ["2.bias"]
    ddp = NaiveDDP(net)
    optimizer = torch.optim.AdamW(ddp.parameters())
    with torch.no_grad():
        net[2].bias.fill_(dist.get_rank())
    ddp.eval()
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(2, DIM)).square().sum().backward()
        optimizer.step()
    check_replicas(ddp.replicas())
    if dist.get_rank() == 2:
        net[0].weight.view(torch.int32)[3, 1] ^= 1
    with pytest.raises(CommError, match=r"0\.weight on rank 2;"):
        check_replicas(ddp.replicas())


def test_one_flipped_bit_is_told_with_parameter_and_rank(ranks):
    ranks(3).run(bit_flipped)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="use 'avg' or 'sum'"):
        NaiveDDP(nn.Linear(1, 1), reduce_op="mean")
