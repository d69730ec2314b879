"""Small tokenizers of the kinds that models use, trained in the test."""

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = ["Answer: that is 42. The answer to it all, \u00e9 and more.\nWhat is 2 + 2? 4 "] * 3
SPECIAL = ["<unk>", "<s>", "</s>"]


def llama_2() -> Tokenizer:
    """Train a BPE with byte fallback, whose Prepend puts a space before each text."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    names = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    _train(made, trainers.BpeTrainer(vocab_size=330, special_tokens=names, show_progress=False))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return made


def metaspace(scheme: str) -> Tokenizer:
    """Train a BPE behind Metaspace, as newer Llama and Gemma tokenizers are."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    _train(made, trainers.BpeTrainer(vocab_size=90, special_tokens=SPECIAL, show_progress=False))
    return made


def t5() -> Tokenizer:
    """Train a unigram model behind Metaspace, whose template ends texts with </s>."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    _train(made, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    return made


def gpt_2() -> Tokenizer:
    """Train a byte-level BPE, whose template cuts spaces off the offsets."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _train(made, trainer)
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    return made


def bert() -> Tokenizer:
    """Train a WordPiece model, which keeps no spaces."""
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=SPECIAL, show_progress=False)
    _train(made, trainer)
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "Llama 2": llama_2,
    "Metaspace always": lambda: metaspace("always"),
    "Metaspace first": lambda: metaspace("first"),
    "Metaspace never": lambda: metaspace("never"),
    "T5": t5,
    "GPT-2": gpt_2,
    "BERT": bert,
}


def save_kind(name: str, folder: Path) -> Path:
    """Save the tokenizer of this name in `folder`, as save_pretrained does."""
    folder.mkdir(parents=True, exist_ok=True)
    KINDS[name]().save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _train(tokenizer: Tokenizer, trainer: object) -> None:
    tokenizer.train_from_iterator(TEXTS, trainer)
