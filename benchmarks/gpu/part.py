"""One part in a process of its own: `python -m benchmarks.gpu.part MODULE FILE` keeps its rows."""

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.here import Here
from benchmarks.gpu.rows import Found, Row
from torchdistpackage.comm.nccl_library import loaded_nccl


def main(module: str, file: str) -> None:
    here = Here.find()
    keep = partial(write, Path(file), here)
    found = Found(keep, small=here.small)
    keep(found.rows)
    with found.case(module):
        importlib.import_module(module).measure(here, found)


def write(file: Path, here: Here, rows: Sequence[Row]) -> None:
    """Whole after every row, so that what ends the process takes none that was there."""
    text = json.dumps({"machine": machine(here), "rows": [asdict(row) for row in rows]})
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


def machine(here: Here) -> dict[str, object]:
    """What the part runs on; a GPU that nobody has touched yet is left alone."""
    known = {"torch": str(torch.__version__), "python": sys.version.split()[0]}
    if here.small or not torch.cuda.is_initialized():
        return known | {"device": here.device.type}
    return known | {
        "device": torch.cuda.get_device_name(here.device),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, loaded_nccl() or ())),
        "memory_bytes": torch.cuda.get_device_properties(here.device).total_memory,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
