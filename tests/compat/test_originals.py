"""Each public name of the earlier libraries is where it was, or the page says that it is not.

`originals.yaml` lists the names by their modules; the page's last section has what is absent. So
neither a name that is lost nor one that comes back goes unseen.
"""

import importlib
import re
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parent
ORIGINALS = yaml.safe_load((HERE / "originals.yaml").read_text(encoding="utf-8"))
NAMES = {
    (library if not path else f"{library}.{path}"): names
    for library, modules in ORIGINALS.items()
    for path, names in modules.items()
}
ROW = re.compile(r"^\| ((?:`[^`]+`(?:, )?)+) \| ([^|]+) \| [^|]+ \|$", re.M)


def absent() -> dict[str, set[str] | None]:
    """Module -> names that it has not; None: it is not there itself."""
    page = (HERE.parents[1] / "docs" / "coming_from.md").read_text(encoding="utf-8")
    section = page.partition("\n## Names that are not there\n")[2]
    found: dict[str, set[str] | None] = {}
    for modules, names in ROW.findall(section):
        for module in re.findall(r"`([^`]+)`", modules):
            assert module not in found, f"{module} has two rows"
            found[module] = None if names == "all" else set(re.findall(r"`([^`]+)`", names))
    return found


ABSENT = absent()


def module_of(path: str) -> object:
    """Ours in place of the earlier module `path`."""
    prefix = "" if path.partition(".")[0] == "torchdistpackage" else "torchdistpackage.compat."
    return importlib.import_module(prefix + path)


def test_the_page_speaks_of_earlier_names_alone():
    assert ABSENT
    for path, names in ABSENT.items():
        assert path in NAMES, path
        assert names is None or names <= set(NAMES[path]), path


@pytest.mark.parametrize("path", NAMES)
def test_a_name_is_where_it_was_or_the_page_says_that_it_is_not(path: str):
    pytest.importorskip("torch")
    if ABSENT.get(path, set()) is None:
        with pytest.raises(ModuleNotFoundError):
            module_of(path)
        return
    module = module_of(path)
    missing = {name for name in NAMES[path] if not has(module, name)}
    assert missing == ABSENT.get(path, set())


def has(module: object, name: str) -> bool:
    """Whether `module` has the name, of a class as `Class.x`."""
    owner, _, attribute = name.partition(".")
    return hasattr(module, owner) and (not attribute or hasattr(getattr(module, owner), attribute))
