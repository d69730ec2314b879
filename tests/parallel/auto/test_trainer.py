"""Hugging Face's Trainer with a model split over ranks, beside the Trainer of one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.parallel.auto.models import VOCAB, language_model
from torchdistpackage import ZeroOptimizer, tensor_parallel, tpc
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto import prepare_trainer

RANKS_IMPORT = ("transformers.trainer",)
GLOBAL_BATCH = 4


def model() -> Any:
    return language_model("llama")


def samples(num: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of which some positions have no label, more or fewer."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for at in range(num):
        ids = torch.randint(2, VOCAB, (7,), generator=draw)
        labels = ids.clone()
        labels[: at % 4] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def metrics(predicted: Any) -> dict[str, float]:
    """Of all samples, each once and in order."""
    weights = torch.arange(1, len(predicted.predictions) + 1, dtype=torch.float64)
    of_sample = torch.from_numpy(predicted.predictions).square().sum((1, 2))
    return {"samples": len(predicted.predictions), "weighted": float(of_sample @ weights)}


def arguments(folder: Path, **changes: Any) -> transformers.TrainingArguments:
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": GLOBAL_BATCH,
        "per_device_eval_batch_size": GLOBAL_BATCH,
        "max_steps": 4,
        "learning_rate": 0.01,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "logging_first_step": True,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # or accelerate sets it, with a warning
    return transformers.TrainingArguments(**{**options, **changes})


def run(model: Any, args: Any, prepare: Any, **options: Any) -> None:
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=samples(24, 1),
        eval_dataset=samples(7, 2),
        compute_metrics=metrics,
        **options,
    )
    trainer = prepare(trainer)
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model()
    if args.should_save:
        logs = [log for log in trainer.state.log_history if "grad_norm" in log]
        told = {"logs": logs, "evaluated": found, "batch": trainer.get_total_train_batch_size(args)}
        Path(args.output_dir, "told.json").write_text(json.dumps(told))


def over_ranks(folder: Path, axes: list[tuple[str, int]], changes: dict[str, Any], zero: int):
    tpc.setup_process_groups(axes)
    with one_of_many():
        split = tensor_parallel(model())
        each = GLOBAL_BATCH // tpc.get_group_size("data") // changes.get(ACCUMULATE, 1)
        args = arguments(folder, **changes, per_device_train_batch_size=each)

        def prepare(trainer: Any) -> Any:
            if zero:
                adam = torch.optim.AdamW(split.parameters(), lr=0.01, weight_decay=0.0)
                trainer.optimizer = ZeroOptimizer(adam, split, stage=zero)
            return prepare_trainer(trainer)

        run(split, args, prepare)


ACCUMULATE = "gradient_accumulation_steps"


class one_of_many:
    """The variables of torchrun, and accelerate's state of this process begun anew."""

    def __enter__(self) -> None:
        from accelerate.state import AcceleratorState

        rank, num = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.patch = pytest.MonkeyPatch()
        for name in ("", "LOCAL_"):
            self.patch.setenv(f"{name}RANK", str(rank))
            self.patch.setenv(f"{name}WORLD_SIZE", str(num))
        AcceleratorState._reset_state(reset_partial_state=True)

    def __exit__(self, *error: object) -> None:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        self.patch.undo()


def same_run(folder: Path, has_data: bool) -> None:
    told = [json.loads((folder / name / "told.json").read_text()) for name in ("one", "many")]
    one, many = told
    assert many["batch"] == one["batch"] == GLOBAL_BATCH
    assert len(one["logs"]) == len(many["logs"]) == 4
    for ours, theirs in zip(many["logs"], one["logs"], strict=True):
        assert theirs["grad_norm"] > 0.5  # so that it is clipped
        for name in ("loss", "grad_norm", "learning_rate"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6), name
    evaluated = [each["evaluated"] for each in told]
    # over data ranks the Trainer's mean counts the sample that fills up their last batch
    for name in ("eval_samples", "eval_weighted", *(() if has_data else ("eval_loss",))):
        assert evaluated[1][name] == pytest.approx(evaluated[0][name], rel=1e-9), name
    files = [load_file(folder / name / "model.safetensors") for name in ("one", "many")]
    assert list(files[0]) == list(files[1])
    torch.testing.assert_close(files[1], files[0], atol=1e-8, rtol=0)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "many", dtype="auto")
    torch.testing.assert_close(dict(loaded.state_dict()), files[1], check_dtype=True)


@pytest.mark.parametrize(
    ("axes", "changes", "zero"),
    [
        ([("data", 2), ("tensor", 2)], {}, 0),
        pytest.param([("tensor", 2)], {}, 0, marks=pytest.mark.full),
        pytest.param([("tensor", 2), ("data", 2)], {}, 0, marks=pytest.mark.full),
        pytest.param([("data", 2), ("tensor", 2)], {ACCUMULATE: 2}, 0, marks=pytest.mark.full),
        pytest.param([("data", 2), ("tensor", 2)], {}, 1, marks=pytest.mark.full),
        pytest.param([("data", 2), ("tensor", 2)], {}, 3, marks=pytest.mark.full),
    ],
)
@pytest.mark.late_in_full
def test_as_the_trainer_of_one_process(ranks, tmp_path, axes, changes, zero):
    as_one_process(ranks, tmp_path, axes, changes, zero)


def as_one_process(
    ranks: Any, tmp_path: Path, axes: list[tuple[str, int]], changes: dict[str, Any], zero: int
) -> None:
    one = {**changes, "per_device_train_batch_size": GLOBAL_BATCH // changes.get(ACCUMULATE, 1)}
    options = {}
    whole = model()
    if zero:
        adam = torch.optim.AdamW(whole.parameters(), lr=0.01, weight_decay=0.0)
        options["optimizers"] = (adam, None)
    run(whole, arguments(tmp_path / "one", **one), lambda trainer: trainer, **options)
    num = 1
    for _, size in axes:
        num *= size
    ranks(num).run(over_ranks, tmp_path / "many", axes, changes, zero)
    same_run(tmp_path, has_data=len(axes) > 1)


def refused(folder: Path) -> None:
    with one_of_many():
        split = tensor_parallel(model())
        saving = {"save_strategy": "steps", "eval_strategy": "steps", "fp16_full_eval": False}
        args = arguments(folder, **saving, load_best_model_at_end=True)
        trainer = transformers.Trainer(model=split, args=args, eval_dataset=samples(1, 1))
        with pytest.raises(LayoutError, match="tpc is not set up; call tpc"):
            prepare_trainer(trainer)
        tpc.setup_process_groups([("data", 2), ("tensor", 2)])
        with pytest.raises(LayoutError) as caught:
            prepare_trainer(trainer)
        for text in (
            r"split over ranks (0, 1, 2, 3), tpc's tensor group is",
            "the first rank's part of the optimizer's state alone; pass save_only_model=True",
            "load_best_model_at_end loads whole weights into shards",
        ):
            assert text in str(caught.value)
        whole = transformers.Trainer(model=model(), args=arguments(folder))
        with pytest.raises(LayoutError, match="is a LlamaForCausalLM in one process; split"):
            prepare_trainer(whole)


def test_what_cannot_be(ranks, tmp_path):
    ranks(4).run(refused, tmp_path)
