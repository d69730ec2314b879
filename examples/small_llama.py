"""A Llama from nothing: tokenizer, training on pipe 2 x tensor 2, a folder for transformers.

    python examples/small_llama.py [FOLDER] [section.key=value ...]

Trains a byte-pair tokenizer and a small Llama of transformers on the source of Python's standard
library, on four processes of this machine, in a few minutes. The run ends with the model as
transformers saves it; transformers loads it and continues a prompt, and so does tdp generate, on
the ranks that trained. Both must write the same.
"""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from torchdistpackage.cli.main import main as tdp

VOCAB, END = 1024, "<|end|>"
PROMPT, NUM_TOKENS = "def ", 48
CONFIG = """
run: {{dir: {folder}, name: run, seed: 7}}
parallel: {{pipe: 2, tensor: 2}}
pipeline: {{schedule: 1f1b, microbatches: 4}}
model: {{hf: {folder}/llama/config.json}}
data: {{name: jsonl, field: text, path: {folder}/source.jsonl, tokenizer: {folder}/llama,
        seq_len: 128, global_batch: 16}}
optim: {{lr: 2e-3, warmup_steps: 40}}
train: {{steps: 600, eval_every: 200}}
checkpoint: {{save_every: 200, keep_last: 1, export: hf}}
launch: {{local: {{procs: 4}}}}
log: {{every: 10}}
"""


def prepare(folder: Path) -> Path:
    """Text, tokenizer, the sizes of the model and the configuration of the run; its path."""
    llama, source = folder / "llama", folder / "source.jsonl"
    llama.mkdir(parents=True, exist_ok=True)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_text("utf-8") for path in files]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, VOCAB, special_tokens=[END], show_progress=False)
    tokenizer.save(str(llama / "tokenizer.json"))
    (llama / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END})
    )
    sizes = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
    )
    sizes.save_pretrained(llama)
    config = folder / "run.yaml"
    config.write_text(CONFIG.format(folder=folder))
    return config


def continued_by_transformers(folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    tokens = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)[0]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def continued_by_tdp(run: Path) -> str:
    command = [sys.executable, "-m", "torchdistpackage", "generate", str(run)]
    options = ["--prompt", PROMPT, "--max-new-tokens", str(NUM_TOKENS)]
    return subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout


def main(args: list[str]) -> int:
    named = [x for x in args if "=" not in x]
    folder = Path(named[0] if named else "runs/small_llama").resolve()
    config = prepare(folder)
    if code := tdp(["train", str(config), *(x for x in args if "=" in x)]):
        return code
    theirs = continued_by_transformers(folder / "run" / "hf")
    ours = continued_by_tdp(folder / "run")
    print(f"transformers continues {PROMPT!r} with the folder {folder / 'run' / 'hf'}:")
    print(theirs)
    same = ours.strip() == theirs.strip()
    print(f"tdp generate on pipe 2 x tensor 2 writes {'the same' if same else 'this:'}")
    if not same:
        print(ours)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
