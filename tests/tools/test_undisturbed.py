"""A model that is run for what it shows leaves no trace, whether it returns or raises."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from torchdistpackage.tools.undisturbed import in_eval, keep_random_states, undisturbed


class Drawing(nn.Module):
    """Draws numbers, and changes a buffer in place, puts another one in its place, and fills one
    that was None."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("cache", None)

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        self.seen, self.cache = self.seen + 1, x.clone()
        y = nn.functional.dropout(self.linear(self.norm(x)), 0.5)
        if fails:
            raise ValueError("as asked")
        return y


@pytest.mark.parametrize("fails", [False, True])
def test_random_numbers_buffers_and_gradients_are_as_before(fails):
    torch.manual_seed(0)
    model, x = Drawing(), torch.randn(4, 3)
    model(x).sum().backward()
    trained = list(model.parameters())
    grads = [(p.grad, p.grad.clone()) for p in trained]
    buffers = {name: (b, None if b is None else b.clone()) for name, b in named(model).items()}
    state = torch.get_rng_state()
    outcome = pytest.raises(ValueError) if fails else nullcontext()
    with outcome, undisturbed(model, gradients_of=trained):
        for p in trained:
            p.grad = None
        model(x).sum().backward()
        assert any(p.grad is not before for p, (before, _) in zip(trained, grads, strict=True))
        assert not torch.equal(torch.get_rng_state(), state) and model.seen == 2
        model(x, fails)
    assert torch.equal(torch.get_rng_state(), state)
    for name, b in named(model).items():
        before, values = buffers[name]
        assert b is before and (b is None or torch.equal(b, values)), name
    for p, (before, values) in zip(trained, grads, strict=True):
        assert p.grad is before and torch.equal(before, values)


def named(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        f"{path}.{name}": buffer
        for path, owner in model.named_modules()
        for name, buffer in owner._buffers.items()
    }


@pytest.mark.parametrize("fails", [False, True])
def test_each_part_is_in_the_mode_of_before(fails):
    model, other = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout())), nn.Dropout().eval()
    model[1].eval()
    before = [part.training for part in (*model.modules(), other)]
    with pytest.raises(ValueError) if fails else nullcontext(), in_eval(model, other):
        assert not any(part.training for part in (*model.modules(), other))
        model.train()
        if fails:
            raise ValueError
    assert (
        [part.training for part in (*model.modules(), other)]
        == before
        == [True, True, False, False, False]
    )


def test_random_numbers_of_a_device_without_memory_are_none_to_keep():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with keep_random_states(torch.device("cpu"), torch.device("meta")):
        torch.rand(5)
    assert torch.equal(torch.rand(2), expected)
