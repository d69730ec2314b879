"""A chain of stages beside the same model in one process, which the tests hold it to."""

import torch
from torch import Tensor, nn

DIM = 4


def chain(num_stages: int) -> nn.Sequential:
    """Alike on every rank, in float64."""
    torch.manual_seed(num_stages)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(num_stages))
    ).double()


def batch(num_samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    make = lambda: torch.randn(num_samples, DIM, generator=draw, dtype=torch.float64)  # noqa: E731
    return make(), make()


def squares(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def same(mine: Tensor | None, truth: Tensor | None) -> None:
    torch.testing.assert_close(mine, truth, rtol=0, atol=1e-12)


def same_gradients(stages: dict[int, nn.Module], whole: nn.Sequential) -> None:
    for number, stage in stages.items():
        for mine, truth in zip(stage.parameters(), whole[number].parameters(), strict=True):
            same(mine.grad, truth.grad)
