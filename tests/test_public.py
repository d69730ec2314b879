"""The package as others import it: each name is there, documented, and loaded on first use."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchdistpackage
from tests.deprecations import FILTERS
from tests.package_files import HAS_WING
from torchdistpackage import errors

REPOSITORY = Path(__file__).parents[1]


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    filters = (f"-W{each}" for each in FILTERS.split(","))
    command = [sys.executable, *filters, "-c", code]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_public_names_are_there_and_documented():
    pytest.importorskip("torch")
    for name in torchdistpackage.__all__:
        thing = getattr(torchdistpackage, name)
        assert len(inspect.getdoc(thing) or "") > 20, name
        module, _, attribute = torchdistpackage.NAMES[name].partition(":")
        assert getattr(sys.modules[f"torchdistpackage.{module}"], attribute) is thing, name


def test_public_names_are_where_they_say():
    """A re-exported name could move unnoticed; classes and functions know their own module."""
    pytest.importorskip("torch")
    for name, place in torchdistpackage.NAMES.items():
        thing = getattr(torchdistpackage, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert f"{thing.__module__}:{thing.__name__}" == f"torchdistpackage.{place}"


def test_public_names_hide_no_folder():
    """`import torchdistpackage.topology` sets an attribute, which a public name would lose to."""
    folder = Path(torchdistpackage.__file__).parent
    inside = {path.stem for path in folder.iterdir()}
    assert inside.isdisjoint(torchdistpackage.__all__)


def test_all_errors_are_public():
    raised = {n for n, e in vars(errors).items() if inspect.isclass(e) and issubclass(e, Exception)}
    assert raised <= set(torchdistpackage.__all__)
    assert all(getattr(torchdistpackage, name) is getattr(errors, name) for name in raised)


def test_the_tree_of_errors_is_the_one_in_their_module():
    above: list[str] = []
    told: dict[str, str] = {}
    for indent, name in re.findall(r"^( *)(\w+Error)\b", str(errors.__doc__), re.MULTILINE):
        above[len(indent) // 2 :] = [name]
        told[name] = above[-2] if above[1:] else "Exception"
    assert told == {
        n: e.__bases__[0].__name__ for n, e in vars(errors).items() if inspect.isclass(e)
    }


def test_dir_shows_what_there_is():
    shown = dir(torchdistpackage)
    assert set(torchdistpackage.__all__) <= set(shown)
    assert "__version__" in shown and "fwd_hook_wrapper" not in shown
    with pytest.raises(AttributeError, match="'torchdistpackage' has no attribute 'NaivDDP'"):
        torchdistpackage.NaivDDP  # noqa: B018


def test_the_version_is_that_of_the_metadata():
    setup = (REPOSITORY / "setup.py").read_text(encoding="utf-8")
    assert re.findall(r'version="(.+?)"', setup) == [torchdistpackage.__version__]


def test_importing_the_package_loads_only_itself():
    code = """
import sys
before = set(sys.modules)
import torchdistpackage
print(*sorted(set(sys.modules) - before))
"""
    loaded = python(code).split()
    below = ("compat", "compat.paths", "errors", "lazy") if HAS_WING else ()
    ours = ["torchdistpackage", *(f"torchdistpackage.{name}" for name in below)]
    assert [name for name in loaded if name.startswith("torchdistpackage")] == ours
    assert not {"torch", "numpy", "pydantic", "yaml", "rich"} & set(loaded)


def test_a_pure_name_is_used_without_torch():
    code = f"""
import sys
sys.modules["torch"] = None
from torchdistpackage import build_schedule, load_config, make_topology, simulate
print(make_topology([("data", None), ("pipe", 2)], 8).dense.axis_size("data"))
print(f"{{simulate(build_schedule('1f1b', 2, 4)).bubble:.3f}}")
print(load_config({str(REPOSITORY / "configs" / "gpt_tiny.yaml")!r}).parallel.pipe)
"""
    assert python(code).split() == ["4", "0.200", "2"]


LOOK_FOR_SIDE_EFFECTS = """
import importlib, json, logging, os, pkgutil, random, signal, sys, threading, warnings

def state():
    root = logging.getLogger()
    return {
        "environment": dict(os.environ),
        "warning filters": [str(f) for f in warnings.filters],
        "showwarning": repr(warnings.showwarning),
        "root logger": [root.level, [repr(h) for h in root.handlers], logging.root.manager.disable],
        "logger class": repr(logging.getLoggerClass()),
        "our loggers": {
            name: [logger.level, logger.propagate, [repr(h) for h in logger.handlers]]
            for name, logger in logging.root.manager.loggerDict.items()
            if name.startswith("torchdistpackage") and isinstance(logger, logging.Logger)
            and (logger.level or logger.handlers or not logger.propagate)
        },
        "folder": os.getcwd(),
        "path": list(sys.path),
        "finders": [repr(f) for f in sys.meta_path if "OldPaths" not in repr(f)],
        "excepthook": repr(sys.excepthook),
        "signals": [repr(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "random": hash(random.getstate()),
        "threads": sorted(t.name for t in threading.enumerate()),
    }

def modules():
    import torchdistpackage
    yield "torchdistpackage"
    for info in pkgutil.walk_packages(torchdistpackage.__path__, "torchdistpackage."):
        if not info.name.endswith("__main__"):
            yield info.name

# The first import brings in what others do when imported. Then all is put back as it was, and the
# second one runs our modules alone.
environment, filters, root = dict(os.environ), list(warnings.filters), logging.getLogger()
names = []
for name in modules():
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # an extra that is not installed
        if error.name not in {"wandb", "mlflow"}:
            raise
    else:
        names.append(name)
os.environ.clear()
os.environ.update(environment)
warnings.filters[:] = filters
root.handlers.clear()
root.setLevel(logging.WARNING)
for name in [n for n in logging.root.manager.loggerDict if n.startswith("torchdistpackage")]:
    del logging.root.manager.loggerDict[name]
for name in [n for n in sys.modules if n.partition(".")[0] == "torchdistpackage"]:
    del sys.modules[name]
changed = {}
for name in names:
    before = state()
    importlib.import_module(name)
    after = state()
    if different := [key for key in before if before[key] != after[key]]:
        changed[name] = different
print(json.dumps({"num_modules": len(names), "changed": changed}))
"""


@pytest.mark.full
def test_importing_changes_nothing_for_others():
    """No module touches logging, warnings, environment, signals or random numbers when imported."""
    pytest.importorskip("torch")
    seen = json.loads(python(LOOK_FOR_SIDE_EFFECTS).splitlines()[-1])
    assert seen["num_modules"] > 60
    assert seen["changed"] == {}
