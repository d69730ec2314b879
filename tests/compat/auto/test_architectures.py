"""Models of no known family: outputs and a step are those of one process, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from tests.parallel.auto.models import randomised, same_state, twin
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.compat.tensor_parallel.nested import map_leaves, nested_flatten

FULL = pytest.mark.full
WORDS = {"vocab_size": 61, "max_position_embeddings": 20}
SMALL = {
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
TEXT = SMALL | WORDS
SIX = TEXT | {"num_attention_heads": 6, "num_key_value_heads": 2}
VISION = SMALL | {"image_size": 8, "patch_size": 4}
SPEECH = {
    "d_model": 24,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": 61,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IDS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(1))
IMAGE = torch.linspace(-1, 1, 2 * 3 * 8 * 8, dtype=torch.float64).view(2, 3, 8, 8)
HEARD = torch.linspace(-1, 1, 2 * 8 * 20, dtype=torch.float64).sin().view(2, 8, 20)
CLIP = {"text_config": TEXT | TOKENS, "vision_config": VISION, "projection_dim": 12}


def whisper() -> Any:
    sizes = {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 20}
    config = hf.WhisperConfig(**SPEECH, **sizes, **TOKENS, decoder_start_token_id=1)
    return hf.WhisperForConditionalGeneration(config)


MODELS = {
    "clip's text": (lambda: hf.CLIPTextModel(hf.CLIPTextConfig(**TEXT, **TOKENS)), {}),
    "clip": (lambda: hf.CLIPModel(hf.CLIPConfig(**CLIP)), {"pixel_values": IMAGE}),
    "roberta": (lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**TEXT)), {}),
    "deberta": (
        lambda: hf.DebertaV2ForMaskedLM(
            hf.DebertaV2Config(**TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"])
        ),
        {},
    ),
    "vit": (
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**VISION)),
        {"input_ids": None, "pixel_values": IMAGE},
    ),
    "whisper": (
        whisper,
        {"input_ids": None, "input_features": HEARD, "decoder_input_ids": IDS},
    ),
    "whisper's decoder": (
        lambda: whisper().model.decoder,
        {"encoder_hidden_states": HEARD[:, :, :10].mT.repeat(1, 1, 3)},
    ),
    "phi": (lambda: hf.PhiForCausalLM(hf.PhiConfig(**TEXT, partial_rotary_factor=2 / 3)), {}),
    "stablelm": (lambda: hf.StableLmForCausalLM(hf.StableLmConfig(**SIX)), {}),
    "gpt-bigcode": (
        lambda: hf.GPTBigCodeForCausalLM(
            hf.GPTBigCodeConfig(n_embd=24, n_layer=1, n_head=4, n_positions=20, vocab_size=61)
        ),
        {},
    ),
    "mamba": (
        lambda: hf.MambaForCausalLM(
            hf.MambaConfig(vocab_size=61, hidden_size=24, state_size=4, num_hidden_layers=1)
        ),
        {},
    ),
}


def as_one_process(module: nn.Module, inputs: dict[str, Any], num: int | None) -> None:
    """num: of threads; None: the ranks of the world."""
    model = randomised(module).eval()
    split = tensor_parallel(twin(model), num and ["cpu"] * num)
    found = []
    for each in (split, model):
        output = each(**inputs)
        found.append(output)
        leaves = [x for x in nested_flatten(output) if isinstance(x, Tensor) and x.requires_grad]
        sum((x.square().mean() for x in leaves), torch.zeros((), requires_grad=True)).backward()
        with torch.no_grad():
            for parameter in each.parameters():
                parameter -= 0.1 * (parameter.grad if parameter.grad is not None else 0)
    assert type(found[0]) is type(found[1])
    map_leaves(same, *found)
    same_state(split, model)


def same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, Tensor):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=0)
    elif isinstance(theirs, (str, int, float, type(None))):  # and no cache, of which each has one
        assert ours == theirs


@pytest.mark.parametrize(
    "name", [name if name == "deberta" else pytest.param(name, marks=FULL) for name in MODELS]
)
@pytest.mark.parametrize("num", [3, pytest.param(2, marks=FULL)])
def test_of_transformers(name, num):
    torch.manual_seed(0)
    make, more = MODELS[name]
    inputs = {name: x for name, x in ({"input_ids": IDS} | more).items() if x is not None}
    as_one_process(make(), inputs, num)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.grouped = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 18, 3, groups=6, padding=1)
        self.norm, self.norms = nn.BatchNorm2d(18), nn.GroupNorm(6, 18)
        self.back = nn.ConvTranspose2d(18, 12, 2, stride=2, groups=2)
        self.last, self.head = nn.ConvTranspose2d(12, 7, 2), nn.Linear(7, 5)

    def forward(self, x):
        x = self.norms(self.norm(self.grouped(self.first(x).relu())))
        return self.head(self.last(self.back(x).relu()).mean((2, 3)))


class Shared(nn.Module):
    """One layer by two names, one block twice, and one weight in two layers."""

    def __init__(self):
        super().__init__()
        self.a, self.tied = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.b, self.tied.weight = self.a, self.a.weight
        self.block = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 5))
        self.again = self.block

    def forward(self, x):
        return self.tied(self.again(self.b(self.block(self.a(x)))))


@dataclass
class Answer:
    score: Tensor
    more: Any


class Answers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 6)

    def forward(self, x, kind):
        y = self.layer(x)
        more = {"text": "as it is", "none": None, "number": 3, "tensors": (y.sum(), [x])}
        return {"dataclass": Answer(y, more), "dict": more, "number": 2.5, "none": None}[kind]


ROWS = torch.linspace(-1, 1, 10, dtype=torch.float64).view(2, 5)


@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (Convolutions, {"x": IMAGE}),
        (Shared, {"x": ROWS}),
        *((Answers, {"x": ROWS, "kind": kind}) for kind in ("dataclass", "dict", "number", "none")),
    ],
    ids=["convolutions", "shared", "dataclass", "dict", "number", "none"],
)
def test_modules_of_ones_own(make, inputs, num):
    torch.manual_seed(0)
    as_one_process(make(), inputs, num)
