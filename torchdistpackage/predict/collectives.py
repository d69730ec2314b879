"""Seconds of a collective between devices: latency and bandwidth, by algorithm and node.

A ring moves (n - 1) / n of the bytes over its slowest link, and its latency grows with its ranks; a
tree's grows with their logarithm but moves more. A group that spans nodes uses the network card of
each of its devices there, so its bandwidth is theirs together, and never more than the links inside
the node. Axes do not share cards: each device sends through its own.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torchdistpackage.errors import ConfigError
from torchdistpackage.predict.devices import Accelerator
from torchdistpackage.predict.links import LinkModel

NODE_HOP_S = 8.6e-6
START_S = 23.6e-6
"""A hop of a ring inside a node and the start of a collective, as NCCL was measured on eight B200:
8.0 us a hop of a reduce-scatter, 9.2 us of an all-gather, and 22 to 26 us (MooreThreads/SimuMax,
configs/system/b200_bf16_ceperm.json)."""
NETWORK_SHARE = 0.75
"""Share of a network card's bandwidth that large collectives reach, on all devices."""
NETWORK_HOP_S = 14e-6
"""A hop between nodes, as NCCL's own model has it for large messages (src/graph/tuning.cc, protocol
Simple)."""
SLOWDOWN = 0.19
"""Seconds that matmuls lose to a second of communication beside them, by its cores and its share of
the memory: the mean of arXiv:2507.03114, which measures overlapped training on A100, H100 and
MI250."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """The links between devices. node_size: ranks of one node. slowdown: seconds that computation
    loses to a second of communication beside it. measured: by operation and link ("node" or
    "network") the time of a call by the bytes that it moves over the busiest link, where a
    cluster's profile has it."""

    node: LinkModel
    network: LinkModel
    node_size: int
    slowdown: float = SLOWDOWN
    measured: Mapping[tuple[str, str], LinkModel] = field(
        default_factory=dict[tuple[str, str], LinkModel]
    )

    @classmethod
    def of(
        cls, device: Accelerator, node_size: int = 0, network_bytes_per_s: float = 0.0
    ) -> "Fabric":
        """The links of a device, or of a cluster that says its own numbers.

        Raises:
            ConfigError: a bandwidth is zero or negative.
        """
        network = network_bytes_per_s or device.network_bytes_per_s
        speeds = (device.node_bytes_per_s, network)
        if min(speeds) <= 0:
            raise ConfigError(
                f"{device.name} has links of {speeds[0]:g} and {speeds[1]:g} bytes/s; give each "
                f"bandwidth as a number above zero"
            )
        return cls(
            LinkModel(NODE_HOP_S, device.node_bytes_per_s * device.fit.link),
            LinkModel(NETWORK_HOP_S, network * NETWORK_SHARE),
            node_size or device.node_size,
        )

    def joined(self, parts: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """Return the number of ranks of a group and their distance.

        parts: (number of ranks, distance) along each axis of the group. For several axes, the
        distance is that of a group along one axis with equally many of its ranks in a node.
        """
        longer = [part for part in parts if part[0] > 1]
        if len(longer) < 2:
            return longer[0] if longer else (1, 1)
        size = math.prod(number for number, _ in longer)
        inside = math.prod(max(min(n, self.node_size // stride), 1) for n, stride in longer)
        if inside == size:
            return size, max(self.node_size // size, 1)
        return size, math.ceil(self.node_size / inside)

    def ring(self, size: int, stride: int) -> tuple[float, float]:
        """Return latency and bytes per second of a ring of `size` ranks, `stride` apart."""
        inside = max(min(size, self.node_size // stride), 1)
        if inside >= size:
            return (size - 1) * self.node.latency_s, self.node.bytes_per_s
        nodes = math.ceil(size / inside)
        hops = (size - nodes) * self.node.latency_s + nodes * self.network.latency_s
        speed = inside * self.network.bytes_per_s
        return hops, min(speed, self.node.bytes_per_s) if inside > 1 else speed

    def beside(self, comm_s: float, compute_s: float) -> float:
        """Return the time that communication adds to computation beside it: the excess, and the
        slowdown during the overlap."""
        hidden = min(comm_s, compute_s)
        return comm_s - hidden + hidden * self.slowdown

    def _measured(self, operation: str, size: int, stride: int) -> LinkModel | None:
        link = "node" if size * stride <= self.node_size else "network"
        return self.measured.get((operation, link))

    def gather_seconds(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """Return the seconds of an all-gather of a tensor of `num_bytes` bytes."""
        if size < 2 or num_bytes <= 0:
            return 0.0
        if link := self._measured("all_gather", size, stride):
            return link.seconds(num_bytes * (size - 1) / size)
        latency, speed = self.ring(size, stride)
        return START_S + latency + num_bytes * (size - 1) / size / speed

    def scatter_seconds(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """Return the seconds of a reduce-scatter; those of an all-gather if it was not measured
        itself."""
        link = self._measured("reduce_scatter", size, stride)
        if link is None or size < 2 or num_bytes <= 0:
            return self.gather_seconds(num_bytes, size, stride)
        return link.seconds(num_bytes * (size - 1) / size)

    def sum_seconds(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """Return the seconds of an all-reduce: of a ring, or of a tree where that is less."""
        if size < 2 or num_bytes <= 0:
            return 0.0
        if link := self._measured("all_reduce", size, stride):
            return link.seconds(2 * num_bytes * (size - 1) / size)
        latency, speed = self.ring(size, stride)
        ring = 2 * latency + 2 * num_bytes * (size - 1) / size / speed
        hop = self.node if size * stride <= self.node_size else self.network
        tree = 2 * math.ceil(math.log2(size)) * hop.latency_s + 2.2 * num_bytes / speed
        return START_S + min(ring, tree)

    def exchange_seconds(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """Return the seconds of an all-to-all in which each rank sends `num_bytes` bytes."""
        if size < 2 or num_bytes <= 0:
            return 0.0
        if link := self._measured("all_to_all", size, stride):
            return link.seconds(num_bytes * (size - 1) / size)
        inside = max(min(size, self.node_size // stride), 1)
        away = num_bytes * (size - inside) / size
        local_bytes = num_bytes * (inside - 1) / size
        out = self.network.seconds(away) if away else 0.0
        return START_S + max(self.node.seconds(local_bytes), out)

    def message_seconds(self, num_bytes: float, stride: int) -> float:
        """Return the seconds of a message to the rank `stride` further."""
        if measured := self._measured("p2p", 2, stride):
            return measured.seconds(num_bytes)
        link = self.node if stride < self.node_size else self.network
        return link.seconds(num_bytes)
