"""Loops of one's own with ZeroOptimizer, an optimizer of one's own, saves, and mistakes in them."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage import NaiveDDP, ZeroOptimizer, tpc
from torchdistpackage.testing import ParityModel

DIM, BATCH = 8, 8


class Scaled(torch.optim.Optimizer):
    """An optimizer of one's own: a step of the length of the gradient's root mean square."""

    def __init__(self, params: Any, wrong: str):
        super().__init__(params, {"lr": 0.1})
        self.wrong = wrong

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(p)) + p.grad
                if self.wrong == "state":
                    state["mean"] += 1e-3 * p.grad * tpc.rank
                scale: Any = 1.0
                if self.wrong == "update":
                    scale = 1.0 + 0.1 * tpc.rank * p.sign()
                if self.wrong == "rate":
                    scale = 1.0 * tpc.get_group_size("data")
                p -= group["lr"] * scale * (p.grad if self.wrong == "state" else state["mean"])


def build(wrong: str = "", zero: int = 0) -> ParityModel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5), nn.GELU(), nn.Linear(DIM, 1))
    net = net.double()
    torch.manual_seed(tpc.rank)
    inner: Any = Scaled(net.parameters(), wrong)
    if wrong == "":
        inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    if zero:
        model, optimizer = net, ZeroOptimizer(inner, net, stage=zero)
    else:
        model, optimizer = NaiveDDP(net), inner
    loads = [0]

    def step(fed: tuple[Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = (model(fed[0]) - fed[1]).square().mean()
        loss.backward()
        if wrong == "missing" and tpc.rank == 1:
            net[3].weight.grad = None
        optimizer.step()
        return loss

    def save(folder: Path) -> None:
        state = {"net": net.state_dict(), "random": torch.get_rng_state()}
        if wrong != "no state" and not (wrong == "second" and loads[0]):
            state["optimizer"] = optimizer.state_dict()
        torch.save(state, folder / f"{tpc.rank}.pt")

    def load(folder: Path) -> None:
        state = torch.load(folder / f"{tpc.rank}.pt", weights_only=True)
        net.load_state_dict(state["net"])
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])
        if wrong != "random" or tpc.rank == 0:
            torch.set_rng_state(state["random"])
        loads[0] += 1

    return ParityModel(net, step, optimizer, save, load)


def batch(number: int, index: int, num: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(BATCH, DIM, generator=draw, dtype=torch.float64)
    return x.chunk(num)[index], x.sum(1, keepdim=True).chunk(num)[index]


def planted(wrong: str, zero: int = 0) -> partial[ParityModel]:
    return partial(build, wrong, zero)
