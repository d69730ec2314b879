"""The public names of `torchdistpackage.parallel`: all there, none loaded before it is used."""

import subprocess
import sys

import pytest

from torchdistpackage import parallel


@pytest.mark.parametrize("name", parallel.__all__)
def test_every_name_is_there_and_documented(name: str):
    pytest.importorskip("torch")
    thing = getattr(parallel, name)
    assert thing.__name__ == name
    assert thing.__doc__


def test_another_name_is_refused():
    with pytest.raises(AttributeError, match="has no attribute 'TpMpl'"):
        parallel.TpMpl  # noqa: B018


def test_pure_files_load_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import torchdistpackage.parallel, torchdistpackage.parallel.tensor.layouts\n"
        "import torchdistpackage.models.registry, torchdistpackage.models.gpt_layout\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
