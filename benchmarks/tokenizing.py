"""JSON lines turned into token ids: MB/s, memory of all processes at its peak, and a second start.

Ours by one process without and with the tokenizers library's own threads, and by one for each core;
beside them `datasets` (`load_dataset`, then `map` with as many processes), where it is installed,
which keeps Arrow tables. The ids of all sides are compared. Texts are pieces of Python's standard
library, the tokenizer is a byte-level BPE that is trained on some of them; all in a temporary
folder. A second start is another process that finds what the first has made.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import psutil

ALONE, THREADS = "ours, one process, one thread", "ours, one process, the library's threads"
OURS, DATASETS = "ours, a process for each core", "datasets, map(num_proc) for each core"
SIDES = (ALONE, THREADS, OURS, DATASETS)
VOCAB = 32_000
_POLL_S = 0.1


def texts(num_bytes: int) -> Iterator[str]:
    """Pieces of the standard library, of a few to thousands of letters."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    sources = [file.read_text("utf-8", errors="ignore") for file in files]
    draw = random.Random(0)
    while num_bytes > 0:
        source = draw.choice(sources)
        begin = draw.randrange(len(source) or 1)
        text = source[begin : begin + int(min(draw.lognormvariate(7, 1), 20_000))] or "x"
        num_bytes -= len(text.encode())
        yield text


def prepare(folder: Path, num_bytes: int) -> None:
    """data.jsonl and a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    with (folder / "data.jsonl").open("w", encoding="utf-8") as file:
        for text in texts(num_bytes):
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["</s>"],
        initial_alphabet=letters,
        show_progress=False,
    )
    made.train_from_iterator(texts(8_000_000), trainer)
    (folder / "tokenizer").mkdir()
    made.save(str(folder / "tokenizer" / "tokenizer.json"))


def ours(folder: Path, num_processes: int) -> Callable[[], str]:
    from torchdistpackage.data.tokens import token_cache
    from torchdistpackage.data.tokens.documents import TextSource

    token_cache.usable_cpus = lambda env: num_processes
    data, tokenizer = str(folder / "data.jsonl"), str(folder / "tokenizer")
    found = token_cache.tokenized(TextSource("jsonl", data, tokenizer, eos="off"), folder / "ours")
    return lambda: hashlib.blake2b(found.tokens.tobytes()).hexdigest()


def datasets_map(folder: Path) -> Callable[[], str]:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    import numpy as np
    from tokenizers import Tokenizer

    cache, number = str(folder / "datasets"), len(os.sched_getaffinity(0))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))

    def encode(rows: dict) -> dict:
        found = tokenizer.encode_batch_fast(rows["text"], add_special_tokens=False)
        return {"ids": [x.ids for x in found]}

    lines = import_module("datasets").load_dataset(  # no requirement of any benchmark's
        "json", data_files=str(folder / "data.jsonl"), split="train", cache_dir=cache
    )
    found = lines.map(encode, batched=True, num_proc=number, remove_columns=["text"])

    def digest() -> str:
        result = hashlib.blake2b()
        for some in found.with_format("numpy").iter(1000):
            result.update(np.concatenate(some["ids"]).astype(np.uint16).tobytes())
        return result.hexdigest()

    return digest


def be(side: str, folder: Path, again: bool) -> None:
    """Be the process of a side: print its seconds, and the first time what it made."""
    os.environ["TOKENIZERS_PARALLELISM"] = str(side == THREADS).lower()
    begin = time.perf_counter()
    if side == DATASETS:
        digest = datasets_map(folder)
    else:
        digest = ours(folder, len(os.sched_getaffinity(0)) if side == OURS else 1)
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "digest": "" if again else digest()}))


def run(side: str, folder: Path, *, again: bool) -> dict:
    """Of one start: seconds, and the most memory of its processes, shared pages counted once."""
    words = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    process = subprocess.Popen([*words, *["--again"] * again], stdout=subprocess.PIPE, text=True)
    most = 0
    while process.poll() is None:
        most = max(most, _held_bytes(process.pid))
        time.sleep(_POLL_S)
    assert process.stdout is not None
    if process.returncode:
        raise SystemExit(f"{side}: exit code {process.returncode}")
    return {**json.loads(process.stdout.read().splitlines()[-1]), "peak_bytes": most}


def _held_bytes(pid: int) -> int:
    total = 0
    try:
        root = psutil.Process(pid)
        for one in (root, *root.children(recursive=True)):
            total += one.memory_full_info().pss
    except psutil.Error:  # one that ended meanwhile
        pass
    return total


def remove_made(folder: Path) -> None:
    for name in ("ours", "datasets"):
        shutil.rmtree(folder / name, ignore_errors=True)


def measure(num_bytes: int, rounds: int, sides: list[str]) -> dict:
    taken: dict[str, list[dict]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, num_bytes)
        size = (folder / "data.jsonl").stat().st_size
        draw = random.Random(0)
        for _ in range(rounds):
            for side in draw.sample(sides, len(sides)):
                remove_made(folder)
                first, second = (run(side, folder, again=again) for again in (False, True))
                taken[side].append({**first, "again_s": second["seconds"]})
    if len({x["digest"] for found in taken.values() for x in found}) > 1:
        raise SystemExit("the ids of the sides differ")
    return {"bytes": size, "sides": taken}


def report(found: dict) -> Iterator[str]:
    """A table; ratios are medians of those within a round."""
    size, sides = found["bytes"], found["sides"]
    yield f"{size / 1e6:.0f} MB, {len(os.sched_getaffinity(0))} cores"
    yield "| | MB/s | time, of datasets' | peak MB | second start, s |"
    yield "|---|---|---|---|---|"
    for side, rounds in sides.items():
        seconds = median(x["seconds"] for x in rounds)
        peak = median(x["peak_bytes"] for x in rounds) / 1e6
        again = median(x["again_s"] for x in rounds)
        pairs = zip(rounds, sides.get(DATASETS, []), strict=False)
        of_peer = [x["seconds"] / peer["seconds"] for x, peer in pairs]
        ratio = f"{median(of_peer):.2f}" if of_peer else ""
        yield f"| {side} | {size / 1e6 / seconds:.2f} | {ratio} | {peak:.0f} | {again:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--sides", type=int, nargs="*", help="numbers of some, from 0")
    for hidden in ("--side", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        be(args.side, Path(args.folder), args.again)
        return
    sides = [SIDES[i] for i in args.sides] if args.sides else [*SIDES]
    if find_spec("datasets") is None and DATASETS in sides:
        print("datasets is not installed: pip install datasets")
        sides.remove(DATASETS)
    found = measure(args.mb * 1_000_000, args.rounds, sides)
    print("\n".join(report(found)))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
