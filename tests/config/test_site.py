"""Options of a job as a site takes them, and what a site cannot give."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from torchdistpackage.config import site as site_module
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.load import load
from torchdistpackage.config.site import Site, SiteNode, SitePartition, fitted, read_site
from torchdistpackage.errors import ConfigError

GPU = SitePartition(gres=["gpu:h100:8"], max_time_s=86400, nodes=10, max_nodes=4)
SHORT = SitePartition(max_time_s=3600, default=True)


def test_the_file_comes_back_as_it_was_written(tmp_path: Path):
    site = Site(
        cluster="big",
        partitions={"gpu": GPU, "short": SHORT},
        options={"account": "lab"},
        forbidden={"mem": "no: memory"},
        qos={"long": None, "normal": 60},
        node=SiteNode(arch="x86_64", pythons={"/usr/bin/python3": True}),
    )
    path = tmp_path / "site.yaml"
    path.write_text(site.to_yaml())
    assert read_site(path) == site


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("partitions: [a", "not valid YAML"),
        ("partition: {}", "partition: "),
        ("gpu_option: gpus", "gpu_option: "),
        ("options: {acount: x}", "did you mean account"),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path, text: str, part: str):
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(part)) as caught:
        read_site(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("site", "asked", "name", "options"),
    [
        ({"gpu_option": "gres"}, {"gpus-per-node": "2"}, "gpus-per-node", {"gres": "gpu:2"}),
        ({"gpu_option": "gpus-per-node"}, {"gres": "gpu:2"}, "gres", {"gpus-per-node": "2"}),
        (
            {"gpu_option": "gpus-per-node"},
            {"gres": "gpu:2,tmp:1"},
            "gres",
            {"gres": "gpu:2,tmp:1"},
        ),
        (
            {"gpu_option": "gpus-per-node", "gpu_type": "h100"},
            {"gpus-per-node": "2"},
            "gpus-per-node",
            {"gpus-per-node": "h100:2"},
        ),
        # a type of another site, and one that this site has
        (
            {"gpu_option": "gres", "partitions": {"gpu": GPU}},
            {"gpus-per-node": "v100:2"},
            "gpus-per-node",
            {"gres": "gpu:2"},
        ),
        (
            {"gpu_option": "gres", "partitions": {"gpu": GPU}},
            {"gpus-per-node": "h100:2"},
            "gpus-per-node",
            {"gres": "gpu:h100:2"},
        ),
        (
            {"gpu_option": "none"},
            {"gpus-per-node": "2"},
            "gpus-per-node",
            {"exclusive": None},
        ),
        ({}, {"gpus-per-node": "v100:2"}, "gpus-per-node", {"gpus-per-node": "v100:2"}),
        ({"options": {"account": "lab"}}, {"account": "own"}, None, {"account": "own"}),
        ({"options": {"mem-per-cpu": 10}}, {"mem": "1G"}, None, {"mem": "1G"}),
        ({"options": {"mem-per-cpu": 10}}, {}, None, {"mem-per-cpu": "10"}),
        ({"forbidden": {"mem": "no"}}, {"mem-per-gpu": "1G"}, None, {}),
        ({"forbidden": {"exclusive": "no"}}, {"exclusive": None}, None, {}),
    ],
)
def test_options_become_those_that_the_site_takes(site, asked, name, options):
    fit = fitted(Site(**site), asked, name)
    assert fit.options == options
    assert bool(fit.notes) == (options != asked)


def problems(tmp_path: Path, site: Site, launch: dict) -> dict[str, str]:
    """Key -> what is wrong, of a run at this site."""
    path = tmp_path / "site.yaml"
    path.write_text(site.to_yaml())
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps({"launch": {"site": str(path), **launch}}))
    try:
        load(run, job=True)
    except ConfigErrors as error:
        return {x.path: x.text for x in error.problems}
    return {}


SITE = Site(
    partitions={"gpu": GPU, "short": SHORT},
    accounts=["lab"],
    qos={"brief": 600, "normal": None},
    forbidden={"requeue": "error: not for users"},
)


@pytest.mark.parametrize(
    ("launch", "key", "numbers", "value"),
    [
        ({"slurm": {"time": "2:00:00"}}, "slurm.time", "0-01:00:00", "0-01:00:00"),
        (
            {"slurm": {"time": "2-00", "partition": "gpu,short"}},
            "slurm.time",
            "1-00:00:00",
            "1-00:00:00",
        ),
        (
            {"slurm": {"time": "0:30:00", "qos": "brief"}},
            "slurm.time",
            "0-00:10:00",
            "0-00:10:00",
        ),
        ({"slurm": {"time": "UNLIMITED"}}, "slurm.time", "0-01:00:00", "0-01:00:00"),
        ({"slurm": {"partition": "gpus"}}, "slurm.partition", "gpu, short", "gpu"),
        ({"slurm": {"partition": "short,old"}}, "slurm.partition", "old", "short"),
        ({"slurm": {"account": "other"}}, "slurm.account", "lab", "lab"),
        ({"slurm": {"qos": "other"}}, "slurm.qos", "brief", "brief"),
        (
            {"slurm": {"partition": "gpu", "nodes": "8-9", "ntasks-per-node": 1}},
            "slurm.nodes",
            "8 is above the 4",
            4,
        ),
        (
            {"slurm": {"partition": "gpu", "gpus-per-node": "h100:16"}},
            "slurm.gpus-per-node",
            "16 is above the 8",
            8,
        ),
        ({"requeue": {"mode": "requeue"}}, "requeue.mode", "not for users", "chain"),
    ],
)
def test_what_a_site_cannot_give_is_refused_with_what_to_write(
    tmp_path: Path, launch: dict, key: str, numbers: str, value: str | int
):
    launch = {"requeue": {"mode": "never"}, **launch}
    text = problems(tmp_path, SITE, launch)[f"launch.{key}"]
    assert numbers in text
    written = yaml.safe_load(text.rpartition("; write ")[2])["launch"]
    section, name = key.split(".")
    assert written == {section: {name: value}}
    both = {**launch, section: {**launch.get(section, {}), name: value}}
    assert problems(tmp_path, SITE, both) == {}


def test_limits_of_all_partitions_count_where_the_site_says_so(tmp_path: Path):
    launch = {"requeue": {"mode": "chain"}, "slurm": {"partition": "gpu,short", "time": "2:00:00"}}
    assert problems(tmp_path, SITE, launch) == {}
    strict = SITE.model_copy(update={"part_limits": "all"})
    assert "0-01:00:00" in problems(tmp_path, strict, launch)["launch.slurm.time"]


def test_an_interpreter_that_nodes_lack_is_refused(tmp_path: Path, monkeypatch):
    node = SiteNode(arch="x86_64", pythons={sys.executable: False, "/opt/python3": True})
    monkeypatch.setattr(site_module.platform, "machine", lambda: "x86_64")
    site = Site(node=node)
    text = problems(tmp_path, site, {})["launch.slurm.python"]
    assert sys.executable in text and '{"python": "/opt/python3"}' in text
    assert problems(tmp_path, site, {"slurm": {"python": "/opt/python3"}}) == {}
    assert problems(tmp_path, site, {"slurm": {"container": ["apptainer"]}}) == {}
    other = Site(node=SiteNode(arch="aarch64"))
    assert "aarch64" in problems(tmp_path, other, {})["launch.slurm.python"]


def test_a_file_that_is_not_there_is_a_problem_of_its_key(tmp_path: Path):
    run = tmp_path / "run.yaml"
    run.write_text(f"launch: {{site: {tmp_path}/none.yaml}}")
    with pytest.raises(ConfigErrors, match=r"launch.site: .*none.yaml.*tdp site"):
        load(run, job=True)
    load(run, world_size=1)  # a rank does not look at it
