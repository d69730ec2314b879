"""Decoders of transformers, with random weights, cut along their blocks and trained in stages."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.parallel.auto.models import checkpoint_activations
from tests.tells import facts_pattern
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.partition.hf_decoder import decoder_stages
from torchdistpackage.parallel.pipeline.pipeline import Pipeline
from torchdistpackage.tools.undisturbed import in_eval

VOCAB = 97
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SMALL),
    # two blocks that see everything, then two that see the last four tokens
    "qwen3": transformers.Qwen3Config(
        **SMALL, head_dim=4, use_sliding_window=True, sliding_window=4, max_window_layers=2
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    ),
    # what these do beside their blocks: squeeze logits; scale embeddings and logits; nothing that
    # has parameters; a norm of embeddings; positions by the mask, in a decoder in a decoder
    "gemma2": transformers.Gemma2Config(**SMALL, head_dim=4),
    "granite": transformers.GraniteConfig(**SMALL, embedding_multiplier=3.0, logits_scaling=2.0),
    "olmo": transformers.OlmoConfig(**SMALL),
    "bloom": transformers.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=4, n_head=4),
    "opt": transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        word_embed_proj_dim=8,
        ffn_dim=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        dropout=0.0,
    ),
}
SMALL_SET = ("llama", "qwen3", "gpt2")
ROUTED = transformers.MixtralConfig(**SMALL, num_local_experts=4, output_router_logits=True)


def decoder(config: transformers.PretrainedConfig):
    """All weights away from where they begin, without dropout."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, a mask with padding, labels; (4, 12) each, 12 + 9 tokens in every two rows."""
    draw = torch.Generator().manual_seed(1)
    ids, mask = torch.randint(VOCAB, (4, 12), generator=draw), torch.ones(4, 12, dtype=torch.long)
    mask[1::2, 9:] = 0
    return ids, mask, ids.masked_fill(mask == 0, -100)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in SMALL_SET else pytest.mark.full) for f in FAMILIES]
)
@pytest.mark.parametrize("placement", [[0, 1, 2], [0, 1, 1, 0]])
def test_stages_in_a_row_are_the_model(family, placement):
    model, (ids, mask, labels) = decoder(FAMILIES[family]), batch()
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    stages = decoder_stages(model, placement)
    held = [name for stage in stages for name, _ in stage.named_parameters()]
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert sorted(held) == sorted(expected.keys() | tied)
    x, boundaries = ids, []
    for stage in stages:
        if stage is not stages[0]:
            boundaries.append((x, x.detach().requires_grad_()))
            x = boundaries[-1][1]
        x = stage(x, attention_mask=mask, labels=labels)
    assert torch.equal(x, loss)
    x.backward()
    for sent, room in reversed(boundaries):
        sent.backward(room.grad)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-12)


def test_a_heavy_head_goes_with_fewer_blocks():
    model = decoder(FAMILIES["llama"])
    stages = decoder_stages(model, [0, 1], costs=[0, 1, 1, 1, 1, 2])
    assert [len(stage.model.layers) for stage in stages] == [3, 1]
    kinds = {type(block) for block in stages[0].model.layers}
    assert len(kinds) == 1  # blocks of two classes would not share a compiled graph
    assert model.config.num_hidden_layers == 4  # the model itself is as it was


def test_what_cannot_be_cut_is_refused_with_the_reason():
    with pytest.raises(ScheduleError, match="do not compute what MixtralForCausalLM does"):
        decoder_stages(decoder(ROUTED).float(), [0, 1])  # its loss has a part of every block's
    model = decoder(FAMILIES["llama"])
    model.model.spare = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(5))
    with pytest.raises(ScheduleError, match="is not a row of blocks"):
        decoder_stages(model, [0, 1])
    with pytest.raises(ScheduleError, match=facts_pattern("4 blocks", "5 stages")):
        decoder_stages(decoder(FAMILIES["llama"]), range(5))


@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_that_are_run_again_are_given_what_they_were_given_before(reentrant):
    """Two microbatches are under way, of copies of the stages."""
    model, (ids, mask, labels) = decoder(FAMILIES["granite"]), batch()
    checkpoint_activations(model, use_reentrant=reentrant)
    stages = deepcopy(decoder_stages(model.train(), [0, 1, 2]))
    outputs = []
    for half in (slice(0, 2), slice(2, 4)):
        x = ids[half]
        for stage in stages:
            x = stage(x, attention_mask=mask[half], labels=labels[half])
        outputs.append(x)
    sum(outputs).backward()
    found = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    for half in (slice(0, 2), slice(2, 4)):
        model(input_ids=ids[half], attention_mask=mask[half], labels=labels[half]).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-12)


class Outside(torch.nn.Module):
    """A block as models of older transformers run it: again, from outside of its own call."""

    def __init__(self, block: torch.nn.Module):
        super().__init__()
        self.block = block

    def forward(self, *args, **kwargs):
        return checkpoint(self.block.__call__, *args, use_reentrant=False, **kwargs)


def test_a_block_that_would_be_given_something_else_the_second_time_is_refused():
    second = decoder_stages(decoder(FAMILIES["granite"]), [0, 1])[1]
    layers = second.model.layers._modules
    layers["2"] = Outside(layers["2"])
    loss = second(torch.randn(1, 5, 16, dtype=torch.double, requires_grad=True)).sum()
    with pytest.raises(ScheduleError, match="is run again from outside"):
        loss.backward()


class Noting(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        self.modes.append(self.training)
        return super().forward(*args, **kwargs)


def test_the_head_runs_in_the_mode_of_its_stage():
    """Also where each part was given its mode back, as after an evaluation."""
    model = Noting(FAMILIES["llama"]).train()
    model.modes = []
    last = decoder_stages(model, [0, 1])[1]
    x = torch.randn(1, 5, 16)
    for mode in (True, False):
        model.modes.clear()
        with in_eval(last):
            last(x)
        last(x)
        assert model.modes == [False, mode]
        last.eval()


def next_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """transformers' own loss, in the logits' precision."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def in_a_pipeline() -> None:
    rank, p = dist.get_rank(), dist.get_world_size()
    model, (ids, mask, labels) = decoder(FAMILIES["llama"]), batch()
    loss = next_token(model(input_ids=ids, attention_mask=mask).logits, labels)
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    stage = decoder_stages(model, range(p))[rank]
    pipe = Pipeline(stage, loss=next_token, num_microbatches=2, group=dist.group.WORLD)
    found = pipe.step(ids, targets=labels, attention_mask=mask)
    torch.testing.assert_close(found, loss.detach(), rtol=0, atol=1e-12)
    for name, parameter in stage.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-12)


@pytest.mark.full
def test_a_pipeline_of_them_is_the_model(ranks):
    ranks(2).run(in_a_pipeline, timeout_s=60)
