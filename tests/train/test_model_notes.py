"""What a run says of a user's own model whose ranks share nothing of it."""

from types import SimpleNamespace

from torch import nn

from tests.tells import tells
from torchdistpackage.config.load import loads
from torchdistpackage.layout.layout import Layout
from torchdistpackage.parallel.context.module import is_wrapped
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.model_notes import model_notes


def notes(layout: Layout, stage: nn.Module, **degrees: int) -> str:
    own = ["model={target: 'm:build'}", "data={target: 'm:Rows', seq_len: 16}"]
    own += [f"parallel.{axis}={size}" for axis, size in {"data": 1, **degrees}.items()]
    size = 1
    for degree in degrees.values():
        size *= degree
    plan = make_plan(loads("{}", overrides=own), size)
    return "\n".join(model_notes(SimpleNamespace(plan=plan, layouts={"w": layout}, stage=stage)))


def test_a_model_that_tensor_ranks_copy_is_said_with_its_size():
    whole, split = Layout("w", (6, 4)), Layout("w", (6, 4), (("tensor",), ()))
    said = notes(whole, nn.Linear(4, 6), tensor=2)
    assert tells(said, "1 parameters", "24 numbers")
    assert "2 ranks hold the same copy" in said
    assert "hold the same copy" not in notes(split, nn.Linear(4, 6), tensor=2)
    assert "hold the same copy" not in notes(whole, nn.Linear(4, 6))


def test_plain_attention_on_context_ranks_is_said():
    whole, plain = Layout("w", (6, 4)), nn.Sequential(nn.Linear(4, 6))
    said = notes(whole, plain, context=2)
    assert tells(said, "parallel.context=2", "2 parts")
    assert "one of 2 parts" not in notes(whole, plain)
    assert not is_wrapped(plain)
