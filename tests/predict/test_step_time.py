"""The predicted step: terms add up to a simulated end, and a better device or fewer bytes never
make it slower.

No torch.
"""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tells import facts_pattern
from torchdistpackage.errors import ConfigError
from torchdistpackage.predict.collectives import SLOWDOWN, Fabric
from torchdistpackage.predict.devices import DEVICES, find_device
from torchdistpackage.predict.kernels import Matmul, attention_seconds, matmul_seconds
from torchdistpackage.predict.layer import STALL_CALLS, LayerCosts, adapter_parameters, shares
from torchdistpackage.predict.links import LinkModel
from torchdistpackage.predict.published import LLAMA3_8B, LLAMA3_70B, QWEN3_30B
from torchdistpackage.predict.step import HOST_CALL_S, TERMS, step_time
from torchdistpackage.predict.workload import StepLayout, TransformerSizes
from torchdistpackage.schedule.costs import StageCosts
from torchdistpackage.schedule.engine import simulate
from torchdistpackage.schedule.generators import GENERATORS

PIPE = StepLayout(
    32, 4096, 1, 8, tensor=2, pipe=4, chunks=2, schedule="interleaved", zero=1, recompute="blocks"
)
CASES = {
    "fsdp": (LLAMA3_8B, StepLayout(64, 8192, 1, 2, zero=3, recompute="matmuls")),
    "ddp": (LLAMA3_8B, StepLayout(16, 2048, 2, 2, float8=True)),
    "pipe": (LLAMA3_8B, PIPE),
    "zero bubble": (LLAMA3_8B, replace(PIPE, chunks=1, schedule="zb-h1")),
    "context": (
        LLAMA3_8B,
        StepLayout(16, 65536, 1, 2, context=8, tensor=2, sequence_parallel=True),
    ),
    "experts": (QWEN3_30B, StepLayout(16, 4096, 2, 2, expert=16, zero=2, attention="flash3")),
    "adapters": (LLAMA3_8B, StepLayout(8, 4096, 2, 2, tensor=4, tensor_overlap=True, lora=16)),
    "copies": (LLAMA3_8B, StepLayout(64, 4096, 1, 2, zero=3, copies="all", float8=True)),
    "host": (
        QWEN3_30B,
        StepLayout(16, 1024, 1, 8, expert=8, zero=1, attention="flash3", expert_bias=True),
    ),
    "muon": (LLAMA3_8B, replace(PIPE, optimizer="muon")),
    "muon on experts": (QWEN3_30B, StepLayout(16, 4096, 2, 2, expert=16, optimizer="muon")),
    "eager": (LLAMA3_8B, StepLayout(8, 2048, 1, 2, zero=3, kernels="eager", attention="unfused")),
}
H100, B200 = DEVICES["h100-sxm"], DEVICES["b200"]


@pytest.mark.parametrize("name", CASES)
def test_terms_are_named_and_not_negative(name: str) -> None:
    terms = step_time(*CASES[name], H100).terms
    assert tuple(terms) == TERMS
    assert all(seconds >= 0 for seconds in terms.values()) and terms["compute"] > 0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_terms_of_a_pipe_add_up_to_its_simulated_end(schedule: str) -> None:
    layout = replace(PIPE, chunks=1, schedule=schedule)
    time = step_time(LLAMA3_8B, layout, H100)
    costs = LayerCosts(LLAMA3_8B, layout, H100, Fabric.of(H100))
    stages = [costs.block().plus(costs.block(), 7) for _ in range(4)]
    stages[0], stages[-1] = stages[0].plus(costs.embedding()), stages[-1].plus(costs.head())
    forward, backward = zip(*(each.pass_s for each in stages), strict=True)
    message = Fabric.of(H100).message_seconds(4096 * 4096 * 2, 8)
    halves = tuple(each / 2 for each in backward)
    end = simulate(
        GENERATORS[schedule](4, 8, 1),
        StageCosts(forward, backward, halves, halves, (message,) * 4),
    ).total
    others = ("exposed data", "optimizer", "host and framework")
    assert time.total - sum(time.terms[x] for x in others) == pytest.approx(end, rel=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_a_better_device_never_makes_a_step_slower(name: str) -> None:
    sizes, layout = CASES[name]
    before = step_time(sizes, layout, H100).total
    for factor in (1.1, 1.7, 3.0):
        better = (
            replace(H100, peaks={x: rate * factor for x, rate in H100.peaks.items()}),
            replace(H100, memory_bytes_per_s=factor * H100.memory_bytes_per_s),
            replace(H100, node_bytes_per_s=factor * H100.node_bytes_per_s),
            replace(H100, network_bytes_per_s=factor * H100.network_bytes_per_s),
            replace(H100, clock=factor),
            replace(H100, call_s=31e-6 / factor),
        )
        for device in better:
            assert step_time(sizes, layout, device).total <= before * (1 + 1e-9)


LAYOUTS = st.builds(
    StepLayout,
    ranks=st.sampled_from([32, 64]),
    seq_len=st.sampled_from([1024, 8192]),
    micro_batch=st.integers(1, 4),
    num_microbatches=st.sampled_from([4, 8]),
    tensor=st.sampled_from([1, 2, 4]),
    pipe=st.sampled_from([1, 2, 4]),
    context=st.sampled_from([1, 2]),
    expert=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    sequence_parallel=st.booleans(),
    recompute=st.sampled_from(["none", "matmuls", "blocks"]),
    float8=st.booleans(),
    kernels=st.sampled_from(["eager", "fused"]),
    copies=st.sampled_from(["none", "gradients", "all"]),
)


@given(LAYOUTS, st.sampled_from([LLAMA3_8B, QWEN3_30B]), st.sampled_from(sorted(DEVICES)))
def test_any_layout_gains_from_a_better_device(
    layout: StepLayout, sizes: TransformerSizes, name: str
) -> None:
    device = DEVICES[name]
    before = step_time(sizes, layout, device)
    assert all(0 <= seconds < math.inf for seconds in before.terms.values())
    better = (
        replace(device, clock=1.3 * device.clock),
        replace(device, memory_bytes_per_s=1.3 * device.memory_bytes_per_s),
        replace(device, node_bytes_per_s=1.3 * device.node_bytes_per_s),
        replace(device, network_bytes_per_s=1.3 * device.network_bytes_per_s),
    )
    for each in better:
        assert step_time(sizes, layout, each).total <= before.total * (1 + 1e-9)


@pytest.mark.parametrize("overlaps", [False, True])
def test_more_stages_of_a_rank_leave_its_exposed_data_as_it_was(overlaps: bool) -> None:
    """A rank sends the same bytes, however many stages its blocks are in."""
    layout = StepLayout(
        64, 4096, 1, 8, pipe=4, zero=1, schedule="interleaved", overlaps_data=overlaps
    )
    seconds = [
        step_time(LLAMA3_8B, replace(layout, chunks=chunks), H100).terms["exposed data"]
        for chunks in (2, 4, 8)
    ]
    assert seconds == pytest.approx([seconds[0]] * 3) and seconds[0] > 0


@pytest.mark.parametrize("pipe", [1, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_more_vocabulary_never_lowers_data_seconds(zero: int, tied: bool, pipe: int) -> None:
    layout = StepLayout(64, 4096, 1, 8, pipe=pipe, zero=zero, exchanges=2)
    for each in (layout, replace(layout, overlaps_data=False)):
        few, some, many = (
            step_time(replace(LLAMA3_8B, vocab=vocab, tied=tied), each, H100).terms["exposed data"]
            for vocab in (256, 50304, 201088)
        )
        assert few < some < many


def test_ranks_that_share_an_expert_are_as_far_apart_as_there_are_experts() -> None:
    """Two nodes of eight with eight ranks of experts each: gradients of experts go between them."""
    sizes, layout = QWEN3_30B, StepLayout(16, 4096, 1, 1, expert=8, zero=1)
    of_node = Fabric(LinkModel(), LinkModel(), 8)
    found = [of_node.joined(shared.sharers) for _, shared in shares(sizes, layout)]
    assert found == [(16, 1), (2, 8)]
    slow = replace(H100, network_bytes_per_s=H100.network_bytes_per_s / 10)
    exposed = [step_time(sizes, layout, x).terms["exposed data"] for x in (slow, H100)]
    assert exposed[0] > 5 * exposed[1]


def test_experts_are_summed_over_the_ranks_that_hold_the_same_ones() -> None:
    """Of 16 ranks with 8 ranks of experts two hold the same expert, in groups of 4 (HSDP) too."""
    layout = StepLayout(16, 4096, 1, 1, expert=8, zero=2, overlaps_data=False)
    narrow = replace(QWEN3_30B, heads=1, kv_heads=1, vocab=0)  # nearly all weights are experts'
    whole, grouped = (
        step_time(narrow, replace(layout, shard=shard), H100).terms["exposed data"]
        for shard in (0, 4)
    )
    # an all-reduce moves 4 bytes of a weight, a scatter and a gather half of 4 and half of 2; 10 %
    # for what is dense
    assert grouped == pytest.approx(4 / 3 * whole, rel=0.1)


def test_adapters_alone_are_sent_where_frozen_weights_are_whole() -> None:
    layout = StepLayout(16, 4096, 1, 1, zero=3, lora=16, overlaps_data=False, exchanges=1)
    sharded, whole, few, plain = (
        step_time(LLAMA3_8B, each, H100).terms["exposed data"]
        for each in (
            layout,
            replace(layout, shards_frozen=False),
            replace(layout, shards_frozen=False, lora_mlp=False),
            replace(layout, zero=0),
        )
    )
    assert 0 < few < whole < sharded / 5  # latency is most of it
    assert 0 < plain < sharded / 5


def test_adapters_have_the_parameters_of_their_two_matrices() -> None:
    layout = StepLayout(1, 4096, 1, 1, lora=16)
    # query and output 4096 x 4096, key and value 1024 x 4096; gate, up and down 14336 x 4096
    attention, mlp = 2 * (4096 + 4096) + 2 * (1024 + 4096), 3 * (14336 + 4096)
    assert adapter_parameters(LLAMA3_8B, layout) == 16 * (attention + mlp)
    assert adapter_parameters(LLAMA3_8B, replace(layout, lora_mlp=False)) == 16 * attention
    joined = replace(layout, joins=True)
    assert adapter_parameters(LLAMA3_8B, joined) == 16 * (attention + mlp - 3 * 4096)


def test_an_optimizer_of_many_kernels_moves_more_bytes() -> None:
    layout = StepLayout(8, 4096, 1, 1, zero=3)
    fused, foreach = (
        step_time(LLAMA3_8B, replace(layout, optimizer=kernels), H100).terms["optimizer"]
        for kernels in ("fused", "foreach")
    )
    assert foreach == pytest.approx(fused * 92 / 34)


@pytest.mark.parametrize("tied", [False, True])
def test_copies_of_fsdp_are_of_every_parameter_on_one_device(tied: bool) -> None:
    """Shards are cast and gathered weights copied out twice (4 + 2 and 2 + 2 bytes), gradients
    copied in (2 + 4), and all but the first of four microbatches added up (12)."""
    sizes, layout = replace(LLAMA3_8B, tied=tied), StepLayout(1, 4096, 1, 4, zero=3)
    none, copied = (
        step_time(sizes, replace(layout, copies=copies), H100).terms["compute"]
        for copies in ("none", "all")
    )
    num_bytes = 4 * (2 * (6 + 4) + 6 + 12 * 3 / 4) * sizes.parameters
    seconds = num_bytes / (H100.memory_bytes_per_s * H100.fit.memory)
    assert copied - none == pytest.approx(seconds)


def test_clamped_gates_are_computed_again_with_the_activation() -> None:
    layout = StepLayout(8, 4096, 1, 1, expert=8, attention="flash3")
    plain, clamped = (
        step_time(QWEN3_30B, replace(layout, clamps=clamps, recompute="elementwise"), H100).terms
        for clamps in (False, True)
    )
    # 8 experts of 768 numbers for each token in each block; 2 us a kernel beside
    numbers = QWEN3_30B.layers * 4096 * 8 * 768
    speed = H100.memory_bytes_per_s * H100.fit.memory
    more = {term: clamped[term] - plain[term] for term in ("compute", "recompute")}
    assert more["compute"] == pytest.approx(36 * numbers / speed, rel=0.2)
    assert more["recompute"] == pytest.approx(16 * numbers / speed, rel=0.2)


def test_a_host_that_starts_each_expert_holds_up_a_small_micro_batch() -> None:
    few, many = (
        step_time(QWEN3_30B, StepLayout(8, 4096, m, 16 // m, expert=8, attention="flash3"), H100)
        for m in (8, 1)
    )
    assert few.terms["host and framework"] < 0.02 * few.total
    assert many.terms["host and framework"] > 0.1 * many.total


def test_a_gather_hides_behind_the_matmul_of_its_own_layer() -> None:
    """The narrow matmuls of queries, keys and values hide less than the wide ones of the MLP."""
    layout = StepLayout(8, 4096, 1, 1, tensor=8, sequence_parallel=True, joins=True)
    costs = LayerCosts(LLAMA3_70B, layout, H100, Fabric.of(H100))
    call = costs.fabric.gather_seconds(2 * 4096 * LLAMA3_70B.dim, 8)
    narrow, wide = (
        next(op for op in costs.block_operations() if op.name == name).backward / 2
        for name in ("q k v", "gate up")
    )
    assert narrow < call < wide
    hidden = 2 * (call - narrow + SLOWDOWN * narrow) + 2 * SLOWDOWN * call
    assert costs.block().tensor == pytest.approx([4 * call, 2 * call + hidden])


def test_tensor_ranks_add_up_their_embeddings() -> None:
    for sequence_parallel, calls in ((False, (1, 0)), (True, (1, 1))):
        layout = StepLayout(8, 4096, 1, 1, tensor=8, sequence_parallel=sequence_parallel)
        costs = LayerCosts(LLAMA3_70B, layout, H100, Fabric.of(H100))
        num_bytes = 2 * 4096 * LLAMA3_70B.dim
        one = costs.fabric.scatter_seconds if sequence_parallel else costs.fabric.sum_seconds
        assert costs.embedding().tensor == [one(num_bytes, 8) * number for number in calls]


def test_a_device_is_idle_until_the_host_has_read_the_counts_of_tokens() -> None:
    layout = StepLayout(8, 4096, 4, 2, expert=8, attention="flash3")
    waits = [
        step_time(sizes, layout, H100).terms["host and framework"]
        for sizes in (QWEN3_30B, replace(QWEN3_30B, num_experts=0))
    ]
    expected = 2 * QWEN3_30B.layers * STALL_CALLS * HOST_CALL_S
    assert waits[0] - waits[1] == pytest.approx(expected)


def test_attention_on_blackwell_takes_one_longest_tile_more() -> None:
    """Within 20 % of kernels that SimuMax measured: milliseconds by tokens and heads."""
    for seq_len, heads, measured_ms in (
        (4096, 8, 0.0984),
        (4096, 64, 0.280),
        (4096, 128, 0.490),
        (131072, 8, 31.2),
    ):
        flops, tiles = 2.0 * seq_len**2 * 128 * heads, seq_len / 256 * heads
        seconds = attention_seconds(B200, "flash3", flops, seq_len, backward=False, tiles=tiles)
        assert seconds == pytest.approx(measured_ms * 1e-3, rel=0.2)


@pytest.mark.parametrize("name", CASES)
def test_fewer_bytes_never_make_a_step_slower(name: str) -> None:
    sizes, layout = CASES[name]
    before = step_time(sizes, layout, H100).total
    fewer = replace(layout, weight_bytes=1), replace(layout, reduce_bytes=2)
    for changed in fewer:
        assert step_time(sizes, changed, H100).total <= before * (1 + 1e-9)


def test_halves_of_a_symmetric_pipe_take_the_same() -> None:
    """Blocks alone, twice as many on twice as many ranks: each rank does what it did."""
    bare = replace(LLAMA3_8B, vocab=0)
    one = StepLayout(1, 4096, 1, 8)
    half = step_time(replace(bare, layers=16), one, H100).terms
    both = step_time(bare, replace(one, ranks=2, pipe=2), H100).terms
    # 1 %: the rank of a pipe that is compared may also hold an end, whose work without a vocabulary
    # is the norm and the look-up; 2 %: the bubble has both of them
    assert both["compute"] == pytest.approx(half["compute"], rel=0.01)
    assert both["bubble"] == pytest.approx(half["compute"] / 8, rel=0.02)


def test_recomputed_blocks_cost_a_forward_without_the_last_matmul() -> None:
    layout = StepLayout(1, 4096, 1, 1, recompute="blocks")
    block = LayerCosts(LLAMA3_8B, layout, H100, Fabric.of(H100)).block()
    whole = replace(layout, stops_early=False)
    assert block.recompute < block.forward
    again = LayerCosts(LLAMA3_8B, whole, H100, Fabric.of(H100)).block()
    assert again.recompute == pytest.approx(again.forward)


def test_a_matmul_has_the_rate_of_the_device_at_most() -> None:
    for size in (64, 1000, 4096, 16384):
        matmul = Matmul(size, size, size)
        rate = matmul.flops / matmul_seconds(H100, matmul, "bfloat16")
        assert rate <= H100.peak("bfloat16") * H100.fit.matmul
    assert rate > 0.9 * H100.peak("bfloat16") * H100.fit.matmul


@pytest.mark.parametrize("node", [4, 8, 16])
@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (2, 16), (8, 4), (1, 8), (2, 1)])
@pytest.mark.parametrize("order", ["dpct", "pdct", "dctp", "cdpt"])
def test_a_group_along_two_axes_has_as_many_ranks_in_a_node_as_there_are(
    node: int, sizes: tuple[int, int], order: str
) -> None:
    """As counted rank by rank."""
    context, data = sizes
    degrees = {"t": 2, "p": 2, "c": context, "d": data}
    names = {"t": "tensor", "p": "pipe", "c": "context", "d": "data"}
    ranks = math.prod(degrees.values())
    given = tuple(names[x] for x in order)
    layout = StepLayout(ranks, 64, 1, 1, tensor=2, pipe=2, context=context, order=given)
    group = [
        sum(digit * layout.stride(names[x]) for x, digit in zip("cd", place, strict=True))
        for place in itertools.product(range(context), range(data))
    ]
    assert len({*group}) == len(group) == layout.sharers
    inside = sum(rank < node for rank in group)
    size, stride = Fabric(LinkModel(), LinkModel(), node).joined(layout.shards.sharers)
    assert size == len(group)
    assert min(size, max(node // stride, 1)) == inside
    assert (size * stride <= node) == (inside == size) or size == 1


def test_a_group_between_nodes_uses_the_cards_of_its_devices() -> None:
    fabric = Fabric.of(H100)
    num_bytes = 1e9
    inside = fabric.gather_seconds(num_bytes, 8)
    assert inside < fabric.gather_seconds(num_bytes, 64) < fabric.gather_seconds(num_bytes, 8, 8)
    # one device a node has one card, eight have eight, and latency is the same
    ratio = fabric.gather_seconds(num_bytes, 64, 8) / fabric.gather_seconds(num_bytes, 64)
    assert 5 < ratio < 9
    # a small sum goes by a tree
    assert fabric.sum_seconds(8, 512) < 2 * fabric.ring(512, 1)[0] / 2


def test_devices_are_found_by_the_names_that_clusters_give() -> None:
    assert find_device("H100") is H100 and find_device("nvidia_h100_sxm") is H100
    assert find_device("NVIDIA-A100-80GB").name == "a100"
    assert find_device("NVIDIA A100-SXM4-80GB").name == "a100"
    assert find_device("NVIDIA H100 80GB HBM3") is H100
    assert find_device("AMD Instinct MI300X").name == "mi300x"
    with pytest.raises(ConfigError, match=facts_pattern("'v100'", "a100", "h100")):
        find_device("v100")


def test_every_device_says_its_numbers_and_their_source() -> None:
    for device in DEVICES.values():
        numbers = (
            *device.peaks.values(),
            device.memory_bytes_per_s,
            device.memory_bytes,
            device.node_bytes_per_s,
            device.network_bytes_per_s,
            device.cores,
        )
        assert min(numbers) > 0 and device.source
        assert all(0 < share < 1 for share in (device.fit.matmul, device.fit.memory))


def test_a_link_without_bandwidth_is_named() -> None:
    with pytest.raises(ConfigError, match="h100-sxm has links of 0 and"):
        step_time(*CASES["fsdp"], replace(H100, node_bytes_per_s=0.0))


def test_a_layout_that_does_not_fit_its_ranks_is_named() -> None:
    with pytest.raises(ConfigError, match=facts_pattern("6 ranks", "4 ranks")):
        StepLayout(6, 128, 1, 1, tensor=4)


def test_muon_adds_the_operations_of_its_iterations() -> None:
    """On one rank 2 (2 s^2 l + s^3) of each matrix, five times; AdamW's bytes cost nothing here."""
    z = TransformerSizes(2, 64, 4, 2, 16, 96, 128)
    sides = [(64, 64), (32, 64), (32, 64), (64, 64), (64, 96), (64, 96), (64, 96)]
    flops = z.layers * sum(10.0 * (2 * s * s * n + s**3) for s, n in sides)
    device = replace(
        H100, matmul_times={"bfloat16": ((1.0, 1.0),)}, memory_bytes_per_s=math.inf, is_host=True
    )

    def seconds(ranks: int, **more: object) -> float:
        layout = StepLayout(ranks, 32, 1, 1, optimizer="muon", **more)  # type: ignore[arg-type]
        free = Fabric(LinkModel(), LinkModel(), 8)
        return step_time(z, layout, device, fabric=free).terms["optimizer"]

    assert seconds(1) == pytest.approx(flops)
    assert seconds(2) == pytest.approx(flops), "replicas repeat it"
    assert seconds(2, zero=1) == pytest.approx(flops / 2), "owners share it"
    assert seconds(2, tensor=2, muon_exchange="gather") == pytest.approx(flops / 2)
    # the squares of the unsplit side are computed on each rank, and its side is not the shorter one
    assert seconds(2, tensor=2, muon_exchange="together") > flops / 2
