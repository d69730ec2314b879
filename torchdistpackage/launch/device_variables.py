"""Variables for ranks that see a GPU, set where the user said nothing; docs/gpu.md says why.

torch and NCCL read them when CUDA or a communicator is initialised, so they are set before. Pure:
the environment is an argument.
"""

from collections.abc import Mapping
from pathlib import Path

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Two names of one setting each, of which the first is the newer."""


def device_variables(env: Mapping[str, str], dump_folder: Path | None = None) -> dict[str, str]:
    """What to set beside `env`.

    dump_folder: where NCCL's flight recorder leaves a file for each rank when a call timed out.
    """
    wanted: dict[tuple[str, ...], str] = {
        _ALLOCATOR: "expandable_segments:True",
        ("NCCL_LAUNCH_ORDER_IMPLICIT",): "1",
    }
    if dump_folder is not None:
        wanted[_DUMPS] = str(dump_folder.absolute() / "nccl_trace_rank")
    return {names[0]: value for names, value in wanted.items() if not env.keys() & {*names}}
