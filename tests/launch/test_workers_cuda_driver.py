"""A preloaded module that initialised the CUDA driver is refused by name; the driver is a small
library here that answers as NVIDIA's does."""

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.process import why_cuda_initialised
from torchdistpackage.launch.workers import run_local

DRIVER = """
static int initialised = 0;
int cuInit(unsigned flags) { initialised = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return initialised ? 0 : 3; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    source, library = folder / "cuda.c", folder / "libcuda.so.1"
    source.write_text(DRIVER)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True
    )
    return library


def preload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **bodies: str) -> tuple[str, ...]:
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(body))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tuple(bodies)


def nvml_check() -> tuple[str | None, str]:
    return os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"), why_cuda_initialised()


def test_a_driver_that_is_loaded_and_not_initialised_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: Path
):
    """And a preloaded module finds the check that does not initialise it; ranks choose anew."""
    modules = preload(
        tmp_path,
        monkeypatch,
        loads=f"import ctypes; ctypes.CDLL({str(driver)!r})",
        asks="import os; assert os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] == '1'",
    )
    assert run_local(nvml_check, num_procs=1, preload=modules) == [(None, "")]


def test_the_module_that_initialised_the_driver_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: Path
):
    modules = preload(
        tmp_path,
        monkeypatch,
        harmless="import json",
        touches=f"import ctypes; ctypes.CDLL({str(driver)!r}).cuInit(0)",
        later="import json",
    )
    with pytest.raises(LaunchError, match=r"importing 'touches' touched a GPU.*returns 0"):
        run_local(nvml_check, num_procs=1, preload=modules)


def test_what_only_cuda_opens_is_a_sign_and_what_nvml_opens_is_none(tmp_path: Path):
    for number, name in enumerate(("/dev/null", "/dev/nvidiactl", "/dev/nvidia0")):
        (tmp_path / str(number)).symlink_to(name)
    assert why_cuda_initialised(tmp_path) == ""
    (tmp_path / "9").symlink_to("/dev/nvidia-uvm")
    assert "/dev/nvidia-uvm is open" in why_cuda_initialised(tmp_path)
