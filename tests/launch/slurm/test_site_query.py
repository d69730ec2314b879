"""What Slurm's answers say about a site, and what a site's own refusals teach."""

from collections.abc import Callable, Mapping, Sequence

import pytest

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm.query import (
    CompletedCommand,
    job_id_of,
    parse_scontrol,
    query_jobs,
)
from torchdistpackage.launch.slurm.site_query import (
    MAX_TRIALS,
    add_nodes,
    combinations,
    parse_associations,
    parse_config,
    parse_partitions,
    parse_probe,
    parse_qos,
    query_site,
    sbatch_words,
    summary,
)

CONFIG = """Configuration data as of 2026-11-29T10:00:00
ClusterName             = big
EnforcePartLimits       = NO
JobSubmitPlugins        = lua
SLURM_VERSION           = 22.05.8
TaskProlog              = (null)
"""
PARTITIONS = (
    "PartitionName=gpu AllowGroups=ALL AllowAccounts=a,b AllowQos=ALL Default=NO GraceTime=30 "
    "MaxNodes=16 MaxTime=1-00:00:00 PreemptMode=REQUEUE State=UP TotalCPUs=64\n"
    "PartitionName=cpu AllowAccounts=ALL AllowQos=ALL Default=YES GraceTime=0 MaxNodes=UNLIMITED "
    "MaxTime=UNLIMITED PreemptMode=OFF State=UP TotalCPUs=64\n"
    "PartitionName=old MaxTime=UNLIMITED State=INACTIVE\n"
)
SINFO = (
    "gpu|8|64|512000|gpu:h100:8(S:0-1)\ngpu|2|32+|256000|gpu:a100:4,tmp:1\ncpu|5|8|64000|(null)\n"
)
ASSOCIATIONS = "lab|normal,long|normal\nproj|long|\n"
QOS = "normal|\nlong|2-00:00:00\n"


def test_partitions_have_limits_and_the_gres_of_their_nodes():
    partitions = add_nodes(parse_partitions(PARTITIONS), SINFO)
    assert [*partitions] == ["gpu", "cpu"]
    gpu, cpu = partitions["gpu"], partitions["cpu"]
    assert (gpu.nodes, gpu.cpus, gpu.memory_mb, gpu.gpus) == (10, 32, 256000, 12)
    assert gpu.gres == ["gpu:h100:8", "gpu:a100:4", "tmp:1"]
    assert (gpu.max_nodes, gpu.max_time_s, gpu.accounts, gpu.qos) == (16, 86400, ["a", "b"], None)
    assert (gpu.preempt, gpu.grace_s, gpu.default) == ("REQUEUE", 30, False)
    assert (cpu.max_nodes, cpu.max_time_s, cpu.gres, cpu.default) == (None, None, [], True)


def test_accounts_and_qos():
    assert parse_associations(ASSOCIATIONS) == (["lab", "proj"], ["normal", "long"])
    assert parse_qos(QOS) == {"normal": None, "long": 172800}
    assert parse_config(CONFIG)["ClusterName"] == "big" and parse_config(CONFIG)["TaskProlog"] == ""


class Slurm:
    """A site that refuses a job of these options for a reason, or takes it."""

    def __init__(self, refuses: Callable[[Mapping[str, str]], str]) -> None:
        self.refuses, self.tried = refuses, 0

    def __call__(self, args: Sequence[str], env: object = None) -> CompletedCommand:
        match list(args):
            case ["sbatch", "--test-only", *words, "--wrap=true"]:
                self.tried += 1
                pairs = (word[2:].partition("=") for word in words)
                why = self.refuses({name: value for name, _, value in pairs})
                banner = "welcome to the cluster\n"
                return CompletedCommand(int(bool(why)), "", f"{banner}sbatch: error: {why}\n")
            case ["scontrol", "show", "config"]:
                return CompletedCommand(0, CONFIG)
            case ["scontrol", *_]:
                return CompletedCommand(0, PARTITIONS)
            case ["sinfo", *_]:
                return CompletedCommand(0, SINFO)
            case ["sacctmgr", *_, "format=name,maxwall"]:
                return CompletedCommand(0, QOS)
            case ["sacctmgr", *_]:
                return CompletedCommand(0, ASSOCIATIONS)
            case _:
                return CompletedCommand(1, "", "unknown")


def test_a_site_that_takes_everything_demands_nothing():
    slurm = Slurm(lambda _: "")
    site = query_site(slurm, {})
    assert (site.options, site.forbidden) == ({}, {})
    assert (site.gpu_option, site.gpu_type) == ("gpus-per-node", None)
    assert (site.cluster, site.slurm, site.accounts) == ("big", "22.05.8", ["lab", "proj"])
    assert site.qos == {"normal": None, "long": 172800} and slurm.tried == 5
    assert any("12" in line or "gpu:h100:8" in line for line in summary(site))


def test_what_a_site_demands_and_forbids_is_found():
    def refuses(job: Mapping[str, str]) -> str:
        if job.get("account") != "proj" or job.get("qos") != "long":
            return "account and QOS, please"
        if "mem-per-cpu" not in job and "mem" not in job:
            return "memory, please"
        if "exclusive" in job or "requeue" in job:
            return "not for you"
        gpus = [job[x] for x in ("gpus-per-node", "gres") if x in job]
        if gpus and (job.get("partition") != "gpu" or "a100" not in gpus[0]):
            return "no such GPUs"
        return ""

    site = query_site(Slurm(refuses), {})
    assert site.options == {
        "account": "proj", "qos": "long", "mem-per-cpu": "8000", "partition": "gpu",
    }  # fmt: skip
    assert {*site.forbidden} == {"exclusive", "requeue"}
    assert "not for you" in site.forbidden["requeue"]
    assert (site.gpu_option, site.gpu_type) == ("gpus-per-node", "a100")
    assert "--account=proj" in sbatch_words(site)


def test_a_site_that_takes_nothing_is_an_error_after_a_bounded_number_of_tries():
    slurm = Slurm(lambda _: "closed on Sundays")
    with pytest.raises(LaunchError, match="closed on Sundays"):
        query_site(slurm, {})
    assert slurm.tried <= MAX_TRIALS


def test_the_fewest_options_are_tried_first():
    tried = [*combinations({"a": ["1", "2"], "b": ["x=3"]})]
    assert tried == [{"a": "1"}, {"a": "2"}, {"x": "3"}, {"a": "1", "x": "3"}, {"a": "2", "x": "3"}]


def test_a_node_says_what_works_there():
    text = "host=n1\narch=aarch64\nclock_s=1300\npython=no /a/python\npython=yes /b/python3\n"
    node = parse_probe(f"{text}home=absent\nsrun=\nend=1\n", now_s=1000.0)
    assert node.arch == "aarch64" and node.pythons == {"/a/python": False, "/b/python3": True}
    assert node.found == {"host": "n1", "home": "absent", "clock": "+300 s from here"}


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("41\n", "41"),
        ("41;big\n", "41"),
        ("Welcome\n17 nodes down\n41\nQuota: 99 TB\n", "41"),
        ("Submitted batch job 41\n", "41"),
        ("Submitted batch job 41 on cluster big\n", "41"),
        ("Welcome\n", ""),
    ],
)
def test_the_id_of_a_job_among_other_lines(text: str, job: str):
    assert job_id_of(text) == job


SHOWN = (
    "JobId=41 JobName=one UserId=me(1) JobState=RUNNING Reason=None Requeue=1 Restarts=2 "
    "BatchFlag=1 ExitCode=0:0 RunTime=00:01:05 StartTime=2026-11-29T10:00:00 NodeList=n[1-2] "
    "ReqNodeList=(null)\n"
    "JobId=43 ArrayJobId=42 ArrayTaskId=0-1 JobName=x JobState=PENDING Reason=Resources Restarts=0 "
    "ExitCode=0:0 RunTime=00:00:00 NodeList=\n"
    "JobId=44 JobName=y JobState=FAILED Reason=NonZeroExitCode Restarts=0 ExitCode=7:0 "
    "RunTime=00:00:02 NodeList=n1\n"
)


def test_scontrol_stands_in_for_a_refused_squeue():
    jobs = parse_scontrol(SHOWN)
    assert {*jobs} == {"41", "42_0", "42_1", "44"}
    one = jobs["41"]
    assert (one.state, one.restarts, one.nodes, one.elapsed_s) == ("RUNNING", 2, "n[1-2]", 65.0)
    assert jobs["44"].exit_code == 7 and jobs["42_1"].reason == "Resources"

    def runner(args: Sequence[str], env: object = None) -> CompletedCommand:
        if args[0] == "scontrol" and args[-1] == "41":
            return CompletedCommand(0, SHOWN.splitlines()[0])
        if args[0] == "scontrol":
            return CompletedCommand(1, "", "slurm_load_jobs error: Invalid job id specified")
        return CompletedCommand(1, "", "Access/permission denied")

    found = query_jobs(["41", "50"], runner).jobs
    assert found["41"].state == "RUNNING" and found["50"].state == ""


def test_where_neither_answers_nothing_is_known():
    def runner(args: Sequence[str], env: object = None) -> CompletedCommand:
        return CompletedCommand(1, "", "Access/permission denied")

    with pytest.raises(LaunchError, match="denied"):
        query_jobs(["41"], runner)
