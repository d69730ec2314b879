"""Parallel modules to compile, by name, for the tests and for benchmarks/compiled.

A case is a module, made with random float64 parameters, and what it is called with, in shapes of
which each has another length of sequence.
"""

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from torchdistpackage.comm import primitives
from torchdistpackage.models.gpt import GPT, GPTBlock
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.parallel.tensor.attention import ParallelAttention, rotary_tables
from torchdistpackage.parallel.tensor.cross_entropy import (
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from torchdistpackage.parallel.tensor.dropout import Dropout
from torchdistpackage.parallel.tensor.embedding import (
    FeatureParallelEmbedding,
    VocabParallelEmbedding,
)
from torchdistpackage.parallel.tensor.init import Initial
from torchdistpackage.parallel.tensor.linear import ColumnLinear, ParallelMlp, RowLinear
from torchdistpackage.parallel.tensor.norm import LayerNorm, RMSNorm
from torchdistpackage.tools.recompute import checkpoint_modules

DIM, HIDDEN, HEADS, BATCH, VOCAB = 16, 24, 4, 2, 32
LENGTHS = (8, 12, 16)
Inputs = list[tuple[Any, ...]]
Case = tuple[nn.Module, Inputs]
Make = Callable[..., Case]

COMMON = {"dtype": torch.float64, "initial": Initial("normal", 0.5)}


class Loss(nn.Module):
    """A cross entropy with the logits, or the output weight, as its parameter."""

    def __init__(self, rows: int, options: dict[str, Any], linear: bool):
        super().__init__()
        self.options, self.linear = options, linear
        if linear:
            self.weight = nn.Parameter(torch.randn(rows, DIM, dtype=torch.float64))

    def __deepcopy__(self, memo: dict[int, object]) -> "Loss":  # a group is no value to copy
        twin = Loss(0, self.options, False)
        twin.linear = self.linear
        twin._parameters = copy.deepcopy(self._parameters, memo)
        return twin

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        if self.linear:
            return linear_cross_entropy(x, self.weight, target, **self.options)
        return vocab_parallel_cross_entropy(x, target, **self.options)


def activations(group, sequence_parallel: bool, features: int = DIM, rows: int = 0) -> Inputs:
    """Equal on all ranks where they are whole; each rank's own where they are cut."""
    size = group.size()
    made = torch.Generator().manual_seed(1 + (group.rank() if sequence_parallel or rows else 0))
    cut = size if sequence_parallel else 1
    return [
        (torch.randn(n // cut, BATCH, features, dtype=torch.float64, generator=made),)
        for n in LENGTHS
    ]


def uneven(group, cut: bool, features: int = DIM) -> Inputs:
    """Sequences of different lengths on each rank, with their lengths."""
    found: Inputs = []
    for n in LENGTHS:
        sizes = tuple(n // group.size() + (rank == 0) for rank in range(group.size()))
        rows = sizes[group.rank()] if cut else sum(sizes)
        made = torch.Generator().manual_seed(1 + (group.rank() if cut else 0))
        found.append(
            (torch.randn(rows, BATCH, features, dtype=torch.float64, generator=made), sizes)
        )
    return found


def ids() -> Inputs:
    made = torch.Generator().manual_seed(2)
    return [(torch.randint(VOCAB - 1, (n, BATCH), generator=made),) for n in LENGTHS]


def shape(sequence_parallel: bool, **options: Any) -> GPTShape:
    how = {"layers": 2, "dim": DIM, "heads": HEADS, "vocab": VOCAB, "seq_len": 32}
    return GPTShape(
        **{"position": "learned", **how, "sequence_parallel": sequence_parallel, **options}
    )


def block(group, sequence_parallel: bool, dropout: float = 0.0, **options: Any) -> Case:
    how = {"group": group, "axis": "tensor", "dtype": torch.float64}
    made = GPTBlock(shape(sequence_parallel, **options), 0, dropout, ("attention", "mlp"), **how)
    return made, activations(group, sequence_parallel)


def rotary_block(group, sequence_parallel: bool) -> Case:
    module, inputs = block(
        group, sequence_parallel, norm="rms", mlp="swiglu", position="rotary", kv_heads=2
    )
    tables = [rotary_tables(n, DIM // HEADS, dtype=torch.float64) for n in LENGTHS]
    return module, [(*x, t) for x, t in zip(inputs, tables, strict=True)]


def recomputed(group, sequence_parallel: bool, *names: str) -> Case:
    module, inputs = block(group, sequence_parallel)
    return checkpoint_modules(nn.Sequential(module), [f"0{n}" for n in names]), inputs


def gpt(group, sequence_parallel: bool, pieces: range | None = None) -> Case:
    made = GPT(shape(sequence_parallel), pieces=pieces, group=group, dtype=torch.float64)
    if pieces is not None and pieces.start:
        return made, activations(group, sequence_parallel)
    return made, [(x.t().contiguous(),) for (x,) in ids()]


def loss(group, linear: bool, **options: Any) -> Case:
    size, rank = group.size(), group.rank()
    rows = -(-VOCAB // size) if rank < size - 1 else VOCAB - -(-VOCAB // size) * (size - 1)
    options = {"group": group, "vocab": VOCAB, **options}
    made = torch.Generator().manual_seed(5 + (0 if linear else rank))
    width = DIM if linear else rows
    found: Inputs = []
    for (target,) in ids():
        x = torch.randn(*target.shape, width, dtype=torch.float64, generator=made)
        target = target.clone()
        target[0, 0] = -100
        found.append((x, target))
    return Loss(rows, options, linear), found


def _simple(kind: type, split: bool = False, **options: Any) -> Make:
    def make(group, sequence_parallel: bool) -> Case:
        how = {"group": group, "sequence_parallel": sequence_parallel, **COMMON, **options}
        features, rows = DIM, 0
        if kind is RowLinear:
            made = kind(HIDDEN, DIM, **how)
            features, rows = made.weight.shape[1], 1
            whole = activations(group, False, features, rows)
            return made, whole
        made = kind(DIM, HIDDEN, **how)
        return made, activations(group, sequence_parallel)

    return make


def _attention(**options: Any) -> Make:
    def make(group, sequence_parallel: bool) -> Case:
        how = {"group": group, "sequence_parallel": sequence_parallel, **COMMON, **options}
        made = ParallelAttention(DIM, HEADS, causal=True, **how)
        return made, activations(group, sequence_parallel)

    return make


def _norm(kind: type) -> Make:
    def make(group, sequence_parallel: bool) -> Case:
        made = kind(DIM, group=group, sequence_parallel=sequence_parallel, dtype=torch.float64)
        return made, activations(group, sequence_parallel)

    return make


def _embedding(kind: type, **options: Any) -> Make:
    def make(group, sequence_parallel: bool) -> Case:
        how = {"group": group, "sequence_parallel": sequence_parallel, **COMMON, **options}
        return kind(VOCAB - 1, DIM, **how), ids()

    return make


def _dropout(split: bool) -> Make:
    def make(group, sequence_parallel: bool) -> Case:
        return Dropout(0.4, split=split, group=group), activations(group, split)

    return make


def _uneven(kind: type) -> Make:
    def make(group, sequence_parallel: bool) -> Case:
        how = {"group": group, "sequence_parallel": True, **COMMON}
        if kind is RowLinear:
            made = RowLinear(HIDDEN, DIM, **how)
            return made, uneven(group, False, made.weight.shape[1])
        return kind(DIM, HIDDEN, **how), uneven(group, True)

    return make


BOTH: dict[str, Make] = {
    "ColumnLinear": _simple(ColumnLinear),
    "ColumnLinear, transposed": _simple(ColumnLinear, transposed=True),
    "RowLinear": _simple(RowLinear),
    "ParallelMlp": _simple(ParallelMlp),
    "ParallelMlp, gated": _simple(ParallelMlp, gated=True, bias=False),
    "ParallelMlp, tp_comm_overlap": _simple(ParallelMlp, tp_comm_overlap=True),
    "ParallelAttention": _attention(),
    "ParallelAttention, grouped": _attention(kv_heads=2),
    "ParallelAttention, shared heads": _attention(kv_heads=1),
    "ParallelAttention, dropout": _attention(dropout=0.3),
    "VocabParallelEmbedding": _embedding(VocabParallelEmbedding),
    "FeatureParallelEmbedding": _embedding(FeatureParallelEmbedding),
    "LayerNorm": _norm(LayerNorm),
    "RMSNorm": _norm(RMSNorm),
    "GPTBlock": block,
    "GPTBlock, rotary, SwiGLU, RMSNorm": rotary_block,
    "GPTBlock, dropout": lambda group, sequence: block(group, sequence, dropout=0.2),
    "GPTBlock, recomputed": lambda group, sequence: recomputed(group, sequence, ""),
    "GPTBlock, attention recomputed": lambda g, sequence: recomputed(g, sequence, ".attention"),
    "GPT": gpt,
    "GPT, last stage": lambda group, sequence: gpt(group, sequence, range(3, 6)),
}
"""With and without sequence parallelism."""

ONCE: dict[str, Make] = {
    "Dropout, whole": _dropout(False),
    "Dropout, split": _dropout(True),
    "ColumnLinear, uneven": _uneven(ColumnLinear),
    "RowLinear, uneven": _uneven(RowLinear),
    "ParallelMlp, uneven": _uneven(ParallelMlp),
    "vocab_parallel_cross_entropy": lambda group, _: loss(group, False),
    "vocab_parallel_cross_entropy, options": lambda group, _: loss(
        group, False, label_smoothing=0.1, z_loss=0.01, reduction="mean"
    ),
    "linear_cross_entropy": lambda group, _: loss(group, True, chunk_tokens=5),
    "linear_cross_entropy, options": lambda group, _: loss(
        group, True, chunk_tokens=5, label_smoothing=0.1, z_loss=0.01, reduction="sum"
    ),
}

CASES: dict[str, tuple[Make, bool]] = {
    **{name: (make, False) for name, make in BOTH.items()},
    **{f"{name}, sequence parallel": (make, True) for name, make in BOTH.items()},
    **{name: (make, False) for name, make in ONCE.items()},
}
"""Name -> what makes it of a group, and whether under sequence parallelism."""


ADDED: dict[str, tuple[Make, bool]] = {}
"""Cases of other files, which `made` finds too."""


def made(name: str, group=None) -> Case:
    """The case, with parameters of this rank's own seed, as each holds its part."""
    make, sequence_parallel = {**CASES, **ADDED}[name]
    group = primitives.world() if group is None else group
    torch.manual_seed(11)
    module, inputs = make(group, sequence_parallel)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:  # biases and norms that do nothing would hide a mistake
                parameter.add_(torch.linspace(-0.5, 0.5, len(parameter), dtype=parameter.dtype))
    return module, inputs


def step(run, parameters, given):
    """What `run` makes of its inputs, and the gradients of these and of the parameters."""
    torch.manual_seed(3)
    given = [
        x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in given
    ]
    out = run(*given)
    factors = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    wanted = [x for x in (*given, *parameters) if isinstance(x, Tensor) and x.requires_grad]
    grads = torch.autograd.grad((out * factors).sum(), wanted) if wanted else ()
    return [out.detach(), *grads]


def use_own_cache() -> None:
    """Let ranks keep graphs apart: of one folder a rank may load what another still writes."""
    rank = primitives.world().rank()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{default_cache_dir()}/rank{rank}"


def compared(name: str, backend: str, num_shapes: int) -> tuple[int, int, float, float]:
    """(graph breaks, recompiles over the shapes, difference forward, of gradients)"""
    use_own_cache()
    module, inputs = made(name)
    twin = copy.deepcopy(module)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(twin, backend=backend, fullgraph=True)
    forward = backward = 0.0
    with inductor.patch(fallback_random=True):  # else inductor draws by itself
        for given in inputs[:num_shapes]:
            here, there = list(module.parameters()), list(twin.parameters())
            expected, found = step(module, here, given), step(compiled, there, given)
            assert [x.shape for x in found] == [x.shape for x in expected]
            apart = [
                float((a - b).abs().max()) if a.numel() else 0.0
                for a, b in zip(expected, found, strict=True)
            ]
            forward, backward = max(forward, apart[0]), max(backward, *apart[1:], 0.0)
    breaks = sum(counters["graph_break"].values())
    return breaks, counters["stats"]["unique_graphs"] - 1, forward, backward
