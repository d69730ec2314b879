"""The program that `tdp prove` writes if a layout differs: it shows the first difference. No
torch.

It needs no command: it takes the steps of the small run itself, and asserts of what the report
names that each rank has what one process has.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.yaml_loader import write
from torchdistpackage.harness.parity.layouts import ParityReport, text_of
from torchdistpackage.plan.parity_plan import ComparedRuns, world_size_of

_PROGRAM = '''\
"""Shows a difference that tdp prove found, on a small copy of the run.

{finding}

It takes the steps of the copy in one process and on {num} CPU ranks, and ends with an
AssertionError while these differ: {subject}.
Run it in the folder of your own modules, if the run names any.
"""

import os
import tempfile
from pathlib import Path

from torchdistpackage.config.load import loads
from torchdistpackage.equivalence.compare import alone_difference, first_difference
from torchdistpackage.equivalence.match import TOLERANCE, WITH_SINGLE, difference
from torchdistpackage.harness.parity.layout_ranks import records_of
from torchdistpackage.plan.user_code import add_user_code
from torchdistpackage.testing import RankPool
from torchdistpackage.train.parity_steps import record_run

ONE = {one}
"""The run in one process, as YAML."""
RUN = {run}
"""The run that differs from it."""
MODEL = {model}
"""The config.json of its model, for one of transformers."""
AXES = {axes}
"""The axes of RUN with several ranks."""


def named(record):
    """Return {subject}: what a rank has recorded of it."""
{named}


def check(one, ranks):
    """Assert that the ranks have what one process has."""
    for record in (one, *ranks):
        assert not record.error, record.error
{check}


def take_steps(pool, text, axes, model, saves, name):
    """Return the records of the steps of a run, one a rank."""
    config = loads(text, overrides=[f"model.hf={{model}}"] if MODEL else [])
    num = 1
    for size in axes.values():
        num *= size
    options = (config, axes, saves, name, {alike}, {dropout}, {wide})
    return records_of(pool(num), record_run, *options)


def main():
    add_user_code(os.environ)
    with tempfile.TemporaryDirectory() as folder, RankPool({num}, timeout_s=600.0) as pool:
        model = Path(folder) / "config.json"
        model.write_text(MODEL)
        saves = {saves}
        (one,) = take_steps(pool, ONE, {{}}, model, saves, "one")
        ranks = {ranks}
    check(one, ranks)
    print("no difference")


if __name__ == "__main__":
    main()
'''
_SLICES = '''\
    tolerance = WITH_SINGLE.tolerance if one.singles else TOLERANCE
    for rank, record in enumerate(ranks):
        for part, full in zip(named(record), named(one), strict=False):
            gap = difference(part, full)  # from the slice of the full tensor that fits best
            fits = {fits}
            assert fits, f"rank {{rank}}: off by {{gap}} of the largest number"'''
_ANY = """\
    found = {call}
    assert found is None, str(found)"""
_MODULES = {"outputs": "outputs", "gradients of its inputs": "input_grads"}
_TENSORS = {
    "the first weights": "initial",
    "gradients": "grads",
    "weights after the first step": "updated",
    "weights after the steps": "weights",
}
"""Subject of a finding -> what the record of a rank has of it."""


def failing_program(report: ParityReport) -> str:
    """Return a program that shows the first difference of the report."""
    assert report.first is not None
    axes, finding = report.first
    runs: ComparedRuns = report.runs[report.findings.index(report.first)]
    having = runs.having
    text = f"{text_of(axes)}: {finding}".replace("\\", "/").replace('"""', "'''")
    named, check = _checked(axes, finding, runs)
    compared = having is not runs.one
    return _PROGRAM.format(
        finding=text,
        num=world_size_of(axes),
        subject=f"{finding.what} of {finding.module}".replace("\\", "/"),
        one=_literal(_yaml(runs.one)),
        run=_literal(_yaml(having)),
        model=_literal(_model(having)),
        axes=repr(dict(axes)),
        named=named,
        check=check,
        alike=runs.alike,
        dropout=runs.dropout,
        wide=runs.wide,
        saves="folder" if runs.saves else '""',
        ranks='take_steps(pool, RUN, AXES, model, saves, "layout")' if compared else "[one]",
    )


def _checked(axes: Mapping[str, int], finding: Any, runs: ComparedRuns) -> tuple[str, str]:
    """Return the body of `named`, and the lines that check what it returns."""
    what, _, name = str(finding.what).partition(" (")
    name = name.removesuffix(")")
    is_tensor = axes and finding.excess is not None and runs.having.parallel.zero == 0
    if is_tensor and what in _MODULES and not name:
        body = (
            f"    calls = record.modules.get({finding.module!r})\n"
            f"    return [] if calls is None else calls.{_MODULES[what]}"
        )
        return body, _SLICES.format(fits="gap is None or gap <= tolerance")
    if is_tensor and what in _TENSORS and re.fullmatch(r"[\w.]+", name):
        kept = _TENSORS[what]
        body = f"    return [record.{kept}[{name!r}]] if {name!r} in record.{kept} else []"
        return body, _SLICES.format(fits="gap is not None and gap <= tolerance")
    if axes:
        call = "first_difference(one, ranks, AXES)"
    elif runs.having is runs.one:
        call = "alone_difference(ranks[0])"
    else:
        # rounds are fed other parts of the samples of a step
        lines = "    for record in ranks:\n        record.inputs.clear()\n"
        call = f"first_difference(one, ranks, {{{finding.axis!r}: 1}})"
        return "    return record", lines + _ANY.format(call=call)
    return "    return record", _ANY.format(call=call)


def _yaml(config: RunConfig) -> str:
    """Return the run without keys that have their defaults."""
    return write(config.model_dump(mode="python", exclude_defaults=True))


def _model(config: RunConfig) -> str:
    return "" if config.model.hf is None else Path(config.model.hf).read_text()


def _literal(text: str) -> str:
    """Return a text as a Python literal, a line of it on each line."""
    lines = text.splitlines(keepends=True)
    if not lines:
        return '""'
    return "(\n" + "".join(f"    {line!r}\n" for line in lines) + ")"
