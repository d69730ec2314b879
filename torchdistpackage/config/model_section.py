"""The model section of the YAML file: one of our models, or the user's own by import path."""

from pydantic import Field, field_validator

from torchdistpackage.config import types as k
from torchdistpackage.config.types import NamedSection, Section, default


class RopeSection(Section):
    """Frequencies of rotary positions and their scaling, as transformers' rope_parameters."""

    theta: k.Positive = Field(default=10000.0, description="Base of the frequencies.")
    type: k.RopeScaling = Field(
        default="default", description="How they are scaled for longer sequences."
    )
    factor: k.PositiveOrNull = Field(
        default=None, description="Of all but default: how many times longer sequences may be."
    )
    low_freq_factor: k.PositiveOrNull = Field(
        default=None, description="Of llama3: the original length over the first scaled wavelength."
    )
    high_freq_factor: k.PositiveOrNull = Field(
        default=None, description="Of llama3: the original length over the last one left alone."
    )
    original_max_position_embeddings: k.LengthOrNull = Field(
        default=None, description="Of llama3 and yarn: tokens of the original length."
    )
    attention_factor: k.PositiveOrNull = Field(
        default=None, description="Of yarn: factor of the tables; null: 0.1 ln(factor) + 1."
    )
    beta_fast: k.PositiveOrNull = Field(
        default=None, description="Of yarn: rotations from which nothing is scaled; null: 32."
    )
    beta_slow: k.PositiveOrNull = Field(
        default=None, description="Of yarn: rotations up to which all is scaled; null: 1."
    )
    mscale: k.PositiveOrNull = Field(
        default=None, description="Of yarn: with mscale_all_dim, another attention factor."
    )
    mscale_all_dim: k.PositiveOrNull = Field(
        default=None, description="Of yarn: what the factor of mscale is divided by."
    )
    truncate: k.BoolOrNull = Field(
        default=None, description="Of yarn: whole channels as edges of the ramp; null: true."
    )


def is_adapter(parameter: str) -> bool:
    """Whether the parameter of this global name is part of a low-rank adapter."""
    return ".lora_" in parameter


NO_LAYERS = "names no layers; set target, e.g. [q_proj, v_proj] or [all-linear], or remove it"


class LoraSection(Section):
    """Low-rank adapters on the weights of model.hf, as peft has them; only they train."""

    target: k.NamesOrNull = Field(
        default=None,
        description="Layers with adapters, by the ends of their names; [all-linear]; null: none.",
    )
    r: k.Count = Field(default=8, le=1 << 16, description="Rank of an adapter.")
    alpha: k.Positive = Field(
        default=8.0, description="peft's lora_alpha: adapters count alpha / r times."
    )
    dropout: k.BelowOne = Field(
        default=0.0, description="peft's lora_dropout: part of an adapter's input dropped."
    )
    load_in_4bit: bool = Field(
        default=False,
        description="QLoRA: linear layers but the head keep their frozen weights in 4 bits.",
    )
    bnb_4bit_quant_type: k.QuantType = Field(
        default="nf4", description="The 16 values of 4 bits, by bitsandbytes' names."
    )


class MoESection(Section):
    """Mixtures of experts in place of MLPs; docs/expert_parallel.md."""

    num_experts: k.ExpertsOrNull = Field(
        default=None, description="Experts of a block; null: no mixtures."
    )
    top_k: k.Count = Field(default=2, le=1 << 14, description="Experts of each token.")
    hidden: k.WidthOrNull = Field(
        default=None, description="Width of an expert; null: that of the MLP."
    )
    score: k.RouterScore = Field(default="softmax", description="What scores experts.")
    normalize: bool = Field(default=True, description="Weights of a token's experts sum to 1.")
    route_scale: k.Positive = Field(default=1.0, description="Factor on these weights.")
    num_groups: k.Count = Field(default=1, le=1 << 14, description="Groups of experts.")
    top_groups: k.Count = Field(
        default=1, le=1 << 14, description="Groups that a token's experts may be in."
    )
    balance: k.ExpertBalance = Field(
        default="aux_loss", description="What keeps experts equally busy."
    )
    aux_loss: k.NotNegative = Field(
        default=0.01, description="Factor of aux_loss and of global_aux_loss."
    )
    z_loss: k.NotNegative = Field(default=0.0, description="Factor of the router's z-loss.")
    bias_rate: k.NotNegative = Field(
        default=0.001, description="What balance=bias moves a bias by in a step."
    )
    capacity_factor: k.PositiveOrNull = Field(
        default=None,
        description="Places of an expert in a sequence over the mean; null: none is dropped.",
    )
    shared_hidden: k.WidthOrNull = Field(
        default=None, description="Width of an MLP besides that takes all tokens; null: none."
    )
    jitter: k.BelowOne = Field(default=0.0, description="Noise on the router's input.")
    every: k.Count = Field(default=1, le=2048, description="Every so many blocks have experts.")
    first: k.CountOrZero = Field(default=0, le=2048, description="The first one that has.")


class ModelSection(NamedSection):
    """What is trained: one of our models, or your own by import path."""

    name: k.ModelName = Field(default="gpt", description="Our model; not with target.")
    layers: k.Count = Field(default=4, le=2048, description="Transformer blocks.")
    dim: k.Count = Field(default=128, le=1 << 20, description="Width of the residual stream.")
    heads: k.Count = Field(default=4, le=k.MAX_HEADS, description="Attention heads, of queries.")
    kv_heads: k.HeadsOrNull = Field(
        default=None, description="Heads of keys and values, shared by queries; null: heads."
    )
    head_dim: k.WidthOrNull = Field(default=None, description="Width of a head; null: dim / heads.")
    mlp_ratio: k.Positive = Field(
        default=4.0, le=k.MAX_MLP_RATIO, description="Width of the MLP over dim."
    )
    mlp_hidden: k.WidthOrNull = Field(
        default=None, description="Width of the MLP; null: dim x mlp_ratio."
    )
    mlp: k.Mlp = Field(default="gelu", description="Activation of the MLP; swiglu also has a gate.")
    mlp_bias: bool = Field(default=True, description="Biases in the MLP.")
    attention_bias: bool = Field(default=True, description="Biases in attention.")
    moe: MoESection = default(MoESection)
    vocab: k.Count = Field(default=256, le=1 << 24, description="Number of token ids.")
    dropout: k.BelowOne = Field(default=0.0, description="Part of activations dropped.")
    tied: bool = Field(default=True, description="Embedding and output head share one weight.")
    position: k.Position = Field(default="rotary", description="How blocks know positions.")
    rope: RopeSection = default(RopeSection)
    max_seq_len: k.LengthOrNull = Field(
        default=None, description="Positions that are learned; null: data.seq_len."
    )
    norm: k.Norm = Field(default="layer", description="LayerNorm, or RMSNorm.")
    norm_eps: k.Positive = Field(default=1e-5, description="Added to the variance in every norm.")
    weights: k.PathOrNull = Field(
        default=None,
        description="Folder of a transformers model (GPT-2, Llama): sizes and initial weights.",
    )
    hf: k.PathOrNull = Field(
        default=None,
        description="Folder of a transformers model, whose own modules are trained from its "
        "weights; or a config.json, and they begin with weights of run.seed.",
    )
    lora: LoraSection = default(LoraSection)
    target: k.ImportPath = Field(
        default=None, description="Your model, pkg.module:build; not with name."
    )
    args: k.FreeForm = Field(default_factory=dict, description="Keyword arguments of target.")
    loss: k.ImportPath = Field(
        default=None, description="Your loss, pkg.module:fn; null: token cross entropy."
    )

    @field_validator("lora", mode="before")
    @classmethod
    def _lora_has_keys(cls, value: object) -> object:
        """Nothing under `lora:` is none; who writes `lora: {}` expects adapters."""
        if value == {}:
            raise ValueError(NO_LAYERS)
        return value

    @property
    def initial_folder(self) -> str | None:
        """The folder whose weights the run begins with; None: those of run.seed."""
        is_folder = self.hf is not None and not self.hf.endswith(".json")
        return self.hf if is_folder else self.weights

    def is_trained(self, parameter: str) -> bool:
        """Whether the parameter of this global name gets gradients."""
        return self.lora.target is None or is_adapter(parameter)

    @property
    def expert_hidden(self) -> int:
        """Width of an expert."""
        return self.moe.hidden or self.hidden

    @property
    def hidden(self) -> int:
        """Width of the MLP."""
        return self.mlp_hidden or max(round(self.dim * self.mlp_ratio), 1)
