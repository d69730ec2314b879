"""Blocks of transformers that `tensor_parallel` has split, under torch.compile."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from tests.each import each
from tests.parallel.tensor.compiled_cases import (
    ADDED,
    DIM,
    HEADS,
    HIDDEN,
    VOCAB,
    Case,
    Make,
    activations,
    compared,
    made,
    step,
)
from torchdistpackage.comm import primitives
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.parallel.auto.draws import ShardDraws, default_draw

RANKS_IMPORT = ("torch._functorch.aot_autograd", "torch._inductor.compile_fx")


class Block(nn.Module):
    """A block of a model of transformers that is split, with what its model gives it."""

    def __init__(self, block: nn.Module, rotary: nn.Module | None):
        super().__init__()
        self.block, self.rotary = block, rotary

    def __deepcopy__(self, memo: dict[int, object]) -> "Block":
        return self  # its hooks hold the group; eager and compiled calls may share the weights

    def forward(self, x: Tensor) -> Tensor:
        given = {}
        if self.rotary is not None:
            positions = torch.arange(x.shape[1]).unsqueeze(0)
            given["position_embeddings"] = self.rotary(x, positions)
        return self.block(x, **given)


def _transformers(name: str, dropout: float = 0.0) -> Make:
    def make(group, _: bool) -> Case:
        # loaded here: thousands of modules, which the other cases do without
        from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

        sizes = {"vocab_size": VOCAB, "num_hidden_layers": 1, "num_attention_heads": HEADS}
        ids = {"bos_token_id": 0, "eos_token_id": 0}
        if name == "gpt2":
            rates = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
            config = GPT2Config(**sizes, hidden_size=DIM, **rates, **ids)
        else:
            kind = LlamaConfig if name == "llama" else Qwen3Config
            sizes |= {"hidden_size": DIM, "intermediate_size": HIDDEN, "num_key_value_heads": 2}
            config = kind(**sizes, head_dim=DIM // HEADS, **ids)
        model = AutoModelForCausalLM.from_config(config).double()
        shard = tensor_parallel(model, group=group).wrapped_model.module_shards[0]
        rotary = None if name == "gpt2" else shard.model.rotary_emb
        layers = shard.transformer.h if name == "gpt2" else shard.model.layers
        return Block(layers[0], rotary), [
            (x.transpose(0, 1).contiguous(),) for (x,) in activations(group, False)
        ]

    return make


CASES = {
    "tensor_parallel, block of a Llama": _transformers("llama"),
    "tensor_parallel, block of a GPT-2": _transformers("gpt2"),
    "tensor_parallel, block of a Qwen 3": _transformers("qwen3"),
}
IN_FLOAT32 = ("tensor_parallel, block of a Llama", "tensor_parallel, block of a Qwen 3")
"""Norms of transformers compute in float32 whatever they get, where inductor rounds elsewhere."""
BREAKS = {"tensor_parallel, block of a GPT-2, dropout": _transformers("gpt2", dropout=0.2)}
"""What is no one graph."""

ADDED.update({name: (make, False) for name, make in (CASES | BREAKS).items()})


def check(name: str, backend: str) -> None:
    num_shapes = 3 if backend == "aot_eager" else 1
    breaks, recompiles, forward, backward = compared(name, backend, num_shapes)
    assert breaks == 0
    assert recompiles <= 2
    limit = 1e-6 if backend == "inductor" and name in IN_FLOAT32 else 1e-12
    assert max(forward, backward) <= limit, (forward, backward)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.own_transport("a graph calls torch's collectives of its own groups")
def test_a_compiled_module_is_one_graph_with_the_numbers_of_eager(ranks, backend):
    ranks(2).run(each, check, [(name, backend) for name in CASES], timeout_s=600)


def drawing_block() -> None:
    """Dropout of a shard takes a seed of its own a call: graphs break there, and draw alike."""
    module, inputs = made("tensor_parallel, block of a GPT-2, dropout")
    parameters = list(module.parameters())
    torch._dynamo.reset()
    # dynamo asks it of what the frame before a break has made
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    compiled = torch.compile(module, backend="aot_eager")
    step(compiled, parameters, inputs[0])  # graphs of draws that are all ranks' own must not serve
    with ShardDraws(primitives.world().rank(), default_draw):
        expected = step(module, parameters, inputs[0])
        assert not torch.equal(expected[0], step(module.eval(), parameters, inputs[0])[0])
        module.train()
        for a, b in zip(expected, step(compiled, parameters, inputs[0]), strict=True):
            assert torch.equal(a, b)


@pytest.mark.full
@pytest.mark.own_transport("a graph calls torch's collectives of its own groups")
def test_a_block_that_draws_gives_the_numbers_of_eager_code(ranks):
    ranks(2).run(drawing_block, timeout_s=600)
