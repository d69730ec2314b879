"""The YAML of the pages of tasks is that of runs with a plan."""

import re
from pathlib import Path

import pytest

from tests.data.texts import save_tokenizer
from tests.train.test_transformers import MODELS
from tests.train.transformers_ranks import save_model
from torchdistpackage.config.load import load
from torchdistpackage.plan.run_plan import local_procs, make_plan

DOCS = Path(__file__).parents[2] / "docs"
SIZES = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4}
CONFIG = {**MODELS["llama"], **SIZES, "vocab_size": 300, "pad_token_id": 0}
PAGES = {"heads": 1, "embedding": 1, "preference": 2, "distill": 2}
"""The number of blocks of YAML on each page."""


@pytest.mark.parametrize("page", PAGES)
def test_each_block_has_a_plan(ranks, tmp_path, monkeypatch, page):
    """Of a part of a run, with the model and data of the first block."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.M | re.S)
    assert len(blocks) == PAGES[page]
    for name in {x for block in blocks for x in re.findall(r"\./([\w.-]+)", block)}:
        ranks(1).run(save_model, CONFIG, str(save_tokenizer(tmp_path / name)))
    monkeypatch.chdir(tmp_path)
    keys = dict(re.findall(r"^(\w+): (.*)$", blocks[0], re.M))
    for block in blocks:
        keys |= dict(re.findall(r"^(\w+): (.*)$", block, re.M))
        Path("run.yaml").write_text("".join(f"{key}: {text}\n" for key, text in keys.items()))
        config = load(Path("run.yaml"), ["run.dir=runs"])
        plan = make_plan(config, local_procs(config))
        assert plan.config.model.hf is not None and (plan.teacher is None) == (page != "distill")
