"""The program that `tdp prove` writes if a layout differs: it shows the first difference. No
torch.
"""

from pathlib import Path

from torchdistpackage.config.schema import RunConfig
from torchdistpackage.harness.parity.layouts import ParityReport, text_of

_PROGRAM = '''\
"""Shows a difference that tdp prove found, on a small copy of the run.

{finding}

Run it in the folder of your own modules, if the run names any; it needs {num} CPU ranks, and exits
with 1 while the difference is there.
"""

import sys
import tempfile
from pathlib import Path

from torchdistpackage.cli.main import main

RUN = {run}
"""The run, as YAML."""
MODEL = {model}
"""The config.json of its model, for one of transformers."""
LAYOUT = {layout}


def show() -> int:
    with tempfile.TemporaryDirectory() as folder:
        file, model = Path(folder) / "run.yaml", Path(folder) / "config.json"
        file.write_text(RUN)
        changes = [f"run.dir={{folder}}"]
        if MODEL:
            model.write_text(MODEL)
            changes.append(f"model.hf={{model}}")
        return main(["prove", str(file), *changes, "--layouts", LAYOUT])


if __name__ == "__main__":
    sys.exit(show())
'''


def failing_program(config: RunConfig, report: ParityReport) -> str:
    """Return a program that compares the first layout that differs; config: of the small run."""
    assert report.first is not None
    axes, finding = report.first
    model = "" if config.model.hf is None else Path(config.model.hf).read_text()
    text = f"{text_of(axes)}: {finding}".replace("\\", "/").replace('"""', "'''")
    # one process alone differs from itself after a stop; any layout shows that
    layout = ",".join(f"{axis}={size}" for axis, size in (axes or {"data": 2}).items())
    ranks = 1
    for size in (axes or {"data": 2}).values():
        ranks *= size
    return _PROGRAM.format(
        finding=text,
        num=ranks,
        run=_literal(config.to_yaml()),
        model=_literal(model),
        layout=repr(layout),
    )


def _literal(text: str) -> str:
    """Return a text as a Python literal, a line of it on each line."""
    lines = text.splitlines(keepends=True)
    if not lines:
        return '""'
    return "(\n" + "".join(f"    {line!r}\n" for line in lines) + ")"
