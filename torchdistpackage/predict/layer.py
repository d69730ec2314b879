"""The seconds of one block and of the two ends of a transformer, forward and backward, on one rank.

Each operation is listed once with its matmuls and bytes; backward, recomputation, tensor, context
and expert communication follow from the list. The rule: nothing here is fitted, and an operation
that is absent takes no time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torchdistpackage.predict.collectives import Fabric
from torchdistpackage.predict.devices import Accelerator
from torchdistpackage.predict.kernels import (
    ATTENTION_ROWS,
    CAST_BYTES,
    TRANSPOSE_BYTES,
    Matmul,
    attention_seconds,
    launches,
    matmul_seconds,
    memory_seconds,
)
from torchdistpackage.predict.workload import ShardGroups, StepLayout, TransformerSizes

ROUTER_CALLS = 40.0, 80.0
"""About what the host starts, forward and backward, for the router's choice, its counts and the
order of rows (Megatron-LM, megatron/core/transformer/moe)."""
EXPERT_BIAS_CALLS = 2.0, 12.0
"""The same for the bias of one expert: a multiplication and an addition forward; backward two of
each, casts, and the gradients of two biases with their hooks (`_apply_bias` there)."""
CLAMP_BYTES = 16, 20
"""Bytes of clamped gates and ups, forward and backward, for each number that leaves the activation:
two clamps and the copy that joins their results; backward those of the clamps and of the split
(Megatron-LM, megatron/core/fusions/fused_bias_geglu.py, `weighted_bias_quick_geglu_impl`)."""
STALL_CALLS = 5.0
"""About what the host starts between reading how many tokens each expert gets, for which it waits
for the device, and the first long kernel after it: the device is idle meanwhile."""
CLAMP_STALL_CALLS = 2.0
"""The same for the number that Megatron-LM adds to a clamped gate, which it copies to the device in
each forward of the activation (`torch.tensor` in the same function)."""
COLLECTIVE_CALLS = 10.0
"""The same around a collective in a block, besides what its measured latency has: autograd's
function, views, waiting and the record. Counted as CPU seconds of a rank's main thread on gloo with
tensor and context ranks, beside those with data ranks; on a device such calls are hidden."""
ATTENTION_MATMULS = ("q", "k", "v", "q k v", "attention output")


@dataclass(frozen=True, slots=True)
class Operation:
    """A matmul with its casts, or a run of element-wise kernels, or an attention.

    kind: "matmul", "elementwise", "attention" or "scores", which is attention in plain matmuls.
    forward, backward: seconds of computation. kernels: launched forward; twice as many backward.
    repeats: the recomputation of matmuls includes this one. calls: of the host besides these
    kernels, forward and backward. stalls: calls of the host that an idle device waits for, forward.
    """

    name: str
    kind: str
    forward: float
    backward: float
    kernels: int = 1
    repeats: bool = False
    calls: tuple[float, float] = (0.0, 0.0)
    stalls: float = 0.0


@dataclass(slots=True)
class BlockTime:
    """Seconds of one block for one microbatch; exposed communication by the axis it is along.

    forward, backward: computation. recompute: what the backward computes again. calls: operations
    that the host starts, (forward, backward). stalls: those of them that an idle device waits for.
    host: seconds that a pass waits for the host. tensor, context, expert: exposed,
    (forward, backward) with what recomputation repeats.
    """

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    calls: list[float] = field(default_factory=lambda: [0.0, 0.0])
    stalls: list[float] = field(default_factory=lambda: [0.0, 0.0])
    host: list[float] = field(default_factory=lambda: [0.0, 0.0])
    tensor: list[float] = field(default_factory=lambda: [0.0, 0.0])
    context: list[float] = field(default_factory=lambda: [0.0, 0.0])
    expert: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @property
    def exposed(self) -> tuple[float, float]:
        """Exposed communication forward and backward."""
        axes = self.tensor, self.context, self.expert
        return sum(x[0] for x in axes), sum(x[1] for x in axes)

    @property
    def pass_s(self) -> tuple[float, float]:
        """Seconds of a forward and of a backward with all that they wait for."""
        exposed_forward, exposed_backward = self.exposed
        host_forward, host_backward = self.host
        return (
            self.forward + exposed_forward + host_forward,
            self.backward + self.recompute + exposed_backward + host_backward,
        )

    def plus(self, other: "BlockTime", times: float = 1.0) -> "BlockTime":
        """Return the sum of this and `times` the other."""

        def pair(one: list[float], two: list[float]) -> list[float]:
            return [a + times * b for a, b in zip(one, two, strict=True)]

        return BlockTime(
            self.forward + times * other.forward,
            self.backward + times * other.backward,
            self.recompute + times * other.recompute,
            pair(self.calls, other.calls),
            pair(self.stalls, other.stalls),
            pair(self.host, other.host),
            pair(self.tensor, other.tensor),
            pair(self.context, other.context),
            pair(self.expert, other.expert),
        )

    def behind_host(self, call_s: float, is_host: bool = False) -> "BlockTime":
        """Return the same where a call takes the host so long, which a pass may wait for. is_host:
        it computes itself, so calls come on top."""
        if is_host:
            return replace(self, host=[calls * call_s for calls in self.calls])
        passes = zip(self.calls, self.stalls, self.pass_s, strict=True)
        host = [max(x * call_s - seconds, stalls * call_s) for x, stalls, seconds in passes]
        return replace(self, host=host)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Times the parts of a model on a device, as one layout shares them."""

    sizes: TransformerSizes
    layout: StepLayout
    device: Accelerator
    fabric: Fabric

    # -- the operations of a block ----------------------------------------------------------

    def block_operations(self) -> list[Operation]:
        """The operations of one block, in order."""
        z, x = self.sizes, self.layout
        rows, tensor = x.tokens, x.tensor
        apart = rows / (tensor if x.sequence_parallel else 1)
        q, kv = z.heads * z.head_dim / tensor, z.kv_heads * z.head_dim / tensor
        stream = apart * z.dim
        ops = [
            self._norm("attention norm", stream),
            *self._inputs({"q": q, "k": kv, "v": kv}, rows, "k"),
            *([self._norm("query and key norm", rows * (q + kv))] if z.qk_norm else []),
            self._elementwise("rotary positions", z.rotary * rows * (q + kv), (4, 4), (20, 20), 2),
            *self._attention(rows, q),
            self._linear("attention output", rows, z.dim, q, repeats=True),
            self._residual("attention residual", stream),
            *(self._norm("mlp norm", stream) for _ in range(z.norms - 1)),
            *(self._experts(apart) if z.num_experts else self._mlp(rows)),
            self._residual("mlp residual", stream),
            *self._host_copies(rows, q),
        ]
        return [each for each in ops if each.forward or each.backward]

    def _host_copies(self, rows: float, q: float) -> Iterator[Operation]:
        """Yield the copies of attention on a host; on a device a fitted share covers them.

        Attention has its dims in another order, so its result and four gradients are copied. Two
        biases are added by themselves, as in layers that tensor ranks split by rows.
        """
        if self.device.is_host:
            yield self._elementwise("attention copies", rows * q, (4, 16), (4, 16), 2)
            yield self._elementwise("biases", 2 * rows * self.sizes.dim, (4, 2), (4, 2), 2)

    def _mlp(self, rows: float) -> Iterator[Operation]:
        z, hidden = self.sizes, self.sizes.hidden / self.layout.tensor
        widths = {"gate": hidden, "up": hidden} if z.gated else {"up": hidden}
        yield from self._inputs(widths, rows, "up" if z.gated else "")
        yield self._activation("activation", rows * hidden)
        yield self._linear("mlp down", rows, z.dim, hidden)

    def _experts(self, rows: float) -> Iterator[Operation]:
        """Router, permutation and the experts of a rank, which get as many rows as it sends."""
        z, x = self.sizes, self.layout
        num_local = max(z.num_experts // x.expert, 1)
        routed = rows * z.top_k * (x.tensor if x.sequence_parallel else 1)
        each, hidden = routed / num_local, z.hidden / x.tensor
        router = self._linear("router", rows, z.num_experts, z.dim)
        yield replace(router, calls=ROUTER_CALLS, stalls=STALL_CALLS)
        # to the order of ranks and back, and again to that of experts where the exchange does not
        passes = (1 if x.dedups else 2) * routed * z.dim
        yield self._elementwise("permutation", passes, (8, 10), (12, 16), 8)
        widths = {"gate": hidden, "up": hidden} if z.gated else {"up": hidden}
        # the host starts the matmuls of each expert, two of them backward
        for op in self._inputs(widths, each, "up" if z.gated else "", num_local):
            yield replace(op, calls=(num_local - 1.0, 2.0 * (num_local - 1)))
        yield self._activation("activation", routed * hidden)
        if x.clamps:
            clamped = self._elementwise(
                "activation clamp", routed * hidden, CLAMP_BYTES, CLAMP_BYTES, 3
            )
            yield replace(clamped, kernels=3, stalls=CLAMP_STALL_CALLS)
        down = self._linear("expert down", each, z.dim, hidden, count=num_local)
        yield replace(down, calls=(num_local - 1.0, 2.0 * (num_local - 1)))
        if x.expert_bias:
            added = self._elementwise("expert bias", routed * z.dim, (28, 40), (28, 40), 0)
            forward_calls, back = EXPERT_BIAS_CALLS
            yield replace(added, kernels=0, calls=(forward_calls * num_local, back * num_local))

    def _inputs(
        self, widths: dict[str, float], rows: float, repeats: str, count: int = 1
    ) -> Iterator[Operation]:
        """Return the time of linear layers that share their input, as one matmul or separately.

        repeats: the one that `recompute: matmuls` computes again."""
        dim = self.sizes.dim
        if self.layout.joins:
            yield self._linear(" ".join(widths), rows, sum(widths.values()), dim, count)
            return
        for name, width in widths.items():
            yield self._linear(name, rows, width, dim, count, name == repeats)

    def _linear(
        self, name: str, m: float, n: float, k: float, count: int = 1, repeats: bool = False
    ) -> Operation:
        """A linear layer: a matmul forward, those of both gradients backward, with its casts."""
        x, matmul = self.layout, Matmul(m, n, k, count)
        is_float8 = x.float8 and name != "router"
        adapts = x.lora and (x.lora_mlp or name in ATTENTION_MATMULS)
        dtype = "float8" if is_float8 else x.dtype
        forward = matmul_seconds(self.device, matmul, dtype)
        backward = matmul_seconds(self.device, matmul.of_input, dtype)
        kernels = 1
        if not x.lora:
            # the sum over microbatches in float32, which FSDP makes of reduced gradients
            added = 8.0 * n * k * count if x.zero < 3 else 0.0
            joined = added if x.joins else 0.0
            backward += matmul_seconds(self.device, matmul.of_weight, dtype, joined)
            backward += self._bytes(added - joined)
        if adapts:
            both = self._adapter(m, n, k, count)
            forward += both
            backward += 2 * both
            kernels += 3
        if is_float8:
            # a weight that stays is brought to float8 once a step
            casts = 1.0 if x.zero == 3 else 1 / x.num_microbatches
            # along the sequence a rank casts its own rows, which are gathered in float8
            apart = x.tensor if x.sequence_parallel else 1
            own_bytes, gathered = CAST_BYTES + TRANSPOSE_BYTES, CAST_BYTES / apart + TRANSPOSE_BYTES
            if name in ("attention output", "mlp down", "expert down"):
                forward_bytes, back = own_bytes, gathered
            else:
                forward_bytes, back = gathered, own_bytes
            weight = casts * (CAST_BYTES + TRANSPOSE_BYTES) * n * k
            forward += self._bytes((forward_bytes * m * k + weight) * count)
            backward += self._bytes(back * m * n * count)
            kernels += 3
        return Operation(name, "matmul", forward, backward, kernels, repeats)

    def _adapter(self, m: float, n: float, k: float, count: int) -> float:
        """Seconds of the two thin matmuls of an adapter and of adding what they give."""
        rank = self.layout.lora
        thin = Matmul(m, rank, k, count), Matmul(m, n, rank, count)
        dtype, item = self.layout.dtype, self.layout.item_bytes
        seconds = sum(matmul_seconds(self.device, each, dtype) for each in thin)
        return seconds + self._bytes(2 * item * m * n * count) + self._launches(2)

    def _attention(self, rows: float, q: float) -> Iterator[Operation]:
        z, x = self.sizes, self.layout
        seen = z.attended(x.seq_len)
        flops = 4.0 * rows * seen * q
        if x.attention != "unfused" or self.device.attention_s is not None:
            length = x.seq_len / x.context
            tiles = rows / ATTENTION_ROWS * q / z.head_dim
            times = [
                attention_seconds(self.device, x.attention, part, length, back, z.head_dim, tiles)
                for part, back in ((flops, False), (2.5 * flops, True))
            ]
            yield Operation("attention", "attention", times[0], times[1], x.context)
            return
        heads = int(x.micro_batch * z.heads / x.tensor) or 1
        length = x.seq_len / x.context
        scores = Matmul(length, x.seq_len, z.head_dim, heads)
        values = Matmul(length, z.head_dim, x.seq_len, heads)
        forward = sum(matmul_seconds(self.device, each, x.dtype) for each in (scores, values))
        numbers, item = heads * length * x.seq_len, x.item_bytes
        # softmax with its mask reads and writes the scores once; dropout again, with its mask
        passes = 2 * item + (2 * item + 1 if x.dropout else 0)
        forward += self._bytes(passes * numbers)
        backward = 2 * forward
        yield Operation("scores", "scores", forward, backward, 4)

    def _norm(self, name: str, numbers: float) -> Operation:
        eager = (30, 60) if self.sizes.norm == "rms" else (4, 8)
        return self._elementwise(name, numbers, (4, 8), eager, 1 if eager[0] == 4 else 6)

    def _residual(self, name: str, numbers: float) -> Operation:
        # with dropout: two inputs, the result and a mask of bytes, forward and back
        both = (7, 11) if self.layout.dropout else (4, 4)
        return self._elementwise(name, numbers, both, (6, 6), 1)

    def _activation(self, name: str, numbers: float) -> Operation:
        both = ((6, 10), (10, 30)) if self.sizes.gated else ((4, 6), (4, 6))
        if (measured := self.device.activation_s) is None:
            return self._elementwise(name, numbers, *both, 2)
        # what a gate takes comes on top
        gate = [tuple(x - y for x, y in zip(way, (4, 6), strict=True)) for way in both]
        others = self._elementwise(
            name, numbers, (gate[0][0], gate[0][1]), (gate[1][0], gate[1][1]), 2
        )
        return replace(
            others,
            forward=others.forward + numbers * measured[0],
            backward=others.backward + numbers * measured[1],
        )

    def _elementwise(
        self,
        name: str,
        numbers: float,
        fused: tuple[float, float],
        eager: tuple[float, float],
        eager_kernels: int,
    ) -> Operation:
        """A run of kernels that read and write `fused` or `eager` bytes a number, there and back,
        at two bytes each."""
        is_fused = self.layout.kernels == "fused"
        forward_passes, back = fused if is_fused else eager
        scale = numbers * self.layout.item_bytes / 2
        seconds = self._bytes(forward_passes * scale), self._bytes(back * scale)
        return Operation(name, "elementwise", *seconds, 1 if is_fused else eager_kernels)

    def _launches(self, count: float) -> float:
        """Seconds between so many kernels; a host that computes has them in its calls."""
        return 0.0 if self.device.is_host else launches(count)

    def _bytes(self, num_bytes: float) -> float:
        return memory_seconds(self.device, num_bytes)

    # -- a block with its communication -----------------------------------------------------

    def block(self, operations: list[Operation] | None = None) -> BlockTime:
        """One block for one microbatch. operations: its own, where they are known."""
        x, ops = self.layout, operations or self.block_operations()
        forward = sum(op.forward for op in ops)
        backward = sum(op.backward for op in ops)
        again = [op for op in ops if self._is_repeated(op)]
        if x.recompute == "blocks" and x.stops_early:
            again = again[: max(i for i, op in enumerate(again) if op.kind == "matmul")]
        share = x.recompute_share if again else 0.0
        kernels = sum(op.kernels for op in ops)
        repeated = share * sum(op.kernels for op in again)
        shared = shares(self.sizes, x)
        copied = self._copied([(count, each.num_sharers) for count, each in shared])
        time = BlockTime(
            forward + self._launches(kernels) + copied[0],
            backward + self._launches(2 * kernels) + copied[1],
            share * sum(op.forward for op in again) + self._launches(repeated),
            [
                kernels + sum(op.calls[0] for op in ops),
                2.0 * kernels + repeated + sum(op.calls[1] for op in ops),
            ],
            [sum(op.stalls for op in ops), share * sum(op.stalls for op in again)],
        )
        rerun = share if x.recompute == "blocks" else 0.0
        self._tensor(time, ops, rerun)
        self._context(time, ops, rerun)
        self._expert(time, rerun)
        if self.device.is_host:
            self._collective_calls(time, rerun)
        return time

    def _collective_calls(self, time: BlockTime, rerun: float) -> None:
        """Add what a host starts around the collectives of a block, and the copies to and from
        their buffers."""
        x, z = self.layout, self.sizes
        calls, copied = [0.0, 0.0], 0.0
        if x.tensor > 1:
            # along the sequence the backward gathers the inputs once more
            calls = [4.0, 5.0] if x.sequence_parallel else [2.0, 2.0]
            copied += 4 * x.tokens * z.dim if x.sequence_parallel else 0.0
        if x.context > 1:
            is_ring = x.context_exchange == "ring"
            calls[0] += x.context - 1 if is_ring else 3.0
            calls[1] += 2.0 * (x.context - 1) if is_ring else 3.0
            # packed and unpacked
            copied += 4 * x.tokens * (z.heads + z.kv_heads) * z.head_dim / x.tensor
        if x.expert > 1 and z.num_experts:
            calls = [calls[0] + 2.0, calls[1] + 2.0]
        time.calls[0] += COLLECTIVE_CALLS * calls[0]
        time.calls[1] += COLLECTIVE_CALLS * (calls[1] + rerun * calls[0])
        copied_s = self._bytes(2 * x.item_bytes * copied)
        time.forward += copied_s
        time.backward += copied_s
        time.recompute += rerun * copied_s

    def _copied(self, shared: list[tuple[float, int]]) -> tuple[float, float]:
        """Seconds to bring shards of weights to their dtype and to copy gathered weights out of
        their buffer, forward and again backward, to copy gradients into theirs, and to add up
        shards of gradients over microbatches, on the stream of the matmuls. shared: parameters,
        and the ranks that share them."""
        x = self.layout
        if x.copies == "none":
            return 0.0, 0.0
        copies = [(count, ranks) for count, ranks in shared if ranks > 1 or x.ranks == 1]
        count = sum(count for count, _ in copies)
        forward_bytes = 2 * x.weight_bytes * count if x.copies == "all" else 0.0
        sharded = sum(count / ranks for count, ranks in copies)
        if not x.lora:  # frozen weights are narrow
            forward_bytes += (4 + x.weight_bytes) * sharded
        if x.lora:
            return self._bytes(forward_bytes), self._bytes(forward_bytes)
        # both bring gradients to the dtype that is reduced; flat parameters are joined before
        joined = 2 * x.item_bytes if x.copies == "gradients" else 0
        cast = x.item_bytes + x.reduce_bytes
        if x.copies == "gradients" and x.reduce_bytes == x.item_bytes:
            cast = 0
        # the first microbatch of a step has no shard to add to
        added = 12 * sharded * (1 - 1 / x.num_microbatches)
        return self._bytes(forward_bytes), self._bytes(
            forward_bytes + (joined + cast) * count + added
        )

    def _is_repeated(self, op: Operation) -> bool:
        match self.layout.recompute:
            case "none":
                return False
            case "attention":
                return op.kind == "scores"
            case "elementwise":
                return "norm" in op.name or op.name.startswith("activation")
            case "matmuls":
                return op.kind == "elementwise" or op.repeats
            case "blocks":
                return True

    def _tensor(self, time: BlockTime, ops: list[Operation], rerun: float) -> None:
        """A half of a block begins with an all-gather and ends with a reduce-scatter along the
        sequence, or ends with an all-reduce; backward they are swapped."""
        x, fabric = self.layout, self.fabric
        if x.tensor == 1:
            return
        num_bytes = x.tokens * self.sizes.dim * x.item_bytes
        ins, outs = _halves(ops)
        # backward, the matmul of the input's gradient and that of the weight's
        back = [sum(op.backward for op in half) / 2 for half in ins]
        if not x.sequence_parallel:
            all_reduce_s = fabric.sum_seconds(num_bytes, x.tensor)
            time.tensor[0] += 2 * all_reduce_s
            # the all-reduce of an input's gradient goes on beside the matmul of the weight's
            time.tensor[1] += 2 * rerun * all_reduce_s
            time.tensor[1] += sum(fabric.beside(all_reduce_s, each) for each in back)
            return
        scatter = fabric.scatter_seconds(num_bytes, x.tensor)
        gather = fabric.gather_seconds(num_bytes / (2 if x.float8 else 1), x.tensor)
        if x.tensor_overlap:
            forward_s, behind = 0.0, 0.0
            for inner, outer in zip(ins, outs, strict=True):
                before, after = (sum(op.forward for op in half) for half in (inner, outer))
                forward_s += _in_chunks(fabric, gather, before, x.tensor)
                forward_s += _in_chunks(fabric, scatter, after, x.tensor)
                before, after = (sum(op.backward for op in half) / 2 for half in (inner, outer))
                behind += _in_chunks(fabric, gather, after, x.tensor)
                behind += _in_chunks(fabric, scatter, before, x.tensor)
        else:
            forward_s = 2 * gather + 2 * scatter
            # beside the other matmul go the gather of the input and the scatter of its gradient
            behind = 2 * gather + sum(
                fabric.beside(each, half) for half in back for each in (gather, scatter)
            )
        time.tensor[0] += forward_s
        time.tensor[1] += behind + rerun * forward_s

    def _context(self, time: BlockTime, ops: list[Operation], rerun: float) -> None:
        """Keys and values go around a ring, a hop while one part of the attention is computed;
        backward their gradients go with them. An exchange of heads has nothing beside it: queries,
        keys with values, and the result go one after another, and their gradients too."""
        x, z = self.layout, self.sizes
        if x.context == 1:
            return
        if x.context_exchange == "heads":
            width, kv = z.heads * z.head_dim / x.tensor, 2 * z.kv_heads * z.head_dim / x.tensor
            sizes = (x.tokens * each * x.item_bytes for each in (width, kv, width))
            stride = x.stride("context")
            one = sum(self.fabric.exchange_seconds(each, x.context, stride) for each in sizes)
            time.context[0] += one
            time.context[1] += (1 + rerun) * one
            return
        attention = next(op for op in ops if op.kind in ("attention", "scores"))
        num_bytes = x.tokens * 2 * z.kv_heads * z.head_dim / x.tensor * x.item_bytes
        hop = self.fabric.message_seconds(num_bytes, x.stride("context") * x.context - 1)
        fabric = self.fabric
        forward_s = (x.context - 1) * fabric.beside(hop, attention.forward / x.context)
        back = (x.context - 1) * fabric.beside(2 * hop, attention.backward / x.context)
        time.context[0] += forward_s
        time.context[1] += back + rerun * forward_s

    def _expert(self, time: BlockTime, rerun: float) -> None:
        """Tokens go to their experts and results come back, twice more in the backward."""
        x, z = self.layout, self.sizes
        if x.expert == 1 or not z.num_experts:
            return
        copies: float = z.top_k
        if x.dedups:  # the mean number of ranks that some of a token's experts are on
            copies = x.expert * (1 - (1 - 1 / x.expert) ** z.top_k)
        rows = x.tokens / (x.tensor if x.sequence_parallel else 1)
        num_bytes = rows * copies * z.dim * x.item_bytes
        exchange_s = self.fabric.exchange_seconds(num_bytes, x.expert, x.expert_stride)
        time.expert[0] += 2 * exchange_s
        time.expert[1] += 2 * exchange_s + 2 * rerun * exchange_s

    # -- the ends ---------------------------------------------------------------------------

    def embedding(self) -> BlockTime:
        """The look-up of the tokens and the sum of its gradient, which is dense: it is set to zero,
        and a head that is the same table adds its own."""
        x, z = self.layout, self.sizes
        numbers = x.tokens * z.dim / (x.tensor if x.sequence_parallel else 1)
        item, table = x.item_bytes, z.vocab_parameters / x.tensor
        dense = 0.0 if x.lora else (4 if z.tied else 1) * item * table
        forward_s, back = self._copied([(table, x.sharers)])
        time = BlockTime(
            self._bytes(2 * item * numbers) + forward_s,
            self._bytes(3 * item * numbers + dense) + back,
            0.0,
            [1.0, 3.0],
        )
        if x.tensor > 1:  # each rank has a share of the vocabulary
            num_bytes = x.tokens * z.dim * item
            if x.sequence_parallel:
                time.tensor[0] += self.fabric.scatter_seconds(num_bytes, x.tensor)
                time.tensor[1] += self.fabric.gather_seconds(num_bytes, x.tensor)
            else:
                time.tensor[0] += self.fabric.sum_seconds(num_bytes, x.tensor)
        return time

    def head(self) -> BlockTime:
        """The last norm, the logits and the loss."""
        x, z = self.layout, self.sizes
        vocab = z.vocab / x.tensor
        matmul = Matmul(x.tokens, vocab, z.dim)
        forward = matmul_seconds(self.device, matmul, x.dtype)
        backward = matmul_seconds(self.device, matmul.of_input, x.dtype)
        if not x.lora:
            backward += matmul_seconds(self.device, matmul.of_weight, x.dtype)
        # eager: a copy in float32; its log-softmax reads a row three times, as rows are longer than
        # a core keeps, and backward the result and its gradient twice
        forward_passes, back = {"eager": (22, 30), "narrow": (8, 12), "fused": (8, 6)}[x.loss]
        logits = x.tokens * vocab
        norm = self._norm("last norm", x.tokens * z.dim)
        # a tied one is copied with the embedding
        copied = self._copied([] if z.tied else [(z.vocab_parameters / x.tensor, x.sharers)])
        time = BlockTime(
            forward
            + self._bytes(forward_passes * logits)
            + norm.forward
            + self._launches(4)
            + copied[0],
            backward + self._bytes(back * logits) + norm.backward + self._launches(8) + copied[1],
            0.0,
            [4.0, 8.0],
        )
        if x.tensor > 1:
            num_bytes = x.tokens * z.dim * x.item_bytes
            gather = self.fabric.gather_seconds(num_bytes, x.tensor)
            time.tensor[0] += gather + 2 * self.fabric.sum_seconds(4.0 * x.tokens, x.tensor)
            time.tensor[1] += self.fabric.scatter_seconds(num_bytes, x.tensor)
        return time


def _halves(ops: list[Operation]) -> tuple[list[list[Operation]], list[list[Operation]]]:
    """Return the matmuls that read the stream and those that write to it, of attention and of the
    MLP each."""
    matmuls = [op for op in ops if op.kind == "matmul" and op.name != "router"]
    last = next(i for i, op in enumerate(matmuls) if op.name == "attention output")
    halves = matmuls[: last + 1], matmuls[last + 1 :]
    return [half[:-1] for half in halves], [half[-1:] for half in halves]


def shares(sizes: TransformerSizes, layout: StepLayout) -> list[tuple[float, ShardGroups]]:
    """(parameters of a block on a rank, ranks that share them): the dense ones, and those of
    experts, which fewer ranks share, further apart."""
    x, z = layout, sizes
    dense = z.attention_parameters / x.tensor
    mlp = max(z.num_experts, 1) * z.mlp_parameters / x.tensor
    if not z.num_experts:
        return [(dense + mlp, x.shards)]
    return [(dense, x.shards), (mlp / x.expert, x.expert_shards)]


def adapter_parameters(sizes: TransformerSizes, layout: StepLayout) -> float:
    """Return the parameters of a block's adapters on a rank; layers that share a matmul share one
    adapter."""
    x, z = layout, sizes
    inputs = 1 if x.joins else 3
    wide = (inputs + 1) * z.dim + 2 * (z.heads + z.kv_heads) * z.head_dim
    if x.lora_mlp:
        ups = 2 if z.gated else 1
        per_adapter = (1 if x.joins else ups) * z.dim + ups * z.hidden + z.hidden + z.dim
        wide += max(z.num_experts, 1) * per_adapter / (x.expert if z.num_experts else 1)
    return x.lora * wide / x.tensor


def _in_chunks(fabric: Fabric, comm_s: float, compute_s: float, size: int) -> float:
    """The same as `beside` in `size` chunks; the first chunk is sent before any matmul."""
    return comm_s / size + fabric.beside(comm_s * (size - 1) / size, compute_s)
