"""Which captured processes are tasks of a step, and where Slurm put each task."""

import json
from pathlib import Path

import pytest

from torchdistpackage.environment.slurm_env import (
    expand_counts,
    hosts_of_ranks,
    in_step,
    is_inherited,
)

ROWS = json.loads((Path(__file__).parent / "environments.json").read_text())
SLURM = [row for row in ROWS if row.get("source") == "slurm" and "error" not in row]


def environments(name: str) -> list[dict[str, str]]:
    row = next(row for row in ROWS if row["name"] == name)
    return [{**row["env"], **process.get("env", {})} for process in row["processes"]]


@pytest.mark.parametrize("row", SLURM, ids=lambda row: row["name"])
def test_every_captured_task_is_in_its_own_step(row):
    for process in row["processes"]:
        env = {**row["env"], **process.get("env", {})}
        assert in_step(env) and not is_inherited(env)


@pytest.mark.parametrize("row", SLURM, ids=lambda row: row["name"])
def test_hosts_are_where_the_tasks_were_or_unknown(row):
    really = {process["place"][0]: process.get("host") for process in row["processes"]}
    for process in row["processes"]:
        env = {**row["env"], **process.get("env", {})}
        counts = expand_counts(env["SLURM_STEP_TASKS_PER_NODE"])
        hosts = hosts_of_ranks(env, counts, process["place"][4])
        assert len(hosts) in (0, sum(counts))
        if hosts:
            assert all(hosts[rank] == host for rank, host in really.items() if host)
        else:
            assert env["SLURM_DISTRIBUTION"] in ("cyclic", "arbitrary")


def test_some_hosts_are_known_and_some_are_not():
    for name, known in (("uneven step", True), ("array task 0", True), ("cyclic step", False)):
        env = environments(name)[0]
        counts = expand_counts(env["SLURM_STEP_TASKS_PER_NODE"])
        assert bool(hosts_of_ranks(env, counts, 0)) is known


def test_hosts_are_unknown_where_the_tasks_or_slurm_speak_against_blocks():
    env = {"SLURM_STEP_NODELIST": "n[1-3]", "SLURM_GTIDS": "0"}
    counts = (1, 2, 1)
    assert hosts_of_ranks(env, counts, 0) == ("n1", "n2", "n2", "n3")
    assert hosts_of_ranks(env | {"SLURM_DISTRIBUTION": "block:cyclic"}, counts, 0) != ()
    assert hosts_of_ranks(env | {"SLURM_DISTRIBUTION": "cyclic"}, (1, 1, 1), 0) != ()
    # on the first node this looks like blocks; on the second rank 3 comes after rank 1
    assert hosts_of_ranks(env | {"SLURM_DISTRIBUTION": "cyclic"}, counts, 0) == ()
    assert hosts_of_ranks(env | {"SLURM_GTIDS": "1,3"}, counts, 1) == ()
    assert hosts_of_ranks(env | {"SLURM_STEP_NODELIST": "n[1-2]"}, counts, 0) == ()


def test_a_batch_script_like_the_step_that_submitted_it_is_no_task():
    """Same nodes, same tasks per node: only the submitting host and the umask give it away."""
    (script,) = environments("batch script just like the step that submitted it")
    tasks = environments("step of a batch script that a rank submitted")
    assert is_inherited(script) and not in_step(script)
    assert all(in_step(env) for env in tasks)
    # each of the signs is needed
    for name in ("ENVIRONMENT", "SLURM_SUBMIT_HOST"):
        assert in_step({key: value for key, value in script.items() if key != name})
    assert in_step({**script, "SLURM_UMASK": "0022"})
    assert in_step({**script, "SLURM_SUBMIT_HOST": "login"})
    assert is_inherited({**script, "SLURM_SUBMIT_HOST": "n1.site.org"})
