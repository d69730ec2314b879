"""A job that cannot be is refused with all that is wrong; one that can be has one shape."""

import re

import pytest

from tests.tells import tells
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.job_geometry import job_geometry
from torchdistpackage.config.load import loads
from torchdistpackage.config.slurm import (
    EXTRA,
    OPTIONS,
    RESERVED,
    extra_of,
    header,
    node_counts,
    problems,
)


def wrong(text: str, *overrides: str, job: bool = True) -> list[str]:
    """Each problem of a file named r.yaml."""
    with pytest.raises(ConfigErrors) as caught:
        loads(text, "r.yaml", overrides, job=job)
    return [str(problem) for problem in caught.value.problems]


def slurm(**options: object) -> str:
    """The only problem of one option, without its place."""
    ((key, text),) = problems(options)
    assert key in options
    return text


def test_no_name_is_in_two_tables():
    assert not set(OPTIONS) & set(RESERVED) and not set(EXTRA) & (set(OPTIONS) | set(RESERVED))
    assert all(re.fullmatch(r"[a-z-]+", name) for name in (*OPTIONS, *EXTRA, *RESERVED))


def test_an_unknown_option_is_told_with_the_nearest_and_the_valid_ones():
    text = "log: {}\nlaunch:\n  slurm:\n    partion: gpu\n    time: 10\n    qqqq: 1\n"
    first, second = wrong(text, job=False)
    start = "r.yaml:4: launch.slurm.partion: unknown option; did you mean partition? valid: "
    assert first.startswith(start)
    assert second.startswith("r.yaml:6: launch.slurm.qqqq: unknown option; valid: ")
    named = second.partition("valid: ")[2].split(", ")
    assert set(named) == set(OPTIONS) | set(EXTRA)


def test_everything_wrong_is_in_one_list_with_its_place():
    text = (
        "parallel: {tensr: 2}\n"
        "launch:\n"
        "  slurm:\n"
        "    time: 1:99\n"
        "    output: x\n"
        "    mem_per_cpu: lots\n"
    )
    found = wrong(text, "launch.slurm.nodes=8-4", "launch.slurm.job_name=x")
    assert [line.partition(": ")[0] for line in found] == [
        *("r.yaml:1", "r.yaml:4", "r.yaml:5", "r.yaml:6"),
        *("command line", "command line"),
    ]
    assert "launch.slurm.time: wants a time: MM, MM:SS" in found[1] and "'1:99'" in found[1]
    assert "launch.slurm.output: " in found[2] and "logs/main.log" in found[2]
    assert "wants a number of MB" in found[3]
    assert "launch.slurm.nodes=8-4: wants a number, a range" in found[4]
    assert "set run.name" in found[5]


@pytest.mark.parametrize("name", RESERVED)
def test_an_option_that_is_ours_to_set_says_what_to_use(name: str):
    assert slurm(**{name: "x"}) == f"cannot be set here: {RESERVED[name]}"


def test_a_name_near_one_that_may_not_be_set_gets_its_answer():
    assert "output cannot be set here" in slurm(outputt="x")


@pytest.mark.parametrize(
    "text",
    [
        *("30", "5:30", "12:30:00", "0:59:59", "2-0", "7-23", "1-12:30", "1-00:00:00", "90:00"),
        *("UNLIMITED", "0"),
    ],
)
def test_times_of_slurm_are_taken(text: str):
    value = int(text) if text.isdigit() else text
    assert problems({"time": value, "time-min": text}) == ()
    assert header({"time": value}) == {"time": text}


@pytest.mark.parametrize(
    "value",
    ["", "1h", "1:60", "1:2:3:4", "1-24", "1-", "-5", "1-1:1:1:1", "1:60:00", 1.5, True, "1٣"],
)
def test_other_times_are_refused(value: object):
    assert slurm(time=value).startswith("wants a time")


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"partition": ["a", "b"]}, {"partition": "a,b"}),
        ({"ntasks_per_node": 2}, {"ntasks-per-node": "2"}),
        ({"exclusive": True}, {"exclusive": None}),
        ({"exclusive": False, "hold": False, "qos": None}, {}),
        ({"exclusive": "user", "nice": 100}, {"exclusive": "user", "nice": "100"}),
        ({"gres": "gpu:a100:2,tmp:1"}, {"gres": "gpu:a100:2,tmp:1"}),
        ({"mem": "64G", "mem-per-gpu": 4000}, {"mem": "64G", "mem-per-gpu": "4000"}),
        ({"signal": "USR2@300"}, {"signal": "USR2@300"}),
        ({"dependency": "afterok:12", "comment": 'it\'s "x"'},) * 2,
        ({"mail-type": ["END", "FAIL"]}, {"mail-type": "END,FAIL"}),
        ({"distribution": "block:cyclic", "gpus": "a100:8"},) * 2,
        ({"modules": ["cuda"], "conda": "x"}, {}),
    ],
)
def test_values_become_lines_of_the_header(options: dict[str, object], lines: dict[str, str]):
    assert problems(options) == ()
    assert header(options) == lines


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"comment": "a\nb"}, "not printable"),
        ({"account": ""}, "wants a text"),
        ({"hold": "yes"}, "wants true or false"),
        ({"exclusive": 1.5}, "wants true or a text"),
        ({"account": ["a"]}, "wants a text"),
        ({"partition": []}, "wants a text or a list"),
        ({"partition": ["a", 1.5]}, "wants a text or a list"),
        ({"cpus-per-task": 0}, "1 or more"),
        ({"signal": "B:USR1@60"}, "it goes to the ranks"),
        ({"distribution": "cyclic"}, "ranks that follow each other"),
        ({"gpus-per-node": "all"}, "number of GPUs"),
        ({"gpus-per-node": "1٣"}, "number of GPUs"),
        ({"nodes": "1٣"}, "wants a number, a range"),
        ({"srun": ["--mpi=pmix"]}, "must not change the way the ranks meet"),
        ({"srun": ["-n4"]}, "must not change the layout"),
        ({"srun": ["--output=x"]}, "must not change the output"),
        ({"srun": ["x"]}, "begins with a dash"),
        ({"modules": 3}, "wants texts in a list"),
        ({"conda": ["a"]}, "wants a text"),
        ({"container": "apptainer 'x"}, "is not a command"),
        ({"prologue": ["a\0b"]}, "not printable"),
    ],
)
def test_values_that_cannot_be_are_refused(options: dict[str, object], part: str):
    assert part in slurm(**options)


def test_the_same_option_in_two_spellings_is_told():
    ((key, text),) = problems({"cpus-per-task": 2, "cpus_per_task": 3})
    assert (key, text) == ("cpus_per_task", "means the same as cpus-per-task; keep one of them")


def test_our_own_keys_are_words_or_lines():
    section = {
        "container": "apptainer exec --nv 'my train.sif'",
        "prologue": "export A=1\nulimit -c 0\n",
        "srun": ["--container-image=a b.sqsh", "-l"],
        "modules": "cuda/12",
    }
    assert problems(section) == ()
    assert extra_of(section, "container") == ("apptainer", "exec", "--nv", "my train.sif")
    assert extra_of(section, "prologue") == ("export A=1", "ulimit -c 0")
    assert extra_of(section, "srun") == ("--container-image=a b.sqsh", "-l")
    assert extra_of(section, "modules") == ("cuda/12",)
    assert extra_of(section, "files") == ()


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("4", (4,)),
        ("4-6", (4, 5, 6)),
        ("2,4", (2, 4)),
        ("8,1-7:3", (1, 4, 7, 8)),
        *((text, ()) for text in ("6-4", "0", "4-", "2,,4", "1k", "-1", "")),
    ],
)
def test_node_counts(text: str, counts: tuple[int, ...]):
    assert node_counts(text) == counts


def shape(degrees: str, **options: object):
    config = loads(f"parallel: {{{degrees}}}\ndata: {{global_batch: 960}}").model_copy()
    launch = config.launch.model_copy(update={"slurm": options})
    return job_geometry(config.model_copy(update={"launch": launch}))


@pytest.mark.parametrize(
    ("degrees", "options", "expected"),
    [
        ("data: 4", {}, ((1,), 4, 1, None)),
        ("data: 4, pipe: 2", {"nodes": 2, "cpus-per-task": 3}, ((2,), 4, 3, None)),
        ("data: auto", {"nodes": "2-3", "gpus-per-node": 4}, ((2, 3), 4, 1, None)),
        ("data: auto", {"nodes": 2, "gres": "gpu:a100:8"}, ((2,), 8, 1, None)),
        ("data: auto", {"gres": "tmp:1,gpu:2"}, ((1,), 2, 1, None)),
        ("data: auto, tensor: 2", {}, ((1,), 2, 1, None)),
        ("data: 4", {"nodes": 2, "gpus-per-task": "a100:1"}, ((2,), 2, 1, "a100:2")),
        ("data: auto", {"nodes": 2, "gpus": 8}, ((2,), 4, 1, "4")),
        ("data: auto", {"nodes": 2, "ntasks": 6}, ((2,), 3, 1, None)),
        ("data: auto", {"nodes": "2,4", "ntasks_per_node": 2}, ((2, 4), 2, 1, None)),
    ],
)
def test_the_shape_follows_from_options_and_degrees(degrees, options, expected):
    found, why = shape(degrees, **options)
    assert why == () and found is not None
    nodes, tasks, cpus, gpus = expected
    assert (found.nodes, found.tasks_per_node, found.cpus_per_task) == (nodes, tasks, cpus)
    assert found.gpus_per_node == gpus
    assert found.world_sizes == tuple(n * tasks for n in nodes)


@pytest.mark.parametrize(
    ("degrees", "options", "key", "part"),
    [
        ("data: 3", {"nodes": 2}, "ntasks-per-node", "the 3 ranks that the degrees need"),
        ("data: 4", {"nodes": "2-3", "ntasks": 4}, "ntasks", "use ntasks-per-node instead"),
        ("data: 4", {"nodes": 3, "ntasks": 4}, "ntasks", "use a multiple of 3"),
        ("data: 4", {"nodes": 2, "ntasks": 4, "ntasks-per-node": 4}, "ntasks", "x ntasks-per-node"),
        ("data: 4", {"nodes": 2, "gpus": 7}, "gpus", "use gpus-per-node instead"),
        ("data: 4", {"gpus": 4, "gres": "gpu:4"}, "gpus", "keep one of them"),
    ],
)
def test_a_shape_that_cannot_be_says_why(degrees, options, key, part):
    found, ((where, why),) = shape(degrees, **options)
    assert found is None and where == key and part in why


def test_each_count_of_a_range_must_give_a_valid_run():
    text = (
        "parallel: {pipe: 2}\ndata: {global_batch: 32}\npipeline: {microbatches: 4}\n"
        "launch:\n  slurm: {nodes: 1-4, ntasks_per_node: 4}\n"
    )
    (line,) = wrong(text)
    assert tells(line, "3", "nodes=1-4", "data.global_batch=32")
    assert line.endswith("; nodes=1,2,4 would fit")
    assert loads(text, overrides=["launch.slurm.nodes=1,2,4"], job=True).parallel.data == "auto"


def test_a_job_need_not_fit_the_local_processes():
    text = "parallel: {data: 8}\nlaunch: {local: {procs: 4}, slurm: {nodes: 2}}\n"
    assert loads(text, job=True).parallel.data == 8
    assert loads(text, job=None).parallel.data == 8
    assert tells(wrong(text, job=False)[0], "8 processes", "launch.local.procs", "4")


def test_too_few_tasks_are_told_with_the_shape_of_the_job():
    (line,) = wrong("parallel: {data: 8}\nlaunch: {slurm: {nodes: 2, ntasks-per-node: 2}}")
    assert tells(line, "4 ranks", "uses 8")
    assert line.endswith("(the job has 2 nodes x 2 tasks)")


def test_a_problem_of_the_shape_is_placed_at_the_key_as_it_is_written():
    text = "launch:\n  slurm:\n    nodes: 2\n    gpus_per_task: 1\n    gpus_per_node: 4\n"
    (line,) = wrong(text, "parallel.data=2")
    assert line.startswith("r.yaml:4: launch.slurm.gpus_per_task: gpus-per-task=1 and gpus-per-no")
