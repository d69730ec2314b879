"""A tokenizer trained in the test, and texts for it."""

import json
import random
from pathlib import Path

from torchdistpackage.data.tokens.documents import TextSource

WORDS = [
    *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"),
    *("iota", "kappa", "lambda", "mu", "nu", "xi", "omicron"),
]


def save_tokenizer(folder: Path, vocab: int = 300, *, bos: bool = False) -> Path:
    """Save a byte-level BPE in `folder`, as save_pretrained does.

    bos: it puts <s>, id 2, before each text, as Llama 3's does.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<pad>", "</s>", *["<s>"] * bos],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    if bos:
        around = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
        made.post_processor = processors.Sequence([processors.ByteLevel(), around])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "</s>"}, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def sentences(number: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 40))) + f" {i}" for i in range(number)]


def save_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def json_lines(folder: Path, texts: list[str]) -> TextSource:
    """Return a source of these documents, with a tokenizer."""
    path = save_lines(
        folder / "data.jsonl", [{"text": text, "id": i} for i, text in enumerate(texts)]
    )
    return TextSource("jsonl", str(path), str(save_tokenizer(folder / "tokenizer")))


def pairs(folder: Path, texts: list[tuple[str, str]]) -> TextSource:
    """Return a source of these prompts and completions."""
    rows = [{"prompt": prompt, "completion": text} for prompt, text in texts]
    path = save_lines(folder / "pairs.jsonl", rows)
    tokenizer = save_tokenizer(folder / "tokenizer")
    return TextSource("jsonl", str(path), str(tokenizer), "prompt+completion")
