"""Fine-tuning on chats: a folder of a model, LoRA, evaluation, adapters merged, a reply.

    python examples/finetune_chat.py [FOLDER] [section.key=value ...]
    python examples/finetune_chat.py FOLDER --prepare     only makes the folder and the files

Makes the folder of a small Llama with random weights, its tokenizer with a chat template, and files
of chats. Then adapters are trained on two processes, chats that were held out are evaluated, the
adapters are merged into the base, and the run and the merged folder must answer alike.
"""

import json
import subprocess
import sys
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from torchdistpackage.cli.main import main as tdp

VOCAB, END, TURN = 400, "<|end|>", "<|turn|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|turn|>' + m.role + '\\n' + m.content + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)
COLOURS = ("red", "green", "blue", "grey", "white", "black")
THINGS = ("house", "boat", "tree", "door", "stone", "river", "cloud", "wall", "shoe", "bird")
QUESTION = "What colour is the boat?"
CONFIG = """
run: {{dir: {folder}, name: run, seed: 7}}
parallel: {{data: 2}}
pipeline: {{microbatches: 1}}
model: {{hf: {folder}/base, lora: {{r: 16, alpha: 32, target: [all-linear]}}}}
data: {{path: {folder}/train.jsonl, name: jsonl, field: messages, tokenizer: {folder}/base,
        val_path: {folder}/held_out.jsonl, eval: {{polite: {folder}/polite.jsonl}},
        seq_len: 96, global_batch: 16}}
optim: {{lr: 1e-2, schedule: cosine, warmup_steps: 10, weight_decay: 0}}
train: {{steps: 400, eval_every: 100}}
checkpoint: {{save_every: 100, keep_last: 1, keep_best: val_loss}}
launch: {{local: {{procs: 2}}}}
log: {{every: 50}}
"""


def chats(opening: str) -> list[dict]:
    """A question and its answer for every thing; its colour is that of its number."""
    pairs = [(thing, COLOURS[number % len(COLOURS)]) for number, thing in enumerate(THINGS)]
    turns = [(f"{opening} colour is the {x}?", f"The {x} is {colour}.") for x, colour in pairs]
    roles = ("user", "assistant")
    messages = [[{"role": r, "content": t} for r, t in zip(roles, x, strict=True)] for x in turns]
    return [{"messages": each} for each in messages]


def prepare(folder: Path) -> Path:
    """The base with its tokenizer, the files of chats and the configuration; its path."""
    base = folder / "base"
    base.mkdir(parents=True, exist_ok=True)
    openings = {"train": "What", "held_out": "Which", "polite": "Please, what"}
    files = {name: chats(x) * (8 if name == "train" else 1) for name, x in openings.items()}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [m["content"] for rows in files.values() for row in rows for m in row["messages"]]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, VOCAB, special_tokens=[END, TURN], show_progress=False)
    tokenizer.save(str(base / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "chat_template.jinja").write_text(TEMPLATE)
    set_seed(7)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None}
    ends = {"eos_token_id": tokenizer.token_to_id(END), "max_position_embeddings": 128}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, **heads, **ends)).save_pretrained(base)
    config = folder / "run.yaml"
    config.write_text(CONFIG.format(folder=folder))
    return config


def answer(folder: Path) -> str:
    """The reply of a run, or of a folder of transformers."""
    words = ["generate", str(folder), "--chat", "--prompt", QUESTION, "--max-new-tokens", "24"]
    command = [sys.executable, "-m", "torchdistpackage", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(args: list[str]) -> int:
    named = [x for x in args if "=" not in x and x != "--prepare"]
    folder = Path(named[0] if named else "runs/finetune_chat").resolve()
    config = prepare(folder)
    if "--prepare" in args:
        return 0
    run, merged = folder / "run", folder / "merged"
    trains = ["train", str(config), *(x for x in args if "=" in x)]
    steps = (trains, ["eval", str(run)], ["export", str(run), str(merged), "--merge"])
    for words in steps:
        print(f"$ tdp {' '.join(words)}", flush=True)
        if code := tdp(words):
            return code
    ours, theirs = answer(run), answer(merged)
    print(f"{QUESTION}\n{ours}the merged folder answers {'the same' if ours == theirs else theirs}")
    return 0 if ours == theirs else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
