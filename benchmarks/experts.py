"""A mixture of experts beside transformers' own, the loop over experts, and an exchange by hand.

    python -m benchmarks.experts             about 2 minutes
    python -m benchmarks.experts --rounds 5  quick

A layer of 8 experts, top 2, forward and backward of the same 4,096 tokens: on one core; on two
ranks that share the experts, each on a host of its own, joined by a cable, and kept to a core
(as root); and what travels between these, without experts. Sides take turns in one run; numbers
are medians, ratios the medians of those of each round.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from benchmarks.common import take_turns
from benchmarks.data_parallel.link import RATES, Link, enter_alone, shape
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.launch.workers import run_local
from torchdistpackage.parallel import MoELayer
from torchdistpackage.parallel.expert.dispatch import plan_dispatch

DIM, HIDDEN, EXPERTS, TOP_K, TOKENS, BATCH = 256, 512, 8, 2, 4096, 4
BARS = {
    "layer / transformers' best": 1.00,
    "layer / loop over experts": 0.80,
    "two ranks / one process": 0.62,
    "dispatch / by hand": 1.02,
}
Side = Callable[[], object]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(argv)
    with Link() as link:
        env = {**link.env, "OMP_NUM_THREADS": "1"}
        preload = ("torch", "transformers", "benchmarks.experts")
        args = (link.hosts, options.rounds)
        found = run_local(rank_main, args, num_procs=2, preload=preload, env=env)[0]
    print(json.dumps({"load": os.getloadavg(), **found}))
    middle = lambda name: statistics.median(found[name]) * 1e3  # noqa: E731
    print("\n| | ms |\n|---|---|")
    for name in found:
        print(f"| {name} | {middle(name):.1f} |")
    best = min((x for x in found if x.startswith("transformers")), key=middle)
    pairs = {
        "layer / transformers' best": ("layer", best),
        "layer / loop over experts": ("layer", "loop over experts"),
        "two ranks / one process": ("two ranks", "one process"),
        "dispatch / by hand": ("dispatch", "by hand"),
    }
    print("\n| | ratio | bar |\n|---|---|---|")
    for name, (side, peer) in pairs.items():
        ratio = statistics.median(a / b for a, b in zip(found[side], found[peer], strict=True))
        print(f"| {name} | {ratio:.3f} | {BARS[name]:.2f} |")
    return 0


def rank_main(hosts: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side, round by round."""
    enter_alone(hosts, int(os.environ["RANK"]))
    rank = setup_distributed()[0]
    if rank == 0:
        shape(hosts, RATES["free"])
    torch.manual_seed(1)
    x, grad = (torch.randn(TOKENS // BATCH, BATCH, DIM) for _ in range(2))
    layer = made(dist.new_subgroups(1)[0])
    found = timed(one_rank(layer, x, grad), rounds) if rank == 0 else {}
    dist.barrier()
    found |= timed(two_ranks(rank, layer, x, grad), rounds, dist.barrier)
    leave()
    return found


def timed(
    sides: dict[str, Side], rounds: int, barrier: Side | None = None
) -> dict[str, list[float]]:
    def turn(name: str) -> float:
        if barrier is not None:
            barrier()
        begin = time.perf_counter()
        sides[name]()
        if barrier is not None:
            barrier()
        return time.perf_counter() - begin

    taken = take_turns([*sides], [*sides], rounds + 1, turn)
    return {name: [statistics.median(some) for some in each[1:]] for name, each in taken.items()}


def made(group: dist.ProcessGroup | None = None) -> MoELayer:
    sizes = {"dim": DIM, "hidden": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K}
    return MoELayer(**sizes, gated=True, balance="none", group=group)


def step(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, and gradients of x and of all parameters."""
    inputs = [x.detach().requires_grad_(), *layer.parameters()]
    y = layer(inputs[0])
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def one_rank(layer: MoELayer, x: Tensor, grad: Tensor) -> dict[str, Side]:
    sides: dict[str, Side] = {"layer": lambda: step(layer, x, grad)}
    expected = step(layer, x, grad)
    for way in ("eager", "grouped_mm"):
        block = transformers_block(layer, way)
        for mine, theirs in zip(expected[:2], step(block, x, grad)[:2], strict=True):
            assert (mine - theirs).abs().max() < 1e-4 * theirs.abs().max(), way
        name = "loop over experts" if way == "eager" else f"transformers, {way}"
        sides[name] = lambda block=block: step(block, x, grad)
    return sides


def transformers_block(layer: MoELayer, way: str) -> nn.Module:
    """Qwen3-MoE's block with the weights of `layer`; its batched products would take 8 GB."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    config = qwen.Qwen3MoeConfig(
        hidden_size=layer.dim,
        moe_intermediate_size=layer.shape.hidden,
        num_experts=layer.shape.num_experts,
        num_experts_per_tok=layer.shape.top_k,
        norm_topk_prob=layer.shape.normalize,
    )
    config._experts_implementation = way
    own, state = layer.router.weight, layer.to_full(fused=True)
    block = qwen.Qwen3MoeSparseMoeBlock(config).to(own.device, own.dtype)
    block.load_state_dict(
        {
            "gate.weight": state["router.weight"],
            "experts.gate_up_proj": state["experts.gate_up_proj"],
            "experts.down_proj": state["experts.down_proj"],
        }
    )
    return block


def two_ranks(rank: int, alone: MoELayer, x: Tensor, grad: Tensor) -> dict[str, Side]:
    """Sides that both ranks call; of one process only the first one works."""
    half = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
    mine, mine_grad = x[:, half].contiguous(), grad[:, half].contiguous()
    layer = made().from_full(alone.to_full())
    expected = step(alone, x, grad)
    for got, want in zip(step(layer, mine, mine_grad)[:2], expected[:2], strict=True):
        assert (got - want[:, half]).abs().max() < 1e-4 * want.abs().max()
    tokens, tokens_grad = mine.flatten(0, 1), mine_grad.flatten(0, 1)
    experts = layer.router(mine).experts
    weights = torch.full(experts.shape, 1 / TOP_K)
    for got, want in zip(
        travel(ours, tokens, experts, weights, tokens_grad),
        travel(by_hand, tokens, experts, weights, tokens_grad),
        strict=True,
    ):
        assert (got - want).abs().max() < 1e-5
    return {
        "one process": lambda: step(alone, x, grad) if rank == 0 else None,
        "two ranks": lambda: step(layer, mine, mine_grad),
        "dispatch": lambda: travel(ours, tokens, experts, weights, tokens_grad),
        "by hand": lambda: travel(by_hand, tokens, experts, weights, tokens_grad),
    }


def travel(way: Callable[..., Tensor], x: Tensor, experts: Tensor, weights: Tensor, grad: Tensor):
    """Tokens to the ranks of their experts and back, forward and backward."""
    inputs = [x.detach().requires_grad_(), weights.detach().requires_grad_()]
    y = way(inputs[0], experts, inputs[1])
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def ours(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    bounds = range(0, EXPERTS + 1, EXPERTS // 2)
    plan, _ = plan_dispatch(experts, None, torch.tensor(False), bounds, dist.group.WORLD)
    rows = plan.by_expert(plan.start(plan.rows_of(x)).wait())
    return plan.combine(plan.send_back(plan.by_rank(rows)), weights)


def by_hand(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """With torch's own collective, in as few operations as that takes."""
    world = dist.group.WORLD
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=EXPERTS).view(2, -1)
    arrived = torch.empty_like(counts)
    dist.all_to_all_single(arrived, counts)
    sent, received = counts.sum(1).tolist(), arrived.sum(1).tolist()
    rows = x[order // TOP_K]
    rows = all_to_all_single_autograd(rows, received, sent, world)
    ids = torch.arange(EXPERTS // 2).repeat(2).repeat_interleave(arrived.flatten())
    by_expert = ids.argsort(stable=True)
    rows = rows[by_expert]
    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(len(back))
    rows = all_to_all_single_autograd(rows[back], sent, received, world)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return (rows[places].view(*experts.shape, -1) * weights.unsqueeze(-1)).sum(1)


if __name__ == "__main__":
    sys.exit(main())
