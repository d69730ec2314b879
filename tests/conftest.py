"""Fixtures of all tests. Torch is imported by the ranks alone, so the pure tests run without it."""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests import deprecations

if TYPE_CHECKING:
    from torchdistpackage.harness.pool import RankPool, Ranks
    from torchdistpackage.launch.fork_server_client import ForkServer

# On a loaded machine a deadline would be a coin toss, and a red run must be red again.
for name, examples in (("small set", 20), ("full", 200)):
    hypothesis.settings.register_profile(
        name, deadline=None, derandomize=True, database=None, max_examples=examples
    )


UNDER_LATE = ("ddp/", "comm/", "parallel/", "optim/", "compat/")
"""Folders whose bodies run under the late transport too: in the small set the first case, on no
other."""
_EVERY = ("tests.deprecations", "pytest", "torch.testing")
_OPTIMIZERS = (*_EVERY, "torch._dynamo")
_RUNS = (
    *(*_OPTIMIZERS, "torchdistpackage.train.worker", "torchdistpackage.cli.train"),
    "torchdistpackage.models.gpt",
)
_TRANSFORMERS = (
    *(*_RUNS, "transformers.models.gpt2.modeling_gpt2"),
    "transformers.models.llama.modeling_llama",
)
PRELOAD = {
    **dict.fromkeys(("environment", "launch", "layout", "topology"), _EVERY),
    **dict.fromkeys(("comm", "compat", "ddp", "harness", "parallel", "tools"), _OPTIMIZERS),
    **dict.fromkeys(("checkpoint", "data", "examples", "optim"), _RUNS),
    **dict.fromkeys(("cli", "docs", "models", "plan", "train"), _TRANSFORMERS),
}
"""Folder -> what its ranks import, once for all: a first optimizer alone imports torch._dynamo,
which takes seconds. Of other folders all. Files whose tests ask for ranks are imported too; what
these load later than at their import, a file names as `RANKS_IMPORT`."""
_DEAR = {
    "torch._dynamo": re.compile(r"optim|compile"),
    "transformers": re.compile(r"transformers|hugging|llama|gpt2|lora|\bhf\b"),
}
"""Imports that take seconds each -> what a file whose ranks need them says, or a file of tests that
it imports. Where one guesses wrong, ranks import by themselves."""
_ON_RANKS = re.compile(r"^def test_\w+\([^)]*\b(?:ranks|pool|tdp|forks)\b", re.MULTILINE)
_RANKS_IMPORT = re.compile(r"^RANKS_IMPORT = (\([^)]*\))", re.MULTILINE)
OWN_TRANSPORT = pytest.StashKey[dict[str, str]]()
"""Bodies there that test gloo's own transport -> why."""


@dataclass
class LeftOut:
    """How many bodies, and cases of others, the small set leaves out, by the names of files."""

    bodies: Counter[str] = field(default_factory=Counter)
    cases: Counter[str] = field(default_factory=Counter)


LEFT_OUT = pytest.StashKey[LeftOut | None]()
"""What no items are made of; None where all are made, as where cases are asked for by name."""


EARLY = pytest.StashKey["RankPool"]()
"""Ranks whose server began before the tests were collected."""


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Generator[RankPool]:
    if early := request.config.stash.get(EARLY, None):
        yield early
        return
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    preload = [x for item in items for x in PRELOAD.get(_folder_of(item.path), _TRANSFORMERS)]
    preload += [x for item in items for x in getattr(item.module, "RANKS_IMPORT", ())]
    # what a rank calls is in these, and each would import them by itself
    preload += [item.module.__name__ for item in items if "pool" in item.fixturenames]
    with _pool(preload) as pool:
        yield pool


def _pool(preload: Sequence[str]) -> RankPool:
    from torchdistpackage.testing import RankPool

    return RankPool(preload=[*dict.fromkeys(preload)], warnings=deprecations.FILTERS)


def _folder_of(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).parts[0]


def pytest_collection(session: pytest.Session) -> None:
    """Let the server of ranks import what one file needs while that file is collected.

    Each imports torch, which takes most of the time of one test.
    """
    config = session.config
    paths = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    refused = config.option.collectonly or config.pluginmanager.has_plugin("tests.no_torch")
    if len(paths) != 1 or refused:
        return
    (path,) = paths
    if not path.is_file() or not path.is_relative_to(Path(__file__).parent):
        return
    text = path.read_text("utf-8")
    if _ON_RANKS.search(text):
        named = _RANKS_IMPORT.search(text)
        imports = ast.literal_eval(named[1]) if named else ()
        name = path.relative_to(Path(__file__).parents[1]).with_suffix("")
        early = _pool([*_needed(path, text), *imports, ".".join(name.parts)])
        assert early.server.folder  # which starts it
        config.stash[EARLY] = early


def _needed(path: Path, text: str) -> list[str]:
    """Return what of the preload of its folder the ranks of one file need."""
    root = Path(__file__).parents[1]
    for module in re.findall(r"^from (tests\.[\w.]+) import", text, re.MULTILINE):
        helper = root.joinpath(*module.split(".")).with_suffix(".py")
        text += helper.read_text("utf-8") if helper.is_file() else ""
    preload = PRELOAD.get(_folder_of(path), _TRANSFORMERS)
    if path.relative_to(Path(__file__).parent).as_posix().startswith(UNDER_LATE):
        text += "compile"  # the modes of the late transport are hidden from it, which imports it
    needless = tuple(name for name, words in _DEAR.items() if not words.search(text))
    return [name for name in preload if not name.startswith(needless)]


def pytest_unconfigure(config: pytest.Config) -> None:
    if early := config.stash.get(EARLY, None):
        early.close()


@pytest.fixture
def small_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots of code have a package of one file in the place of ours, which takes half a second
    to copy."""
    from torchdistpackage.launch.slurm import snapshot

    package = tmp_path / "installed" / "torchdistpackage"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(snapshot, "PACKAGE", package)


@pytest.fixture
def forks(
    pool: RankPool, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that `run_local` starts, and processes that tokenize, are forks of the pool's server,
    which has imported torch.

    For tests that are about what they do, and not how their server begins and ends.
    """
    from torchdistpackage.data.tokens import token_workers
    from torchdistpackage.launch import workers

    pool(1).run("os:getpid")  # or the server would begin in what a test sets in the environment

    def borrow(preload: Sequence[str]) -> _Borrowed:
        return _Borrowed(pool.server, tmp_path_factory.mktemp("ranks"))

    for module in (workers, token_workers):
        monkeypatch.setattr(module, "ForkServer", borrow)


@pytest.fixture
def tdp(forks: None, capfd: pytest.CaptureFixture[str]) -> Callable[[list[str]], tuple[int, str]]:
    """`tdp words...` in this process: its exit code, and what it and its ranks said, in order."""
    from torchdistpackage.cli.main import main

    def run(words: list[str]) -> tuple[int, str]:
        with contextlib.ExitStack() as stack:
            own = os.dup(2)
            stack.callback(os.close, own)
            stack.callback(os.dup2, own, 2)
            os.dup2(1, 2)
            stack.enter_context(contextlib.redirect_stderr(sys.stdout))
            code = main(words)
        return code, capfd.readouterr().out

    return run


class _Borrowed:
    """A fork server with a folder of the borrower's, which stays when the borrower closes it."""

    def __init__(self, server: ForkServer, folder: Path):
        self._server, self.folder = server, folder

    def __enter__(self) -> _Borrowed:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest, pool: RankPool) -> RankPool | _Under:
    """`ranks(4).run(fn, ...)` calls fn on 4 ranks that live as long as the session."""
    transport = getattr(request, "param", "gloo")
    return pool if transport == "gloo" else _Under(pool, transport)


class _Under:
    """A pool, or its ranks, whose runs are under a transport."""

    def __init__(self, of: RankPool | Ranks, transport: str):
        self._of, self._transport = of, transport

    def __call__(self, world_size: int) -> _Under:
        return _Under(self._of(world_size), self._transport)

    def run(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self._of.run(*args, **{"transport": self._transport, **kwargs})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the tests are collected: none of them is garbage
    config.stash[OWN_TRANSPORT] = {}
    small = config.getoption("markexpr") == "not full"
    by_name = any("::" in argument for argument in config.args)
    config.stash[LEFT_OUT] = LeftOut() if small and not by_name else None
    hypothesis.settings.load_profile("small set" if small else "full")
    for number in (signal.SIGINT, signal.SIGQUIT):  # a lane of scripts/test has them ignored
        if signal.getsignal(number) is signal.SIG_IGN:
            default = signal.SIG_DFL if number is signal.SIGQUIT else signal.default_int_handler
            signal.signal(number, default)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the collected tests, a million objects, out of each garbage collection; end ranks that
    began early and that no test asks for."""
    early = session.config.stash.get(EARLY, None)
    if early and not any("pool" in getattr(x, "fixturenames", ()) for x in session.items):
        early.close()
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_warning_recorded(warning_message: warnings.WarningMessage, nodeid: str) -> None:
    """What this process is warned of; ranks write of theirs by themselves."""
    deprecations.write(
        warning_message.category,
        warning_message.message,
        f"{warning_message.filename}:{warning_message.lineno} in {nodeid}",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[pytest.Item] | None:
    """Make no items of a body that the small set leaves out whole: most would be made in vain."""
    left_out = collector.config.stash[LEFT_OUT]
    if left_out is None or not collector.istestfunction(obj, name):
        return None
    marks = {mark.name for mark in (*collector.iter_markers(), *getattr(obj, "pytestmark", ()))}
    if "full" not in marks:
        return None
    left_out.bodies[collector.path.name] += 1
    return []


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None]:
    """Make every body on ranks of these folders run under both transports; then mark the cases
    that are not of the small set, and make no items of them where it alone is run."""
    path = metafunc.definition.path.relative_to(Path(__file__).parent)
    late = path.as_posix().startswith(UNDER_LATE)
    if "ranks" in metafunc.fixturenames and late:
        if mark := metafunc.definition.get_closest_marker("own_transport"):
            (reason,) = mark.args
            metafunc.config.stash[OWN_TRANSPORT][f"{path}::{metafunc.definition.name}"] = reason
        else:
            both = [pytest.param("gloo", id=pytest.HIDDEN_PARAM), "late"]
            metafunc.parametrize("ranks", both, indirect=True, scope="session")
    yield
    cases = metafunc._calls  # what pytest makes items of, for which it has no public name
    full = _of_the_full_set(metafunc.definition, cases)
    left_out = metafunc.config.stash[LEFT_OUT]
    if left_out is None or len(full) == len(cases):  # without a case pytest makes one of no values
        for case in full:
            case.marks.append(pytest.mark.full.mark)
    else:
        if full:
            left_out.cases[path.name] += len(full)
        metafunc._calls = [case for case in cases if not any(case is other for other in full)]


def _of_the_full_set(body: pytest.Function, cases: Sequence[Any]) -> list[Any]:
    """Return the cases of `body` that are not of the small set.

    Late cases beyond the first of a body are more cases of the same body; so are all of one that is
    about time, memory or names more than about calls (`late_in_full`). Of a body with `few(n)`, so
    are all others but n, which are spread evenly over its cases. The case that is late is not run
    on gloo alone as well: what lies under the late transport is gloo.
    """
    full = [case for case in cases if _mark(body, case, "full")]
    rest = [case for case in cases if not _mark(body, case, "full")]
    late = [case for case in rest if case.params.get("ranks") == "late"]
    kept = [case for case in rest if case.params.get("ranks") != "late"]
    if few := body.get_closest_marker("few"):
        (number,) = few.args
        step = max((len(kept) - 1) / max(number - 1, 1), 1)
        at = {round(place * step) for place in range(number)}
        full += [case for place, case in enumerate(kept) if place not in at]
        kept = [case for place, case in enumerate(kept) if place in at]
    if late and not _mark(body, late[0], "late_in_full"):
        full += [case for case in kept if _same_case(case, late[0])]
        late = late[1:]
    return full + late


def _mark(body: pytest.Function, case: Any, name: str) -> bool:
    """Whether a case has this mark, by itself or as all of its body have."""
    return body.get_closest_marker(name) is not None or any(
        mark.name == name for mark in case.marks
    )


def _same_case(case: Any, other: Any) -> bool:
    """Whether they differ at most by the transport."""
    first, second = (
        {name: value for name, value in x.params.items() if name != "ranks"} for x in (case, other)
    )
    return all(first[name] is second[name] for name in first)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what each folder cost, what the small set left out, and what runs on gloo alone."""
    seconds: Counter[str] = Counter()
    for report in (x for found in terminalreporter.stats.values() for x in found):
        if isinstance(report, pytest.TestReport):
            seconds["/".join(report.nodeid.split("/")[:2]).partition("::")[0]] += report.duration
    if seconds:
        folders = ", ".join(f"{name} {cost:.1f}" for name, cost in seconds.most_common())
        terminalreporter.write_line(f"seconds by folder: {folders}")
    if own := config.stash[OWN_TRANSPORT]:
        reasons = ", ".join(f"{why} {number}" for why, number in Counter(own.values()).items())
        terminalreporter.write_line(f"not under the late transport: {len(own)} bodies ({reasons})")
    left_out = config.stash[LEFT_OUT] or LeftOut()
    for item in terminalreporter.stats.get("deselected", []):
        if item.get_closest_marker("full"):
            left_out.cases[item.path.name] += 1
    bodies, cases = left_out.bodies, left_out.cases
    if bodies.total() or cases.total():
        files = ", ".join(f"{name} {number}" for name, number in (bodies + cases).items())
        terminalreporter.write_line(
            f"left out: {bodies.total()} bodies with all their cases, and {cases.total()} cases of "
            f"others ({files}); ./scripts/test --full runs them"
        )
