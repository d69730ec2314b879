"""Gradients that travel as rows are those of the dense way, exactly, whatever is looked up."""

import gc
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.sparse_grads import SparseRows
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer

VOCAB, DIM, STEPS = 40, 4, 3


class Words(nn.Module):
    """tokens (B, S) -> logits (B, S, VOCAB); the head tied to the table, to itself, or by hand."""

    def __init__(self, head: str, padding: int | None = None):
        super().__init__()
        self.table = nn.Embedding(VOCAB, DIM, padding_idx=padding)
        self.mix = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.by_hand = head == "by hand"
        if head == "tied":
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x += 1  # in place, as a sum with positions may be
        x = torch.tanh(self.mix(x))
        return x @ self.table.weight.t() if self.by_hand else self.head(x)


def tokens_of(step: int, num: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(VOCAB, (num, 2), generator=draw)


def as_dense(head: str, options: dict, num_tokens: tuple[int, ...], set_to_none: bool) -> None:
    """Both ways side by side, with weights that move; num_tokens: of each rank."""
    torch.manual_seed(0)
    nets = [Words(head, options.pop("padding", None)).double() for _ in range(1)]
    nets.append(Words(head, nets[0].table.padding_idx).double())
    nets[1].load_state_dict(nets[0].state_dict())
    rows = NaiveDDP(nets[0], embedding_rows=True, **options)
    dense = NaiveDDP(nets[1], **options)
    num = num_tokens[dist.get_rank()]
    for step in range(STEPS):
        for ddp in (rows, dense):
            ddp.zero_grad(set_to_none=set_to_none)
            for micro in range(options.get("num_grad_acc_iter", 1)):
                ddp(tokens_of(10 * step + micro, num)).square().mean().backward()
        for (name, p), q in zip(
            rows.module.named_parameters(), dense.module.parameters(), strict=True
        ):
            if q.grad is None:
                assert p.grad is None, name
                continue
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-13, msg=name)
            with torch.no_grad():
                p -= 0.1 * p.grad
                q -= 0.1 * q.grad


@pytest.mark.parametrize("head", ["tied", "own", "by hand"])
@pytest.mark.parametrize(
    ("options", "num_tokens", "set_to_none"),
    [
        ({}, (3, 4), True),
        ({"padding": 1}, (3, 3), False),
        ({"num_grad_acc_iter": 2, "bucket_cap_mb": 0.0001}, (2, 3), True),
        ({"reduce_op": "sum"}, (3, 30), True),
    ],
    ids=["means", "padding, zeroed in place", "accumulated", "too many on one rank"],
)
def test_rows_add_up_to_the_dense_gradient(ranks, head, options, num_tokens, set_to_none):
    ranks(2).run(as_dense, head, options, num_tokens, set_to_none)


def few_elements(head: str, expected: int) -> None:
    """Of all that is sent in a step, nothing has the size of the table unless a head needs it."""
    ddp = NaiveDDP(Words(head), embedding_rows=True, bucket_cap_mb=0.00001)
    sent: list[int] = []
    begin = recorder.begin

    def noted(operation: str, group: object, x: Tensor) -> object:
        sent.append(x.numel())
        return begin(operation, group, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "begin", noted)
        for _ in range(STEPS):
            sent.clear()
            ddp.zero_grad()
            ddp(tokens_of(0, 2)).sum().backward()
    assert sum(size >= VOCAB * DIM for size in sent) == expected
    assert max(size for size in sent if size < VOCAB * DIM) <= 4 * DIM + 1 + DIM * DIM


@pytest.mark.parametrize("head", ["tied", "own"])
def test_a_table_is_sent_only_for_its_head(ranks, head):
    ranks(2).run(few_elements, head, 1)


def equal_to_the_bit() -> None:
    ddp = NaiveDDP(Words("own"), embedding_rows=True)
    ddp(tokens_of(0, 5)).sum().backward()
    grad = ddp.module.table.weight.grad
    others = [torch.empty_like(grad) for _ in range(3)]
    dist.all_gather(others, grad)
    assert all(torch.equal(other, grad) for other in others)


def test_all_ranks_end_with_the_same_bits(ranks):
    ranks(3).run(equal_to_the_bit)


def on_a_device() -> None:
    net = Words("tied").to("meta")
    shared = [ParamSpec(n, p, dist.group.WORLD) for n, p in net.named_parameters()]
    with pytest.raises(ValueError, match=r"embedding_rows: table\.weight is on meta"):
        SparseRows(net, shared, lookups=True, counts=lambda: True)
    assert SparseRows(net, shared, lookups=False, counts=lambda: True).after == []


def test_rows_are_refused_where_the_host_would_wait_for_a_device(ranks):
    ranks(2).run(on_a_device)


def in_zero() -> None:
    net = Words("tied")
    with pytest.raises(ValueError, match="embedding_rows is an option of NaiveDDP"):
        ZeroOptimizer(torch.optim.AdamW(net.parameters()), net, embedding_rows=True)


def test_a_zero_optimizer_refuses_the_option(ranks):
    ranks(2).run(in_zero)


def fail_half_way() -> None:
    """Rows of a backward that failed are not in the next sum."""
    nets = [Words("own").double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    rows, dense = NaiveDDP(nets[0], embedding_rows=True), NaiveDDP(nets[1])
    for step in range(STEPS):
        for ddp in (rows, dense):
            if step == 1:
                tokens = ddp(tokens_of(7, 3))
                handle = tokens.register_hook(_fail)
                with pytest.raises(ValueError, match="half-way"):
                    tokens.square().mean().backward()
                handle.remove()
            ddp.zero_grad()
            ddp(tokens_of(step, 3)).square().mean().backward()
        for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-13)


def _fail(*_: object) -> None:
    raise ValueError("half-way")


def test_a_backward_that_fails_half_way_leaves_no_rows(ranks):
    ranks(2).run(fail_half_way)


def drop() -> None:
    net, plain = Words("own").double(), Words("own").double()
    plain.load_state_dict(net.state_dict())
    ddp = ref(NaiveDDP(net, embedding_rows=True))
    gc.collect()
    assert ddp() is None
    for each in (plain, net):
        each(tokens_of(0, 3)).sum().backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_the_hooks_of_lookups_do_not_keep_a_wrapper(ranks):
    ranks(2).run(drop)
