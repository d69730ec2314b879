"""Starts of a run: counted alike by all ranks, refused when they lead nowhere."""

from torchdistpackage.config.schema import RequeueSection
from torchdistpackage.launch.slurm.requeue import restart_denied
from torchdistpackage.launch.slurm.run_dir import (
    amend_start,
    append_start,
    attempt_id,
    read_starts,
    series_of,
    this_start,
)
from torchdistpackage.run_files import RunDir


def job(number: int, restart: int = 0, **more: str) -> dict[str, str]:
    restarts = {"SLURM_RESTART_COUNT": str(restart)} if restart else {}  # Slurm leaves 0 out
    return {"SLURM_JOB_ID": str(number), "SLURM_JOB_NODELIST": "n[1-2]", **restarts, **more}


def begin(files: RunDir, env: dict[str, str], step: int):
    start = this_start(files, env, step)
    append_start(files, start)
    return start


def test_ids_tell_jobs_and_their_restarts_apart():
    assert attempt_id({}) == "local"
    ids = [attempt_id(job(7)), attempt_id(job(7, 1)), attempt_id(job(8))]
    assert ids == ["7.0", "7.1", "8.0"]


def test_ranks_before_and_after_rank_0_wrote_count_the_same(tmp_path):
    files = RunDir(tmp_path / "run")
    begin(files, job(7), 0)
    early = this_start(files, job(7, 1), 0)
    begin(files, job(7, 1), 40)
    late = this_start(files, job(7, 1), 0)
    assert early.restart == late.restart == 1 and late.step == 40
    begin(files, job(9), 60)
    assert [s.restart for s in read_starts(files.starts)] == [0, 1, 2], "over jobs: names of logs"
    append_start(files, late)
    assert len(read_starts(files.starts)) == 3, "noted once"


def test_ranks_started_anew_on_fewer_nodes_note_those(tmp_path):
    """The job's own variables still name the node that it has lost."""
    files = RunDir(tmp_path)
    begin(files, job(7, SLURM_STEP_NODELIST="n[1-2]"), 0)
    begin(files, job(7, TDP_ATTEMPT="1", SLURM_STEP_NODELIST="n1"), 20)
    noted = [(start.start, start.nodes) for start in read_starts(files.starts)]
    assert noted == [("7.0", "n[1-2]"), ("7.0.1", "n1")]


def test_a_line_cut_short_is_passed_over(tmp_path):
    files = RunDir(tmp_path)
    begin(files, job(7), 0)
    with files.starts.open("a") as file:
        file.write('{"start": "7.1", "rest')
    assert [s.start for s in read_starts(files.starts)] == ["7.0"]


def test_a_chain_is_one_series_and_a_new_submission_another(tmp_path):
    files = RunDir(tmp_path)
    for env in (job(7), job(7, 1), job(12, TDP_SERIES="7")):
        start = begin(files, env, 0)
    assert [s.start for s in series_of(files, start)] == ["7.0", "7.1", "12.0"]
    fresh = begin(files, job(20), 0)
    assert [s.start for s in series_of(files, fresh)] == ["20.0"]


def test_the_third_start_at_the_same_step_is_refused_and_a_new_submission_is_not(tmp_path):
    files = RunDir(tmp_path)
    for restart in (0, 1):
        assert not restart_denied(files, begin(files, job(7, restart), 40), RequeueSection())
    why = restart_denied(files, this_start(files, job(7, 2), 40), RequeueSection())
    assert "two starts in a row ended at step 40" in why and "step 40, which is saved" in why
    assert str(files.logs) in why
    assert not restart_denied(files, this_start(files, job(8), 40), RequeueSection())
    assert not restart_denied(files, this_start(files, job(7, 2), 41), RequeueSection())


def test_more_starts_than_requeues_allow_are_refused(tmp_path):
    files = RunDir(tmp_path)
    for restart in (0, 1, 2):
        start = begin(files, job(7, restart), restart)
        assert not restart_denied(files, start, RequeueSection(max_requeues=2))
    why = restart_denied(files, this_start(files, job(7, 3), 3), RequeueSection(max_requeues=2))
    assert "max_requeues=2" in why


def test_a_start_that_fell_back_behind_a_damaged_checkpoint_made_progress(tmp_path):
    """It seemed to begin at 6, began at 3 and came to 4: the next one is no third in vain."""
    files = RunDir(tmp_path)
    for restart, began in ((0, 3), (1, 4)):
        assert not restart_denied(files, begin(files, job(7, restart), 6), RequeueSection())
        amend_start(files, job(7, restart), began)
    assert [s.step for s in read_starts(files.starts)] == [3, 4]
    assert not restart_denied(files, this_start(files, job(7, 2), 6), RequeueSection())
    amend_start(files, {}, 9)
    assert len(read_starts(files.starts)) == 2, "outside of a job nothing is noted"
