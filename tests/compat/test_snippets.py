"""The snippets of other packages' pages, run one by one with the import changed.

A snippet stands here as printed. What else had to change to run it stands in `CHANGES`, with the
reason, and nowhere else.
"""

from __future__ import annotations

import doctest
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.comm.runtime import find_free_port
from torchdistpackage.compat import tplib

IMPORTS = {
    "from tplib import": "from torchdistpackage.compat.tplib import",
    "import torchshard as ts": "import torchdistpackage.compat.torchshard as ts",
    "import tensor_parallel as tp": "import torchdistpackage.compat.tensor_parallel as tp",
}

SNIPPETS = {
    "tplib: start": """
from tplib import init_dist_env

init_dist_env(world_size=2, rank=0, distributed_init_method="tcp://localhost:23456")
""",
    "tplib: worker": """
from tplib import Worker

def print_rank(rank):
    print(f"I am process {rank}")

worker = Worker(world_size=2)

worker.run(print_rank)
""",
    "tplib: groups": """
from tplib import init_model_parallel

init_model_parallel(tp_size=2)
""",
    "tplib: asking": """
from tplib import model_parallel_is_initialized

if model_parallel_is_initialized():
    return True
else:
    return False
""",
    "ts: init_process_group": """
>>> import torch
>>> import torchshard as ts
>>> torch.distributed.init_process_group(
        backend='nccl',
        init_method='tcp://127.0.0.1:8000',
        world_size=2,
        rank=0 # on Rank 0 / rank=1 on Rank 1
    )
>>> ts.distributed.init_process_group(group_size=2)
""",
    "ts: get_rank": """
>>> import torchshard as ts
>>> current_rank = ts.distributed.get_rank()
>>> current_rank
>>> 0 # Rank 0
>>> 1 # Rank 1
""",
    "ts: get_world_size": """
>>> import torchshard as ts
>>> world_size = ts.distributed.get_world_size()
>>> world_size
>>> 2 # Rank 0
>>> 2 # Rank 1
""",
    "ts: get_group_size": """
>>> import torchshard as ts
>>> group_size = ts.distributed.get_group_size()
>>> group_size
>>> 2 # Rank 0
>>> 2 # Rank 1
""",
    "ts: scatter": """
>>> import torchshard as ts
>>> input = torch.Tensor(6, 8)
>>> input.shape
torch.Size([6, 8])
>>> output = ts.distributed.scatter(input, dim=0)
>>> output.shape
torch.Size([3, 8])
>>> output = ts.distributed.scatter(input, dim=1)
>>> output.shape
torch.Size([6, 4])
""",
    "ts: gather": """
>>> import torchshard as ts
>>> input = torch.Tensor(6, 8)
>>> input.shape
torch.Size([6, 8])
>>> output = ts.distributed.gather(input, dim=0)
>>> output.shape
torch.Size([12, 8])
>>> output = ts.distributed.gather(input, dim=1)
>>> output.shape
torch.Size([6, 16])
""",
    "ts: reduce": """
>>> import torchshard as ts
>>> tensor = torch.arange(2, dtype=torch.int64) + 1 + 2 * rank
>>> tensor
tensor([1, 2]) # Rank 0
tensor([3, 4]) # Rank 1
>>> ts.distributed.reduce(tensor)
>>> tensor
tensor([4, 6]) # Rank 0
tensor([4, 6]) # Rank 1
""",
    "tp: start": """
import transformers
import tensor_parallel as tp
tokenizer = transformers.AutoTokenizer.from_pretrained("facebook/opt-13b")
model = transformers.AutoModelForCausalLM.from_pretrained("facebook/opt-13b")  # use opt-125m for testing

model = tp.tensor_parallel(model, ["cuda:0", "cuda:1"])  # <- each GPU has half the weights

inputs = tokenizer("A cat sat", return_tensors="pt")["input_ids"].to("cuda:0")
outputs = model.generate(inputs, num_beams=5)
print(tokenizer.decode(outputs[0])) # A cat sat on my lap for a few minutes ...

model(input_ids=inputs, labels=inputs).loss.backward()  # training works as usual
""",  # noqa: E501
    "tp: saving": """
import torch
import transformers
import tensor_parallel as tp

model = tp.tensor_parallel(
    transformers.AutoModelForCausalLM.from_pretrained("facebook/opt-13b"),
)

# A whole lot of trainig...

with tp.save_tensor_parallel(model):
    torch.save(model.state_dict(), "/tmp/")
    # or
    model.save_pretrained("/tmp/")
""",
    "tp: dispatch": """
import accelerate
import transformers

import tensor_parallel as tp

# Initialize a weightless tensor_parallel model from MyModel
with accelerate.init_empty_weights():
    model = tp.TensorParallel(
        MyModel(),
        device_ids=[0, 1] # and prepare it to be put on GPUs 0 and 1
    )

# Load partial state_dict for MyModel
state_dict = torch.load("my_model_part_1_of_5.bin")

# Convert it into a tensor_parallel state_dict
tensor_parallel_state_dict = tp.convert_state_dict(
    state_dict,
    tensor_parallel_config=model.tensor_parallel_config,
    world_size=len(model.devices),
)

# Dispatch the partial state_dict (load_state_dict doesn't work with meta so here I use accelerate)
device_map = tp.infer_sharded_device_map(model)
for param_name, param in state_dict.items():
    module_name = param_name
    while len(module_name) > 0 and module_name not in device_map:
        module_name = ".".join(module_name.split(".")[:-1])
    param_device = device_map[module_name]
    accelerate.utils.set_module_tensor_to_device(model, param_name, param_device, value=param)
""",
    "ts: copy": """
>>> import torchshard as ts
>>> input = torch.Tensor(6, 8)
>>> input = ts.distributed.copy(input)
""",
}

PROMPT = "the page puts a prompt before the outputs"
CHANGES = {
    "tplib: start": [
        ("rank=0", "rank=RANK", "the snippet is that of rank 0 only; a peer is supplied"),
        ("23456", "PORT", "a port that is free on the machine of the tests"),
    ],
    "tplib: asking": [
        ("return True", "answer = True", "a script cannot return"),
        ("return False", "answer = False", "a script cannot return"),
    ],
    "ts: init_process_group": [
        ("'nccl'", "'gloo'", "torch itself refuses nccl without a GPU"),
        ("rank=0 # on Rank 0 / rank=1 on Rank 1", "rank=RANK", "a peer is supplied"),
        ("8000", "PORT", "a port that is free on the machine of the tests"),
        ("\n    ", "\n...     ", "the page leaves out the prompts of continued lines"),
    ],
    "tp: start": [
        ('"facebook/opt-13b"', '"opt"', "a small model of the same architecture"),
        ('"cuda:0", "cuda:1"', '"cpu", "cpu"', "a machine without GPUs"),
        ('.to("cuda:0")', "", "a machine without GPUs"),
    ],
    "tp: saving": [
        ('"facebook/opt-13b"),', '"opt"), ["cpu"] * 2', "a small model; no GPUs to find"),
        ('.state_dict(), "/tmp/"', '.state_dict(), "state.bin"', "a file, as a folder is none"),
        ('save_pretrained("/tmp/")', 'save_pretrained("saved")', "a folder of the test"),
    ],
    "tp: dispatch": [
        (
            "device_ids=[0, 1]",
            'device_ids=["cpu"] * 2, sharded=False',
            "no GPUs; the page's package refuses to shard a model on the meta device too",
        ),
        (
            "in state_dict.items",
            "in tensor_parallel_state_dict.items",
            "the page goes through the names that were not converted, which no shard has",
        ),
    ],
    "ts: get_rank": [(">>> 0", "0", PROMPT), (">>> 1", "1", PROMPT)],
    "ts: get_world_size": [(">>> 2", "2", PROMPT)],
    "ts: get_group_size": [(">>> 2", "2", PROMPT)],
    "ts: reduce": [
        (">>> ts.dist", ">>> _ = ts.dist", "the tensor is returned, which a prompt would show"),
    ],
}
"""Snippet -> (as printed, as run, why). Besides, `torch` and `rank` are there, as the text says."""


def as_run(name: str, rank: int, port: str) -> str:
    """The snippet for this rank."""
    text = SNIPPETS[name]
    for printed, ours in IMPORTS.items():
        text = text.replace(printed, ours)
    for printed, ours, _ in CHANGES.get(name, ()):
        assert printed in text, f"{printed!r} is not in the snippet any more"
        text = text.replace(printed, ours)
    return text.replace("RANK", str(rank)).replace("PORT", port)


def of_this_rank(text: str, rank: int) -> str:
    """Without the outputs of other ranks; those of all ranks stand below each other."""
    kept = [x for x in text.splitlines() if (m := re.search(r"# Rank (\d)", x)) is None
            or int(m[1]) == rank]  # fmt: skip
    return "\n".join(line.partition(" # Rank")[0].rstrip() for line in kept) + "\n"


def by_prompt(name: str, rank: int, port: str) -> dict:
    """Run the snippet as if typed; what it leaves, if all that it shows is as printed."""
    text = of_this_rank(as_run(name, rank, port), rank)
    left: dict = {"torch": torch, "rank": rank}
    test = doctest.DocTestParser().get_doctest(text, left, name, None, None)
    seen: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    failed, tried = runner.run(test, out=seen.append, clear_globs=False)
    assert tried >= 2 and not failed, "".join(seen)
    return test.globs


def page_of_tplib(folder: Path, port: str) -> None:
    """Its snippets in the order of the page, in processes that have joined nothing yet."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)

    def run(name: str) -> dict:
        script = folder / f"{name.split(': ')[1]}{rank}.py"
        script.write_text(as_run(name, rank, port))
        return runpy.run_path(str(script))

    run("tplib: start")
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
    assert tplib.get_local_rank() == rank
    assert run("tplib: asking")["answer"] is False
    run("tplib: groups")
    assert run("tplib: asking")["answer"] is True
    total = tplib.tp_all_reduce(torch.ones(1))
    assert total.tolist() == [2]
    tplib.destroy_dist_env()


def test_the_page_of_tplib(ranks, tmp_path):
    ranks(2).run(page_of_tplib, tmp_path, find_free_port())


@pytest.mark.full  # tests/compat/test_worker.py has scripts of its own
def test_the_worker_of_tplib_as_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(as_run("tplib: worker", 0, ""))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["I am process 0", "I am process 1"]


@pytest.mark.full
def test_the_script_of_the_page_on_coming_from_tplib(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "coming_from.md"
    text = page.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    (tmp_path / "script.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(page.parents[1])}
    command = [sys.executable, str(tmp_path / "script.py")]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout == text.rpartition("# ")[2] == "[(0, 9), (1, 9)]\n"


def opt(**options):
    import transformers as hf

    sizes = {"hidden_size": 24, "word_embed_proj_dim": 24, "ffn_dim": 37, "num_hidden_layers": 2}
    config = hf.OPTConfig(**sizes, num_attention_heads=4, vocab_size=99, **options)
    return hf.OPTForCausalLM(config).eval()


def test_the_page_of_tensor_parallel(tmp_path, monkeypatch, capsys):
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    whole = opt()
    whole.generation_config.max_new_tokens = 5
    whole.save_pretrained("opt")
    words = {"[UNK]": 0, "A": 1, "cat": 2, "sat": 3, **{f"w{i}": i for i in range(4, 99)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained("opt")

    def run(name: str) -> dict:
        (tmp_path / "script.py").write_text(as_run(name, 0, ""))
        return runpy.run_path("script.py", {"torch": torch, "MyModel": opt})

    left = run("tp: start")
    expected = whole.generate(left["inputs"], num_beams=5)
    assert torch.equal(left["outputs"], expected) and "A cat sat" in capsys.readouterr().out
    assert all(p.grad is not None for p in left["model"].parameters() if p.requires_grad)
    run("tp: saving")
    for found in (torch.load("state.bin"), opt().from_pretrained("saved").state_dict()):
        torch.testing.assert_close(dict(found), dict(whole.state_dict()), atol=0, rtol=0)
    torch.save(whole.state_dict(), "my_model_part_1_of_5.bin")
    model = run("tp: dispatch")["model"].eval()
    logits = [each(left["inputs"]).logits for each in (model, whole)]
    torch.testing.assert_close(*logits, atol=1e-6, rtol=0)  # float32: sums of two parts


def page_of_torchshard(port: str) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    for name in (name for name in SNIPPETS if name.startswith("ts: ")):
        left = by_prompt(name, rank, port)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SNIPPETS, "ts: scatter", SNIPPETS["ts: scatter"].replace("3, 8", "3, 9"))
        with pytest.raises(AssertionError, match=r"Got:\s+torch\.Size\(\[3, 8\]\)"):
            by_prompt("ts: scatter", rank, port)  # outputs are really compared
    # what the last one says of gradients
    x = torch.ones(6, 8, requires_grad=True)
    copied = left["ts"].distributed.copy(x)
    (copied * (1 + rank)).sum().backward()
    assert torch.equal(copied, x) and torch.equal(x.grad, torch.full((6, 8), 3.0))
    left["ts"].distributed.destroy_process_group()
    dist.destroy_process_group()


def test_the_page_of_torchshard(ranks):
    ranks(2).run(page_of_torchshard, find_free_port())


def test_every_change_has_a_reason():
    assert set(CHANGES) <= set(SNIPPETS)
    assert all(why for changes in CHANGES.values() for _, _, why in changes)
