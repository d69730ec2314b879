"""The run whose step is predicted: a transformer's sizes, and how its work is shared and repeated.

These are plain numbers, so that a published run of any library can be written down beside a plan of
ours. The rule: a field says what the run does, never how long anything takes.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from torchdistpackage.errors import ConfigError
from torchdistpackage.predict.newton_schulz import Exchange

Recompute = Literal["none", "attention", "elementwise", "matmuls", "blocks"]
"""The backward computes some of a block again. attention: scores and values of unfused attention
(Megatron-LM's selective recompute). elementwise: norms and activations. matmuls: these and every
second matmul (torchtitan's selective recompute by operation). blocks: the forward of whole
blocks."""

ContextExchange = Literal["ring", "heads"]
Kernels = Literal["eager", "fused"]
"""fused: of norms, rotary positions, activations and loss each is one kernel, as torch.compile,
Transformer Engine and Megatron-LM have them. eager: one kernel an operation of PyTorch."""

Loss = Literal["eager", "narrow", "fused"]
"""Kinds of a loss: PyTorch's cross_entropy with a float32 copy of the logits (eager) or without
(narrow), or one kernel (fused).
"""

AttentionKernel = Literal["unfused", "flash2", "flash3"]
"""flash3 stands for every kernel made for Hopper or later, that of cuDNN too."""


OptimizerKernels = Literal["fused", "foreach", "muon"]
"""fused: AdamW is one kernel over a parameter. foreach: one kernel an operation of it, as PyTorch
has it unless told otherwise. muon: Muon on the matrices of blocks, fused AdamW on the rest."""


@dataclass(frozen=True, slots=True)
class TransformerSizes:
    """A decoder's sizes. hidden: width of an MLP, or of each expert. gated: the MLP has three
    matmuls. num_experts: 0 for a dense model; each token goes to top_k of them. window: tokens that
    `window_share` of the blocks attend to; 0: all. norms: of a block on its residual stream.
    qk_norm: queries and keys are normalized."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norms: int = 2
    rotary: bool = True
    num_experts: int = 0
    top_k: int = 1
    tied: bool = False
    window: int = 0
    window_share: float = 0.0
    qk_norm: bool = False

    @property
    def attention_parameters(self) -> int:
        """Parameters of a block's attention."""
        return 2 * self.dim * self.head_dim * (self.heads + self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one MLP or one expert."""
        return (3 if self.gated else 2) * self.dim * self.hidden

    @property
    def vocab_parameters(self) -> int:
        """Parameters of the embedding, and of the head where it has its own."""
        return self.vocab * self.dim

    @property
    def parameters(self) -> int:
        """Parameters of the model, norms and biases left out."""
        block = self.attention_parameters + max(self.num_experts, 1) * self.mlp_parameters
        return self.layers * block + (1 if self.tied else 2) * self.vocab_parameters

    def attended(self, seq_len: int) -> float:
        """Return the mean number of tokens that a token attends to under a causal mask."""
        full = seq_len / 2
        if not self.window or self.window >= seq_len:
            return full
        return (1 - self.window_share) * full + self.window_share * self.window

    def forward_flops(self, seq_len: int) -> float:
        """Return the floating-point operations of the matmuls of a forward, per token of a full
        sequence; scores and values of all tokens, causal or not."""
        block = self.attention_parameters + self.top_k * self.mlp_parameters
        block += self.num_experts * self.dim
        scores = 2 * self.heads * self.head_dim * seq_len
        return 2.0 * (self.layers * (block + scores) + self.vocab_parameters)


class AxisPart(NamedTuple):
    """Ranks along one axis: their number, and how far apart two neighbours are."""

    size: int
    stride: int


class ShardGroups(NamedTuple):
    """The ranks that share parameters, and the ranks that hold copies of one's share, each as the
    parts along the axes."""

    sharers: tuple[AxisPart, ...]
    copies: tuple[AxisPart, ...]

    @property
    def num_sharers(self) -> int:
        """Ranks that share the parameters."""
        return prod(part.size for part in self.sharers)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The layout of a step over the ranks, and what the software does.

    ranks: in all; data ranks are what tensor, pipe and context leave. expert: data ranks that share
    the experts. micro_batch, num_microbatches: sequences at a time and how often, on each data
    rank. zero: stage of ZeRO; 3 frees weights after use, as FSDP does. shard: data ranks that share
    what ZeRO splits, the others hold copies (HSDP); 0: all. chunks: stages of a pipe rank.
    weight_bytes, reduce_bytes: of a weight that is gathered and of a gradient that is reduced.
    recompute_share: of the blocks that `recompute` is applied to. stops_early: recomputation ends
    at the last tensor that the backward needs, as torch.utils.checkpoint does without reentry.
    lora: rank of adapters on linear layers, the rest is frozen; 0: all is trained. lora_mlp: the
    MLP has them too. shards_frozen: ZeRO 3 shards frozen weights, as FSDP does.
    kernels, loss, optimizer: of the blocks, of the loss, and of AdamW. muon_exchange: how tensor
    ranks make Muon's matrices orthogonal.
    overlaps_data: gradients and weights travel while the ranks compute. tensor_overlap: the same
    for matmuls of tensor ranks, in chunks. dedups: a token goes once to a rank that has several of
    its experts. graphs: the host replays recorded launches. copies: what ZeRO 3 copies to and from
    the buffers that it sends: nothing; gradients, as the flat parameters of FSDP1 do; or all, as
    FSDP2 does, whose parameters are DTensors. expert_bias: experts have biases, which Megatron-LM
    adds expert by expert in float32. clamps: gate and up of experts are clamped, each in a kernel
    of its own, and joined again by a copy, as Megatron-LM does before its fused activation.
    context_exchange: keys and values go around the ranks of a sequence, or these trade heads for
    sequence before and after attention. order: axes from the slowest to the fastest varying; the
    default is Megatron-LM's. Experts lie along data, or with `folds_context` along context and data
    together, as they do there.
    """

    ranks: int
    seq_len: int
    micro_batch: int
    num_microbatches: int
    tensor: int = 1
    pipe: int = 1
    chunks: int = 1
    context: int = 1
    context_exchange: ContextExchange = "ring"
    expert: int = 1
    zero: int = 0
    shard: int = 0
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    tensor_overlap: bool = False
    overlaps_data: bool = True
    recompute: Recompute = "none"
    recompute_share: float = 1.0
    stops_early: bool = True
    float8: bool = False
    dtype: str = "bfloat16"
    weight_bytes: float = 2
    reduce_bytes: float = 4
    kernels: Kernels = "fused"
    loss: Loss = "fused"
    optimizer: OptimizerKernels = "fused"
    muon_exchange: Exchange = "auto"
    attention: AttentionKernel = "flash2"
    dropout: bool = False
    lora: int = 0
    lora_mlp: bool = True
    shards_frozen: bool = True
    dedups: bool = False
    joins: bool = False
    graphs: bool = False
    copies: Literal["none", "gradients", "all"] = "none"
    expert_bias: bool = False
    clamps: bool = False
    rounds: int = 1
    exchanges: int = 0
    blocks: tuple[float, ...] = ()
    node_size: int = 0
    network_bytes_per_s: float = 0.0
    order: tuple[str, ...] = ("pipe", "data", "context", "tensor")
    folds_context: bool = True

    def __post_init__(self) -> None:
        model = self.tensor * self.pipe * self.context
        if min(self.ranks, self.seq_len, self.micro_batch, self.num_microbatches, model) < 1:
            raise ConfigError("a layout needs 1 or more of ranks, tokens, sequences and degrees")
        if self.ranks % model:
            raise ConfigError(
                f"tensor={self.tensor} x pipe={self.pipe} x context={self.context} does not divide "
                f"{self.ranks} ranks; use a multiple of {model} ranks"
            )

    @property
    def data(self) -> int:
        """Replicas of the model."""
        return self.ranks // (self.tensor * self.pipe * self.context)

    @property
    def sharers(self) -> int:
        """Ranks that share what ZeRO splits: FSDP counts those along context as well."""
        return min(self.shard or self.data * self.context, self.data * self.context)

    def stride(self, axis: str) -> int:
        """Return how far apart two neighbours along an axis are."""
        inner = self.order[self.order.index(axis) + 1 :]
        return prod(getattr(self, each) for each in inner)

    @property
    def expert_stride(self) -> int:
        """Return the distance of two ranks that share experts."""
        return self.stride("context" if self.folds_context else "data")

    @property
    def shards(self) -> ShardGroups:
        """The ranks that share dense parameters, and those that hold copies of such shards."""
        along_context = min(self.context, self.sharers)
        along_data, stride = max(self.sharers // self.context, 1), self.stride("data")
        copies = max(self.data // along_data, 1)
        return ShardGroups(
            (AxisPart(along_context, self.stride("context")), AxisPart(along_data, stride)),
            (AxisPart(copies, stride * along_data),),
        )

    @property
    def expert_shards(self) -> ShardGroups:
        """Return the numbers of ranks that share the parameters of experts, and of ranks that hold
        replicas.
        """
        if self.folds_context:
            sharers, stride = max(self.sharers // self.expert, 1), self.expert_stride * self.expert
            copies = max(self.data * self.context // (self.expert * sharers), 1)
            return ShardGroups((AxisPart(sharers, stride),), (AxisPart(copies, stride * sharers),))
        along_context = min(self.context, self.sharers)
        along_data = max(self.sharers // self.context // self.expert, 1)
        stride = self.stride("data") * self.expert
        copies = max(self.data // (self.expert * along_data), 1)
        return ShardGroups(
            (AxisPart(along_context, self.stride("context")), AxisPart(along_data, stride)),
            (AxisPart(copies, stride * along_data),),
        )

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one rank."""
        return self.micro_batch * self.seq_len // self.context

    @property
    def step_tokens(self) -> int:
        """Tokens of a step on all ranks."""
        return self.data * self.rounds * self.num_microbatches * self.micro_batch * self.seq_len

    @property
    def item_bytes(self) -> int:
        """Bytes of an activation."""
        return {"float64": 8, "float32": 4, "tfloat32": 4}.get(self.dtype, 2)
