"""The order of nodes that crosses the fewest switches is that of a search over all orders."""

import itertools
import random

import pytest

from torchdistpackage.cli.main import main
from torchdistpackage.config.load import load
from torchdistpackage.errors import ConfigError
from torchdistpackage.plan.node_order import NodeLinks, best_order, crossed_axes, host_lines
from torchdistpackage.plan.run_plan import make_plan

TINY = "configs/gpt_tiny.yaml"
CASES = [
    # degrees, ranks of a node, and the lowest and the next switch of each node
    ("data=2 pipe=4", 2, "a1 b1 a1 b1"),
    ("data=2 pipe=2 tensor=2 order=[tensor,pipe,data,context]", 1, "a1 b1 c2 a1 b1 c2 a1 b1"),
    ("data=6 order=[data,pipe,context,tensor]", 1, "a1 b1 a1 c2 b1 c2"),
    ("data=2 pipe=3 order=[pipe,data,context,tensor]", 1, "a1 b1 a1 b1 a1 b1"),
    ("data=2 context=2 pipe=2 order=[context,pipe,data,tensor]", 1, "a1 b1 b1 c2 c2 d2 a1 d2"),
    ("data=2 pipe=1 tensor=4", 4, "a1 b1"),
    ("data=5 pipe=2 order=[pipe,data,context,tensor]", 2, "a1 b2 a1 b2 a1"),
]


def plan_of(degrees: str):
    keys = [f"parallel.{x.replace(',', ', ')}" for x in degrees.split()]
    given = dict(x.split("=") for x in degrees.split())
    world = 1
    for axis in ("data", "pipe", "context", "tensor"):
        world *= int(given.get(axis, 1))
    if "pipe" not in given:
        keys.append("parallel.pipe=1")
    run = load(TINY, [*keys, "data.global_batch=960", "pipeline.microbatches=2"])
    return make_plan(run, world)


@pytest.mark.parametrize(("degrees", "per_node", "switches"), CASES)
def test_the_order_is_as_good_as_the_best_of_all(degrees, per_node, switches):
    plan = plan_of(degrees)
    nodes = [f"n{i}" for i in range(len(switches.split()))]
    paths = {n: (x[0], x[1:]) for n, x in zip(nodes, switches.split(), strict=True)}
    best = best_order(plan, per_node, nodes, paths)
    # nodes of one switch are alike, so an order is known by its switches
    links = NodeLinks.of(plan, per_node)
    orders = set(itertools.permutations([paths[node] for node in nodes]))
    least = min(map(links.cost, orders))
    assert best.is_exact
    assert best.cost == links.cost([paths[n] for n in best.nodes]) == pytest.approx(least, rel=1e-9)
    assert sorted(best.nodes) == nodes
    # given the best order, it is kept
    assert best_order(plan, per_node, best.nodes, paths).nodes == best.nodes


def test_many_nodes_in_any_order_end_as_good_as_those_sorted_by_switch():
    plan = plan_of("data=32 pipe=4 tensor=1")
    nodes = [f"n{i}" for i in range(128)]
    paths = {n: (f"leaf{i // 8}", f"top{i // 32}") for i, n in enumerate(nodes)}
    shuffled = random.Random(0).sample(nodes, len(nodes))
    best = best_order(plan, 1, shuffled, paths)
    assert best.cost <= best_order(plan, 1, nodes, paths).given_cost < best.given_cost
    assert not best.is_exact


def test_groups_that_cross_are_counted_by_level():
    plan, nodes = plan_of("data=2 pipe=2 tensor=2"), ("n1", "n3", "n2", "n4")
    paths = {f"n{i}": (f"s{(i - 1) // 2}", "root") for i in range(1, 5)}
    crossed = {x.axis: x for x in crossed_axes(plan, 2, nodes, paths)}
    assert crossed["data"].num_crossing == (0, 0)
    assert crossed["pipe"].num_crossing == (4, 0)
    assert crossed["tensor"].num_crossing == (0, 0)
    # a message each way for each of two micro-batches
    rows, dim = plan.samples_per_microbatch * plan.shape.seq_len, plan.shape.dim
    assert crossed["pipe"].num_bytes == 2 * 2 * rows * dim * 4
    assert host_lines(nodes, 8, 2).split() == ["n1", "n1", "n3", "n3", "n2", "n2", "n4", "n4"]


@pytest.mark.parametrize(
    ("nodes", "said"),
    [("n1 n2", "fill 4 nodes, but 2"), ("n1 n1 n2 n3", "n1 is named twice"), ("n1 n2 n3 m", "m")],
)
def test_nodes_that_do_not_fit_are_refused(nodes, said):
    paths = {f"n{i}": ("s",) for i in range(1, 5)}
    with pytest.raises(ConfigError, match=said):
        best_order(plan_of("data=4 pipe=2"), 2, nodes.split(), paths)


def test_the_command_prints_what_crosses_and_writes_the_order(tmp_path, capsys):
    file, hosts = tmp_path / "topology.conf", tmp_path / "hosts"
    file.write_text("SwitchName=s0 Nodes=n[1-2]\nSwitchName=s1 Nodes=n[3-4]\n")
    degrees = [TINY, "parallel.data=2", "parallel.pipe=2", "parallel.tensor=2", "--procs", "8"]
    words = ["plan", *degrees, "--ranks-per-node", "2", "--topology", str(file)]
    assert main([*words, "--nodelist", "n1,n3,n[2,4]", "--hostfile", str(hosts)]) == 0
    out = capsys.readouterr().out.split("switches of 4 nodes")[1]
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["data"][-2:] == ["0", "4"]
    assert rows["pipe"][-2:] == ["4", "0"]
    assert hosts.read_text().split() == ["n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4"]
    assert main(words) == 0
    assert "as given" in capsys.readouterr().out
    assert main(["plan", *degrees, "--topology", str(file)]) == 2
    assert main(["plan", *degrees, "--hostfile", str(hosts)]) == 2
    assert main([*words, "--search"]) == 2
    assert main(["plan", TINY, "--procs", "16", "parallel.data=8", *words[7:]]) == 2
    assert "has 4 nodes, but 16 ranks" in " ".join(capsys.readouterr().err.split())
