"""Packed documents that do not see each other: the same as if each were run alone."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.data.texts import json_lines, pairs, sentences
from tests.train import parity
from tests.train.inference_ranks import answer
from tests.train.test_transformers import MODELS
from torchdistpackage.config.packages import is_before
from torchdistpackage.data.packing import PackedDataset
from torchdistpackage.data.tokens.token_cache import tokenized
from torchdistpackage.errors import ConfigError
from torchdistpackage.parallel.tensor.attention import document_mask
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.inference_request import EvalRequest, EvalResult, TrainedWeights

RUN = [
    *(
        "data.seq_len=32",
        "data.global_batch=4",
        "pipeline.microbatches=2",
        "train.steps=3",
        "optim.warmup_steps=1",
    ),
    *("train.eval_batches=1", "precision.dtype=float64", "data.name=jsonl"),
    "data.document_masks=true",
    "data.packing=wrapped",
]
OURS = ["model.layers=2", "model.dim=16", "model.heads=4", "model.vocab=300"]
LEARNED = [*OURS, "model.position=learned"]
ROTARY = [*OURS, "model.position=rotary", "model.kv_heads=2", "model.norm=rms", "model.mlp=swiglu"]
SEQUENCE = ["parallel.tensor=2", "parallel.sequence_parallel=true"]


def gradients(overrides: list[str]) -> tuple[list[float], parity.Held]:
    """((loss sum, count), gradients) of a step, where this rank has them."""
    run = parity.trainer([*RUN, *overrides])
    totals = run.accumulate(1)
    run.close()
    return totals.tolist(), parity.held(run, "grad")


def one_by_one(overrides: list[str]) -> tuple[list[float], parity.Held, int]:
    """The same of one process that runs every document of the batch alone; and their number."""
    run = parity.trainer([*RUN, *overrides])
    model, sums, number = run.stage["0"], torch.zeros(2, dtype=torch.float64), 0
    for row in zip(*run.batches.of_training(1, 0), strict=True):
        begins = [*(row[2] == 0).nonzero().flatten().tolist(), len(row[2])]
        for begin, end in pairwise(begins):
            ids, targets, _ = (x[None, begin:end] for x in row)
            number += 1
            with run.reducer.no_sync():
                total, count = model.loss(model(ids), targets)
                total.backward()
            sums += torch.stack([total.detach(), count])
    run.close()
    return sums.tolist(), parity.held(run, "grad"), number


@pytest.fixture
def where(tmp_path) -> list[str]:
    """Short documents, several in a sample; prompts do not count."""
    source = pairs(tmp_path, [(t[:8], t[8:60] + "x") for t in sentences(60)])
    return [
        f"data.path={source.path}",
        f"data.tokenizer={source.tokenizer}",
        "data.field=prompt+completion",
        f"data.cache={tmp_path}/cache",
    ]


def expect_equal(ranks, where: list[str], model: list[str], layout: list[str], world: int) -> None:
    ((sums, grads, number),) = ranks(1).run(one_by_one, [*where, *model])
    assert number > 8, "several documents in a sample"
    found = ranks(world).run(gradients, [*where, *model, *layout])
    total = [sum(column) for column in zip(*(x[0] for x in found), strict=True)]
    assert total == pytest.approx(sums, rel=1e-12)
    parity.expect_close((without_zeros(x[1]) for x in found), [without_zeros(grads)])


def without_zeros(grads: parity.Held) -> parity.Held:
    """But for biases that a softmax takes out, of whose gradients there is only rounding."""
    return [x for x in grads if not (".decoder.layers." in x[0] and x[0].endswith("k_proj.bias"))]


@pytest.mark.parametrize(
    ("model", "layout", "world"),
    [
        pytest.param(LEARNED, [], 1, id="one-learned"),
        pytest.param(LEARNED, SEQUENCE, 2, id="sequence-learned"),
        pytest.param(ROTARY, ["parallel.pipe=2"], 2, id="pipe-rotary"),
        pytest.param(ROTARY, ["parallel.context=2"], 2, id="parts-rotary"),
        *(
            pytest.param(model, layout, world, id=f"{name}-{kind}", marks=pytest.mark.full)
            for kind, model in (("learned", LEARNED), ("rotary", ROTARY))
            for name, layout, world in (
                ("data", ["parallel.data=2", "pipeline.microbatches=1"], 2),
                ("tensor", ["parallel.tensor=2"], 2),
                ("sequence", SEQUENCE, 2),
                ("overlap", [*SEQUENCE, "parallel.tp_comm_overlap=true"], 2),
                ("pipe", ["parallel.pipe=2", "pipeline.schedule=zb-h1"], 2),
                ("chunks", ["parallel.pipe=2", "pipeline.schedule=zb-v"], 2),
                ("both", ["parallel.pipe=2", *SEQUENCE], 4),
                ("zero", ["parallel.data=2", "pipeline.microbatches=1", "parallel.zero=3"], 2),
                ("blocks", ["parallel.pipe=2", "train.recompute=blocks"], 2),
                ("context", ["parallel.context=2", "parallel.cp_comm_type=all_gather"], 2),
                ("context4", ["parallel.context=4", "parallel.cp_comm_type=a2a+p2p"], 4),
                (
                    "context, blocks",
                    ["parallel.pipe=2", "parallel.context=2", "train.recompute=blocks"],
                    4,
                ),
            )
        ),
    ],
)
def test_losses_and_gradients_are_those_of_the_documents_one_by_one(
    ranks, where, model, layout, world
):
    expect_equal(ranks, where, model, layout, world)


def config_json(folder: Path, name: str) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**MODELS[name], "vocab_size": 300}))
    return path


FAMILIES = [name for name in MODELS if "alibi" not in name and name != "bloom"]


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_modules_of_transformers_take_them_too(ranks, where, tmp_path, name):
    model = [f"model.hf={config_json(tmp_path, name)}"]
    layout = ["parallel.pipe=2", "parallel.tensor=2"]
    if name != "gemma2":
        expect_equal(ranks, where, model, [], 1)
        expect_equal(ranks, where, model, layout, 4)
        return
    # its softmax is in float32, so numbers that a mask hides leave a trace
    ((sums, _, _),) = ranks(1).run(one_by_one, [*where, *model])
    ((packed, grads),) = ranks(1).run(gradients, [*where, *model])
    assert packed == pytest.approx(sums, rel=1e-7)
    found = ranks(4).run(gradients, [*where, *model, *layout])
    parity.expect_close((x[1] for x in found), [grads])


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "short_factor": [1.0, 1.1, 1.2],
        "long_factor": [2.0, 3.0, 4.0],
    },
}


def losses_of_ropes(files: list[str], where: list[str]) -> list[tuple[float, list[float]]]:
    """For each model the loss of documents one by one, and of a step in 1, 2 and 4 micro-batches,
    the second time it is asked for."""
    found = []
    for file in files:
        model = [*where, f"model.hf={file}"]
        sums = []
        for num in (1, 2, 4):
            run = parity.trainer([*RUN, *model, f"pipeline.microbatches={num}"])
            run.accumulate(2)
            sums.append(run.accumulate(1).tolist()[0])
            run.close()
        found.append((one_by_one(model)[0][0], sums))
    return found


def test_rotary_lengths_are_of_each_document_not_of_its_neighbours(ranks, where, tmp_path):
    """transformers takes the longest of a batch, and of earlier ones."""
    key, files = "rope_scaling" if is_before("transformers", "5") else "rope_parameters", []
    for name, rope in ROPES.items():
        model = MODELS["llama"] | {"vocab_size": 300, "max_position_embeddings": 8, "head_dim": 6}
        files.append(str(tmp_path / f"{name}.json"))
        Path(files[-1]).write_text(json.dumps({**model, key: {**rope, "rope_theta": 1e4}}))
    (found,) = ranks(1).run(losses_of_ropes, files, where)
    for alone, packed in found:
        assert packed == pytest.approx([alone] * 3, rel=1e-11)


@pytest.mark.parametrize(
    "name", ["mistral", *(pytest.param(x, marks=pytest.mark.full) for x in ("llama", "opt"))]
)
def test_modules_of_transformers_take_them_in_parts(ranks, where, tmp_path, name):
    """Documents travel as the mask of each layer, also where blocks are computed again."""
    model = [f"model.hf={config_json(tmp_path, name)}"]
    layout = ["parallel.pipe=2", "parallel.context=2", "train.recompute=blocks"]
    expect_equal(ranks, where, model, layout, 4)


@pytest.mark.parametrize("name", ["bloom", "falcon, alibi"])
def test_documents_whose_distances_are_counted_get_rows_of_their_own(where, tmp_path, name):
    """Steps of BLOOM are in tests/models/test_transformers_documents.py."""
    run = parity.config([*RUN, *where, f"model.hf={config_json(tmp_path, name)}"])
    model = make_plan(run, 1).model
    assert model is not None and "row of its own" in dict(model.goes_with())["document_masks"]


def of_an_epoch(folder: str, packing: str) -> tuple[float, int]:
    """(Sum of the tokens' losses, their number) of all documents, one sample after another."""
    run = parity.trainer([*RUN[:-3], *ROTARY, "data.name=python_stdlib", "data.packing=auto"])
    source = pairs(Path(folder), [(t[:8], t[8:60] + "x") for t in sentences(60)])
    options = {"vocab": 300, "seq_len": 32, "global_batch": 4, "val_fraction": 0.0}
    data = PackedDataset(
        tokenized(source, Path(folder) / "cache"),
        packing=packing,
        document_masks=packing != "none",
        **options,
    )
    total, number = 0.0, 0
    for sample in range(data.num_samples["train"]):
        ids, targets, *positions = data.batch("train", 1, 1, 0, 1, 1, first=sample)
        model = run.stage["0"]
        loss, count = model.loss(model(ids, *positions), targets)
        total, number = total + loss.item(), number + int(count)
    run.close()
    return total, number


def test_chats_of_a_row_each_have_the_loss_of_packed_ones(ranks, tmp_path):
    ((alone, number),) = ranks(1).run(of_an_epoch, str(tmp_path), "none")
    ((packed, same),) = ranks(1).run(of_an_epoch, str(tmp_path), "whole")
    assert number == same > 500 and alone == pytest.approx(packed, rel=1e-12)


def test_without_masks_they_are_not(ranks, where):
    ((masked, _),) = ranks(1).run(gradients, [*where, *ROTARY])
    ((seen, _),) = ranks(1).run(gradients, [*where, *ROTARY, "data.document_masks=false"])
    assert masked[1] == seen[1] and abs(masked[0] - seen[0]) > 1e-4


def evaluated(overrides: list[str]) -> float | None:
    run = parity.trainer([*RUN, *overrides])
    found = run.evaluate()
    run.close()
    return found


@pytest.mark.full
def test_validation_is_masked_alike_on_two_layouts(ranks, where):
    (one,) = ranks(1).run(evaluated, [*where, *LEARNED])
    four = ranks(4).run(evaluated, [*where, *LEARNED, "parallel.pipe=2", *SEQUENCE])
    assert four == pytest.approx([one] * 4, rel=1e-12)


def asked_of(overrides: list[str]) -> EvalResult:
    """What `tdp eval` says of all documents."""
    found, _ = answer(".", parity.config([*RUN, *overrides]), TrainedWeights(), EvalRequest(True))
    assert isinstance(found, EvalResult)
    return found


@pytest.mark.full
def test_an_evaluation_is_masked_too(ranks, where):
    (one,) = ranks(1).run(asked_of, [*where, *LEARNED])
    (seen,) = ranks(1).run(asked_of, [*where, *LEARNED, "data.document_masks=false"])
    assert one.num_tokens == seen.num_tokens and abs(one.loss - seen.loss) > 1e-6
    four = ranks(4).run(asked_of, [*where, *LEARNED, "parallel.data=2", "parallel.tensor=2"])
    assert [x.num_tokens for x in four] == [one.num_tokens] * 4
    assert [x.loss for x in four] == pytest.approx([one.loss] * 4, rel=1e-12)


def test_a_mask_is_of_documents_and_of_what_came_before():
    found = document_mask(torch.tensor([[0, 1, 0, 1, 2, 0]]))
    assert found.shape == (1, 1, 6, 6)
    rows = ["100000", "110000", "001000", "001100", "001110", "000001"]
    assert ["".join(map(str, row)) for row in found[0, 0].int().tolist()] == rows


@pytest.mark.parametrize("split", ["train", "val"])
def test_positions_begin_again_with_each_document_and_in_each_sample(tmp_path, split):
    text = tokenized(json_lines(tmp_path, sentences(40)), tmp_path / "cache")
    options = {"vocab": 300, "seq_len": 16, "global_batch": 8, "val_fraction": 0.2}
    plain = PackedDataset(text, **options)
    data = PackedDataset(text, **options, document_masks=True)
    eos, steps = text.eos, -(-data.num_samples[split] // 8)
    for step in range(1, steps + 1):
        ids, targets, positions = data.batch(split, 7, step, 0, 1, 8)
        without = plain.batch(split, 7, step, 0, 1, 8)
        assert torch.equal(ids, without[0]) and torch.equal(targets, without[1])
        for row in range(8):
            count = 0
            for at in range(16):
                assert positions[row, at] == count or (ids[row, at:] == 0).all()
                count = 0 if ids[row, at] == eos else count + 1
        # resumed at this step, in another layout
        fresh = PackedDataset(text, **options, document_masks=True)
        parts = [fresh.batch(split, 7, step, d, 2, 4) for d in range(2)]
        for i, whole in enumerate((ids, targets, positions)):
            assert torch.equal(torch.cat([part[i] for part in parts]), whole)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([], "needs data.tokenizer"),
        (
            [
                *("data.name=text", f"data.path={Path(__file__)}", "data.tokenizer=t"),
                *("model.name=null", "model.target=x:y", "model.loss=x:z"),
            ],
            "needs positions, but model.target=x:y",
        ),
    ],
)
def test_runs_that_cannot_have_masks_are_refused(overrides, text):
    with pytest.raises(ConfigError, match=text):
        parity.config(["data.document_masks=true", *overrides])
