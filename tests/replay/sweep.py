"""The search for false alarms: `tdp prove` over all that is right.

Right are the classes of docs/model_classes.md, each made small, and every file of configs/. The
rows are written as they come, so that a sweep which was ended goes on where it was.
"""

import gc
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.replay.forked_pool import ForkedPool
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.load import load
from torchdistpackage.errors import ConfigError, TorchDistError
from torchdistpackage.files import atomic_write
from torchdistpackage.harness.parity.layouts import text_of
from torchdistpackage.lazy import resolve
from torchdistpackage.plan.parity_model import model_plan
from torchdistpackage.plan.parity_plan import AXES, parity_run
from torchdistpackage.plan.run_plan import Plan, make_plan, num_ranks

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "benchmarks" / "results" / "replay_sweep.json"
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
NUM_CLASSES = 196
"""Classes of docs/model_classes.md."""
DATA = (
    "data.target=tests.replay.sources:Tokens",
    "data.args={seq_len: 16, vocab: 256}",
    "pipeline.microbatches=2",
)
"""Samples that cost nothing to make, with other numbers of targets in each."""
PRELOAD = (
    "torchdistpackage.train.parity",
    "torchdistpackage.harness.pool_worker",
    "tests.models.coverage",
    "tests.replay.sources",
    "torch._dynamo",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
)
_LIMIT_S = 400.0
"""Limit in seconds for the steps of one layout."""
Row = dict[str, Any]


def cases() -> list[str]:
    """Return the names of all that is right: `configs/NAME.yaml`, or a model_type."""
    names: Any = resolve("tests.models.coverage:names")
    return [*(f"configs/{path.name}" for path in CONFIGS), *names()]


def stored() -> dict[str, Row]:
    """Return the rows of the file, by name."""
    if not ROWS.exists():
        return {}
    return {row["name"]: row for row in json.loads(ROWS.read_text("utf-8"))}


def sweep(names: Iterable[str], limit_s: float, *, resumes: bool) -> Iterator[Row]:
    """Compare each case, write its row and yield it; limit_s: no case begins later."""
    ends = time.monotonic() + limit_s
    for module in PRELOAD:
        import_module(module)
    # a collection in a fork would look at, and so copy, all that was loaded
    gc.freeze()
    for name in names:
        if time.monotonic() > ends:
            return
        began = time.monotonic()
        row = _forked(name, resumes=resumes) | {"s": round(time.monotonic() - began, 1)}
        write([row])
        yield row


def _forked(name: str, *, resumes: bool) -> Row:
    """Return the row of a case, from a fork, so that this process keeps nothing of a class."""
    read, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            with ForkedPool(_LIMIT_S) as pool:
                row = compared(name, pool, resumes=resumes)
        except BaseException as error:  # a row of its own, and the sweep goes on
            row = {"name": name, "layouts": [], "found": [f"stopped: {error!r}"[:300]]}
        with os.fdopen(write_end, "w") as file:
            json.dump(row, file)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else {"name": name, "layouts": [], "found": ["stopped: died"]}


def write(rows: Iterable[Row]) -> None:
    """Put rows into the file, in the place of earlier ones of the same names."""
    by_name = stored() | {row["name"]: row for row in rows}
    lines = ",\n".join(json.dumps(by_name[name], sort_keys=True) for name in sorted(by_name))
    atomic_write(ROWS, f"[\n{lines}\n]\n")


def compared(name: str, pool: Any, *, resumes: bool) -> Row:
    """Return the row of a case: its layouts, and what is found, or why it is refused.

    resumes: also stop and resume, which takes twice the time.
    """
    with tempfile.TemporaryDirectory(prefix="tdp-sweep-") as folder:
        try:
            plan, layouts = _plan(name, Path(folder))
        except ConfigErrors as error:
            return {"name": name, "why": error.problems[0].text[:200]}
        except ConfigError as error:
            return {"name": name, "why": str(error)[:200]}
        gc.freeze()
        compare: Any = resolve("torchdistpackage.train.parity:compare_run")
        try:
            report = compare(parity_run(plan, layouts), pool, resumes=resumes)
        except TorchDistError as error:
            text = str(error).strip().splitlines()[-1]
            return {"name": name, "layouts": [], "found": [f"stopped: {text[:300]}"]}
    found = [f"{text_of(axes)}: {x}"[:300] for axes, x in report.findings if x is not None]
    compared_layouts = [text_of(x) for x, _ in report.findings if x]
    return {"name": name, "layouts": compared_layouts, "resumes": resumes, "found": found}


def _plan(name: str, scratch: Path) -> tuple[Plan, str]:
    """Return the plan of a case, and the layouts of it that are compared."""
    if name.endswith(".yaml"):
        text = ["data.name=python_stdlib", "data.path=null", "model.vocab=256"]
        config = load(str(ROOT / name), text)
        return make_plan(config, num_ranks(config)), "this"
    settings: Any = resolve("tests.models.coverage:settings")
    refused: Any = resolve("tests.models.coverage_ranks:refused_settings")
    folder, small = scratch / "model", scratch / "small"
    for made in (folder, small):
        made.mkdir()
    config_dict: Mapping[str, Any] = settings(name)
    if (why := refused(config_dict)) is not None:
        raise ConfigError(why)
    (folder / "config.json").write_text(json.dumps(config_dict))
    plan, _ = model_plan(str(folder), DATA, small)
    several = [axis for axis in AXES if (getattr(plan.config.parallel, axis) or 1) != 1]
    return plan, ";".join(f"{axis}=2" for axis in several)
