"""`optim.ema_decay`: averages on every layout are those of one process, through a resume on another
one, in a validation, and as `tdp export --ema` and `tdp eval --ema` take them.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train import parity
from torchdistpackage.checkpoint.commit import latest
from torchdistpackage.checkpoint.formats.source import checkpoint_source
from torchdistpackage.checkpoint.manifest import read_manifest
from torchdistpackage.errors import CheckpointError
from torchdistpackage.train.train_state import TrainState, resume, save_state
from torchdistpackage.train.weight_averages import average_name

RUN = ["model.layers=4", "model.dim=16", "model.heads=2", "data.seq_len=16", "data.global_batch=8"]
RUN += ["pipeline.microbatches=2", "precision.dtype=float64", "optim.lr=0.02", "optim.clip=0"]
RUN += ["optim.ema_decay=0.7", "train.eval_batches=1", "train.eval_ema=true", "train.steps=9"]
LAYOUTS = {
    "data2-zero3": ["parallel.data=2", "parallel.zero=3"],
    "pipe2xtensor2-zero1": ["parallel.pipe=2", "parallel.tensor=2", "parallel.zero=1"],
    "data2": ["parallel.data=2"],
    "data2-zero1": ["parallel.data=2", "parallel.zero=1"],
    "data2-zero2": ["parallel.data=2", "parallel.zero=2"],
    "data2-muon-zero2": ["parallel.data=2", "parallel.zero=2", "optim.name=muon"],
    "context2-sgd": ["parallel.context=2", "optim.name=sgd", "optim.momentum=0"],
}
Found = tuple[parity.Held, parity.Held, float | None]


def averaged(overrides: list[str], saved: str = "", resumed: str = "") -> Found:
    """(averages, weights, validation) after three steps. saved, resumed: a folder, of step 2."""
    run = parity.trainer(overrides)
    done = resume(run, Path(resumed), "auto").step if resumed else 0
    for step in range(done + 1, 4):
        run.train_step(step).wait()
        if step == 2 and saved:
            save_state(run, TrainState(step=2), Path(saved), keep_last=1)
    loss = run.evaluate()
    with run.update.averaged():
        averages = parity.held(run, "data")
    return averages, parity.held(run, "data"), loss


def by_hand(overrides: list[str]) -> Found:
    """The same of one process without averages of its own."""
    plain = [x for x in overrides if "ema" not in x]
    run = parity.trainer(plain)
    parameters = list(run.stage.parameters())
    averages = [p.detach().clone() for p in parameters]
    for step in range(1, 4):
        run.train_step(step).wait()
        for average, p in zip(averages, parameters, strict=True):
            average.mul_(0.7).add_(p.detach(), alpha=0.3)
    weights = parity.held(run, "data")
    for average, p in zip(averages, parameters, strict=True):
        p.data.copy_(average)
    return parity.held(run, "data"), weights, run.evaluate()


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=() if i < 2 else pytest.mark.full) for i, x in enumerate(LAYOUTS)],
)
def test_averages_are_those_of_one_process(ranks, tmp_path, layout):
    changes = LAYOUTS[layout]
    optimizer = [x for x in changes if x.startswith("optim.")]
    ((averages, weights, loss),) = ranks(1).run(by_hand, [*RUN, *optimizer])
    size = 4 if "x" in layout else 2
    found = ranks(size).run(averaged, [*RUN, *changes], str(tmp_path))
    parity.expect_close([mine for mine, *_ in found], [averages])
    parity.expect_close([mine for _, mine, _ in found], [weights])
    for *_, own in found:
        assert own == pytest.approx(loss, rel=1e-9)
    if optimizer:
        return
    other = ranks(2).run(averaged, [*RUN, "parallel.pipe=2"], "", str(tmp_path))
    parity.expect_close([mine for mine, *_ in other], [averages])


@pytest.mark.parametrize("evaluates", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_run_is_exported_and_evaluated_by_its_averages(tdp, tmp_path, evaluates):
    (tmp_path / "run.yaml").write_text(f"run: {{dir: {tmp_path}/runs, name: r}}")
    words = [*RUN, "train.steps=3", "parallel.data=2", "parallel.zero=2", "log.plot=false"]
    words += ["checkpoint.save_every=3", "train.generate_tokens=0", "precision.dtype=float32"]
    words += ["model.norm=rms", "model.mlp=swiglu"]
    words = list({x.partition("=")[0]: x for x in words}.values())
    code, said = tdp(["train", str(tmp_path / "run.yaml"), *words])
    assert code == 0, said
    run = tmp_path / "runs" / "r"
    path = latest(run / "checkpoints")
    assert path is not None
    code, said = tdp(["export", str(run), str(tmp_path / "hf"), "--ema"])
    assert code == 0, said
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    source = checkpoint_source(path)
    averages = [source.read(n) for n in source.tensors if n.endswith("#ema")]
    table = exported["model.embed_tokens.weight"]
    assert sum(torch.equal(table, x) for x in averages) == 1
    manifest = read_manifest(path)
    weights = {n: x for n, x in manifest.tensors.items() if not n.endswith("#ema")}
    assert average_name(manifest, "embed.weight", path) == "embed.weight#ema"
    with pytest.raises(CheckpointError, match=r"no averages .* optim.ema_decay"):
        average_name(replace(manifest, tensors=weights), "embed.weight", path)
    losses: list[float] = []
    for more in (["--ema"], []) if evaluates else ():
        code, said = tdp(["eval", str(run), "--json", *more])
        assert code == 0, said
        losses.append(json.loads(said.splitlines()[-1])["loss"])
    assert losses == sorted(losses, reverse=True), "averages of a falling loss are behind"
