"""What stands in the file reaches whoever wants a text, whatever YAML takes it for."""

import pytest

from torchdistpackage.config.load import loads
from torchdistpackage.config.slurm import header
from torchdistpackage.errors import ConfigError

PLAIN = ["012345", "2026_11_28", "0x1F", "0o17", "1e3", "1.50", "-0", "+7", ".5", ".inf", ".NaN",
         "true", "FALSE", "yes", "on", "1:30", "2026-11-28", "1_0.5"]  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["account", "qos", "constraint", "gres", "exclude", "nodelist"])
def test_an_option_that_is_a_text_reaches_slurm_as_it_is_written(name: str) -> None:
    for text in PLAIN:
        in_file = loads(f"launch: {{slurm: {{{name}: {text}}}}}", job=True)
        on_line = loads("", overrides=[f"launch.slurm.{name}={text}"], job=True)
        for config in (in_file, on_line, loads(in_file.to_yaml(), job=True)):
            assert header(config.launch.slurm)[name] == text


def test_so_do_items_of_lists_and_words_around_the_ranks() -> None:
    text = f"exclude: [{', '.join(PLAIN)}], modules: [1.10, 0x1F, true], conda: 3.10"
    slurm = loads(f"launch: {{slurm: {{{text}}}}}", job=True).launch.slurm
    assert header(slurm)["exclude"] == ",".join(PLAIN)
    assert (slurm["modules"], slurm["conda"]) == (["1.10", "0x1F", "true"], "3.10")
    over = "launch.slurm.exclude=[007, 008]"
    assert loads(f"launch: {{slurm: {{{text}}}}}", overrides=[over], job=True).launch.slurm[
        "exclude"
    ] == ["007", "008"]


def test_numbers_and_truths_stay_what_they_are() -> None:
    text = "nodes: 1, mem: 0x10, cpus-per-task: 1_0, exclusive: true"
    slurm = loads(f"launch: {{slurm: {{{text}, hold: false, qos: ~}}}}", job=True).launch.slurm
    assert header(slurm) == {"nodes": "1", "mem": "16", "cpus-per-task": "10", "exclusive": None}
    args = loads("data: {name: null, target: 'a:b', args: {x: 010, y: 1e3, z: true}}").data.args
    assert args == {"x": 10, "y": 1000.0, "z": True}
    assert loads("train: {profile: {steps: 10}}").train.profile.steps == "10..10"


@pytest.mark.parametrize("time", ["infinite", "Unlimited", "INFINITE", "90", "1:30:00", "2-0"])
def test_times_in_every_form_that_slurm_reads(time: str) -> None:
    assert header(loads(f"launch: {{slurm: {{time: {time}}}}}", job=True).launch.slurm) == {
        "time": time
    }


def test_names_paths_and_mappings_of_them_keep_their_text() -> None:
    sets = "{web: 1_0, code: 1e3}"
    config = loads(
        f"run: {{name: 012, dir: 1.10}}\ndata: {{name: text, path: 2026_11, eval: {sets}}}\n"
        "launch: {requeue: {signals: [USR1]}}",
        overrides=["checkpoint.keep_best=007", "data.eval.007=0x1F"],
    )
    assert (config.run.name, config.run.dir, config.data.path) == ("012", "1.10", "2026_11")
    assert config.data.eval == {"web": "1_0", "code": "1e3", "007": "0x1F"}
    again = loads("run: {name: 012}", overrides=["run.name=1_2"])
    assert again.run.name == "1_2", "an override takes the place of what is in the file"
    with pytest.raises(ConfigError, match="duplicate key"):
        loads("run: {name: 012}\nrun: {name: {a: 1}}")
