"""Small models with random weights, and a run that is compared with the unsplit one."""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from torchdistpackage.parallel.auto.saving import save_tensor_parallel

VOCAB = 61
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=24,
        n_layer=2,
        n_head=4,
        n_positions=32,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=1,
    ),
    "llama": lambda: transformers.LlamaConfig(**SMALL),
}


def language_model(family: str, **changes: Any) -> Any:
    """A causal model in float64, all weights away from where they begin."""
    torch.manual_seed(0)
    config = CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    return randomised(transformers.AutoModelForCausalLM.from_config(config))


def randomised(model: nn.Module) -> Any:
    draw = torch.Generator().manual_seed(0)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(0.2 * noise + parameter)
    return model


def cache_name(model: nn.Module) -> str:
    """What this release of transformers calls the cache, in arguments and outputs."""
    known = inspect.signature(model.forward).parameters
    return "cache" if "cache" in known else "past_key_values"


def checkpoint_activations(model: Any, **kwargs: Any) -> None:
    """By the name that this release of transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)(kwargs or None)


def prompt() -> dict[str, Tensor]:
    """Two sequences of 7 tokens, one padded on the left."""
    ids = torch.randint(2, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def steps(model: Any, inputs: dict[str, Tensor], num: int = 2, lr: float = 0.5) -> list[float]:
    """Losses of plain gradient descent; an error in any gradient shows in the weights."""
    losses = []
    for _ in range(num):
        model.zero_grad()
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= lr * parameter.grad
        losses.append(loss.item())
    return losses


def same_state(split: Any, model: nn.Module, atol: float = 1e-11) -> None:
    """Names, order and, within `atol`, numbers."""
    with save_tensor_parallel(split):
        found = split.state_dict()
    expected = model.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, atol=atol, rtol=0, msg=name)


def same_training(
    split: Any, model: Any, inputs: dict[str, Tensor] | None = None, atol: float = 1e-11
) -> None:
    """Outputs, losses and all weights after steps are those of the unsplit model."""
    inputs = inputs or prompt()
    labels = {"labels": inputs["input_ids"]}
    same_state(split, model, atol=0)
    expected, found = model(**inputs, **labels), split(**inputs, **labels)
    assert type(found) is type(expected) and list(found) == list(expected)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-11, rtol=0)
    losses = [torch.tensor(steps(each, inputs)) for each in (split, model)]
    assert torch.allclose(*losses, atol=atol, rtol=0)
    same_state(split, model, atol)


GENERATIONS = (
    {"do_sample": False},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": True, "top_p": 0.9},
)


def same_tokens(split: Any, model: Any, inputs: dict[str, Tensor] | None = None) -> None:
    """Greedy, by beams and sampled, with caches."""
    inputs = inputs or prompt()
    split.eval()
    model.eval()
    for options in GENERATIONS:
        options = {**options, "max_new_tokens": 6, "pad_token_id": 0}
        torch.manual_seed(3)
        expected = model.generate(**inputs, **options)
        torch.manual_seed(3)
        assert torch.equal(split.generate(**inputs, **options), expected), options


def twin(model: nn.Module) -> Any:
    return deepcopy(model)
