"""Two nodes with two network cards: over which one the ranks talk, and what they are told when not.

Two ranks join and leave once per scenario. On n1 the host's own name means 127.0.1.1, as Debian's
installer writes it, and something else listens on the first candidate port.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT, Cluster
from tests.tells import tells
from torchdistpackage.environment.device import choose_device, exclusive_device

JOBS = Path(__file__).parent / "jobs"
DETECT = JOBS / "join_detect.py"
LIMIT_S = 120


def submit(cluster: Cluster, folder: Path) -> dict[str, object]:
    return {"folder": folder, "cards": cluster.beside(meet, cluster, folder)}


def meet(cluster: Cluster, folder: Path) -> dict[str, list[dict]]:
    """What ranks 0 and 1 saw in each scenario, and the cards' addresses on n1."""
    with cluster.sibling(nodes=2, cards=2, gpus=2) as own:
        hosts = own.node("exec", "n1", "cat", "/etc/hosts").stdout
        first, second = (
            next(line.split()[0] for line in hosts.splitlines() if line.split()[1] == name)
            for name in ("n1", "n1-eth1")
        )
        # as Debian's installer writes it
        debian = folder / "hosts"
        debian.write_text(hosts.replace(f"{first} n1\n", "127.0.1.1 n1\n"))
        own.node("exec", "n1", "mount", "--bind", str(debian), "/etc/hosts")
        scenarios = [
            {"name": "own_name"},
            {"name": "first", "env": {"MASTER_ADDR": first, "MASTER_PORT": "29601"}},
            {"name": "second", "env": {"MASTER_ADDR": second, "MASTER_PORT": "29602"}},
            {
                "name": "users",
                "env": {
                    "MASTER_ADDR": "n1-eth1",
                    "MASTER_PORT": "29603",
                    "GLOO_SOCKET_IFNAME": "eth0",
                },
            },
            {"name": "wrong", "env": {"GLOO_SOCKET_IFNAME": "eth7", "MASTER_PORT": "29604"}},
            {"name": "loopback", "env": {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29605"}},
            {
                "name": "absent",
                "env": {"MASTER_ADDR": first, "MASTER_PORT": "29606"},
                "absent": [1],
                "limit_s": 3.0,
            },
        ]
        told = folder / "cards.scenarios"
        told.write_text(json.dumps(scenarios))
        path = {"PYTHONPATH": str(ROOT)}
        taken = f"{cluster.python} {JOBS}/join_port_taken.py {folder}/taken"
        rank = f"{cluster.python} {JOBS}/join_all.py {folder} {told}"
        words = ["-N2", "--ntasks-per-node=1", "-o", folder / "log-cards"]
        job = own.sbatch(*words, script=f"{taken} srun {rank}", env=path)
        detected = f"{cluster.python} {DETECT} {folder}"
        words = ["-N2", "--ntasks-per-node=2", "--gpus-per-task=1", "--overcommit", "sh", "-c"]
        both = f"{detected}/gpu; env >{folder}/gpu.$SLURM_PROCID.env"
        own.run("srun", *words, both, env=path)
        own.wait_end(job, LIMIT_S)
        log = (folder / "log-cards").read_text()
        seen = {
            s["name"]: [_json(folder / f"{s['name']}.{r}.json", log) for r in (0, 1)]
            for s in scenarios
        }
        return seen | {"addresses": [first, second]}


def _json(path: Path, log: str) -> dict:
    assert path.exists(), f"{path.name} was not written:\n{log}"
    return json.loads(path.read_text())


@pytest.fixture
def cards(submitted) -> dict:
    return submitted["cards"].result(2 * LIMIT_S)


def over(seen: dict) -> str:
    """The card over which the sum went."""
    (card,) = [card for card, size in seen["received_bytes"].items() if size > 1 << 20]
    return card


@pytest.mark.parametrize(
    ("scenario", "card", "reason"),
    [("first", "eth0", "subnet"), ("second", "eth1", "subnet"), ("users", "eth0", "as set")],
)
def test_the_card_is_that_of_the_masters_network_or_the_users(cards, scenario, card, reason):
    for seen in cards[scenario]:
        assert seen.get("total") == 2.0, seen
        assert over(seen) == card
        assert seen["told"] == [card, f"={card}"]
    here, there = (seen["notes"][-1] for seen in cards[scenario])
    assert here.startswith("network: ") and reason in there
    if reason == "subnet":
        address = cards["addresses"][int(card[-1])]
        assert f"{card} ({address}), which holds the master's address {address}" in here
        assert f"{card} (" in there and f"of the master {address}" in there


def test_a_host_that_knows_itself_as_loopback_learns_its_address_from_the_others(cards):
    first, second = cards["own_name"]
    assert [first.get("total"), second.get("total")] == [2.0, 2.0], cards["own_name"]
    assert over(first) == over(second) == "eth0"
    assert f"which holds the master's address {cards['addresses'][0]}" in first["notes"][-1]


def test_with_the_first_candidate_port_taken_all_ranks_still_meet(cards, submitted):
    taken = int((submitted["folder"] / "taken").read_text())
    for seen in cards["own_name"]:
        assert seen["ports"][0] == taken and seen["port"] == seen["ports"][1]


def test_a_users_card_that_a_node_has_not_is_refused(cards):
    for seen in cards["wrong"]:
        assert "GLOO_SOCKET_IFNAME=eth7" in seen["error"]
        assert "eth0 (" in seen["error"] and "eth1 (" in seen["error"]


def test_a_loopback_master_is_refused_on_both_nodes_at_once(cards):
    for seen in cards["loopback"]:
        assert tells(seen["error"], "address 127.0.0.1", "127.0.0.1 here")
        assert seen["host"] in seen["error"] and seen["took_s"] < 5


def test_a_rank_that_never_came_is_named_with_its_host_in_time(cards):
    seen = cards["absent"][0]
    assert tells(seen["error"], "1", "2 ranks", "rank 1", "n2", "within 3")
    assert 2.5 < seen["took_s"] < 8


def test_one_gpu_per_task(cards, submitted):
    """Slurm shows each task its own; the ports and places are those of any step."""
    folder = submitted["folder"]
    rows = [json.loads(p.read_text()) for p in (folder / "gpu").glob("*.json")]
    assert sorted(row["rank"] for row in rows) == [0, 1, 2, 3]
    taken = set()
    for rank in range(4):
        lines = (folder / f"gpu.{rank}.env").read_text().splitlines()
        env = dict(line.split("=", 1) for line in lines if "=" in line)
        visible = env["CUDA_VISIBLE_DEVICES"]
        choice = choose_device(
            rank % 2, visible, 1, local_world_size=2, exclusive=exclusive_device(env)
        )
        assert choice.index == 0
        taken.add((rank // 2, visible))
    assert len(taken) == 4
