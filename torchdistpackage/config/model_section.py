"""The model section of the YAML file: a built-in model, or your own by import path."""

from collections.abc import Sequence

from pydantic import Field, field_validator

from torchdistpackage.config import types as k
from torchdistpackage.config.head_tasks import is_head
from torchdistpackage.config.types import NamedSection, Section, default
from torchdistpackage.layout.balances import BALANCES, WITH_LOSS
from torchdistpackage.layout.four_bit import PackedFormat, packed_format


class RopeSection(Section):
    """Frequencies of rotary positions and their scaling, as in transformers' rope_parameters."""

    theta: k.Positive = Field(
        default=10000.0,
        description="Base of the rotary frequencies. Larger values make positions far apart "
        "easier to tell apart.",
    )
    type: k.RopeScaling = Field(
        default="default",
        description="How the frequencies are scaled for sequences longer than the original "
        "length; default: not at all.",
    )
    factor: k.PositiveOrNull = Field(
        default=None,
        description="How many times longer than the original length sequences may be. Every type "
        "except default needs it.",
    )
    low_freq_factor: k.PositiveOrNull = Field(
        default=None,
        description="Only for llama3: frequencies whose wavelength is at least the original "
        "length / low_freq_factor are scaled in full.",
    )
    high_freq_factor: k.PositiveOrNull = Field(
        default=None,
        description="Only for llama3: frequencies whose wavelength is at most the original length "
        "/ high_freq_factor are not scaled.",
    )
    original_max_position_embeddings: k.LengthOrNull = Field(
        default=None,
        description="Only for llama3 and yarn: the original length, in tokens, for which the "
        "model was first trained.",
    )
    attention_factor: k.PositiveOrNull = Field(
        default=None,
        description="Only for yarn: factor on the cosine and sine tables; null: 0.1 ln(factor) + "
        "1, or what mscale and mscale_all_dim give.",
    )
    beta_fast: k.PositiveOrNull = Field(
        default=None,
        description="Only for yarn: frequencies that turn at least this often within the original "
        "length are not scaled; null: 32.",
    )
    beta_slow: k.PositiveOrNull = Field(
        default=None,
        description="Only for yarn: frequencies that turn at most this often within the original "
        "length are scaled in full; null: 1.",
    )
    mscale: k.PositiveOrNull = Field(
        default=None,
        description="Only for yarn: with mscale_all_dim, the attention factor is (0.1 mscale "
        "ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1).",
    )
    mscale_all_dim: k.PositiveOrNull = Field(
        default=None,
        description="Only for yarn: the coefficient in the denominator of the formula of mscale.",
    )
    truncate: k.BoolOrNull = Field(
        default=None,
        description="Only for yarn: round the ends of the range of channels that are scaled in "
        "part to whole channels; null: true.",
    )


TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"
"""End of the name of the parameter with rows of trainable_token_indices, in peft's files too."""


def is_adapter(parameter: str) -> bool:
    """Return whether the parameter of this global name belongs to a low-rank adapter."""
    return ".lora_" in parameter or is_token_rows(parameter)


def is_token_rows(parameter: str) -> bool:
    """Return whether the parameter of this global name has the trained rows of an embedding or an
    output head.
    """
    return parameter.endswith(TOKEN_ROWS)


def trains_with_adapters(parameter: str, modules: Sequence[str] = ()) -> bool:
    """Return whether the parameter with this global name is trained although model.lora freezes the
    model.

    Adapters, a head and the modules of `modules_to_save` are trained, as peft does.
    """
    return is_adapter(parameter) or is_head(parameter) or is_inside(modules, parameter)


def is_inside(modules: Sequence[str], parameter: str) -> bool:
    """Return whether the parameter with this global name belongs to a module whose path is one of
    `modules`, or ends with one after a dot.
    """
    return any(f".{module}." in f".{parameter}" for module in modules)


NO_LAYERS = "names no layers; set target, e.g. [q_proj, v_proj] or [all-linear], or remove it"


class LoraSection(Section):
    """Low-rank adapters on the weights of model.hf, as in peft; only adapters, a head and
    modules_to_save are trained.
    """

    target: k.NamesOrNull = Field(
        default=None,
        description="Linear layers and embeddings that get adapters, by the ends of their names, "
        "such as [q_proj, v_proj]; [all-linear]: all linear layers of the blocks. Stacked experts "
        "by the name of their module too, such as experts.down_proj. null: no adapters, the whole "
        "model trains.",
    )
    r: k.Count = Field(
        default=8,
        le=1 << 16,
        description="Rank of an adapter. A higher rank trains more parameters and needs more "
        "memory.",
    )
    alpha: k.Positive = Field(
        default=8.0,
        description="peft's lora_alpha: the output of an adapter is multiplied by alpha / r.",
    )
    use_rslora: bool = Field(
        default=False,
        description="peft's use_rslora: multiply by alpha / sqrt(r) instead, so that updates of "
        "high ranks do not shrink.",
    )
    use_dora: bool = Field(
        default=False,
        description="peft's use_dora: train the length of each row of an adapted weight apart from "
        "its direction. Costs time in each step; low ranks gain most.",
    )
    modules_to_save: k.NamesOrNull = Field(
        default=None,
        description="peft's modules_to_save: modules that are trained as a whole and saved beside "
        "the adapters, by the ends of their names, such as [lm_head] or [embed_tokens, norm].",
    )
    trainable_token_indices: k.TokenIdsOrNull = Field(
        default=None,
        description="peft's trainable_token_indices: ids of tokens whose rows of the embedding and "
        "of the output head are trained, such as those of added tokens.",
    )
    adapter: k.PathOrNull = Field(
        default=None,
        description="Folder of adapters of peft with the same settings, from whose values the run "
        "goes on; null: adapters start as in peft.",
    )
    dropout: k.BelowOne = Field(
        default=0.0,
        description="peft's lora_dropout: share of an adapter's input that is dropped in training.",
    )
    load_in_4bit: bool = Field(
        default=False,
        description="QLoRA: keep the frozen weights of all linear layers except the output head "
        "in 4 bits, to save memory. Needs bitsandbytes.",
    )
    bnb_4bit_quant_type: k.QuantType = Field(
        default="nf4",
        description="4-bit type of load_in_4bit, by the names of bitsandbytes: nf4 for values "
        "that are normally distributed, fp4 for a 4-bit float.",
    )
    bnb_4bit_use_double_quant: bool = Field(
        default=False,
        description="Quantize the scales of load_in_4bit too, to 8 bits, which saves 0.37 bits for "
        "each weight.",
    )
    load_in_8bit: bool = Field(
        default=False,
        description="Keep the frozen weights of all linear layers except the output head in 8 "
        "bits, rounded as LLM.int8() rounds them, with a scale for each output.",
    )

    @property
    def packing(self) -> PackedFormat | None:
        """The format of the frozen weights; None: that of the model."""
        return packed_format(
            self.load_in_4bit,
            self.load_in_8bit,
            self.bnb_4bit_quant_type,
            self.bnb_4bit_use_double_quant,
        )


class MoESection(Section):
    """Mixtures of experts in place of MLPs; see docs/expert_parallel.md."""

    num_experts: k.ExpertsOrNull = Field(
        default=None,
        description="Number of experts in each mixture; null: plain MLPs in all blocks.",
    )
    top_k: k.Count = Field(
        default=2, le=1 << 14, description="Number of experts to which the router sends each token."
    )
    hidden: k.WidthOrNull = Field(
        default=None, description="Hidden width of an expert; null: that of the MLP."
    )
    score: k.RouterScore = Field(
        default="softmax",
        description="Function that turns the router's outputs into the scores of experts.",
    )
    normalize: bool = Field(
        default=True,
        description="Divide the weights of a token's experts by their sum, so that they sum to 1.",
    )
    route_scale: k.Positive = Field(
        default=1.0,
        description="Factor on the weights of a token's experts, applied after normalize.",
    )
    num_groups: k.Count = Field(
        default=1,
        le=1 << 14,
        description="Number of equal groups of experts, of which a token chooses top_groups.",
    )
    top_groups: k.Count = Field(
        default=1,
        le=1 << 14,
        description="Number of groups in which a token may choose its experts, those with the "
        "best scores.",
    )
    balance: k.ExpertBalance = Field(
        default="aux_loss",
        description="How experts are kept equally busy: "
        f"{', '.join(f'{x.name} {x.does}' for x in BALANCES.values())}.",
    )
    aux_loss: k.NotNegative = Field(
        default=0.01, description=f"Coefficient of the balance loss of {' and '.join(WITH_LOSS)}."
    )
    z_loss: k.NotNegative = Field(
        default=0.0,
        description="Coefficient of the router's z-loss, which keeps its outputs small; 0 is off.",
    )
    bias_rate: k.NotNegative = Field(
        default=0.001,
        description="How much balance: bias moves the bias of an expert's score in one step.",
    )
    capacity_factor: k.PositiveOrNull = Field(
        default=None,
        description="Most tokens that an expert takes from one sequence, as a multiple of the "
        "mean; further tokens skip the expert. null: no limit.",
    )
    pad_to_capacity: bool = Field(
        default=False,
        description="In training, pad the tokens of each expert with zeros to its capacity "
        "(capacity_factor). The host then need not wait for counts in each layer. Set it if the "
        "host of a GPU limits the steps.",
    )
    shared_hidden: k.WidthOrNull = Field(
        default=None,
        description="Hidden width of an extra MLP through which all tokens go; null: none.",
    )
    jitter: k.BelowOne = Field(
        default=0.0,
        description="Multiply the router's input by random factors from 1 - jitter to 1 + jitter "
        "in training; 0 is off.",
    )
    every: k.Count = Field(
        default=1,
        le=2048,
        description="Number of blocks from one block with experts to the next: 1 puts experts in "
        "every block, 2 in every second one.",
    )
    first: k.CountOrZero = Field(
        default=0, le=2048, description="Index of the first block that has experts, counted from 0."
    )


class ModelSection(NamedSection):
    """The model to train: a built-in one, a transformers model, or your own by import path."""

    name: k.ModelName = Field(
        default="gpt",
        description="Built-in model to train. Leave it out when target or hf names another model.",
    )
    layers: k.Count = Field(default=4, le=2048, description="Number of transformer blocks.")
    dim: k.Count = Field(
        default=128,
        le=1 << 20,
        description="Width of the residual stream: the length of the vector of each token.",
    )
    heads: k.Count = Field(
        default=4,
        le=k.MAX_HEADS,
        description="Number of attention heads (of queries). dim must be a multiple of it unless "
        "head_dim is set.",
    )
    kv_heads: k.HeadsOrNull = Field(
        default=None,
        description="Number of heads of keys and values, each shared by several query heads; "
        "null: as many as heads.",
    )
    head_dim: k.WidthOrNull = Field(
        default=None, description="Width of an attention head; null: dim / heads."
    )
    mlp_ratio: k.Positive = Field(
        default=4.0,
        le=k.MAX_MLP_RATIO,
        description="Hidden width of the MLP divided by dim; not used if mlp_hidden is set.",
    )
    mlp_hidden: k.WidthOrNull = Field(
        default=None, description="Hidden width of the MLP; null: dim x mlp_ratio."
    )
    mlp: k.Mlp = Field(
        default="gelu", description="Activation of the MLP; swiglu also adds a gate."
    )
    mlp_bias: bool = Field(
        default=True, description="Whether the linear layers of the MLP have biases."
    )
    attention_bias: bool = Field(
        default=True, description="Whether the linear layers of attention have biases."
    )
    moe: MoESection = default(MoESection)
    vocab: k.Count = Field(
        default=256,
        le=1 << 24,
        description="Size of the vocabulary: the number of different token ids. At least 256 for "
        "text without a tokenizer. With hf: that of the folder; more adds rows to the embedding "
        "and the output head, which begin as the mean of the others.",
    )
    dropout: k.BelowOne = Field(
        default=0.0, description="Share of activations that are dropped in training."
    )
    tied: bool = Field(
        default=True, description="Whether the embedding and the output head share one weight."
    )
    position: k.Position = Field(
        default="rotary",
        description="How the model knows positions: rotary rotates queries and keys, learned adds "
        "a trained vector for each position.",
    )
    rope: RopeSection = default(RopeSection)
    max_seq_len: k.LengthOrNull = Field(
        default=None,
        description="Number of learned position vectors, with position: learned; null: "
        "data.seq_len.",
    )
    norm: k.Norm = Field(
        default="layer", description="Kind of normalization: LayerNorm (layer) or RMSNorm (rms)."
    )
    norm_eps: k.Positive = Field(
        default=1e-5,
        description="Small number that every norm adds to the variance, against division by zero.",
    )
    weights: k.PathOrNull = Field(
        default=None,
        description="Folder of a GPT-2 or Llama model of transformers. The built-in model takes "
        "its sizes and initial weights from there; null: sizes from these keys, weights drawn "
        "with run.seed.",
    )
    hf: k.PathOrNull = Field(
        default=None,
        description="Folder of a transformers model, which is trained with transformers' own "
        "modules from its weights. With a config.json instead of a folder the weights are drawn "
        "with run.seed.",
    )
    mtp: k.MtpUse = Field(
        default="keep",
        description="Layers of hf that predict further tokens (MTP). keep: they do not train, and "
        "an export has them as they are; leave_out: an export is without them; train: the one of "
        "DeepSeek V3 or GLM 4 MoE trains with the model.",
    )
    mtp_loss: k.Positive = Field(
        default=0.3,
        description="Weight of the loss of the MTP layer beside that of the next token; DeepSeek "
        "V3 used 0.3, and 0.1 at the end.",
    )
    lora: LoraSection = default(LoraSection)
    target: k.ImportPath = Field(
        default=None,
        description="Import path of your function that builds the model, such as "
        "pkg.module:build; replaces name.",
    )
    args: k.FreeForm = Field(
        default_factory=dict, description="Keyword arguments for the function of target."
    )
    loss: k.ImportPath = Field(
        default=None,
        description="Import path of your loss function, such as pkg.module:fn; null: cross "
        "entropy of the next token.",
    )

    @field_validator("lora", mode="before")
    @classmethod
    def _lora_has_keys(cls, value: object) -> object:
        """Refuse `lora: {}`, because it names no layers although its writer expects adapters.

        `lora:` with nothing under it means no adapters.
        """
        if value == {}:
            raise ValueError(NO_LAYERS)
        return value

    @property
    def initial_folder(self) -> str | None:
        """Return the folder of the initial weights, or None if run.seed draws them."""
        is_folder = self.hf is not None and not self.hf.endswith(".json")
        return self.hf if is_folder else self.weights

    def is_trained(self, parameter: str) -> bool:
        """Return whether the parameter of this global name is trained."""
        modules = self.lora.modules_to_save or ()
        return self.lora.target is None or trains_with_adapters(parameter, modules)

    @property
    def expert_hidden(self) -> int:
        """Return the hidden width of an expert."""
        return self.moe.hidden or self.hidden

    @property
    def hidden(self) -> int:
        """Return the hidden width of the MLP."""
        return self.mlp_hidden or max(round(self.dim * self.mlp_ratio), 1)
