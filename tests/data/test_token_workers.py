"""Several processes tokenize like one: the same cache entry and the same messages."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.test_chat import CHATML
from tests.data.texts import pairs, save_lines, save_tokenizer, sentences
from torchdistpackage.data.tokens import documents, token_cache
from torchdistpackage.data.tokens.documents import TextSource, pieces_of
from torchdistpackage.data.tokens.token_cache import tokenized
from torchdistpackage.data.tokens.token_workers import TokenWorkers
from torchdistpackage.errors import DataError
from torchdistpackage.launch.process import usable_cpus

ODD = ("né à Zürich 東京 🚲", "x" * 3000, "a", "\u2028 no end of a line", "alpha " * 700)


@pytest.fixture
def share(forks, monkeypatch):
    """Provide `share(n, size)`: n processes tokenize files, in pieces of `size` bytes."""

    def set_to(number: int, size: int) -> None:
        monkeypatch.setattr(documents, "PIECE_BYTES", size)
        monkeypatch.setattr(token_cache, "WORKER_BYTES", 1)
        monkeypatch.setattr(token_cache, "usable_cpus", lambda env: number)

    return set_to


def odd_lines(folder: Path) -> TextSource:
    """Write files with long lines, CRLF, multi-byte letters, no lines, and an unfinished line."""
    folder.mkdir()
    rows = [json.dumps({"text": x}, ensure_ascii=False) for x in (*ODD, *sentences(60)) * 2]
    (folder / "a.jsonl").write_text("\r\n".join(rows), encoding="utf-8", newline="")
    (folder / "b.jsonl").touch()
    (folder / "c.jsonl").write_text("\n".join(rows[::-1]) + "\n", encoding="utf-8")
    return TextSource("jsonl", str(folder), str(save_tokenizer(folder.parent / "tokenizer")))


def chats(folder: Path, kind: str = "jsonl") -> TextSource:
    """Write chats, or preference pairs."""
    rows = []
    for i, text in enumerate(sentences(60)):
        asked, said = {"role": "user", "content": text}, {"role": "assistant", "content": f"{i} é"}
        other = {"role": "assistant", "content": text}
        chat = {"messages": [asked, said, asked, other]}
        pair = {"prompt": [asked], "chosen": [said], "rejected": [other]}
        rows.append(chat if kind == "jsonl" else pair)
    file, tokenizer = save_lines(folder / "chats.jsonl", rows), save_tokenizer(folder / "tokenizer")
    (tokenizer / "chat_template.jinja").write_text(CHATML)
    return TextSource(kind, str(file), str(tokenizer), "messages" if kind == "jsonl" else "text")


def parquet(folder: Path) -> TextSource:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    folder.mkdir()
    texts = [*ODD, *sentences(200)]
    for name, some in (("a", texts), ("b", []), ("c", texts[:7])):
        columns = {"text": pyarrow.array(some, pyarrow.string())}
        write_table(pyarrow.table(columns), folder / f"{name}.parquet", row_group_size=20)
    return TextSource("parquet", str(folder), str(save_tokenizer(folder.parent / "tokenizer")))


def files(folder: Path) -> TextSource:
    folder.mkdir()
    for i, text in enumerate((*ODD, *sentences(30))):
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    return TextSource("text", str(folder), str(save_tokenizer(folder.parent / "tokenizer")))


def made(source: TextSource, cache: Path) -> dict[str, bytes]:
    """Make the cache entry anew and return its files."""
    shutil.rmtree(cache, ignore_errors=True)
    folder = tokenized(source, cache).folder
    assert not list(cache.glob("*.draft"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["lines", "chats", "prompts", "preference", "parquet", "files"])
def test_any_number_of_processes_makes_the_same_entry(share, tmp_path, kind):
    source = {
        "lines": lambda: odd_lines(tmp_path / "data"),
        "chats": lambda: chats(tmp_path),
        "prompts": lambda: pairs(tmp_path, [(x, x[::-1]) for x in sentences(60)]),
        "preference": lambda: chats(tmp_path, "preference"),
        "parquet": lambda: parquet(tmp_path / "data"),
        "files": lambda: files(tmp_path / "data"),
    }[kind]()
    share(1, 1 << 20)
    whole = made(source, tmp_path / "cache")
    assert len(whole["tokens.bin"]) > 1000 and ("counted.bin" in whole) == source.has_prompts
    for number, size in ((1, 100), (2, 1000), (5, 300)):
        share(number, size)
        assert made(source, tmp_path / "cache") == whole, (number, size)


def test_pieces_are_whole_lines_and_all_of_them(tmp_path, monkeypatch):
    texts = [b"a\n\nbb\r\n" + "é".encode() * 20 + b"\ncc", b"", b"\n", b"\n\n\n", b"x" * 70 + b"\n"]
    for content in texts:
        (tmp_path / "file").write_bytes(content)
        for size in range(1, 60):
            monkeypatch.setattr(documents, "PIECE_BYTES", size)
            monkeypatch.setattr(documents, "_BLOCK_BYTES", 1 + size % 5)
            pieces = [*pieces_of("jsonl", tmp_path / "file")]
            parts = [content[x.first : x.last] for x in pieces]
            assert b"".join(parts) == content and [len(x) for x in parts] == [x[3] for x in pieces]
            assert all(x.endswith(b"\n") for x in parts[:-1])
            # no piece is larger than it has to be
            assert all(x[:-1].rfind(b"\n") + 1 < size for x in parts)


def test_lines_that_are_wrong_are_named_as_by_one_process(share, tmp_path):
    source = odd_lines(tmp_path / "data")
    lines = Path(source.path, "c.jsonl").read_bytes().splitlines(keepends=True)
    lines[3], lines[70] = b"-\n", b'{"text": 5}\n'
    lines[100] = b'{"text": "a"\n'
    Path(source.path, "c.jsonl").write_bytes(b"".join(lines))
    said = set()
    for number, size in ((1, 1 << 20), (1, 500), (3, 500)):
        share(number, size)
        with pytest.raises(DataError) as found:
            tokenized(source, tmp_path / "cache")
        said.add(str(found.value))
        assert not list((tmp_path / "cache").glob("*.draft"))
    (text,) = said
    for line, name in zip(text.splitlines(), (4, 71, 101), strict=True):
        assert line.startswith(f"{source.path}/c.jsonl:{name}: ")
    Path(source.path, "a.jsonl").write_bytes(b"-\n" * 30)
    with pytest.raises(DataError) as found:
        tokenized(source, tmp_path / "cache")
    *named, last = str(found.value).splitlines()
    assert last == "and maybe more" and len(named) == 20
    assert named[19].startswith(f"{source.path}/a.jsonl:20: not JSON")


def test_a_process_that_is_killed_is_told_with_what_it_was_at(share, tmp_path, monkeypatch):
    source, workers = odd_lines(tmp_path / "data"), list[TokenWorkers]()

    class Watched(TokenWorkers):
        def __init__(self, *args):
            super().__init__(*args)
            workers.append(self)

    killed: list[int] = []

    def kill(done: int, total: int) -> None:
        if not killed:
            killed.append(workers[0]._workers[-1].child.pid)
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(token_cache, "TokenWorkers", Watched)
    share(3, 200)
    text = r"\.jsonl: lines \d+ to \d+: the process that tokenized this was ended by SIGKILL"
    with pytest.raises(DataError, match=text):
        tokenized(source, tmp_path / "cache", kill)
    assert not list((tmp_path / "cache").glob("*.draft"))
    assert len(tokenized(source, tmp_path / "cache").ends) == 260


def test_a_signal_leaves_nothing_and_the_next_start_makes_the_entry(tmp_path):
    source = odd_lines(tmp_path / "data")
    line = Path(source.path, "c.jsonl").read_text("utf-8")
    Path(source.path, "c.jsonl").write_text(line * (9_000_000 // len(line.encode())), "utf-8")
    run = tmp_path / "run.yaml"
    data = f"{{name: jsonl, path: {source.path}, tokenizer: {source.tokenizer}}}"
    run.write_text(f"run: {{dir: {tmp_path}/runs}}\ndata: {data}\n")
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    words = [sys.executable, "-m", "torchdistpackage", "data", "tokenize", str(run)]
    cache = tmp_path / "runs" / "tokens"
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not any(x.stat().st_size for x in cache.glob("*.draft/tokens.bin")):
            assert process.poll() is None
            time.sleep(0.02)
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM and time.monotonic() - began_s < 5
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
    assert not [*(tmp_path / "tmp").iterdir()]
    assert [x.suffix for x in cache.iterdir()] == [".lock"]
    Path(source.path, "c.jsonl").unlink()
    killed = [cache / f"{tokenized(source, cache).folder.name}.7.{x}.draft" for x in ("else", "-")]
    shutil.rmtree(killed[0].with_name(killed[0].name.split(".")[0]))
    killed[1] = killed[1].with_name(killed[1].name.replace("-", socket.gethostname()))
    for draft in killed:
        draft.mkdir()
    tokenized(source, cache)
    assert [x.is_dir() for x in killed] == [True, False], "of this host nobody else can write"


def test_files_that_did_not_change_are_not_read_again(tmp_path, monkeypatch):
    source, read = odd_lines(tmp_path / "data"), []
    digest = token_cache._content_digest
    monkeypatch.setattr(token_cache, "_content_digest", lambda x: (read.append(x), digest(x))[1])
    cache = tmp_path / "cache"
    folder = tokenized(source, cache).folder
    assert tokenized(source, cache).folder == folder and len(read) == 10, "they changed just now"
    monkeypatch.setattr(token_cache, "SETTLED_S", -60.0)
    assert tokenized(source, cache).folder == folder
    read.clear()
    assert tokenized(source, cache).folder == folder and not read
    file = Path(source.path, "a.jsonl")
    before, content = file.stat(), file.read_bytes()
    file.write_bytes(content.replace(b"alpha", b"gamma"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    other = tokenized(source, cache).folder
    assert other != folder and file.stat().st_mtime_ns == before.st_mtime_ns
    shutil.rmtree(other)
    assert tokenized(source, cache).folder == other, "an entry that was removed is made again"


def test_cpus_are_those_that_the_process_may_use(tmp_path):
    free = len(os.sched_getaffinity(0))
    quota = tmp_path / "cpu.max"
    assert usable_cpus({}, quota) == free
    for text, most in (("max 100000", free), ("150000 100000", 2), ("1000 100000", 1)):
        quota.write_text(text)
        assert usable_cpus({}, quota) == min(free, most)
    assert usable_cpus({"SLURM_CPUS_ON_NODE": "1"}, quota) == 1
