"""One part in a process of its own: `python -m benchmarks.gpu.part MODULE FILE` keeps its rows.

`--cases PATTERN`, `--seconds N` and `--resume` choose among the cases of a part that has many.
"""

import argparse
import importlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.here import Here
from benchmarks.gpu.rows import Choice, Found, Row, Status
from torchdistpackage.comm.nccl_library import loaded_nccl


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="one part")
    parser.add_argument("module")
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", default="")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(argv)
    end_s = time.monotonic() + options.seconds
    here = Here.find()
    keep = partial(write, options.file, here)
    earlier = read(options.file) if options.resume else []
    found = Found(keep, small=here.small, choice=Choice(options.cases, end_s, earlier))
    keep(found.rows)
    with found.case(options.module):
        importlib.import_module(options.module).measure(here, found)


def read(file: Path) -> list[Row]:
    """The rows that a run before has kept; none without one."""
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return [Row(**row | {"status": Status(row["status"])}) for row in rows]


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
    main()
