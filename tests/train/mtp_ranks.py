"""A layer that predicts the token after the next one, written by hand beside transformers."""

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from tests.train import parity
from tests.train.transformers_ranks import (
    RUN,
    Answer,
    adam_of,
    alone,
    everywhere_float64,
    save_model,
    whole,
)
from torchdistpackage.models.transformers_meta import build_options

LOSS = 0.3


def save_with_mtp(config: dict, folder: str) -> None:
    """A folder as DeepSeek V3's: the layer stands behind the last block of the model."""
    layers = config["num_hidden_layers"]
    save_model({**config, "num_hidden_layers": layers + 1}, folder, "float32")
    tensors = load_file(f"{folder}/model.safetensors")
    block, draw = f"model.layers.{layers}.", torch.Generator().manual_seed(2)
    dim = config["hidden_size"]
    for name, shape in (
        *(("enorm", (dim,)), ("hnorm", (dim,)), ("shared_head.norm", (dim,))),
        ("eh_proj", (dim, 2 * dim)),
    ):
        tensors[f"{block}{name}.weight"] = torch.randn(shape, generator=draw) * 0.3 + 0.1
    tensors[f"{block}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{block}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
    config_of(folder, config)


def config_of(folder: str, config: dict) -> None:
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    made.num_nextn_predict_layers = 1
    made.save_pretrained(folder)


def rms(x, weight, eps):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class ByHand(nn.Module):
    """transformers' model, one block of its class and what is around that by hand."""

    def __init__(self, folder: str):
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        self.layers = config.num_hidden_layers
        config.num_hidden_layers += 1
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, **build_options(torch.float64)
        )
        for parameter in model.parameters():  # routers keep theirs in float32
            parameter.data = parameter.data.double()
        tensors = load_file(f"{folder}/model.safetensors")
        self.block = f"model.layers.{self.layers}."
        self.more = nn.ParameterDict(
            {
                key.replace(".", "/"): nn.Parameter(tensors[f"{self.block}{key}.weight"].double())
                for key in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
            }
        )
        self.model, self.eps = model, config.rms_norm_eps
        model.config.num_hidden_layers = self.layers

    def named(self) -> dict[str, nn.Parameter]:
        tensors = dict(self.model.named_parameters())
        return tensors | {
            f"{self.block}{key.replace('/', '.')}.weight": p for key, p in self.more.items()
        }


def loss_by_hand(both: ByHand, ids, targets):
    """The mean of the next token's loss, and LOSS times that of the token behind it over as many
    tokens."""
    base, model, more = both.model.model, both.model, both.more
    hidden = base(input_ids=ids, use_cache=False).last_hidden_state
    count = (targets != -100).sum()
    total = F.cross_entropy(
        model.lm_head(hidden).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    # one token less: the last one has no next one that is embedded
    num = ids.shape[1] - 1
    following = base.embed_tokens(ids[:, 1:])
    joined = torch.cat(
        [
            rms(following, more["enorm"], both.eps),
            rms(hidden[:, :num], more["hnorm"], both.eps),
        ],
        -1,
    )
    x = joined @ more["eh_proj"].T
    positions = torch.arange(num)[None]
    mask = torch.full((num, num), torch.finfo(x.dtype).min).triu(1)[None, None]
    x = base.layers[both.layers](
        x,
        attention_mask=mask.to(x),
        position_ids=positions,
        position_embeddings=base.rotary_emb(x, positions),
    )
    logits = model.lm_head(rms(x, more["shared_head/norm"], both.eps))
    further = F.cross_entropy(
        logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    return (total + LOSS * further) / count


def of_hand(folder: str) -> Answer:
    """Three steps in one process."""
    section = parity.config([*RUN, f"model.hf={folder}", "model.mtp=train"])
    both = ByHand(folder).train()
    named = both.named()
    with everywhere_float64():
        gradients, losses = alone(both, named, adam_of(named, section), section, loss_by_hand)
    return Answer(whole(named), gradients, losses)
