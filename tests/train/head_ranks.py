"""What ranks do with heads, and transformers' own models with heads in one process beside them."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.data.texts import WORDS, save_lines, save_tokenizer
from tests.train import parity
from tests.train.lora_ranks import plain, quiet
from tests.train.preference_ranks import trainer
from tests.train.transformers_ranks import (
    Answer,
    adam_of,
    everywhere_float64,
    logged_steps,
    set_rate,
    whole,
)
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.models.transformers_meta import build_options
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.build import build_data

STEPS, EOS, PAD = 3, 1, 0
NAMES = ("red", "green", "blue")
RUN = ["train.dpo={}", "data.val_fraction=0.3", "train.eval_batches=2"]
"""Changes to those of `preference_ranks.RUN`."""
KEYS = {
    "classification": ["data.name=classification"],
    "weighted": ["data.name=classification", "data.class_weights=[0.5, 2.0, 1.0]"],
    "multi_label": ["data.name=classification", "data.multi_label=true"],
    "regression": ["data.name=regression"],
    "token_classification": ["data.name=token_classification"],
    "reward": ["data.name=reward", "data.center_rewards=0.05"],
}
"""What the YAML has of each kind of task here."""
TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "bert": ["query", "value"],
    "roberta": ["query", "intermediate.dense"],
    "modernbert": ["Wqkv", "mlp.Wo"],
    "phi3": ["qkv_proj", "down_proj"],
}
"""The layers that get adapters, by the type of the model."""


def adapters_of(model: str) -> str:
    return f"model.lora={{r: 3, alpha: 6, target: [{', '.join(TARGETS[model])}]}}"


ADAPTERS = adapters_of("llama")
ENDING = {"token_classification": "ForTokenClassification"}


def row(kind: str, number: int) -> dict:
    words = [WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(3 + number % 6)]
    text, color = " ".join(words) + f" {number}", NAMES[number % 3]
    match kind:
        case "multi_label":
            return {"text": text, "label": [NAMES[i] for i in range(3) if number >> i & 1]}
        case "regression":
            return {"text": text, "label": number / 7 - 1}
        case "token_classification":
            labels = [None if i == 1 else NAMES[(number + i) % 3] for i in range(len(words))]
            return {"text": words, "label": labels}
        case "reward":
            answers = {"chosen": f" {text}", "rejected": " ".join(words[:2])}
            return {"prompt": f"{number} ", **answers, "margin": number % 3 / 4}
        case _:
            return {"text": text, "label": color}


def rows_of(kind: str, number: int = 30) -> list[dict]:
    return [row(kind, i) for i in range(number)]


def save_head(config: dict, folder: str, ending: str | None, num_labels: int) -> None:
    """A folder of transformers with all weights away from where they begin; ending: None for that
    of the language model, "" for the base model."""
    import transformers

    known = {"num_labels": num_labels} if ending else {}
    if num_labels == len(NAMES) and ending:
        known = {
            "id2label": dict(enumerate(NAMES)),
            "label2id": {x: i for i, x in enumerate(NAMES)},
        }
    made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict({**config, **known})
    torch.manual_seed(1)
    auto = getattr(transformers, f"AutoModel{'ForCausalLM' if ending is None else ending}")
    model = auto.from_config(made).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)


def data_keys(kind: str, folder: Path) -> list[str]:
    path = save_lines(folder / "rows.jsonl", rows_of(kind))
    tokenizer = save_tokenizer(folder / "tokenizer")
    keys = [f"data.path={path}", f"data.tokenizer={tokenizer}", f"data.cache={folder}/cache"]
    return [*RUN, *KEYS[kind], *keys, "model.vocab=300"]


def trained(overrides: list[str]) -> tuple[Answer, list[dict[str, float]], float | None, dict]:
    """Three steps, what the log has of them, and a validation."""
    run = trainer(overrides)
    answer, logged = logged_steps(run, lambda x: {**x.task, "tokens": x.tokens})
    return answer, logged, run.evaluate(), dict(run.val_task)


def begun(overrides: list[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights before the first step, here and in transformers."""
    from transformers import AutoModelForSequenceClassification

    run, section = trainer(overrides), parity.config([*BASE, *overrides])
    known = {"dtype": torch.float64, "num_labels": len(NAMES)}
    model = AutoModelForSequenceClassification.from_pretrained(section.model.hf, **known)
    return parity.whole([parity.held(run, "data")]), dict(model.named_parameters())


def initial(overrides: list[str]) -> parity.Held:
    return parity.held(trainer(overrides), "data")


def of_transformers(
    kind: str, overrides: list[str], adapters: dict[str, Tensor] | None = None
) -> tuple[Answer, float, Tensor, Tensor]:
    """(Answer, loss of a validation, its outputs, its labels) of transformers' own model and loss,
    from the rows of the file. adapters: with peft's, which begin with these values."""
    import transformers

    section = parity.config([*BASE, *overrides])
    auto = getattr(transformers, f"AutoModel{ENDING.get(kind, 'ForSequenceClassification')}")
    model = auto.from_pretrained(section.model.hf, **build_options(torch.float64)).train()
    if kind == "multi_label":
        model.config.problem_type = "multi_label_classification"
    elif kind == "regression":
        model.config.problem_type = "regression"
    if adapters is not None:
        task = "TOKEN_CLS" if kind == "token_classification" else "SEQ_CLS"
        model = with_adapters(model, adapters, task)
    named = {plain(n): p for n, p in model.named_parameters() if "original_module" not in n}
    named = {name.replace(".modules_to_save", ""): p for name, p in named.items()}
    adam = adam_of({n: p for n, p in named.items() if p.requires_grad}, section)
    gradients, losses = [], []
    by_ids = _labels_by_ids(kind, section)
    for step in range(1, STEPS + 1):
        adam.zero_grad()
        with everywhere_float64():
            loss, _, _ = loss_of(kind, model, _batch(section, "train", step), by_ids, section)
            loss.backward()
        gradients.append(whole({name: p.grad for name, p in named.items()}))
        losses.append(loss.item())
        set_rate(adam, section, step)
        adam.step()
    model.eval()
    ids = torch.cat([_batch(section, "val", step) for step in range(section.train.eval_batches)])
    with everywhere_float64(), torch.no_grad():
        val, outputs, labels = loss_of(kind, model, ids, by_ids, section)
    return Answer(whole(named), gradients, losses), val.item(), outputs, labels


def with_adapters(model: nn.Module, adapters: dict[str, Tensor], task: str) -> nn.Module:
    """peft's adapters around `TARGETS`, with these values. task: peft's `task_type`."""
    from peft import LoraConfig, get_peft_model

    with quiet():
        targets = TARGETS[model.config.model_type]
        settings = LoraConfig(task_type=task, r=3, lora_alpha=6, target_modules=targets)
        model = get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(adapters[plain(name)])
    return model


BASE = [
    *("data.seq_len=24", "data.global_batch=4", "pipeline.microbatches=2"),
    *("precision.dtype=float64", "optim.clip=0.0", "optim.lr=0.01", "optim.warmup_steps=0"),
    "train.steps=5",
]


def _batch(section: RunConfig, split: str, step: int) -> Tensor:
    data = build_data(make_plan(section, 1))
    num = section.data.global_batch * section.data.rows_per_sample
    return data.batch(split, section.run.seed, step, 0, 1, num)[0]


def _labels_by_ids(kind: str, section: RunConfig) -> dict[tuple[int, ...], object]:
    """What each row of ids is labelled with, by the tokenizer and the rows alone."""
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(f"{section.data.tokenizer}/tokenizer.json")

    def ids(text: str) -> tuple[int, ...]:
        return (*made.encode(text).ids, EOS)[: section.data.seq_len]

    labels: dict[tuple[int, ...], object] = {}
    for each in rows_of(kind):
        if kind == "reward":
            for key in ("chosen", "rejected"):
                labels[ids(each["prompt"] + each[key])] = each["margin"]
        elif kind == "token_classification":
            text, at, classes = " ".join(each["text"]), 0, []
            spans = made.encode(text).offsets
            of_tokens = [-100] * (len(spans) + 1)
            for word, label in zip(each["text"], each["label"], strict=True):
                first = next(i for i, (b, e) in enumerate(spans) if e > at)
                of_tokens[first] = -100 if label is None else NAMES.index(label)
                at += len(word) + 1
                classes.append(label)
            labels[ids(text)] = of_tokens[: section.data.seq_len]
        elif kind == "regression":
            labels[ids(each["text"])] = each["label"]
        elif kind == "multi_label":
            labels[ids(each["text"])] = [float(x in each["label"]) for x in NAMES]
        else:
            labels[ids(each["text"])] = NAMES.index(each["label"])
    return labels


def loss_of(
    kind: str,
    model: nn.Module,
    ids: Tensor,
    by_ids: dict[tuple[int, ...], object],
    section: RunConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, logits, labels) as transformers computes them, and trl that of rewards."""
    mask = ids != PAD
    found = [by_ids[tuple(x[m].tolist())] for x, m in zip(ids, mask, strict=True)]
    given = {"input_ids": ids, "attention_mask": mask.long()}
    if kind == "reward":
        rewards = model(**given).logits.squeeze(-1)
        (chosen, rejected), margin = (rewards[::2], rewards[1::2]), torch.tensor(found[::2])
        loss = -F.logsigmoid(chosen - rejected - margin).mean()
        center = section.data.center_rewards * torch.mean((chosen + rejected) ** 2)
        return loss + center, rewards, margin
    if kind == "token_classification":
        labels = torch.full(ids.shape, -100)
        for line, each in zip(labels, found, strict=True):
            line[: len(each)] = torch.tensor(each)
    else:
        labels = torch.tensor(found)
    if kind == "weighted":
        logits = model(**given).logits
        weights = torch.tensor(section.data.class_weights, dtype=logits.dtype)
        return F.cross_entropy(logits, labels, weights), logits, labels
    output = model(**given, labels=labels)
    return output.loss, output.logits, labels


def expected_values(kind: str, outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """The metrics of a validation by their definitions, of the outputs of transformers."""
    if kind == "reward":
        margins = outputs[::2] - outputs[1::2]
        values = {"accuracy": (margins > 0).double().mean(), "margin": margins.mean()}
        return {k: v.item() for k, v in (values | {"mean_reward": outputs.mean()}).items()}
    if kind == "regression":
        errors = outputs.squeeze(-1) - labels
        both = torch.stack([outputs.squeeze(-1), labels])
        ranked = both.argsort(1).argsort(1).double()  # no two are equal
        values = {"mae": errors.abs().mean(), "mse": errors.square().mean()}
        values |= {"pearson": both.corrcoef()[0, 1], "spearman": ranked.corrcoef()[0, 1]}
        return {k: v.item() for k, v in values.items()}
    if kind == "multi_label":
        found, wanted = outputs > 0, labels > 0
        scores = [f1(found[:, k], wanted[:, k]) for k in range(len(NAMES))]
        areas = [area(outputs[:, k], wanted[:, k]) for k in range(len(NAMES))]
        known = [x for x in areas if x is not None]
        return {
            "accuracy": (found == wanted).all(1).double().mean().item(),
            "f1": f1(found.flatten(), wanted.flatten()),
            "f1_macro": sum(scores) / len(scores),
            **({"auc": sum(known) / len(known)} if known else {}),
        }
    logits, classes = outputs.flatten(0, -2), labels.flatten()
    logits, classes = logits[classes >= 0], classes[classes >= 0]
    found = logits.argmax(-1)
    there = [k for k in range(len(NAMES)) if ((found == k) | (classes == k)).any()]
    values = {
        "accuracy": (found == classes).double().mean().item(),
        "f1_macro": sum(f1(found == k, classes == k) for k in there) / len(there),
    }
    areas = [area(logits.softmax(-1)[:, k], classes == k) for k in range(len(NAMES))]
    if kind != "token_classification" and None not in areas:
        values["auc"] = sum(x for x in areas if x is not None) / len(areas)
    return values


def f1(found: Tensor, wanted: Tensor) -> float:
    right, wrong = (found & wanted).sum().item(), (found ^ wanted).sum().item()
    return 2 * right / max(2 * right + wrong, 1)


def area(scores: Tensor, wanted: Tensor) -> float | None:
    above, below = scores[wanted].unsqueeze(1), scores[~wanted]
    if not above.numel() or not below.numel():
        return None
    return ((above > below).double() + (above == below).double() / 2).mean().item()


def of_folder(folder: str, overrides: list[str], base: str | None = None) -> dict[str, float]:
    """(loss, accuracy) on all rows of transformers' own class, by what is in an exported folder.
    base: the folder of the model, of which an export has the adapters alone."""
    from transformers import AutoModelForSequenceClassification

    if base is None:
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    else:
        from peft import PeftModel

        names = {
            "id2label": dict(enumerate(NAMES)),
            "label2id": {x: i for i, x in enumerate(NAMES)},
        }
        model = AutoModelForSequenceClassification.from_pretrained(base, **names)
        with quiet():
            model = PeftModel.from_pretrained(model, folder).eval()
    section, (ids, labels) = parity.config(overrides), ([], [])
    for key, label in _labels_by_ids("classification", section).items():
        ids.append([*key, *[PAD] * (section.data.seq_len - len(key))])
        labels.append(model.config.label2id[NAMES[label]])
    with torch.no_grad():
        given = {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}
        output = model(**given, attention_mask=(given["input_ids"] != PAD).long())
    right = (output.logits.argmax(-1) == given["labels"]).double().mean()
    return {"loss": output.loss.item(), "accuracy": right.item()}
