"""Which runs a sweep has, and what they are called."""

import pytest
from pydantic import TypeAdapter

from torchdistpackage.config.types import FolderName
from torchdistpackage.errors import ConfigError
from torchdistpackage.launch.slurm.job import MAX_RUNS, SweepRun, points


def test_values_go_together_in_every_combination():
    assert points(["optim.lr=1e-4,3e-4", "run.seed=1, 2"]) == (
        SweepRun("lr=1e-4-seed=1", ("optim.lr=1e-4", "run.seed=1")),
        SweepRun("lr=1e-4-seed=2", ("optim.lr=1e-4", "run.seed=2")),
        SweepRun("lr=3e-4-seed=1", ("optim.lr=3e-4", "run.seed=1")),
        SweepRun("lr=3e-4-seed=2", ("optim.lr=3e-4", "run.seed=2")),
    )


def test_a_value_may_be_a_list_or_a_text_with_commas():
    found = points(["optim.betas=[0.9, 0.95],[0.8, 0.9]"])
    assert [p.overrides[0] for p in found] == ["optim.betas=[0.9, 0.95]", "optim.betas=[0.8, 0.9]"]
    assert len(points(["data.path='a,b',c"])) == 2


@pytest.mark.parametrize("sweep", ["optim.betas=[0.9, 1]", "data.path=/a b/ü?*", "a.b={a: 1}"])
def test_every_name_is_one_of_a_folder(sweep: str):
    (point,) = points([sweep])
    TypeAdapter(FolderName).validate_python(f"run-{point.suffix}")


@pytest.mark.parametrize(
    ("sweeps", "part"),
    [
        (["optim.lr"], "section.key=value,value"),
        (["optim.lr=1,,2"], "section.key=value,value"),
        (["=1"], "section.key=value,value"),
        (["a.b=1", "a.b=2"], "a.b is given twice"),
        (["a.b=1,1"], "the name ending in b=1"),
        (["a.x=1,?1"], "the name ending in x=1"),
        (["launch.slurm.nodes=1,2"], "share their job"),
        (["run.name=a,b"], "share their job"),
        (["a.b=" + ",".join(map(str, range(MAX_RUNS + 1)))], f"more than {MAX_RUNS}"),
    ],
)
def test_what_is_no_sweep_is_refused(sweeps: list[str], part: str):
    with pytest.raises(ConfigError) as caught:
        points(sweeps)
    assert part in str(caught.value)
