"""What is set for ranks with a GPU, and that the user's words stand under either name."""

from pathlib import Path

import pytest

from torchdistpackage.environment.device import device_variables

ALL = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "NCCL_GRAPH_REGISTER": "0",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    "TORCH_FR_DUMP_TEMP_FILE": "/run/logs/nccl_trace_rank",
}
FOLDER = Path("/run/logs")


def test_all_are_set_where_nothing_is_said():
    assert device_variables({"PATH": "x"}, FOLDER) == ALL
    assert "TORCH_FR_DUMP_TEMP_FILE" not in device_variables({})
    on_rocm = device_variables({}, FOLDER, is_hip=True)
    assert ALL.keys() - on_rocm.keys() == {"NCCL_LAUNCH_ORDER_IMPLICIT"}, "RCCL ends there"


@pytest.mark.parametrize(
    ("said", "stands"),
    [
        ("PYTORCH_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        ("NCCL_GRAPH_REGISTER", "NCCL_GRAPH_REGISTER"),
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "NCCL_LAUNCH_ORDER_IMPLICIT"),
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"),
    ],
)
def test_what_the_user_said_stands(said: str, stands: str):
    """Also an empty value is a word."""
    assert device_variables({said: ""}, FOLDER) == {k: v for k, v in ALL.items() if k != stands}


def test_the_page_has_each_with_its_value():
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    for name, value in device_variables({}).items():
        assert f"| `{name}` | `{value}` |" in page
    assert "| `TORCH_FR_DUMP_TEMP_FILE` | `<run folder>/logs/nccl_trace_rank` |" in page
