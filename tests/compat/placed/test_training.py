"""A placed classifier of digits learns what the plain one learns, step by step."""

from __future__ import annotations

import pytest

STEPS, BATCH = 12, 64


def digits(num_steps: int) -> tuple[float, float]:
    """Two branches on two places, a head on a third, integer labels; accuracies of both."""
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch import nn

    from torchdistpackage.compat.placed import DeviceFunctor

    torch.set_default_dtype(torch.float64)
    data = load_digits()
    images, labels = torch.tensor(data.data / 16), torch.tensor(data.target)

    def parts():
        torch.manual_seed(3)
        left = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True))
        right = nn.Sequential(nn.Linear(64, 32), nn.Tanh())
        return left, right, nn.Linear(64, 10)

    plain, own = nn.ModuleList(parts()), parts()
    F = DeviceFunctor(["cpu"] * dist.get_world_size())
    places = [F.allocate_device() for _ in range(3)]
    made = []
    for place, module in zip(places, own, strict=True):
        with F.under(place):
            made.append(F(module))
    with F.under(places[2]):
        join = F(lambda a, b: torch.cat([a, b], dim=1))
        loss_of = F(nn.functional.cross_entropy)
    left, right, head = made
    groups = [{"params": made[:2], "lr": 0.3}, {"params": head}]
    optimizer = F.optimizer(torch.optim.SGD, groups, lr=0.3, momentum=0.9)
    expected = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
    schedules = [
        torch.optim.lr_scheduler.StepLR(one, 50, 0.9)  # on ranks that hold nothing, too
        for one in (optimizer, expected)
    ]

    def forward(x):
        return head(join(left(x), right(x)))

    for step in range(num_steps):
        chosen = slice(step * BATCH % 1536, step * BATCH % 1536 + BATCH)
        with F.under(places[0]):
            x = F(images[chosen])
        with F.under(places[1]):
            y = F(labels[chosen])
        loss = loss_of(forward(x), y)
        loss.backward()
        hidden = torch.cat([plain[0](images[chosen]), plain[1](images[chosen])], dim=1)
        error = nn.functional.cross_entropy(plain[2](hidden), labels[chosen])
        error.backward()
        for mine, like in zip(made, plain, strict=True):
            for p, q in zip(mine.parameters(), like.parameters(), strict=False):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-11)
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
        for one in schedules:
            one.step()
    for module in made:
        module.eval()
    plain.eval()
    with torch.no_grad():
        with F.under(places[0]):
            guess = forward(F(images[1536:])).full().argmax(1)
        hidden = torch.cat([plain[0](images[1536:]), plain[1](images[1536:])], dim=1)
        right_ones = plain[2](hidden).argmax(1) == labels[1536:]
    F.finish()
    return (guess == labels[1536:]).double().mean().item(), right_ones.double().mean().item()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num", "steps"),
    [(3, 24), *(pytest.param(n, 150, marks=pytest.mark.full) for n in (1, 2, 3, 4))],
)
def test_digits_are_learned_as_by_the_plain_program(ranks, num, steps):
    for mine, plain in ranks(num).run(digits, steps):
        assert mine == plain > (0.85 if steps > 100 else 0.7)


def noise(count: int) -> list:
    """Dropout, and data drawn by the program between operations."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from torchdistpackage.compat.placed import DeviceFunctor

    F = DeviceFunctor(["cpu"] * dist.get_world_size())
    places = [F.allocate_device() for _ in range(count)]
    drawn, found = [], []
    with F.under(places[1]):
        drop = F(nn.Dropout())
        built = F.build(nn.Linear, 4, 4)
        with torch.device("meta"):
            later = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
        later = F(later)
    for place in places:
        x = torch.rand(8)
        drawn.append(x.tolist())
        with F.under(place):
            found.append(drop(F(x)).full().tolist())
    with F.under(places[0]):
        x = F(torch.ones(2, 4))
    found.append(later(built(x)).full().tolist())
    assert all(not p.is_meta for p in later.parameters())
    assert len(list(built.parameters())) == (2 if places[1].rank == dist.get_rank() else 0)
    F.finish()
    return [drawn, found]


def test_ranks_draw_alike_and_operations_the_same_on_any_number_of_ranks(ranks):
    first = ranks(1).run(noise, 3)[0]
    for num in (2, 3):
        assert ranks(num).run(noise, 3) == [first] * num
    assert first[1][0] != first[1][1]
