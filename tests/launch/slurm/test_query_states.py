"""Slurm's words and texts, as a real Slurm 22.05 wrote them, and what we take them for."""

import pytest

from torchdistpackage.launch.slurm.query import (
    OUTCOMES,
    SQUEUE_FIELDS,
    JobInfo,
    Outcome,
    array_job_id,
    expand_array,
    merge_array,
    parse_sacct,
    parse_squeue,
)


def squeue(*rows: str) -> str:
    """Rows as squeue pads them."""
    widths = [int(field.partition(":")[2]) for field in SQUEUE_FIELDS]
    lines = [
        "".join(f"{cell:<{width}}|" for cell, width in zip(row.split("|"), widths, strict=True))
        for row in rows
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("state", "fate"),
    [
        *((state, Outcome.ALIVE) for state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")),
        *(
            (state, Outcome.ALIVE)
            for state in ("SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "RESIZING")
        ),
        *((state, Outcome.ALIVE) for state in ("REQUEUE_FED", "SIGNALING", "STAGE_OUT", "STOPPED")),
        *((state, Outcome.ALIVE) for state in ("SPECIAL_EXIT", "RESV_DEL_HOLD")),
        ("COMPLETED", Outcome.SUCCEEDED),
        *((state, Outcome.FAILED) for state in ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")),
        *((state, Outcome.FAILED) for state in ("BOOT_FAIL", "DEADLINE", "PREEMPTED")),
        ("CANCELLED", Outcome.CANCELLED),
        ("REVOKED", Outcome.CANCELLED),
        ("", Outcome.UNKNOWN),
        ("HYPERSLEEPING", Outcome.UNKNOWN),
    ],
)
def test_what_a_state_means(state: str, fate: Outcome):
    info = JobInfo("1", state)
    assert info.outcome is fate
    assert info.ended == (fate in (Outcome.SUCCEEDED, Outcome.FAILED, Outcome.CANCELLED))


def test_every_state_that_squeue_documents_is_in_the_table():
    documented = """BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE FAILED NODE_FAIL
    OUT_OF_MEMORY PENDING PREEMPTED RUNNING RESV_DEL_HOLD REQUEUE_FED REQUEUE_HOLD REQUEUED
    RESIZING REVOKED SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED SUSPENDED TIMEOUT"""
    assert set(documented.split()) <= OUTCOMES.keys()


def test_squeue_of_jobs_in_every_phase():
    found = parse_squeue(
        squeue(
            "4|CANCELLED|0|15|0:02|n1|None",
            "1|COMPLETED|0|0|0:01|n1|None",
            "2|FAILED|0|768|2-03:04:05|n1|NonZeroExitCode",
            "6|FAILED|0|9|0:00|n1|JobLaunchFailure",
            "3_2|PENDING|0|0|0:00||JobArrayTaskLimit",
            "3_0|RUNNING|0|0|3:00:03|n[1-2,7]|None",
            "11|COMPLETING|1|0|0:00|n2|None",
            "12|NODE_FAIL|0|0|0:03|n3|NodeDown",
        )
    )
    assert found == {
        "4": JobInfo("4", "CANCELLED", "", "n1", 143, 0, 2.0),
        "1": JobInfo("1", "COMPLETED", "", "n1", 0, 0, 1.0),
        "2": JobInfo("2", "FAILED", "NonZeroExitCode", "n1", 3, 0, 183845.0),
        "6": JobInfo("6", "FAILED", "JobLaunchFailure", "n1", 137, 0, 0.0),
        "3_2": JobInfo("3_2", "PENDING", "JobArrayTaskLimit", "", None, 0, 0.0),
        "3_0": JobInfo("3_0", "RUNNING", "", "n[1-2,7]", None, 0, 10803.0),
        "11": JobInfo("11", "COMPLETING", "", "n2", None, 1, 0.0),
        "12": JobInfo("12", "NODE_FAIL", "NodeDown", "n3", 0, 0, 3.0),
    }


def test_sacct_counts_the_starts_of_a_requeued_job_and_takes_the_last():
    text = (
        "10|REQUEUED|0:0|1|n1|None\n"
        "11|NODE_FAIL|0:0|3|n[1-3]|None\n"
        "10|NODE_FAIL|0:0|7|n1|None\n"
        "10|CANCELLED by 1000|0:0|5|n1|None\n"
        "11|PENDING|0:0|0|None assigned|BeginTime\n"
        "2|FAILED|3:0|1|n1|None\n"
        "6|OUT_OF_MEMORY|0:125|0|n1|None\n"
    )
    assert parse_sacct(text) == {
        "10": JobInfo("10", "CANCELLED", "", "n1", 0, 2, 5.0, "1000"),
        "11": JobInfo("11", "PENDING", "BeginTime", "", None, 1, 0.0),
        "2": JobInfo("2", "FAILED", "", "n1", 3, 0, 1.0),
        "6": JobInfo("6", "OUT_OF_MEMORY", "", "n1", None, 0, 0.0),
    }


@pytest.mark.parametrize("parse", [parse_squeue, parse_sacct])
@pytest.mark.parametrize(
    "text", ["", "\n\n", "slurm_load_jobs error: Invalid job id specified\n", "1|RUNNING\n", "||||"]
)
def test_what_is_no_row_is_no_job(parse, text: str):
    assert parse(text) == {}


@pytest.mark.parametrize(
    ("job", "meant"),
    [
        ("12", ["12"]),
        ("12_3", ["12_3"]),
        ("12_[0-3%2]", ["12_0", "12_1", "12_2", "12_3"]),
        ("12_[7]", ["12_7"]),
        ("12_[1,5-6,8-12:2]", ["12_1", "12_5", "12_6", "12_8", "12_10", "12_12"]),
        ("12_[1,3,...]", ["12_1", "12_3"]),
        ("12_[1,3-", ["12_1"]),
        ("12+0", ["12"]),
        ("12+1", ["12+1"]),
    ],
)
def test_an_id_may_stand_for_many_tasks(job: str, meant: list[str]):
    assert list(expand_array(job)) == meant
    assert array_job_id(job) == "12"


def test_pending_tasks_that_share_a_row_are_told_apart():
    assert parse_sacct("3_[0-1%2]|PENDING|0:0|0|None assigned|None\n") == {
        job: JobInfo(job, "PENDING", "", "", None, 0, 0.0) for job in ("3_0", "3_1")
    }


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["COMPLETED", "COMPLETED"], "COMPLETED"),
        (["COMPLETED", "RUNNING", "FAILED"], "RUNNING"),
        (["COMPLETED", "FAILED", "CANCELLED"], "FAILED"),
        (["COMPLETED", "CANCELLED"], "CANCELLED"),
        (["COMPLETED", "HYPERSLEEPING"], "HYPERSLEEPING"),
        ([], ""),
    ],
)
def test_an_array_is_as_the_worst_of_its_tasks(states: list[str], expected: str):
    infos = [JobInfo(f"7_{i}", state) for i, state in enumerate(states)]
    assert merge_array("7", infos) == JobInfo("7", expected)
