"""Random placed programs: as plain data, as the same program in plain torch, and on places.

Edges go both ways between ranks; values are reused, left unused, detached inside of operations,
integers, members of structures, and not contiguous.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.compat.placed.message_order import PlacedCall

SIZE = 3
"""All floats are (SIZE, SIZE), all integers (SIZE,)."""


class Node(NamedTuple):
    """kind: of FUNCTIONS, or `leaf`, `data` (wants no gradient), `labels`. place: which rank."""

    kind: str
    place: int
    inputs: tuple[tuple[int, int], ...] = ()
    """(node, which of its outputs)"""


class Graph(NamedTuple):
    nodes: tuple[Node, ...]
    roots: tuple[int, ...]
    """Numbers, of which a backward is made, one after the other."""


ARITY = {
    # float outputs
    "add": "ff",
    "mul": "ff",
    "same": "f",
    "tanh": "f",
    "matmul": "ff",
    "turned": "f",  # its output is not contiguous
    "nested": "ffff",
    "keyword": "ff",
    "picked": "fi",
    "half_detached": "ff",
    "detached": "f",
    "in_place": "f",
    "pair": "ff",  # two outputs
    # integer output
    "argmax": "f",
    # one number
    "loss": "fi",
}
NUM_OUTPUTS = {"pair": 2}


def random_graph(seed: int, num_places: int) -> Graph:
    draw = random.Random(seed)
    nodes: list[Node] = []
    floats, integers = list[tuple[int, int]](), list[tuple[int, int]]()

    def add(kind: str, inputs: tuple[tuple[int, int], ...] = ()) -> int:
        nodes.append(Node(kind, draw.randrange(num_places), inputs))
        return len(nodes) - 1

    for kind in ("leaf", "data", "leaf", "labels", *draw.choices(("leaf", "labels"), k=2)):
        (integers if kind == "labels" else floats).append((add(kind), 0))
    kinds = [kind for kind in ARITY if kind != "loss"]
    for _ in range(draw.randint(3, 20)):
        kind = draw.choice(kinds)
        # mostly what is new, so that graphs are deep
        recent = {"f": floats[-6:] if draw.random() < 0.7 else floats, "i": integers}
        number = add(kind, tuple(draw.choice(recent[what]) for what in ARITY[kind]))
        outputs = [(number, i) for i in range(NUM_OUTPUTS.get(kind, 1))]
        (integers if kind == "argmax" else floats).extend(outputs)
    roots = [add("loss", (floats[0], integers[-1]))]  # floats[0] is a leaf: it has a gradient
    mixed = add("add", (floats[-1], floats[0]))
    roots.append(add("loss", ((mixed, 0), draw.choice(integers))))
    return Graph(tuple(nodes), tuple(roots))


def wants_gradient(graph: Graph) -> list[bool]:
    """Of each node's outputs."""
    wants: list[bool] = []
    for node in graph.nodes:
        inputs = [wants[i] for i, _ in node.inputs]
        found = node.kind == "leaf" or any(inputs)
        if node.kind == "half_detached":
            found = inputs[1]
        wants.append(found and node.kind not in ("detached", "argmax"))
    return wants


def calls(graph: Graph, first: int) -> list[PlacedCall]:
    """The operations as the package numbers them, from `first` on."""
    wants, made = wants_gradient(graph), list[PlacedCall]()
    for i, node in enumerate(graph.nodes):
        sources: dict[int, bool] = {}
        for read, _ in node.inputs:
            place = graph.nodes[read].place
            if place != node.place:
                sources[place] = sources.get(place, False) or wants[read]
        parents = tuple(first + read for read, _ in node.inputs)
        listed = tuple(((place,), wanted) for place, wanted in sources.items())
        made.append(PlacedCall(first + i, (node.place,), listed, parents))
    return made


def functions() -> dict[str, Callable[..., Any]]:
    import torch

    def nested(x, parts, *, last):
        return x * 0.5 + parts["b"][0] - parts["a"] + last

    return {
        "add": lambda a, b: a + b,
        "mul": lambda a, b: a * b,
        "same": lambda a: a,
        "tanh": torch.tanh,
        "matmul": lambda a, b: torch.tanh(a @ b),
        "turned": lambda a: (a * 2).t(),
        "nested": lambda a, b, c, d: nested(a, {"b": [b, 1], "a": c}, last=d),
        "keyword": lambda a, b: a - 0.3 * b,
        "picked": lambda a, i: a[i % SIZE],
        "half_detached": lambda a, b: a.detach() * b,
        "detached": lambda a: a.detach() + 1,
        "in_place": lambda a: (a * 1.5).relu_(),
        "pair": lambda a, b: (a + 2 * b, {"x": a * b.detach()}),
        "argmax": lambda a: a.argmax(1),
        "loss": lambda a, i: torch.nn.functional.cross_entropy(a, i % SIZE),
    }


def leaves(graph: Graph, seed: int) -> dict[int, Any]:
    """The tensors that the program begins with, by node; alike on all ranks."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    made = {}
    for i, node in enumerate(graph.nodes):
        if node.kind == "labels":
            made[i] = torch.randint(0, SIZE, (SIZE,), generator=generator)
        elif not node.inputs:
            x = torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator)
            made[i] = x.requires_grad_(node.kind == "leaf")
    return made


def play_graph(graph: Graph, leaf: dict[int, Any], put: Callable[[int, Any], Any]) -> list[Any]:
    """The outputs of all nodes. put: a tensor or a function, on a place."""
    known, made = functions(), list[Any]()

    def read(place: int, node: int, output: int) -> Any:
        value = made[node]
        if graph.nodes[node].kind != "pair":
            return value
        return value[0] if output == 0 else value[1]["x"]

    for i, node in enumerate(graph.nodes):
        if not node.inputs:
            made.append(put(node.place, leaf[i]))
            continue
        inputs = [read(node.place, *one) for one in node.inputs]
        function = put(node.place, known[node.kind])
        if node.kind == "keyword":
            made.append(function(inputs[0], b=inputs[1]))
        else:
            made.append(function(*inputs))
    return made
