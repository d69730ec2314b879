"""What another job said of itself is not handed on; all else is."""

import pytest

from torchdistpackage.environment.slurm_env import DEVICES, options_dropped, scrub_slurm_env

MINE = {
    "PATH": "/bin",
    "HOME": "/home/me",
    "SLURM_CONF": "/etc/slurm.conf",
    "LANG": "C",
    "LOCAL_SCRATCH": "/scratch",
    "MASTER_PLAN": "x",
    "GROUP_DIR": "/g",
    "RANKING": "1",
    "MY_SLURM_JOB_ID": "1",
    "PMIX": "x",
    "WANDB_MODE": "offline",
    "OMP_NUM_THREADS": "4",
}
POISON = (
    *("SLURM_CPU_BIND", "SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE", "SLURM_JOB_NODELIST"),
    *("SLURM_TRES_PER_TASK", "SLURMD_NODENAME", "SBATCH_PARTITION", "SBATCH_ACCOUNT"),
    *("SRUN_CPUS_PER_TASK", "SALLOC_PARTITION", "SQUEUE_STATES", "PMIX_RANK", "PMI_RANK"),
    *("PMI2_X", "OMPI_COMM_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"),
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RUN_ID"),
    *("TDP_STORE", "TDP_SERIES", "TDP_BATCH"),
)


def test_a_user_keeps_all_that_is_his():
    assert scrub_slurm_env(MINE) == MINE


def test_poison_is_not_handed_on():
    assert scrub_slurm_env({**MINE, **dict.fromkeys(POISON, "9")}) == MINE


@pytest.mark.parametrize("name", POISON)
def test_each_kind_of_poison_by_itself(name: str):
    assert scrub_slurm_env({**MINE, name: "9"}) == MINE


def test_devices_are_a_choice_outside_of_a_job_and_a_leftover_inside():
    devices = dict.fromkeys(DEVICES, "0,1")
    assert scrub_slurm_env({**MINE, **devices}) == {**MINE, **devices}
    for job in ("SLURM_JOB_ID", "SLURM_JOBID"):
        assert scrub_slurm_env({**MINE, **devices, job: "7"}) == MINE


def test_what_a_user_may_miss_is_named():
    env = {**MINE, "SBATCH_QOS": "high", "SBATCH_ACCOUNT": "lab"}
    assert options_dropped(env) == ("SBATCH_ACCOUNT", "SBATCH_QOS"), "values may be secret"
    assert options_dropped(MINE) == ()
