"""The host-list parser against the scontrol of the Slurm that is installed here."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

import pytest

from tests.slurm.cluster import ROOT
from torchdistpackage.environment.slurm_env import MAX_HOSTS, expand
from torchdistpackage.errors import LaunchError

CORPUS = json.loads((ROOT / "tests" / "environment" / "hostlist_corpus.json").read_text())


@pytest.fixture(scope="module")
def capture() -> ModuleType:
    """scripts/capture_hostlists, the program that wrote the corpus."""
    loader = SourceFileLoader("capture_hostlists", str(ROOT / "scripts" / "capture_hostlists"))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def parsed(text: str) -> list[str] | None:
    try:
        return list(expand(text))
    except LaunchError:
        return None


def differences(capture: ModuleType, cluster, texts: list[str]) -> dict[str, tuple]:
    """{list: (ours, scontrol's)} where the two are not equal; None is a refusal.

    Ours is to refuse also what is longer than the longest list it takes.
    """
    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(lambda text: capture.ask(text, cluster.env), texts)
        rows = [(text, parsed(text), answer) for text, answer in zip(texts, answers, strict=True)]
    return {
        text: (ours, answer)
        for text, ours, answer in rows
        if ours != (None if answer and len(answer) > MAX_HOSTS else answer)
    }


EVERY = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.full)])
"""How many lists stand for one that is asked about: each is a process. What was recorded,
tests/environment/test_slurm_env_hostlist.py compares whole."""


@EVERY
def test_the_recorded_corpus(cluster, capture, every):
    texts = [row["text"] for row in CORPUS["lists"]]
    assert len(texts) == 540
    assert differences(capture, cluster, texts[::every]) == {}


@EVERY
def test_500_lists_that_the_corpus_has_not(cluster, capture, every):
    recorded = {row["text"] for row in CORPUS["lists"]}
    texts = [text for text in capture.generated(1000)[0] if text not in recorded]
    assert len(texts) == 500
    assert 20 < sum(parsed(text) is None for text in texts) < 200
    assert differences(capture, cluster, texts[::every]) == {}


def test_the_node_list_of_a_job_on_this_cluster(cluster):
    nodes = ",".join(cluster.node_states())
    folded = cluster.run("scontrol", "show", "hostlist", nodes).stdout.strip()
    assert folded == "n[1-5]"
    assert ",".join(expand(folded)) == nodes
