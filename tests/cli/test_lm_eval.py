"""`tdp eval --lm-eval` has the metrics of lm-eval's own adapter of the same folder."""

import json
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml

from tests.data.texts import save_lines, save_tokenizer, sentences
from tests.models import hugging_face_folders as folders
from tests.models.hugging_face_ranks import VOCAB
from tests.train.inference_ranks import answer, run_in
from torchdistpackage.cli import _inference
from torchdistpackage.cli import eval as eval_command
from torchdistpackage.cli.main import main

needs_lm_eval = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm-eval is no dependency: its own adapter is the peer"
)
LAYOUTS = {
    "one": [],
    "tensor2": ["--tensor", "2"],
    "pipe2": ["--pipe", "2"],
    "data2": ["parallel.data=2"],
}


@pytest.fixture
def pooled(ranks, monkeypatch):
    monkeypatch.setattr(_inference, "run_local", run_in(ranks))


def task_files(folder: Path) -> Path:
    """Tasks of the three kinds of requests, with their data beside them."""
    folder.mkdir()
    texts = sentences(7)
    rows = [
        {"text": x, "question": x[:12], "choices": [" alpha", " beta x", " nu"], "answer": i % 3}
        for i, x in enumerate(texts)
    ]
    data = save_lines(folder / "rows.jsonl", rows)
    kinds = {
        "choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "text": {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{text}}",
            "generation_kwargs": {"until": ["e"], "max_gen_toks": 6},
            "metric_list": [{"metric": "exact_match"}, {"metric": "chrf"}],
        },
    }
    for name, kind in kinds.items():
        options = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
        source = {"dataset_path": "json", "dataset_kwargs": options, "test_split": "test"}
        text = yaml.safe_dump({"task": f"tiny_{name}", **source, **kind})
        (folder / f"{name}.yaml").write_text(text)
    return folder


TASKS = "tiny_choice,tiny_rolling,tiny_text"


def of_hflm(folder: Path, tasks: Path, template: str | None = None, **chat: object) -> dict:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    with folders.everywhere_float64():
        return simple_evaluate(
            HFLM(model, tokenizer=tokenizer, batch_size=3, device="cpu"),
            tasks=TASKS.split(","),
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=True,
            **chat,
        )


@needs_lm_eval
@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_metrics_are_those_of_lm_evals_own_adapter(pooled, tmp_path, capsys):
    source = save_tokenizer(folders.save("llama", tmp_path / "source"), VOCAB)
    tasks = task_files(tmp_path / "tasks")
    truth = of_hflm(source, tasks)["results"]
    assert truth["tiny_choice"]["acc,none"] not in (0, 1) and truth["tiny_text"]["chrf,none"] > 0
    capsys.readouterr()
    command = ["eval", str(source), "--lm-eval", TASKS, "--task-path", str(tasks), "--json"]
    for options in LAYOUTS.values():
        assert main([*command, "precision.dtype=float64", *options]) == 0
        values = json.loads(capsys.readouterr().out)["results"]
        for task, metrics in truth.items():
            numbers = {k: x for k, x in metrics.items() if isinstance(x, int | float)}
            assert {k: values[task][k] for k in numbers} == pytest.approx(numbers, rel=1e-9)


CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITHOUT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
)
CHATS = {
    "multiturn": (CHATML, [], {"fewshot_as_multiturn": True}),
    "one turn": (CHATML, ["--no-fewshot-as-multiturn"], {"fewshot_as_multiturn": False}),
    "no system": (WITHOUT_SYSTEM, ["--fewshot-as-multiturn"], {"fewshot_as_multiturn": True}),
}


def sampled(*args: object) -> tuple[object, dict]:
    """What a rank answers, and of each request of a task (its texts, its results)."""
    from torchdistpackage.train import lm_eval_model

    kept: dict[str, list] = {}
    plain = lm_eval_model.simple_evaluate

    def with_samples(*args, **kwargs):
        found = plain(*args, **{**kwargs, "log_samples": True})
        kept.update(requests_of(found.pop("samples")))
        return found

    with mock.patch.object(lm_eval_model, "simple_evaluate", with_samples):
        return answer(*args)[0], kept


def requests_of(samples: dict[str, list[dict]]) -> dict[str, list]:
    return {
        task: [(x["doc_id"], x["arguments"], x["resps"]) for x in rows]
        for task, rows in samples.items()
    }


@needs_lm_eval
@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CHATS)
def test_chats_are_the_requests_of_lm_evals_own_adapter(ranks, tmp_path, capsys, monkeypatch, kind):
    """Examples, a description, a system's message, and an answer that the prompt begins."""
    template, options, chat = CHATS[kind]
    source = save_tokenizer(folders.save("llama", tmp_path / "source"), VOCAB)
    (source / "chat_template.jinja").write_text(template)
    tasks = task_files(tmp_path / "tasks")
    for name, more in (("choice", {"gen_prefix": "So: "}), ("text", {})):
        file = tasks / f"{name}.yaml"
        settings = {**yaml.safe_load(file.read_text()), "num_fewshot": 1, "description": "Say."}
        file.write_text(yaml.safe_dump(settings | more))
    said = {"apply_chat_template": True, "system_instruction": "Be brief.", **chat}
    truth = of_hflm(source, tasks, template, **said)
    capsys.readouterr()
    found: dict[str, list] = {}

    def run_local(_, args, *, num_procs, preload):
        answers = ranks(num_procs).run(sampled, str(Path.cwd()), False, *args)
        found.update(answers[0][1])
        return [x for x, _ in answers]

    monkeypatch.setattr(_inference, "run_local", run_local)
    command = ["eval", str(source), "--lm-eval", TASKS, "--task-path", str(tasks), "--json"]
    command += ["--apply-chat-template", "--system-instruction", "Be brief.", *options]
    expected = requests_of(truth["samples"])
    first = expected["tiny_choice"][0][1]
    assert "<|user|>" in str(first) and ("Be brief." in str(first)) == (kind != "no system")
    for layout in LAYOUTS.values():
        assert main([*command, "precision.dtype=float64", *layout]) == 0
        assert found.keys() == expected.keys()
        for task, rows in expected.items():
            for mine, other in zip(found[task], rows, strict=True):
                assert mine[:2] == other[:2]
                for ours, theirs in zip(mine[2], other[2], strict=True):
                    expect_equal(ours[0], theirs[0])


def expect_equal(mine: object, other: object) -> None:
    """Of texts, log-likelihoods, or those with whether they are greedy, as samples write them."""
    if not isinstance(other, str | float | bool):
        for one, each in zip(mine, other, strict=True):
            expect_equal(one, each)
        return
    try:
        expected = float(other)
    except ValueError:
        assert mine == other
    else:
        assert float(mine) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("layout", [[], ["--tokenizer", "other"]], ids=["none", "other"])
def test_a_chat_without_a_template_is_refused(tmp_path, capsys, monkeypatch, layout):
    source = save_tokenizer(folders.save("llama", tmp_path / "source"), VOCAB)
    save_tokenizer(tmp_path / "other", VOCAB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(eval_command, "find_spec", lambda _: None)
    command = ["eval", str(source), "--lm-eval", "tiny", *layout]
    assert main([*command, "--apply-chat-template"]) == 2
    folder = layout[1] if layout else str(source)
    text = " ".join(capsys.readouterr().err.split())
    assert "--apply-chat-template" in text and folder in text
    assert main([*command, "--fewshot-as-multiturn"]) == 2
    assert "--apply-chat-template" in capsys.readouterr().err


def test_what_cannot_be_evaluated_is_refused_together(tmp_path, capsys, monkeypatch):
    source = save_tokenizer(folders.save("llama", tmp_path / "source"), VOCAB)
    monkeypatch.setattr(eval_command, "find_spec", lambda _: None)
    missing = ["--task-path", str(tmp_path / "no"), "--data", str(source / "config.json")]
    assert main(["eval", str(source), "--lm-eval", "tiny", *missing]) == 2
    text = capsys.readouterr().err
    assert 'pip install "torchdistpackage[lm-eval]"' in text
    assert "--task-path" in text and "--data has no effect" in text
    assert main(["eval", str(source), "--limit", "3"]) == 2
    assert "--limit has no effect without --lm-eval" in capsys.readouterr().err
    (source / "tokenizer.json").unlink()
    assert main(["eval", str(source), "--lm-eval", "tiny"]) == 2
    assert "no tokenizer" in capsys.readouterr().err


@needs_lm_eval
@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_an_unknown_task_and_a_broken_one_are_refused(pooled, tmp_path, capsys):
    source = save_tokenizer(folders.save("llama", tmp_path / "source"), VOCAB)
    tasks = task_files(tmp_path / "tasks")
    command = ["eval", str(source), "--task-path", str(tasks), "--lm-eval"]
    assert main([*command, "no_such_task"]) == 2
    assert "no_such_task" in capsys.readouterr().err
    broken = yaml.safe_load((tasks / "text.yaml").read_text())
    broken["generation_kwargs"]["max_gen_toks"] = 99
    (tasks / "text.yaml").write_text(yaml.safe_dump(broken))
    assert main([*command, "tiny_text", "--tensor", "2"]) != 0
    assert "99 new tokens" in capsys.readouterr().err
