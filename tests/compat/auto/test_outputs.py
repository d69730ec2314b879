"""Outputs of a split module are the caller's, who may change them in place as any other tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.parallel.auto.families import FAMILIES
from tests.parallel.auto.models import same_state, twin
from tests.parallel.auto.test_trainer import samples
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.parallel.auto import Config, FirstOnly, Split


class Twice(nn.Module):
    """One tensor under two names."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = x * 3
        return {"last": y, "all": y, "view": y[:1]}


def layers(*last: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 4), *last)


ENDINGS = {
    "a sum": layers,
    "a gather": lambda: layers(nn.LayerNorm(4), nn.Linear(4, 5)),
    "a view": lambda: layers(nn.Flatten(0)),
    "one tensor twice": lambda: layers(Twice()),
}


def plan(num: int, full: bool) -> Config:
    return Config(
        {r"^0\.": Split(num, 0), r"^2\.weight": Split(num, 1), r"^2\.bias": FirstOnly()},
        {"^0$": {0: "copy"}},
        {"^2$": {0: "sum"}},
        {},
        full_gradients=full,
    )


def change(module: nn.Module) -> list[torch.Tensor]:
    """Outputs after a change in place, and the gradients behind it."""
    x = torch.arange(12, dtype=torch.float64).reshape(3, 4).cos().requires_grad_()
    given = module(x)
    outputs = given if isinstance(given, dict) else {"last": given}
    y = outputs["last"]
    y *= 2.0
    y += y.detach() ** 2
    sum(each.square().sum() for name, each in outputs.items() if name != "view").backward()
    return [y.detach(), x.grad]


def changed_in_place(num_threads: int | None, num: int) -> None:
    devices = num_threads and ["cpu"] * num_threads
    for make in ENDINGS.values():
        torch.manual_seed(0)
        module = make().double()
        for config in (None, plan(num, True), plan(num, False)):
            alone, split = twin(module), tensor_parallel(twin(module), devices, config)
            torch.testing.assert_close(change(split), change(alone), atol=1e-11, rtol=0)
            with torch.no_grad():
                for parameter in (*split.parameters(), *alone.parameters()):
                    if parameter.grad is not None:
                        parameter -= parameter.grad
            same_state(split, alone)


def test_an_output_of_threads_is_changed_in_place():
    changed_in_place(2, 2)


def test_an_output_of_ranks_is_changed_in_place(ranks):
    ranks(2).run(changed_in_place, None, 2)


def overwritten(num: int | None) -> None:
    """The derivative of tanh needs its output."""
    split = tensor_parallel(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), num and ["cpu"] * num)
    y = split(torch.ones(2, 4))
    y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_change_of_what_a_backward_needs_is_noticed(ranks):
    overwritten(2)
    ranks(2).run(overwritten, None)


class PassesOn(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return x if super().forward(x) is not None else None


def test_a_change_of_an_output_leaves_the_input_alone():
    split = tensor_parallel(PassesOn(nn.Linear(4, 6)), ["cpu"] * 2)
    x = torch.ones(2, 4, requires_grad=True)
    y = split(x)
    y += 1
    assert torch.equal(x, torch.ones(2, 4))


def trained(model: Any, folder: Path) -> list[float]:
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        max_grad_norm=0.0,  # of all shards together, which hold some weights alike
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=model, args=args, train_dataset=samples(8, 1))
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.full
def test_hugging_faces_trainer_changes_the_loss_of_threads(tmp_path):
    """A T5 over two threads, whose loss the Trainer divides in place."""
    torch.manual_seed(0)
    model = FAMILIES["t5"]().double()
    split = tensor_parallel(twin(model), ["cpu"] * 2)
    losses = [trained(each, tmp_path) for each in (split, model)]
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=2e-7)  # which the Trainer adds up in float32
    same_state(split, model, 1e-9)
