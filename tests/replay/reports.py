"""Published bugs of distributed training, each with the mistake to plant and what must be named.

Every row was found by reading the report. `what` says what was wrong there, in one line; the plant
of the same name (plants.py in a part of this package, own_loop.py in a user's own loop) makes the
same mistake and keeps shapes, dtypes and calls. The list was fixed before the detectors were run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Report:
    """One published bug.

    name: of the plant. reports: `owner/repository#number`. kind: the chapter it belongs to.
    axis: the axes along which ranks must be named; `one process` where one process is wrong too.
    module: regular expressions, one of which the named module matches.
    says: kinds of `equivalence.causes`, one of which the finding has.
    changes: overrides of the run that the plant is in; empty: it is in a user's own loop.
    """

    name: str
    reports: tuple[str, ...]
    what: str
    kind: str
    axis: frozenset[str]
    module: tuple[str, ...]
    says: tuple[str, ...]
    changes: Sequence[str] = field(default=())

    @property
    def is_run(self) -> bool:
        """True if the plant is in a part of this package, and a run is compared."""
        return bool(self.changes)


GRADIENTS, NORMS, DATA, RANDOMNESS = "gradients", "norms and updates", "data", "randomness"
PIPELINE, STATE, PRECISION, COMPILE = "pipeline", "state", "precision", "compile"
KINDS = (GRADIENTS, NORMS, DATA, RANDOMNESS, PIPELINE, STATE, PRECISION, COMPILE)

_DENSE = (
    *("model.layers=2", "model.heads=2", "model.dim=8", "model.vocab=64", "model.mlp_ratio=2.0"),
    *("data.seq_len=8", "data.args={seq_len: 8, vocab: 64}", "data.global_batch=8"),
    *("data.target=tests.replay.sources:Tokens", "pipeline.microbatches=2", "train.steps=5"),
    *("optim.clip=0.5", "optim.lr=0.01", "optim.warmup_steps=2"),
)
_MOE = (
    *(*_DENSE, "model.mlp=swiglu", "model.mlp_bias=false"),
    "model.moe={num_experts: 4, top_k: 2, hidden: 8, balance: aux_loss, aux_loss: 0.1}",
)
_PACKED = (*_DENSE, "data.target=tests.replay.sources:Packed")


def _run(base: Sequence[str], **parallel: object) -> tuple[str, ...]:
    """Return overrides of a run; `zero=1` is parallel.zero, `pipeline__schedule` another key."""
    parallel = {"data": 1, **parallel}
    keys = {k.replace("__", ".") if "__" in k else f"parallel.{k}": x for k, x in parallel.items()}
    return (*base, *(f"{key}={str(x).lower()}" for key, x in keys.items()))


def _axes(text: str) -> frozenset[str]:
    return frozenset(text.split())


REPORTS: tuple[Report, ...] = (
    # -- gradients -------------------------------------------------------------------------
    Report(
        "norm_not_summed",
        ("NVIDIA/Megatron-LM#1446",),
        "under tensor and sequence parallelism the final norm's gradient is each rank's own",
        GRADIENTS,
        _axes("tensor"),
        (r"head\.norm",),
        ("gradient not summed",),
        _run(_DENSE, tensor=2, sequence_parallel=True),
    ),
    Report(
        "norm_summed_again",
        ("NVIDIA/Megatron-LM#1528",),
        "with tensor and context parallelism a norm's gradient is as often too large as there are "
        "tensor ranks",
        GRADIENTS,
        _axes("tensor context"),
        (r"norm",),
        ("gradient summed",),
        _run(_DENSE, tensor=2, context=2),
    ),
    Report(
        "experts_times_ranks",
        ("deepspeedai/DeepSpeed#6545",),
        "under ZeRO the gradient of experts is as often too large as ranks share the experts",
        GRADIENTS,
        _axes("expert"),
        (r"mlp\.experts",),
        ("gradient summed",),
        _run(_MOE, data=2, expert=2, zero=1),
    ),
    Report(
        "experts_twice",
        ("pytorch/pytorch#160285",),
        "with two expert ranks the gradients of experts have twice the size, those of the rest not",
        GRADIENTS,
        _axes("expert"),
        (r"mlp\.experts",),
        ("gradient summed",),
        _run(_MOE, data=2, expert=2),
    ),
    Report(
        "doubled_each_microbatch",
        ("NVIDIA/Megatron-LM#6660",),
        "a sharded gradient buffer of a group of one rank, as experts have where expert ranks are "
        "the data ranks, is doubled with every micro-batch",
        GRADIENTS,
        _axes("expert"),
        (r"mlp\.experts",),
        ("accumulation", "gradient summed", "wrong backward"),
        _run(_MOE, data=2, expert=2, zero=2),
    ),
    Report(
        "expert_lora_counted_twice",
        ("NVIDIA-NeMo/Megatron-Bridge#5634", "NVIDIA-NeMo/Megatron-Bridge#5635"),
        "the adapter of an expert's second product gathers its full result, which the sum over "
        "tensor ranks then counts once a rank",
        GRADIENTS,
        _axes("tensor"),
        (r"experts?(\.|$)",),
        ("added on every rank", "wrong sum"),
    ),
    Report(
        "expert_lora_detached",
        ("NVIDIA-NeMo/Megatron-Bridge#5634",),
        "where tensor ranks share experts the adapter's output is detached, so it trains nothing",
        GRADIENTS,
        _axes("tensor"),
        (r"lora",),
        ("not reached",),
    ),
    Report(
        "expert_lora_drawn_apart",
        ("NVIDIA-NeMo/Megatron-Bridge#5396",),
        "adapters that expert ranks hold alike begin with values of each rank's own random state",
        GRADIENTS,
        _axes("expert"),
        (r"lora",),
        ("initial weights",),
    ),
    Report(
        "expert_lora_by_degree",
        ("NVIDIA-NeMo/Megatron-Bridge#5484",),
        "an adapter shared by the experts of a rank is another one on every expert rank, so what "
        "is trained depends on the expert degree",
        GRADIENTS,
        _axes("expert"),
        (r"lora",),
        ("gradient not summed",),
    ),
    Report(
        "latent_summed_twice",
        ("inclusionAI/AReno#496",),
        "the gradient of MLA's replicated first projections is summed over tensor ranks twice",
        GRADIENTS,
        _axes("tensor"),
        (r"latent\.(a|norm)",),
        ("gradient summed",),
    ),
    Report(
        "tied_sum_of_unreduced",
        ("NVIDIA/Megatron-LM#844",),
        "copies of a tied embedding are added up between the stages while each data rank has only "
        "its own partition summed",
        GRADIENTS,
        _axes("data pipe"),
        (r"embed|head",),
        ("gradient not summed", "tied"),
        _run(_DENSE, data=2, pipe=2, model__tied=True),
    ),
    Report(
        "tied_not_summed",
        ("uw-syfi/piper#13",),
        "copies of a tied embedding on two stages are updated by their own gradients alone",
        GRADIENTS,
        _axes("pipe"),
        (r"embed|head",),
        ("gradient not summed", "tied"),
        _run(_DENSE, pipe=2, model__tied=True),
    ),
    Report(
        "auxiliary_by_microbatches",
        ("NVIDIA-NeMo/Automodel#3359",),
        "the auxiliary loss enters every micro-batch's backward without the division that the "
        "main loss has, so it counts once a micro-batch",
        GRADIENTS,
        _axes("accumulation"),
        (r"mlp(\.router)?$",),
        ("auxiliary loss",),
        _run(_MOE, data=2),
    ),
    Report(
        "auxiliary_by_ranks",
        ("NVIDIA-NeMo/Automodel#1412",),
        "the gradient of the auxiliary loss is divided by the number of data ranks once more",
        GRADIENTS,
        _axes("data"),
        (r"mlp(\.router)?$",),
        ("auxiliary loss",),
        _run(_MOE, data=2),
    ),
    Report(
        "auxiliary_by_context",
        ("NVIDIA/Megatron-LM#1652",),
        "the main loss is multiplied by the context degree before gradients are averaged, the "
        "auxiliary loss is not",
        GRADIENTS,
        _axes("context"),
        (r"mlp(\.router)?$",),
        ("auxiliary loss",),
        _run(_MOE, context=2),
    ),
    Report(
        "mean_of_context_means",
        ("PrimeIntellect-ai/prime-rl#1960",),
        "each rank takes the mean over its own tokens, and ranks with few of them weigh too much",
        GRADIENTS,
        _axes("context"),
        (r"loss",),
        ("uneven means",),
        _run(_DENSE, context=2),
    ),
    Report(
        "replicas_begin_apart",
        ("NVIDIA-NeMo/Automodel#3822",),
        "parameters that tensor ranks hold alike are not equal from the start, and drift",
        GRADIENTS,
        _axes("tensor"),
        (r"norm",),
        ("initial weights",),
        _run(_DENSE, tensor=2),
    ),
    Report(
        "replica_groups_not_summed",
        ("NVIDIA-NeMo/Automodel#3135",),
        "with sharding inside groups, gradients are no longer summed over the groups",
        GRADIENTS,
        _axes("data"),
        (r".",),
        ("gradient not summed",),
        _run(_DENSE, data=4, zero=1, zero_group=2),
    ),
    Report(
        "head_norms_not_summed",
        ("NVIDIA-NeMo/RL#3716",),
        "the norm of queries is whole on every tensor rank but sees its own heads; one of two "
        "code paths does not sum its gradient",
        GRADIENTS,
        _axes("tensor"),
        (r"q_norm",),
        ("gradient not summed",),
    ),
    Report(
        "mixture_input_not_summed",
        ("pytorch/torchtitan#1805",),
        "a mixture under tensor parallelism leaves out the sum of its input's gradient",
        GRADIENTS,
        _axes("tensor"),
        (r"mlp$",),
        ("gradient not summed",),
        _run(_MOE, tensor=2),
    ),
    Report(
        "head_input_not_summed",
        ("NovaSky-AI/SkyRL#1886",),
        "the sum of the gradient of the output layer's input goes into a copy that nobody reads",
        GRADIENTS,
        _axes("tensor"),
        (r"head$",),
        ("gradient not summed",),
        _run(_DENSE, tensor=2),
    ),
    Report(
        "router_of_local_experts",
        ("huggingface/transformers#48205",),
        "the gradient of the router's scores covers the experts of this rank alone",
        GRADIENTS,
        _axes("expert"),
        (r"mlp(\.router)?$",),
        ("gradient not summed", "wrong backward"),
        _run(_MOE, data=2, expert=2),
    ),
    Report(
        "smoothing_of_columns",
        ("NVIDIA/Megatron-LM#737", "NVIDIA/Megatron-LM#7464"),
        "label smoothing takes the mean over this rank's columns of the vocabulary",
        GRADIENTS,
        _axes("tensor"),
        (r"loss",),
        ("loss of a shard",),
        _run(_DENSE, tensor=2, train__label_smoothing=0.2),
    ),
    Report(
        "loss_of_gathered_logits",
        ("NVIDIA/Megatron-LM#7452",),
        "the loss of a split vocabulary is taken of gathered logits: it is too large by log(ranks)",
        GRADIENTS,
        _axes("tensor"),
        (r"loss",),
        ("loss of a shard",),
        _run(_DENSE, tensor=2),
    ),
    Report(
        "bias_on_every_rank",
        ("pytorch/torchtitan#2106",),
        "the bias of a product whose result is a partial sum is added on every rank",
        GRADIENTS,
        _axes("tensor"),
        (r"attention\.out|mlp\.down|attention$|mlp$",),
        ("added on every rank",),
        _run(_DENSE, tensor=2),
    ),
    Report(
        "rounds_dropped",
        ("NVIDIA-NeMo/Automodel#3530",),
        "under pipeline parallelism stages are made ready again between accumulated micro-batches, "
        "which drops all gradients but the last",
        GRADIENTS,
        _axes("pipe"),
        (r".",),
        ("accumulation",),
        _run(_DENSE, pipe=2, train__accumulate=2),
    ),
    Report(
        "last_microbatch_not_summed",
        ("deepspeedai/DeepSpeed#7985",),
        "the last micro-batch's gradient is added after the sum over ranks",
        GRADIENTS,
        _axes("data"),
        (r".",),
        ("gradient not summed", "accumulation"),
    ),
    # -- norms and updates -----------------------------------------------------------------
    Report(
        "clip_by_expert_group",
        ("NVIDIA-NeMo/Automodel#3816", "NVIDIA-NeMo/Automodel#3817"),
        "the norm to clip by lacks the experts of other ranks, and differs between them",
        NORMS,
        _axes("expert"),
        (r"norm",),
        ("norm",),
        _run(_MOE, data=2, expert=2),
    ),
    Report(
        "clip_by_mean_of_norms",
        ("deepspeedai/DeepSpeed#8475",),
        "norms of ranks that hold different experts are averaged",
        NORMS,
        _axes("expert"),
        (r"norm",),
        ("norm",),
        _run(_MOE, data=2, expert=2),
    ),
    Report(
        "replicated_counted_twice",
        ("NVIDIA-NeMo/RL#3788",),
        "the norm counts what tensor ranks hold alike once a rank",
        NORMS,
        _axes("tensor"),
        (r"norm",),
        ("norm",),
        _run(_DENSE, tensor=2),
    ),
    Report(
        "experts_left_out_of_norm",
        ("NVIDIA/Megatron-LM#5916",),
        "with tensor and expert ranks the norm leaves out experts of all but one tensor rank",
        NORMS,
        _axes("tensor expert"),
        (r"norm",),
        ("norm",),
        _run(_MOE, data=2, expert=2, tensor=2),
    ),
    Report(
        "clip_by_stage",
        ("pytorch/torchtitan#596",),
        "every stage clips by the norm of its own parameters",
        NORMS,
        _axes("pipe"),
        (r"norm",),
        ("norm",),
        _run(_DENSE, pipe=2),
    ),
    Report(
        "muon_of_shards",
        ("deepspeedai/DeepSpeed#8437",),
        "Muon makes each tensor rank's rows orthogonal as if they were the matrix",
        NORMS,
        _axes("tensor"),
        (r"mlp|mixer|latent|expert",),
        ("update", "optimizer state"),
    ),
    Report(
        "adafactor_of_shards",
        ("pytorch/pytorch#109581",),
        "Adafactor's means over rows are those of the rows that a data rank holds",
        NORMS,
        _axes("data"),
        (r".",),
        ("update", "optimizer state"),
    ),
    Report(
        "decay_of_flat_shards",
        ("verl-project/verl#7215", "verl-project/verl#5070"),
        "sharding joins norms and biases with matrices, and weight decay applies to them too",
        NORMS,
        _axes("data"),
        (r"norm|bias|attention|mlp|embed",),
        ("weight decay", "update"),
        _run(_DENSE, data=2, zero=1, optim__weight_decay=0.1),
    ),
    Report(
        "schedule_by_ranks",
        ("huggingface/accelerate#2926",),
        "the schedule of the learning rate steps once a rank in every step",
        NORMS,
        _axes("data"),
        (r"learning rate",),
        ("learning rate",),
        _run(_DENSE, data=2),
    ),
    # -- data ------------------------------------------------------------------------------
    Report(
        "model_peers_read_apart",
        ("huggingface/accelerate#3092",),
        "ranks of one data index get different samples, as each process is taken for a data rank",
        DATA,
        _axes("tensor"),
        (r"data",),
        ("samples of peers", "order of data", "same samples"),
        _run(_DENSE, tensor=2),
    ),
    Report(
        "labels_shifted_in_parts",
        ("NVIDIA-BioNeMo/bionemo-recipes#1449",),
        "labels are shifted after the sequence was cut: the last token of each part has none",
        DATA,
        _axes("context"),
        (r"data",),
        ("labels",),
        _run(_DENSE, context=2),
    ),
    Report(
        "documents_seen_by_others",
        ("huggingface/trl#6843", "axolotl-ai-cloud/axolotl#3867"),
        "context parallelism drops the mask of packed documents and attends to all before",
        DATA,
        _axes("context"),
        (r"attention|attend",),
        ("mask or positions",),
        _run(_PACKED, context=2),
    ),
    Report(
        "documents_of_parts",
        ("axolotl-ai-cloud/axolotl#2495",),
        "bounds of packed documents are computed in the order of ranks, not of the sequence",
        DATA,
        _axes("context"),
        (r"attention|attend",),
        ("mask or positions",),
        _run(_PACKED, context=2),
    ),
    Report(
        "loader_begins_anew",
        ("pytorch/torchtitan#3907",),
        "a loader that was loaded once saves the position of its start, so the second resume "
        "begins anew",
        DATA,
        _axes("resume"),
        (r"data",),
        ("data after a resume",),
        _run(_DENSE, data=2),
    ),
    Report(
        "loader_of_another_rank",
        ("NVIDIA/Megatron-LM#7413", "huggingface/accelerate#4165"),
        "data ranks write their position into one file, and all resume at that of one",
        DATA,
        _axes("data resume"),
        (r"data",),
        ("data after a resume",),
        _run(_DENSE, data=2),
    ),
    Report(
        "mean_of_microbatch_means",
        ("PrimeIntellect-ai/prime-rl#583", "meta-pytorch/torchtune#1875"),
        "every micro-batch is divided by its own tokens, not by those of the batch",
        DATA,
        _axes("accumulation"),
        (r"loss",),
        ("uneven means",),
        _run(_DENSE, data=2),
    ),
    # -- randomness ------------------------------------------------------------------------
    Report(
        "dropout_alike_on_parts",
        ("PaddlePaddle/PaddleFleetX#1005",),
        "parts of a sequence on tensor ranks are dropped by one mask",
        RANDOMNESS,
        _axes("tensor"),
        (r"drop",),
        ("dropout alike on shards",),
        _run(_DENSE, tensor=2, sequence_parallel=True, model__dropout=0.3),
    ),
    Report(
        "dropout_apart_on_replicas",
        ("InternLM/InternLM#405",),
        "tensor ranks draw from different seeds what they hold alike",
        RANDOMNESS,
        _axes("tensor"),
        (r"drop",),
        ("dropout apart",),
        _run(_DENSE, tensor=2, model__dropout=0.3),
    ),
    Report(
        "dropout_alike_on_samples",
        ("tenstorrent/tt-metal#55947",),
        "all data ranks drop by one mask",
        RANDOMNESS,
        _axes("data"),
        (r"drop",),
        ("dropout alike",),
        _run(_DENSE, data=2, model__dropout=0.3),
    ),
    Report(
        "recompute_draws_anew",
        ("allenai/OLMo-core#828",),
        "a recomputed block draws another dropout mask than its forward did",
        RANDOMNESS,
        _axes("recompute"),
        (r"blocks|drop",),
        ("recompute",),
        _run(_DENSE, data=2, model__dropout=0.3, train__recompute="blocks"),
    ),
    # -- pipeline --------------------------------------------------------------------------
    Report(
        "stale_activation",
        ("deepspeedai/DeepSpeed#2800",),
        "with one buffer less, what arrives for a micro-batch takes the place of another's",
        PIPELINE,
        _axes("pipe"),
        (r"blocks",),
        ("stale activations",),
        _run(_DENSE, pipe=2),
    ),
    Report(
        "buffer_freed_while_sent",
        ("NVIDIA/Megatron-LM#4047",),
        "an output is freed, and its memory used again, before it has been sent",
        PIPELINE,
        _axes("pipe"),
        (r"blocks",),
        ("stale activations", "message changed"),
        _run(_DENSE, pipe=2),
    ),
    Report(
        "weight_pass_skipped",
        ("deepspeedai/Megatron-DeepSpeed#442",),
        "gradients of weights are stored for a later pass that nobody runs",
        PIPELINE,
        _axes("pipe"),
        (r".",),
        ("not reached",),
        _run(_DENSE, pipe=2, pipeline__schedule="zb-h1"),
    ),
    Report(
        "split_backward_not_summed",
        ("pytorch/pytorch#144530",),
        "a zero-bubble backward does not run the hooks by which replicas sum their gradients",
        PIPELINE,
        _axes("data pipe"),
        (r".",),
        ("gradient not summed",),
        _run(_DENSE, data=2, pipe=2, pipeline__schedule="zb-h1"),
    ),
    Report(
        "updated_between_microbatches",
        ("pytorch/pytorch#124523",),
        "an optimizer in the backward steps with every micro-batch, so later ones see new weights",
        PIPELINE,
        _axes("pipe"),
        (r".",),
        ("updated weights",),
        _run(_DENSE, pipe=2, train__accumulate=2),
    ),
    # -- state -----------------------------------------------------------------------------
    Report(
        "state_of_another_shard",
        ("huggingface/transformers#48569",),
        "after a load under tensor parallelism the optimizer has the state of another shard",
        STATE,
        _axes("tensor resume"),
        (r".",),
        ("state after a resume",),
        _run(_DENSE, tensor=2),
    ),
    Report(
        "average_not_restored",
        ("m2lines/Samudra#313", "ai2cm/ace#349"),
        "a resumed run begins its average of the weights anew",
        STATE,
        _axes("resume"),
        (r".",),
        ("state after a resume",),
        _run(_DENSE, data=2, optim__ema_decay=0.9),
    ),
    Report(
        "random_state_of_rank_0",
        ("NVIDIA/Megatron-LM#6858", "radixark/miles#3187"),
        "one rank's random state is saved, and all ranks resume from it",
        STATE,
        _axes("data resume"),
        (r"random|drop",),
        ("random state after a resume",),
        _run(_DENSE, data=2, model__dropout=0.3),
    ),
    # -- precision -------------------------------------------------------------------------
    Report(
        "sums_in_bf16",
        ("ISEEKYAN/Megatron-LM#149",),
        "a sharded optimizer accumulates the gradients of micro-batches in bf16",
        PRECISION,
        _axes("data"),
        (r".",),
        ("precision",),
        _run(_DENSE, data=2, zero=1),
    ),
    Report(
        "rotary_in_bf16",
        ("KellerJordan/modded-nanogpt#39", "EleutherAI/gpt-neox#1003"),
        "cosines and sines of positions are rounded to bf16",
        PRECISION,
        frozenset({"one process"}),
        (r"attention|blocks|rotary",),
        ("precision",),
        _run(_DENSE, data=2, model__position="rotary"),
    ),
    Report(
        "router_in_bf16",
        ("PrimeIntellect-ai/prime-rl#2952",),
        "the product of a router is computed in bf16",
        PRECISION,
        frozenset({"one process"}),
        (r"router",),
        ("precision",),
        _run(_MOE, data=2),
    ),
    Report(
        "float8_scale_of_shard",
        ("NVIDIA/Megatron-LM#442",),
        "the largest value behind a float8 scale is shared over the data ranks, not the tensor "
        "ranks that hold the tensor",
        PRECISION,
        _axes("tensor"),
        (r"mlp",),
        ("wrong sum", "precision", "sum is missing", "scale of a shard"),
    ),
    # -- compile ---------------------------------------------------------------------------
    Report(
        "collective_eliminated",
        ("pytorch/pytorch#130918",),
        "the compiler erases a collective whose result this rank does not use",
        COMPILE,
        _axes("data"),
        (r".",),
        ("gradient not summed",),
    ),
    Report(
        "collective_rewritten",
        ("vllm-project/vllm#33088",),
        "a pass of the compiler turns the sum of a fused reduce-scatter into a mean",
        COMPILE,
        _axes("tensor"),
        (r"mlp",),
        ("wrong sum", "sum is missing"),
    ),
    Report(
        "compiled_gradient_unwritten",
        ("pytorch/pytorch#193061",),
        "the compiled backward of chained norms with one table of scales leaves a part of the "
        "table's gradient unwritten",
        COMPILE,
        _axes("compile"),
        (r"blocks|norm",),
        ("compiled",),
        _run(_DENSE, data=2, train__compile="blocks", train__compile_backend="aot_eager"),
    ),
)
