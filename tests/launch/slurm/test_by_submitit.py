"""What submitit is told of a job: the same that the plain script says."""

import shlex
from dataclasses import replace

import pytest

from tests.launch.slurm.batch import job_of
from torchdistpackage.config.schema import RequeueSection
from torchdistpackage.errors import ConfigError
from torchdistpackage.launch.slurm.by_submitit import _parameters, _python, check
from torchdistpackage.launch.slurm.script import render


def test_python_is_that_of_the_script_also_in_a_container(tmp_path):
    job = job_of("{container: apptainer exec 'my train.sif'}", tmp_path)
    script = render(job)
    command = script[script.index("sh -c '") : script.index("status=$?")]
    words = shlex.split(command.replace("\\\n", " "))
    own = list(_python(job))
    assert words[: len(own)] == own and own[-4:] == ["apptainer", "exec", "my train.sif", "python"]


def test_options_go_through_and_suspects_are_left_out(tmp_path):
    job = job_of("{nodes: 2, time: '1-00:00:00', exclude: [n7], srun: ['-l']}", tmp_path)
    found = _parameters(job, ["n9"])
    more = found["slurm_additional_parameters"]
    assert isinstance(more, dict)
    assert more["time"] == "1-00:00:00" and more["exclude"] == "n7,n9"
    assert not {"output", "open_mode", "job_name", "signal"} & more.keys(), "these are submitit's"
    words = found["slurm_srun_args"]
    assert isinstance(words, list)
    stated = ("--nodes=2", "--mpi=none", "--kill-on-bad-exit=1", "-l")
    assert {*stated, f"--ntasks={job.shape.world_sizes[0]}"} <= set(words)


def test_what_it_cannot_do_is_refused(tmp_path):
    job = job_of("{time: 60}", tmp_path)
    check(job, RequeueSection())
    with pytest.raises(ConfigError, match="mode=chain"):
        check(job, RequeueSection(mode="chain"))
    timeless = replace(job, options=tuple(o for o in job.options if o[0] != "time"))
    with pytest.raises(ConfigError, match=r"launch\.slurm\.time is not set"):
        check(timeless, RequeueSection())
    elastic = job_of(
        "{time: 60, ntasks-per-node: 1}", tmp_path, overrides=["launch.elastic.nodes=[1, 4]"]
    )
    with pytest.raises(ConfigError, match=r"launch\.elastic\.nodes: submitit does not choose"):
        check(elastic, RequeueSection())
    again = job_of("{time: 60}", tmp_path, overrides=["launch.requeue.in_job_restarts=1"])
    with pytest.raises(ConfigError, match=r"in_job_restarts: submitit starts the ranks once"):
        check(again, RequeueSection())
