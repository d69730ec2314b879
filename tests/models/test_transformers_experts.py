"""Stacked experts of transformers on one rank: as one graph, and by rows, as by its own code."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.models.found_cases import STACKED, transformers
from torchdistpackage.comm.primitives import Group
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.transformers_experts import experts_of, share_experts

TOKENS, DIM, EXPERTS = 7, 8, 4
SIZES = {"hidden_size": DIM, "intermediate_size": 4, "num_local_experts": EXPERTS}
ALONE = cast(Group, SimpleNamespace(size=lambda: 1, rank=lambda: 0))


def block_of(family: str) -> Any:
    """A block's mixture, in float64."""
    torch.manual_seed(1)
    options = {**SIZES, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    if family == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block

        config: Any = transformers.MixtralConfig(**options)
    elif family == "gpt_oss":
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP as Block

        config = transformers.GptOssConfig(**options)
    else:
        from transformers.models.llama4.modeling_llama4 import Llama4TextMoe as Block

        config = transformers.Llama4TextConfig(**options)
    block = nn.Sequential(Block(config)).double()
    with torch.no_grad():
        for p in block.parameters():
            p.normal_(0, 0.3)
    return block


def answers(block: Any) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    x = torch.linspace(-1, 1, TOKENS * DIM, dtype=torch.float64).sin().mul(5)
    x = x.view(1, TOKENS, DIM).requires_grad_()
    y = block(x)
    y = y[0] if isinstance(y, tuple) else y
    y.square().sum().backward()
    named = {name: p.grad for name, p in block.named_parameters()}
    return {"y": y.detach().view(TOKENS, DIM), "x": x.grad, **named}  # type: ignore[dict-item]


@STACKED
@pytest.mark.parametrize(
    ("family", "is_compiled"),
    [
        ("llama4", False),
        ("mixtral", True),
        *(
            pytest.param(*x, marks=pytest.mark.full)
            for x in (("llama4", True), ("mixtral", False), ("gpt_oss", False), ("gpt_oss", True))
        ),
    ],
)
def test_experts_of_one_rank_compute_what_transformers_does(family, is_compiled):
    """Compiled they are one graph, which reads no number on the host; both count the choices."""
    expected, block = answers(block_of(family)), block_of(family)
    ((path, experts),) = experts_of(block).items()
    layouts = {
        f"{path}.{name}": Layout(
            f"{path}.{name}", tuple(p.shape), split=(("expert",), (), ())[: p.dim()]
        )
        for name, p in experts.named_parameters()
    }
    share_experts(block, layouts, ALONE)
    shared: Any = block.get_submodule(path)
    shared.load_state_dict(experts.state_dict())
    if is_compiled:
        torch._dynamo.reset()
        block.compile(backend="aot_eager", fullgraph=True)
    found = answers(block)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-12, atol=1e-12, msg=name)
    counts = shared.counter.take(torch.device("cpu"))
    assert counts.sum() == TOKENS * 2 and counts[-1] == 0
