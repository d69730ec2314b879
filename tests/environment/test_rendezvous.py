"""Who launched me: real environments, captured from Slurm 22.05 and torchrun, and laws.

A row of `environments.json` holds every process of one launch: what is common, what is its
own, and its place (rank, world size, local rank, local world size, node). Rows marked
"written" could not be captured and say why.
"""

import itertools
import json
from pathlib import Path

import pytest

from torchdistpackage.environment.rendezvous import (
    NUM_PORTS,
    candidate_ports,
    detect,
)
from torchdistpackage.errors import LaunchError

ROWS = json.loads((Path(__file__).parent / "environments.json").read_text())
NAMES = {row["name"]: row for row in ROWS}
JOINED = [row for row in ROWS if "error" not in row]


def environments(name: str) -> list[dict[str, str]]:
    row = NAMES[name]
    return [{**row["env"], **process.get("env", {})} for process in row["processes"]]


def test_the_table_is_mostly_captured():
    assert len(NAMES) == len(ROWS)
    assert sum("written" not in row for row in ROWS) >= 30
    assert all(row["reason"] for row in ROWS if "written" in row)


@pytest.mark.parametrize("row", JOINED, ids=lambda row: row["name"])
def test_every_process_finds_its_place(row):
    for env, process in zip(environments(row["name"]), row["processes"], strict=True):
        found = detect(env)
        place = [
            found.rank,
            found.world_size,
            found.local_rank,
            found.local_world_size,
            found.node,
        ]
        assert (found.source, place) == (row["source"], process["place"])
        assert bool(found.note) == row.get("note", False)
        assert "\n" not in found.note
        assert (found.store is not None) == (row["source"] == "local")
        assert hash(found) == hash(detect(env))


@pytest.mark.parametrize("row", JOINED, ids=lambda row: row["name"])
def test_all_processes_of_a_launch_go_to_the_same_place(row):
    """One address, one list of ports, one token; and rank 0 is really there."""
    found = [detect(env) for env in environments(row["name"])]
    assert len({(f.address, f.ports, f.token, f.store, f.served) for f in found}) == 1
    host = row["processes"][0].get("host")
    if found[0].source in ("slurm", "torchrun") and host:
        assert found[0].address == host
    assert bool(found[0].ports) == (found[0].source not in ("alone", "local"))


@pytest.mark.parametrize("row", JOINED, ids=lambda row: row["name"])
def test_captured_places_tile_the_world(row):
    """The table itself: each rank once, local ranks of a node counted from 0."""
    places = [process["place"] for process in row["processes"]]
    if len(places) == places[0][1]:
        assert [place[0] for place in places] == list(range(len(places)))
        for node in {place[4] for place in places}:
            here = [place for place in places if place[4] == node]
            assert [place[2] for place in here] == list(range(len(here)))
            assert {place[3] for place in here} == {len(here)}


@pytest.mark.parametrize(
    "row", [row for row in ROWS if "error" in row], ids=lambda row: row["name"]
)
def test_a_process_that_cannot_know_is_refused_on_every_rank(row):
    for env in environments(row["name"]):
        with pytest.raises(LaunchError, match=row["error"]):
            detect(env)


def test_arbitrary_distribution_works_once_the_host_is_told():
    """Slurm lists n[1,3], but rank 0 ran on n3: the first host of the list would be wrong."""
    row, envs = NAMES["arbitrary distribution"], environments("arbitrary distribution")
    for env, process in zip(envs, row["processes"], strict=True):
        found = detect({**env, "MASTER_ADDR": "n3"})
        assert [found.rank, found.node] == [process["place"][0], process["place"][4]]
        assert found.address == row["processes"][0]["host"] == "n3"


def test_no_two_captured_launches_share_a_token():
    """Above all a job and its restart, which have the same job and step id."""
    first, again = (
        detect(environments(f"{n} run of a requeued job")[0]) for n in ("first", "second")
    )
    assert first.token != again.token
    assert first.ports != again.ports
    firsts = [environments(row["name"])[0] for row in JOINED if "written" not in row]
    tokens = [detect(env).token for env in firsts if detect(env).world_size > 1]
    assert len(set(tokens)) == len(tokens) >= 20


def test_candidate_ports_differ_between_neighbouring_jobs():
    env = environments("srun step")[0]
    jobs = [detect({**env, "SLURM_JOB_ID": str(job)}) for job in range(1000, 1200)]
    for found in jobs:
        assert len(set(found.ports)) == NUM_PORTS
        assert all(20_000 <= port < 30_000 for port in found.ports)
        assert found.ports == candidate_ports(found.token)
    assert len({found.ports[0] for found in jobs}) >= 190
    assert max(len({*a.ports} & {*b.ports}) for a, b in itertools.combinations(jobs, 2)) <= 3


@pytest.mark.parametrize("name", ["srun step", "submitit", "array task 1"])
def test_a_users_address_and_port_are_honoured(name):
    for env in environments(name):
        plain = detect(env)
        found = detect({**env, "MASTER_ADDR": "ib0.n1", "MASTER_PORT": "29511"})
        assert (found.address, found.ports) == ("ib0.n1", (29511,))
        assert (found.rank, found.token) == (plain.rank, plain.token)


def test_torchrun_serves_its_own_store():
    assert all(detect(env).served for env in environments("torchrun in srun"))
    assert not detect(environments("variables by hand, one machine")[0]).served


def test_slurm_tells_the_host_of_each_rank():
    assert detect(environments("srun step")[3]).hosts == ("n1", "n1", "n1", "n2")
    for name in ("torchrun in srun", "cyclic step", "plain python"):
        assert detect(environments(name)[0]).hosts == ()


def test_a_late_agent_of_torchrun_has_the_token_of_the_others():
    envs = environments("torchrun in srun")
    late = {**envs[3], "TORCHELASTIC_RESTART_COUNT": "2"}
    assert detect(late).token == detect(envs[0]).token


@pytest.mark.parametrize(
    ("name", "inner", "source"),
    [
        ("srun step", "torchrun alone", "torchrun"),
        ("batch script", "torchrun alone", "torchrun"),
        ("torchrun in srun", "own starter in a batch script", "local"),
        ("srun step", "variables by hand, one process per node", "environment"),
    ],
)
def test_the_inner_launcher_wins(name, inner, source):
    for env in environments(inner):
        found = detect({**environments(name)[0], **env})
        assert found.source == source
        assert found.rank == int(env["RANK"])


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("own starter in a batch script", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
        (
            "torchrun alone",
            ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        ),
        ("variables by hand, one machine", ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
        (
            "srun step",
            (
                *("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
                *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"),
            ),
        ),
    ],
)
def test_all_missing_variables_are_named_at_once(name, variables):
    env = environments(name)[0]
    for gone in [*itertools.combinations(variables, 1), *itertools.combinations(variables, 2)]:
        if name == "variables by hand, one machine" and {*gone} == {"RANK", "WORLD_SIZE"}:
            continue  # nothing is left that says there are others
        with pytest.raises(LaunchError) as error:
            detect({key: value for key, value in env.items() if key not in gone})
        named, advice = str(error.value).partition(" but not ")[2].split(";", 1)
        assert {*named.split(", ")} == {*gone}
        assert "unset" in advice


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "1_0", "", " 1", "9" * 30])
@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("srun step", "SLURM_PROCID"),
        ("srun step", "SLURM_JOB_ID"),
        ("torchrun alone", "WORLD_SIZE"),
        ("variables by hand, one machine", "MASTER_PORT"),
        ("own starter in a batch script", "LOCAL_RANK"),
    ],
)
def test_what_is_no_number_is_named(name, variable, value):
    with pytest.raises(LaunchError, match=variable):
        detect({**environments(name)[0], variable: value})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("torchrun alone", {"RANK": "2"}),
        ("torchrun alone", {"LOCAL_RANK": "2"}),
        ("torchrun alone", {"LOCAL_WORLD_SIZE": "3"}),
        ("torchrun alone", {"WORLD_SIZE": "0"}),
        ("own starter in a batch script", {"RANK": "2"}),
        ("variables by hand, one machine", {"RANK": "7"}),
        ("variables by hand, one process per node", {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "0"}),
        ("srun step", {"SLURM_PROCID": "4"}),
        ("srun step", {"SLURM_LOCALID": "3"}),
        ("srun step", {"SLURM_NODEID": "2"}),
        ("srun step", {"SLURM_STEP_NUM_TASKS": "8"}),
        ("srun step", {"MASTER_PORT": "70000"}),
        ("srun step", {"MASTER_PORT": "0"}),
    ],
)
def test_numbers_that_disagree_are_refused(name, change):
    with pytest.raises(LaunchError) as error:
        detect({**environments(name)[0], **change})
    assert all(value in str(error.value) for value in change.values())


def test_a_local_rank_by_hand_needs_the_local_world_size():
    env = environments("variables by hand, one process per node")[1]
    with pytest.raises(LaunchError, match="not LOCAL_WORLD_SIZE"):
        detect({**env, "LOCAL_RANK": "0"})
    found = detect({**env, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    assert (found.local_rank, found.local_world_size, found.node) == (0, 1, 1)


def test_world_size_alone_is_no_launch_but_a_mistake():
    with pytest.raises(LaunchError, match="not RANK, MASTER_PORT, MASTER_ADDR"):
        detect({"WORLD_SIZE": "8"})


def test_mpirun_is_refused_rather_than_run_as_many_single_processes():
    with pytest.raises(LaunchError, match="OMPI_COMM_WORLD_SIZE=4"):
        detect({**environments("salloc shell")[0], "OMPI_COMM_WORLD_SIZE": "4"})
    assert detect({"OMPI_COMM_WORLD_SIZE": "1"}).source == "alone"


def test_one_of_several_tasks_never_runs_alone():
    env = {k: v for k, v in environments("srun step")[3].items() if "STEP" not in k}
    with pytest.raises(LaunchError, match="SLURM_PROCID=3"):
        detect(env)
