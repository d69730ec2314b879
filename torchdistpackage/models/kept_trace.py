"""Count what a model of transformers keeps for its backward, by running its blocks on meta tensors.

The modules are transformers' own, so no file states what they keep. Each kind of block runs forward
and backward once on fake tensors, with one sample and with two; in between and beyond, bytes follow
a line. A fused attention stands in for the one of the device, and keeps what that keeps.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn import functional

from torchdistpackage.lazy import resolve
from torchdistpackage.models.model_spec import ModelSpec
from torchdistpackage.models.transformers_layout import TransformersShape, parts
from torchdistpackage.parallel.tensor.numbers import LayerNumbers
from torchdistpackage.predict.calls import Microbatch
from torchdistpackage.tools.activations import storages_of
from torchdistpackage.tools.live_bytes import LiveBytes


@dataclass(frozen=True, slots=True)
class TracedBytes:
    """Bytes of one or more layers. kept: without the logits, which are apart. temporary: most in
    the backward besides."""

    kept: float
    logits: float
    temporary: float

    def minus(self, other: "TracedBytes") -> "TracedBytes":
        """Return what the layers have besides those of `other`."""
        return TracedBytes(self.kept - other.kept, self.logits - other.logits, self.temporary)


@dataclass(frozen=True, slots=True)
class _Line:
    """Bytes of a layer with one sample and with two, of so many tokens each."""

    one: TracedBytes
    two: TracedBytes
    tokens: int

    def at(self, rows: int) -> TracedBytes:
        """Return the bytes of so many tokens in all."""
        share = rows / self.tokens - 1
        values = [
            a + (b - a) * share
            for a, b in (
                (self.one.kept, self.two.kept),
                (self.one.logits, self.two.logits),
                (self.one.temporary, self.two.temporary),
            )
        ]
        return TracedBytes(*values)

    def minus(self, other: "_Line") -> "_Line":
        return _Line(self.one.minus(other.one), self.two.minus(other.two), self.tokens)


@dataclass(frozen=True)
class TracedSpec:
    """A `ModelSpec` of transformers whose layers state what they keep."""

    spec: ModelSpec
    shape: TransformersShape
    lines: dict[str, _Line]
    """The traced lines, by name of the layer."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.spec, name)

    def layer_numbers(self, held: Sequence[int], batch: Microbatch) -> tuple[LayerNumbers, ...]:
        """Return the numbers of the layers, with their kept bytes."""
        return tuple(self._stated(x, batch) for x in self.spec.layer_numbers(held, batch))

    def _stated(self, layer: LayerNumbers, batch: Microbatch) -> LayerNumbers:
        traced = self.lines[layer.layer].at(batch.rows)
        kept = {"activations": traced.kept, "logits": traced.logits}
        if batch.recomputed and layer.layer not in ("embedding", "head"):
            item = torch.empty(0, dtype=getattr(torch, batch.stream)).element_size()
            kept = {"input of the block": batch.rows * self.shape.dim * item}
        kept = {key: int(num_bytes) for key, num_bytes in kept.items() if num_bytes}
        return replace(layer, kept=kept, is_exact=True, temporary=int(traced.temporary))


def traced(spec: ModelSpec, batch: Microbatch) -> TracedSpec | str:
    """Return the spec with what its layers keep of micro-batches like `batch`, for any number of
    samples; or why they cannot run without numbers.

    Raises:
        NotAvailableError: transformers is not installed, or too old.
    """
    shape = cast(TransformersShape, spec.shape)
    try:
        return _traced(spec, shape, batch)
    except (DataDependentOutputException, DynamicOutputShapeException, RuntimeError) as error:
        return f"activations of {shape.class_name} are not counted: without numbers, {error}"


def _traced(spec: ModelSpec, shape: TransformersShape, batch: Microbatch) -> TracedSpec:
    number = shape.sizes.layers
    kinds = [_kind(part.parameters) for part in parts(shape, "tensor")[1:-1]]
    # a block of the whole model, for each kind; the first and the last stand in where there are few
    inner = {kind: i for i, kind in enumerate(kinds) if 0 < i < number - 1}
    blocks = {kind: _line(spec, shape, batch, i) for kind, i in inner.items()}
    ends = {i: _line(spec, shape, batch, i) for i in {0, number - 1}}
    lines = {f"{shape.kind.blocks}.{i}": blocks.get(x) or ends[i] for i, x in enumerate(kinds)}
    nothing = _Line(_NOTHING, _NOTHING, batch.tokens)
    first, last = (blocks.get(kinds[i]) for i in (0, -1))
    lines["embedding"] = nothing if first is None else ends[0].minus(first)
    lines["head"] = nothing if last is None else ends[number - 1].minus(last)
    return TracedSpec(spec, shape, lines)


def _kind(parameters: Mapping[str, Any]) -> Hashable:
    """Return what blocks have in common that keep the same."""
    names = (name.split(".") for name in parameters)
    short = (tuple(x for x in name if not x.isdigit()) for name in names)
    shapes = (weight.layout.shape for weight in parameters.values())
    return tuple(zip(short, shapes, strict=True))


def _line(spec: ModelSpec, shape: TransformersShape, batch: Microbatch, index: int) -> _Line:
    """Trace one block, with what stands before or behind it."""
    with FakeTensorMode():
        module = resolve(spec.module)(
            shape,
            pieces=range(index, index + 1),
            dtype=getattr(torch, batch.stream),
        )
        one, two = (_run(module, shape, replace(batch, samples=n), index) for n in (1, 2))
    return _Line(one, two, batch.tokens)


def _run(module: Any, shape: TransformersShape, batch: Microbatch, index: int) -> TracedBytes:
    """Run a stage of one block forward and backward."""
    dtype, live = getattr(torch, batch.stream), LiveBytes()
    ids = torch.zeros(batch.samples, batch.tokens, dtype=torch.int64)
    x = ids
    if index:
        x = torch.empty(batch.samples, batch.tokens, shape.dim, dtype=dtype, requires_grad=True)
    narrow = torch.autocast(
        "cpu", getattr(torch, batch.products), enabled=batch.products != batch.stream
    )
    model = {s._cdata for s in storages_of((*module.parameters(), *module.buffers()))}
    is_last = index == shape.sizes.layers - 1
    # on fake tensors transformers repeats keys and values, which kernels read as they are
    repeats = patch("transformers.integrations.sdpa_attention.repeat_kv", lambda x, _: x)
    attends = patch.object(functional, "scaled_dot_product_attention", _attend)
    with repeats, attends, live.counting():
        with narrow:
            y = module(x)
            y = module.loss(y, ids)[0] if is_last else y
        kept = {key: n for key, n in live.sizes.items() if key not in model}
        output = {s._cdata for s in storages_of([y])}
        seed = torch.empty_like(y)
        live.reset()
        y.backward(seed)
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        stay = model | {s._cdata for s in storages_of(gradients)}
        largest = max((g.nbytes for g in gradients), default=0)
    wide = batch.samples * batch.tokens * shape.sizes.vocab
    logits = sum(n for n in kept.values() if n in (2 * wide, 4 * wide)) if is_last else 0
    num_kept = sum(n for key, n in kept.items() if key not in output)
    peak = sum(n for key, n in live.at_peak.items() if key not in stay)
    # the output and its gradient are those of the stream, which the plan counts
    beside = y.nbytes + seed.nbytes
    return TracedBytes(num_kept - logits, logits, max(peak + largest - num_kept - beside, 0))


_NOTHING = TracedBytes(0, 0, 0)


def _attend(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    if torch.is_autocast_enabled("cpu"):  # which casts what this takes the place of
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return _FusedAttention.apply(query, key, value)  # type: ignore[no-any-return]


class _FusedAttention(torch.autograd.Function):
    """Attention without numbers, which keeps what a fused kernel keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # tokens before heads, as fused kernels lay it out, so that joining heads copies nothing
        samples, heads, tokens, _ = query.shape
        output = query.new_empty(samples, tokens, heads, value.shape[-1]).transpose(1, 2)
        dtype = torch.promote_types(query.dtype, torch.float32)
        sums = query.new_empty(query.shape[:-1], dtype=dtype)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return tuple(torch.empty_like(x) for x in (query, key, value))
