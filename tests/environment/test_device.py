"""Device choice: a table, and laws over every small node."""

import itertools
import json
from pathlib import Path

import pytest

from tests.tells import tells
from torchdistpackage.environment.device import DeviceChoice, choose_device, exclusive_device
from torchdistpackage.errors import LaunchError

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
UUID2 = "GPU-1f2a9c04-0b7e-77aa-2d9e-0c5b1a7d33e1"
MIG = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"
MIG2 = "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb"

CASES = [
    # local rank, visible, number visible, local ranks -> index
    (0, None, 0, 1, None),
    (0, "", 0, 1, None),
    (0, "NoDevFiles", 0, 2, None),
    (0, "-1", 0, 1, None),
    (0, None, 1, 1, 0),
    (0, "3", 1, 1, 0),
    (3, "3", 1, 1, 0),
    (0, "0,1,2,3", 4, 4, 0),
    (3, "0,1,2,3", 4, 4, 3),
    (3, None, 4, 4, 3),
    (2, "4,5,6,7", 4, 3, 2),
    (1, "2,3", 2, 1, 1),
    (0, "0, 1", 2, 2, 0),
    (1, "2,-1,3", 1, 1, 0),
    (0, UUID, 1, 1, 0),
    (1, f"{UUID},{UUID2}", 2, 2, 1),
    (1, "GPU-8932,GPU-1f2a", 2, 2, 1),
    (0, MIG, 1, 1, 0),
    (1, f"{MIG},{MIG2}", 2, 2, 1),
    (1, f"{MIG},{MIG2}", 1, 2, None),
    (0, f"MIG-{UUID}/1/0", 1, 1, 0),
    (1, MIG2, 1, 1, 0),
    (1, UUID2, 1, 1, 0),
    (1, f"0,{UUID2}", 2, 2, 1),
    (0, "-1,0", 0, 1, None),
    (7, None, 8, 8, 7),
    (0, None, 8, 1, 0),
    (3, "0", 1, 4, None),
    (2, "0,1", 2, 1, None),
]


@pytest.mark.parametrize(("local_rank", "visible", "num_visible", "ranks", "index"), CASES)
def test_table(local_rank, visible, num_visible, ranks, index):
    choice = choose_device(local_rank, visible, num_visible, local_world_size=ranks)
    assert choice.index == index
    assert bool(choice.note) == (index is None)


def test_too_few_gpus_are_said_in_one_line_with_numbers():
    few = choose_device(2, "0", 1, local_world_size=4)
    assert few.index is None and few.note.startswith("4 local ranks, 1 GPU: running on CPU with")
    more = choose_device(0, None, 2, local_world_size=3)
    assert more.note.startswith("3 local ranks, 2 GPUs: ") and "launch.share_gpus" in more.note
    assert "\n" not in more.note


def test_ranks_may_share_gpus():
    def shared(num_visible: int, num_ranks: int, **more: bool) -> list[DeviceChoice]:
        return [
            choose_device(
                rank, None, num_visible, local_world_size=num_ranks, share_gpus=True, **more
            )
            for rank in range(num_ranks)
        ]

    assert shared(2, 4) == [DeviceChoice(gpu, "", 2) for gpu in (0, 0, 1, 1)]
    assert shared(1, 3) == [DeviceChoice(0, "", 3)] * 3
    assert shared(4, 4) == [DeviceChoice(gpu, "") for gpu in range(4)], "none is shared"
    assert [x.index for x in shared(0, 2)] == [None, None]
    assert [(x.index, x.sharing) for x in shared(1, 2, exclusive=True)] == [(0, 1)] * 2


def test_own_device_for_each_task_is_device_0_with_one_warning():
    choice = choose_device(3, "3", 1, local_world_size=4, exclusive=True)
    assert choice.index == 0
    assert tells(choice.note, "4 local", "GPU")
    assert "\n" not in choice.note
    for visible in (UUID, MIG, None):
        choice = choose_device(3, visible, 1, local_world_size=4, exclusive=True)
        assert choice.index == 0 and choice.note
    assert choose_device(0, "3", 1, local_world_size=1, exclusive=True) == DeviceChoice(0, "")
    assert choose_device(1, "2,3", 2, local_world_size=2, exclusive=True) == DeviceChoice(0, "")


@pytest.mark.parametrize(
    ("visible", "num_visible"),
    [
        ("0,1", 1),
        ("0", 4),
        ("0,1", 0),
        ("", 1),
        ("NoDevFiles", 2),
        (UUID, 2),
        (f"{MIG},{MIG2}", 3),
        (MIG, 0),
        ("0,-1,1", 2),
    ],
)
@pytest.mark.parametrize("exclusive", [False, True])
def test_a_mismatch_names_all_three(visible, num_visible, exclusive):
    with pytest.raises(LaunchError) as error:
        choose_device(7, visible, num_visible, local_world_size=8, exclusive=exclusive)
    for part in ("local rank 7", repr(visible), f"reports {num_visible};"):
        assert part in str(error.value)


@pytest.mark.parametrize(("local_rank", "num_visible"), [(-1, 1), (0, -1)])
def test_negative_numbers_are_refused(local_rank, num_visible):
    with pytest.raises(LaunchError, match="negative"):
        choose_device(local_rank, None, num_visible)


@pytest.mark.parametrize(("ranks", "gpus"), [*itertools.product(range(1, 9), range(9))])
def test_ranks_of_a_node_never_share(ranks, gpus):
    visible = ",".join(map(str, range(gpus)))
    plain = [choose_device(r, visible, gpus, local_world_size=ranks).index for r in range(ranks)]
    assert plain == (list(range(ranks)) if gpus >= ranks else [None] * ranks)


ENVIRONMENTS = json.loads((Path(__file__).parent / "environments.json").read_text())
GPU_STEPS = [row for row in ENVIRONMENTS if "exclusive" in row]


@pytest.mark.parametrize("row", GPU_STEPS, ids=lambda row: row["name"])
def test_captured_gpu_steps(row):
    """Tasks that Slurm gave GPUs of their own are told apart from tasks that share."""
    nodes: dict[str, list[tuple[int | None, str]]] = {}
    for process in row["processes"]:
        env = {**row["env"], **process.get("env", {})}
        before = dict(env)
        exclusive = exclusive_device(env)
        assert exclusive is row["exclusive"]
        visible = env.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else ["0", "1"]
        _, _, local_rank, local_world_size, _ = process["place"]
        index = choose_device(
            local_rank,
            visible,
            len(names),
            local_world_size=local_world_size,
            exclusive=exclusive,
        ).index
        assert env == before
        taken = nodes.setdefault(process["host"], [])
        if index is not None:
            assert names[index] not in taken
            taken.append(names[index])
        else:
            assert local_world_size > len(names)


def test_the_gpu_steps_hold_both_kinds():
    assert {row["exclusive"] for row in GPU_STEPS} == {True, False}


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_STEP_GPUS": "1"},
        {"SLURM_STEP_GPUS": "1", "SLURM_GPUS_ON_NODE": "2"},
        {
            "SLURM_STEP_GPUS": "1",
            "SLURM_GPUS_ON_NODE": "2",
            "SLURM_NODEID": "1",
            "SLURM_STEP_TASKS_PER_NODE": "2",
        },
    ],
)
def test_without_slurms_word_nothing_is_exclusive(env):
    assert exclusive_device(env) is False


def test_one_task_with_all_gpus_of_its_node_is_not_exclusive():
    env = {
        "SLURM_STEP_GPUS": "0,1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    assert exclusive_device(env) is False


@pytest.mark.parametrize("starter", ["TORCHELASTIC_RUN_ID", "TDP_STORE"])
def test_ranks_started_inside_a_task_share_its_devices(starter):
    """Two torchruns on a node under --gpus-per-task=2: their local ranks 0 and 1 differ."""
    row = next(row for row in GPU_STEPS if row["name"] == "one GPU per task")
    env = {**row["env"], **row["processes"][0]["env"]}
    assert exclusive_device(env) is True
    assert exclusive_device({**env, starter: "x"}) is False
