"""Count what each tensor-parallel layer sends, computes and keeps for one micro-batch. No torch.

These functions stand beside layouts.py: shapes of matmuls follow from the layouts there, so a
layer's cut is stated once. Calls are listed forward and backward, which are pairs of autograd
(comm/collectives.py): what is gathered forward is reduce-scattered backward, and so on. Plans and
MFU read these numbers, and `tests/models/test_layer_numbers.py` runs each layer and holds its
record to them, so a call that nobody counted fails there by the layer's name. Predicted step times
price matmuls of their own (predict/layer.py); a test holds both to the same FLOPs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torchdistpackage.layout.derive import local_shape
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import Layouts
from torchdistpackage.predict.calls import ITEM_BYTES, CallCount, Microbatch
from torchdistpackage.predict.kernels import Matmul
from torchdistpackage.topology.mesh import Mesh


@dataclass(frozen=True, slots=True)
class LayerNumbers:
    """The calls, matmuls and kept activations of one layer of a rank for one microbatch.

    layer: its path in the model. calls: forward and backward, with what recomputation repeats.
    matmuls: of the forward. kept: bytes of each activation that autograd keeps for the backward,
    with kernels of the CPU. is_exact: it keeps these bytes on every rank and kernel; without it
    they are those of experts chosen alike, or of a kernel that may keep more.
    """

    layer: str
    calls: tuple[CallCount, ...] = ()
    matmuls: tuple[Matmul, ...] = ()
    kept: Mapping[str, int] = field(default_factory=dict[str, int])
    is_exact: bool = True

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward. A multiply-add counts two."""
        return sum(matmul.flops for matmul in self.matmuls)

    @property
    def kept_bytes(self) -> int:
        return sum(self.kept.values())

    def __or__(self, other: "LayerNumbers") -> "LayerNumbers":
        """Return the numbers of both layers under the name of the first."""
        assert not self.kept.keys() & other.kept.keys()
        return LayerNumbers(
            self.layer,
            self.calls + other.calls,
            self.matmuls + other.matmuls,
            {**self.kept, **other.kept},
            self.is_exact and other.is_exact,
        )


ONE_TOKEN = Microbatch(1, 1, 1, 0, 1, "float32", "float32", "float32")
"""One token of a full sequence on one rank, so that FLOPs of a layer are per token."""
BACKWARD_PER_FORWARD = 2.0
"""Backward matmuls for each forward one: each matmul has two gradients."""


def _mesh(batch: Microbatch) -> Mesh:
    """Return the ranks that share a layer; for experts, those of an average rank."""
    return Mesh((("expert", 1), ("tensor", batch.tensor)))


def on_rank(layout: Layout, batch: Microbatch) -> tuple[int, ...]:
    """Return the shape of the rank's shard of a parameter that tensor ranks share."""
    return local_shape(layout, _mesh(batch), batch.index)


def linear(weight: Layout, batch: Microbatch) -> Matmul:
    """Return the matmul of a linear layer by its weight's layout, (Dout, Din)."""
    width, terms = on_rank(weight, batch)
    return Matmul(batch.rows, width, terms)


def embedding(place: "CallPlace", dim: int) -> LayerNumbers:
    """Return the numbers of an embedding with a table split by rows."""
    batch = place.of
    kept_bytes = {"ids": batch.rows * ITEM_BYTES["int64"]}
    if batch.tensor == 1:
        return LayerNumbers("embedding", kept=kept_bytes)
    return LayerNumbers(
        "embedding", (*place.row(dim, batch.stream),), (), kept_bytes | {"mask": batch.rows}
    )


def norm(place: "CallPlace", dim: int, kind: str) -> LayerNumbers:
    """Return the numbers of a norm over the last dim, "layer" or "rms", on this rank's tokens."""
    rows, item = place.rows, ITEM_BYTES[place.of.stream]
    if kind == "layer":
        kept_bytes = {"norm input": rows * dim * item, "norm": 2 * rows * item}
    else:  # on a CPU by operations of float32, of which two keep a tensor; on a GPU by a kernel
        wide = max(item, 4)
        kept_bytes = {"norm input": rows * dim * item, "norm": rows * wide}
        kept_bytes["norm in steps"] = rows * dim * (2 * wide - item)
    return LayerNumbers("norm", kept=kept_bytes)


def attention(
    place: "CallPlace",
    cuts: Layouts,
    dim: int,
    head_dim: int,
    seq_len: int,
    is_rotary: bool,
    again: bool = True,
) -> LayerNumbers:
    """Return the numbers of a self-attention whose heads tensor ranks share, by
    `layouts.attention`.

    seq_len: keys that a query meets, causal or not. again: see `CallPlace.row`.
    """
    batch = place.of
    first = [linear(cuts[x], batch) for x in ("qkv.weight", "q.weight", "kv.weight") if x in cuts]
    out = linear(cuts["out.weight"], batch)
    q = int(out.k)
    heads = batch.samples * q // head_dim
    scores = Matmul(batch.tokens, seq_len, head_dim, heads)
    values = Matmul(batch.tokens, head_dim, seq_len, heads)
    matmuls = (*first, out)
    calls = _pair(place, dim, again)
    # other kernels, which keep more
    is_exact = not (batch.drops or batch.has_positions or batch.tokens != seq_len)
    item, width = ITEM_BYTES[batch.products], int(sum(each.n for each in first))
    kept_bytes = {"input": batch.rows * dim * item} | _narrow_weights(batch, matmuls)
    if batch.drops:  # a kernel that has all scores, their softmax and their mask
        kept_bytes["scores"] = 3 * heads * batch.tokens * seq_len * item
    else:
        kept_bytes["softmax"] = batch.rows * (q // head_dim) * max(item, 4)
        kept_bytes["heads"] = batch.rows * q * item
    if is_rotary or batch.drops:
        kv = (width - q) // 2
        kept_bytes["turned queries and keys"] = batch.rows * (q + kv) * item
        # a view of values keeps all that one matmul gave
        values_width = kv if batch.drops else (width if len(first) == 1 else 2 * kv)
        kept_bytes["values"] = batch.rows * values_width * item
        kept_bytes["joined heads"] = batch.rows * q * item
    else:
        kept_bytes["queries, keys and values"] = batch.rows * width * item
    return LayerNumbers("attention", calls, (*matmuls, scores, values), kept_bytes, is_exact)


def rotary(batch: Microbatch, head_dim: int) -> LayerNumbers:
    """Return the numbers of the rotary tables, which all attentions of a stage share."""
    wide = max(ITEM_BYTES[batch.stream], 4)
    return LayerNumbers("rotary", kept={"cosines and sines": batch.tokens * head_dim * wide})


def mlp(
    place: "CallPlace", cuts: Layouts, dim: int, gated: bool, again: bool = True
) -> LayerNumbers:
    """Return the numbers of two matmuls with the hidden dim split between them, by
    `layouts.mlp`.
    """
    batch = place.of
    up = linear(cuts["gate_up.weight" if gated else "up.weight"], batch)
    down = linear(cuts["down.weight"], batch)
    item = ITEM_BYTES[batch.products]
    hidden = batch.rows * int(down.k) * item
    kept_bytes = {
        "input": batch.rows * dim * item,
        "before activation": batch.rows * int(up.n) * item,
        "hidden": hidden,
    } | _narrow_weights(batch, (up, down))
    if gated:
        kept_bytes["activated gate"] = hidden
    return LayerNumbers("mlp", _pair(place, dim, again), (up, down), kept_bytes)


def head(place: "CallPlace", weight: Layout, dim: int) -> LayerNumbers:
    """Logits cut by the vocabulary, and their cross entropy."""
    batch = place.of
    calls = (*place.column(dim, batch.products), *place.loss()) if batch.tensor > 1 else ()
    matmul = linear(weight, batch)
    item = ITEM_BYTES[batch.products]
    kept_bytes = {
        "input": batch.rows * dim * item,
        "logits": batch.rows * int(matmul.n) * item,
        "softmax of the loss": 2 * batch.rows * ITEM_BYTES[batch.losses],
    } | _narrow_weights(batch, (matmul,))
    return LayerNumbers("head", calls, (matmul,), kept_bytes)


def _pair(place: "CallPlace", dim: int, again: bool) -> tuple[CallCount, ...]:
    """Return the calls around a column layer and the row layer after it."""
    dtype = place.of.products
    if place.of.tensor == 1:
        return ()
    return (*place.column(dim, dtype), *place.row(dim, dtype, again))


def _narrow_weights(batch: Microbatch, matmuls: tuple[Matmul, ...]) -> dict[str, int]:
    """Return the bytes of the weight copies that autocast makes."""
    if batch.stream == batch.products:
        return {}
    numbers = sum(int(matmul.n) * int(matmul.k) for matmul in matmuls)
    return {"narrow weights": numbers * ITEM_BYTES[batch.products]}


@dataclass(frozen=True, slots=True)
class CallPlace:
    """The place of a layer in a forward. Calls of the forward repeat in a recomputed block.

    forward: how often the forward is computed in a step; 2 for a recomputed block. Nothing is sent
    backward for a tensor without a gradient (`has_grad`).
    """

    of: Microbatch
    sequence_parallel: bool
    forward: int = 1

    @property
    def rows(self) -> int:
        """Tokens that this rank has between the split layers."""
        return self.of.rows // (self.of.tensor if self.sequence_parallel else 1)

    def column(self, width: int, dtype: str, has_grad: bool = True) -> Iterator[CallCount]:
        """Yield the calls around the input, `width` wide, of a layer cut by outputs, or of several
        layers that share it.

        dtype: the type in which the input is gathered.
        """
        backward = int(has_grad and self.of.trains)
        if self.sequence_parallel:
            yield self._gather(width, dtype, self.forward)
            yield self._scatter(width, dtype, backward)
        else:
            yield self._sum(width, dtype, backward)

    def row(
        self, width: int, dtype: str, again: bool = True, has_grad: bool = True
    ) -> Iterator[CallCount]:
        """Yield the calls around the result, `width` wide, of a layer split by inputs. again: a
        recomputed block needs the result again."""
        number = self.forward if again else 1
        if self.sequence_parallel:
            yield self._scatter(width, dtype, number)
            yield self._gather(width, dtype, int(has_grad and self.of.trains))
        else:
            yield self._sum(width, dtype, number)

    def norms(self, width: int) -> CallCount:
        """Return the calls that sum the norms of the rows of a layer split by inputs (DoRA)."""
        return CallCount(
            "tensor", "all_reduce", width, self.of.losses, "norms of rows", self.forward
        )

    def joined(self, width: int, dtype: str) -> Iterator[CallCount]:
        """Yield the call that gathers outputs; this rank has `width` of their columns."""
        yield self._call("all_gather", self.of.rows * width, dtype, "outputs", self.forward)

    def experts(
        self, width: int, top_k: int, dtypes: tuple[str, str, str], again: bool = False
    ) -> Iterator[CallCount]:
        """Yield the calls around experts whose matrices are split over tensor ranks.

        The experts get the tokens of all slices of the sequence. dtypes: of tokens, of their
        results, and of the routing weights.
        """
        (tokens, results, weights), backward = dtypes, int(self.of.trains)
        if self.sequence_parallel:
            yield self._gather(width, tokens, self.forward)
            yield self._scatter(width, results, self.forward if again else 1)
            yield self._gather(width, results, backward)
        else:
            yield self._sum(width, results, self.forward if again else 1)
        yield self._sum(width, tokens, backward)
        label = "gradients of weights of experts"
        yield self._call("all_reduce", self.of.rows * top_k, weights, label, backward)

    def joined_sequence(self, width: int, dtype: str) -> CallCount:
        """Return the call that gathers a sequence from its slices."""
        return self._gather(width, dtype)

    def shared_sequence(self, width: int, dtype: str, has_grad: bool = True) -> CallCount:
        """Return the call that gathers gradients after a sequence was cut into slices."""
        return self._gather(width, dtype, int(has_grad and self.of.trains))

    def loss(self) -> Iterator[CallCount]:
        """Yield the calls of a loss over column-split logits: a maximum, then two all-reduces of
        sums, or three with label smoothing."""
        batch, label = self.of, "of the softmax of the loss"
        tokens, number = (batch.tokens, batch.samples) if batch.by_row else (batch.rows, 1)
        yield self._call("all_reduce", tokens, batch.losses, label, number)
        yield self._call("all_reduce", (2 + batch.smooths) * tokens, batch.losses, label, number)

    def _sum(self, width: int, dtype: str, number: int = 1) -> CallCount:
        return self._call("all_reduce", self.of.rows * width, dtype, "activations", number)

    def _gather(self, width: int, dtype: str, number: int = 1) -> CallCount:
        part = self.of.rows * width // self.of.tensor
        return self._call("all_gather", part, dtype, "activations", number)

    def _scatter(self, width: int, dtype: str, number: int = 1) -> CallCount:
        return self._call("reduce_scatter", self.of.rows * width, dtype, "activations", number)

    def _call(self, operation: str, num: int, dtype: str, label: str, number: int = 1) -> CallCount:
        return CallCount("tensor", operation, num, dtype, label, number)


def dispatch(
    batch: Microbatch,
    num_experts: int,
    top_k: int,
    width: int,
    dtypes: tuple[str, str],
    forward: int,
    padded_rows: int | None = None,
) -> Iterator[CallCount]:
    """Yield the calls of a block with experts shared by ranks: counts of tokens, the tokens and
    their results.

    The router decides how many rows come to a rank; a mean rank gets as many as it sends. dtypes:
    of tokens and of results. forward: see `CallPlace`. padded_rows: of each expert; then no counts
    travel and the router decides nothing.
    """
    tokens, results = dtypes
    rows = (batch.rows * top_k if padded_rows is None else num_experts * padded_rows) * width
    counts = 0 if padded_rows is not None else forward
    both = forward + int(batch.trains)
    for operation, num, dtype, label, number in (
        ("all_gather", num_experts + 1, "int64", "how many tokens go where", counts),
        ("all_to_all", rows, tokens, "tokens to their experts and their gradients", both),
        ("all_to_all", rows, results, "results of experts and their gradients", both),
    ):
        yield CallCount("expert", operation, num, dtype, label, number)
