"""Every way in which a process gets into a Slurm job: who it is, among how many, where they meet.

The jobs have no torch: each process writes what `detect` says. Only torchrun's ranks join.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT, Cluster

JOBS = Path(__file__).parent / "jobs"
DETECT = JOBS / "join_detect.py"
LIMIT_S = 120


def submit(cluster: Cluster, folder: Path) -> dict[str, object]:
    python = f"{cluster.python} {DETECT} {folder}"
    path = f"export PYTHONPATH={ROOT}"
    # 5 tasks of -N3 are uneven: 3,1(x2) if no other job is in the way
    steps = f"""{path}
        {python}/batch
        srun {python}/uneven
        srun -N1 -n2 {python}/small
        srun -N2 -n2 -r1 {python}/later
    """
    lone = f"{path}\nsrun -n2 {python}/array 1.5"
    outer = folder / "outer.sh"
    inner = f"{path}\n{python}/inherited\nsrun {python}/inherited_step\n"
    (folder / "inner.sh").write_text(f"#!/bin/bash\n{inner}")
    outer.write_text(
        f"#!/bin/bash\n[ $SLURM_PROCID = 0 ] && "
        f"sbatch -N2 --ntasks-per-node=1 -w $SLURM_JOB_NODELIST -o /dev/null {folder}/inner.sh\n"
        f"exit 0\n"
    )
    outer.chmod(0o755)
    agents = f"{cluster.python} -m torch.distributed.run --nnodes=2 --nproc-per-node=1"
    scenarios = folder / "torchrun.scenarios"
    scenarios.write_text(json.dumps([{"name": "torchrun"}]))
    meet = "--rdzv-backend=c10d --rdzv-endpoint=$(hostname):29511 --rdzv-id=$SLURM_JOB_ID"
    torchrun = f"{path}\nsrun {agents} {meet} {JOBS}/join_all.py {folder} {scenarios}"
    out = ["-o", folder / "log-%A_%a"]
    return {
        "folder": folder,
        "torchrun": cluster.sbatch(
            *("-N2", "--ntasks-per-node=1", "-J", "heavy", "--dependency=singleton"),
            *("-c2", *out),
            script=torchrun,
        ),
        "steps": cluster.sbatch("-N3", "-n5", *out, script=steps),
        "array": cluster.sbatch("--array=0-1", "-N1", "-n2", "-wn5", *out, script=lone),
        "inherited": cluster.sbatch(*("-N2", "--ntasks-per-node=1", *out), script=f"srun {outer}"),
        "salloc": cluster.beside(shell, cluster, folder),
        "submitit": cluster.beside(through_submitit, cluster, folder),
    }


def shell(cluster: Cluster, folder: Path) -> None:
    python = f"{cluster.python} {DETECT} {folder}"
    words = f"{python}/salloc; srun {python}/srun_in_salloc"
    shell = ["salloc", "-N2", "-n3", "bash", "-c", words]
    cluster.run(*shell, env={"PYTHONPATH": str(ROOT)}, limit_s=LIMIT_S)


def through_submitit(cluster: Cluster, folder: Path) -> str:
    script = JOBS / "join_submitit.py"
    words = [cluster.python, script, folder / "by_submitit", f"{ROOT}:{JOBS}"]
    return cluster.run(*words, env={"PYTHONPATH": str(ROOT)}).stdout.strip()


def _json(path: Path, log: str) -> dict:
    assert path.exists(), f"{path.name} was not written:\n{log}"
    return json.loads(path.read_text())


@pytest.fixture
def ended(cluster, submitted):
    """Wait for a job of `submit`, and give what the processes of one folder wrote, by rank."""

    def read(job: str, name: str, number: int) -> list[dict]:
        folder = submitted["folder"] / name
        if isinstance(submitted.get(job), str):
            cluster.wait_end(submitted[job], LIMIT_S)
        found = cluster.wait_for(
            lambda: len(files := list(folder.glob("*.json"))) >= number and files,
            30,
            f"{number} files in {folder}",
        )
        rows = [json.loads(path.read_text()) for path in found]
        assert len(rows) == number
        return sorted(rows, key=lambda row: (row["job"], row["rank"]))

    return read


def places(rows: list[dict]) -> list[tuple[object, ...]]:
    names = ("rank", "world_size", "local_rank", "local_world_size", "node", "host")
    return [tuple(row[name] for name in names) for row in rows]


def test_a_plain_shell_is_alone(cluster, shared_folder):
    out = shared_folder / "test_join" / "plain"
    cluster.run(cluster.python, DETECT, out, env={"PYTHONPATH": str(ROOT)})
    (path,) = out.glob("*.json")
    row = json.loads(path.read_text())
    assert (row["source"], row["world_size"], row["note"]) == ("alone", 1, "")


def test_a_batch_script_is_alone_and_says_so(ended):
    (row,) = ended("steps", "batch", 1)
    assert (row["source"], row["world_size"]) == ("alone", 1)
    assert "without a step" in row["note"] and "srun" in row["note"]


def test_an_uneven_step(ended):
    rows = ended("steps", "uneven", 5)
    hosts = [row["host"] for row in rows]
    nodes = list(dict.fromkeys(hosts))
    counts = [hosts.count(host) for host in nodes]
    assert len(nodes) == 3 and len(set(counts)) > 1
    assert hosts == [host for host, count in zip(nodes, counts, strict=True) for _ in range(count)]
    assert places(rows) == [
        (rank, 5, local, counts[node], node, nodes[node])
        for rank, (node, local) in enumerate((n, i) for n in range(3) for i in range(counts[n]))
    ]
    assert all(row["hosts"] == hosts and row["address"] == hosts[0] for row in rows)
    assert len({row["token"] for row in rows}) == 1


def test_steps_that_are_smaller_than_their_job(ended):
    whole, small, later = (
        ended("steps", name, number) for name, number in (("uneven", 5), ("small", 2), ("later", 2))
    )
    first, second, third = dict.fromkeys(row["host"] for row in whole)
    here = small[0]["host"]
    assert here in (first, second, third)
    assert places(small) == [(r, 2, r, 2, 0, here) for r in range(2)]
    assert places(later) == [(0, 2, 0, 1, 0, second), (1, 2, 0, 1, 1, third)]
    assert {row["address"] for row in later} == {second}
    assert all(row["hosts"] == [second, third] for row in later)
    # three steps of one job, which may run side by side
    assert len({rows[0]["token"] for rows in (whole, small, later)}) == 3


def test_two_jobs_at_once_on_one_node_never_meet(ended):
    """The tasks of an array, which also have one name and one script."""
    rows = ended("array", "array", 4)
    one, two = rows[:2], rows[2:]
    assert places(one) == places(two) == [(r, 2, r, 2, 0, "n5") for r in range(2)]
    assert one[0]["from_s"] < two[0]["to_s"] and two[0]["from_s"] < one[0]["to_s"]
    assert one[0]["token"] == one[1]["token"] != two[0]["token"] == two[1]["token"]
    assert one[0]["ports"] == one[1]["ports"] and two[0]["ports"] == two[1]["ports"]
    assert one[0]["ports"][0] != two[0]["ports"][0]


def test_an_salloc_shell_is_alone_and_srun_in_it_is_not(submitted, ended):
    submitted["salloc"].result(LIMIT_S)
    (row,) = ended("salloc", "salloc", 1)
    assert (row["source"], row["world_size"]) == ("alone", 1)
    assert "without a step" in row["note"]
    rows = ended("salloc", "srun_in_salloc", 3)
    assert [row["rank"] for row in rows] == [0, 1, 2]
    assert sorted(row["local_world_size"] for row in rows) == [1, 2, 2]
    assert {row["address"] for row in rows} == {rows[0]["host"]}


def test_a_batch_script_submitted_by_a_rank_on_the_same_nodes(ended):
    """It inherits all of a step's variables; the step that it starts itself is a step."""
    (row,) = ended("inherited", "inherited", 1)
    assert (row["source"], row["world_size"]) == ("alone", 1)
    assert "of another job" in row["note"]
    rows = ended("inherited", "inherited_step", 2)
    assert [(row["rank"], row["world_size"]) for row in rows] == [(0, 2), (1, 2)]


def test_submitit_tasks_are_ranks(cluster, submitted, ended):
    cluster.wait_end(submitted["submitit"].result(LIMIT_S), LIMIT_S)
    rows = ended("submitit", "by_submitit/tasks", 4)
    hosts = [row["host"] for row in rows]
    assert [row["source"] for row in rows] == ["slurm"] * 4
    assert places(rows) == [(r, 4, r % 2, 2, r // 2, hosts[r]) for r in range(4)]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    assert all(row["hosts"] == hosts for row in rows)


def test_torchrun_in_srun_over_two_nodes(cluster, submitted):
    cluster.wait_end(submitted["torchrun"], LIMIT_S)
    folder = submitted["folder"]
    log = "\n".join(path.read_text() for path in folder.glob("log-*"))
    seen = [_json(folder / f"torchrun.{r}.json", log) for r in (0, 1)]
    assert len({s["host"] for s in seen}) == 2
    assert [s.get("total") for s in seen] == [2.0, 2.0], seen
    assert all(s["told"] == ["eth0", "=eth0"] for s in seen)
