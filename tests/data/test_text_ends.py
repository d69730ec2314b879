"""Training, evaluation and generation put the same ids before and behind a text."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.data.texts import json_lines, pairs, save_lines, save_tokenizer, sentences
from torchdistpackage.config.check import wrong_files
from torchdistpackage.config.load import loads
from torchdistpackage.config.text_ends import text_ends
from torchdistpackage.data.packing import PackedDataset
from torchdistpackage.data.tokens.documents import TextSource
from torchdistpackage.data.tokens.token_cache import tokenized
from torchdistpackage.errors import DataError

WORDS = {"[CLS]": 0, "[SEP]": 1, "<s>": 2, "</s>": 3, "alpha": 4, "<mask>": 5}


def template(single: str, *names: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=single, special_tokens=[(name, WORDS[name]) for name in names]
    )


PROCESSORS = {
    "none": None,
    "GPT-2": processors.ByteLevel(),
    "Llama": template("<s> $A", "<s>"),
    "T5": template("$A </s>", "</s>"),
    "two": template("[CLS] <s> $A </s>", "[CLS]", "<s>", "</s>"),
    "BERT": processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0)),
    "RoBERTa": processors.RobertaProcessing(("</s>", 3), ("<s>", 2)),
    "Llama 3": processors.Sequence([processors.ByteLevel(), template("<s> $A", "<s>")]),
    "nested": processors.Sequence([template("<s> $A", "<s>"), template("[CLS] $A", "[CLS]")]),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_bos_is_what_the_tokenizer_puts_before_a_text(tmp_path, name):
    made = Tokenizer(models.WordLevel(WORDS, unk_token="<mask>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if PROCESSORS[name] is not None:
        made.post_processor = PROCESSORS[name]
    made.save(str(tmp_path / "tokenizer.json"))
    ids = made.encode("alpha").ids
    found = text_ends(tmp_path)
    assert found.bos == tuple(ids[: ids.index(WORDS["alpha"])])
    assert found.eos == (WORDS["</s>"],), "by its name, whatever the template has"
    assert text_ends(tmp_path, "off", "off") == ((), ())


def with_bos(source: TextSource) -> TextSource:
    save_tokenizer(Path(source.tokenizer), bos=True)
    return source


def documents(source: TextSource, folder: Path) -> list[list[int]]:
    found = tokenized(source, folder / "cache")
    return [found.tokens[a:b].tolist() for a, b in zip(found.starts, found.ends, strict=True)]


def test_documents_have_what_is_chosen_around_them(tmp_path):
    texts = [*sentences(20), "<s>alpha"]
    source = with_bos(json_lines(tmp_path, texts))
    tokenizer = Tokenizer.from_file(f"{source.tokenizer}/tokenizer.json")
    plain = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    begun = [ids[plain[-1][0] == 2 and ids[0] == 2 :] for ids in plain]
    assert documents(source, tmp_path) == [[2, *ids, 1] for ids in begun], "and never two"
    for bos, eos in (("off", "auto"), ("on", "off"), ("off", "off")):
        chosen = replace(source, bos=bos, eos=eos)
        want = [[*ids, *[1] * (eos != "off")] for ids in plain]
        if bos == "on":
            want = [[2, *ids] for ids in begun]
        assert documents(chosen, tmp_path) == want
    assert len([x for x in (tmp_path / "cache").iterdir() if x.is_dir()]) == 4


def test_without_bos_ids_and_the_entry_are_those_of_before_the_choice(tmp_path):
    texts = sentences(20)
    source = json_lines(tmp_path, texts)
    tokenizer = Tokenizer.from_file(f"{source.tokenizer}/tokenizer.json")
    assert documents(source, tmp_path) == [[*tokenizer.encode(text).ids, 1] for text in texts]
    digest = hashlib.blake2b(b"9 jsonl text 1", digest_size=16)
    folder = Path(source.tokenizer)
    for path in (folder / "tokenizer.json", folder / "tokenizer_config.json", Path(source.path)):
        digest.update(hashlib.blake2b(path.read_bytes(), digest_size=16).digest())
    for same in (source, replace(source, bos="off"), replace(source, eos="on")):
        assert tokenized(same, tmp_path / "cache").folder.name == digest.hexdigest()


def test_a_token_that_is_not_there_is_refused_before_ranks_start(tmp_path):
    source = json_lines(tmp_path, sentences(20))
    folder = Path(source.tokenizer)
    settings = folder / "tokenizer_config.json"

    def refused(**choice: str) -> str:
        with pytest.raises(DataError) as caught:
            tokenized(replace(source, **choice), tmp_path / "cache")
        data = {"name": "jsonl", "path": source.path, "tokenizer": source.tokenizer, **choice}
        (problem,) = wrong_files(loads(json.dumps({"data": data, "model": {"vocab": 300}})))
        assert (problem.path, problem.text) == ("data.tokenizer", str(caught.value))
        return problem.text

    assert refused(bos="on") == (
        f"data.bos=on, but the tokenizer {folder}/tokenizer.json adds no such token by itself, and "
        f"no file next to it names a bos_token; name one in {settings}, or set data.bos to auto or "
        f"off"
    )
    settings.write_text('{"bos_token": "<begin>", "eos_token": "</s>"}')
    said = refused(bos="on")
    assert "bos_token of" in said and "'<begin>', which tokenizer.json does not have" in said
    settings.write_text('{"bos_token": "<pad>", "eos_token": "</s>"}')
    assert documents(replace(source, bos="on"), tmp_path)[0][0] == 0
    settings.write_text('{"eos_token": "<end>"}')
    for eos in ("auto", "on"):
        assert "'<end>', which tokenizer.json does not have" in refused(eos=eos)
    assert documents(replace(source, eos="off"), tmp_path)


def test_a_chat_has_the_tokens_of_its_template_alone(tmp_path):
    folder = save_tokenizer(tmp_path / "tokenizer", bos=True)
    write = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    (folder / "chat_template.jinja").write_text("<s>" + write)
    chat = [{"role": "user", "content": "alpha"}, {"role": "assistant", "content": "beta"}]
    path = save_lines(tmp_path / "chats.jsonl", [{"messages": chat}])
    (ids,) = documents(TextSource("jsonl", str(path), str(folder), "messages"), tmp_path)
    assert ids[0] == 2 and ids.count(2) == 1 and ids.count(1) == 2 and ids[-1] == 1


@pytest.mark.parametrize("masks", [False, True])
def test_what_begins_a_document_is_read_and_never_predicted(tmp_path, masks):
    """Check that position 0 belongs to the first token, which predicts the second."""
    texts = [(f"alpha {i}", f"beta gamma {i}") for i in range(60)]
    source = with_bos(pairs(tmp_path, texts))
    text = tokenized(source, tmp_path / "cache")
    prompts = [len(x) for x in map(prompt_ids(source), (prompt for prompt, _ in texts))]
    assert text.prompts is not None and text.prompts.tolist() == [1 + n for n in prompts]
    options = {"vocab": 300, "seq_len": 32, "global_batch": 8, "val_fraction": 0.2}
    for field in ("prompt+completion", "completion"):
        found = tokenized(replace(source, field=field), tmp_path / "cache")
        data = PackedDataset(found, **options, document_masks=masks)
        batch = [x.numpy() for x in data.batch("train", 1, 1, 0, 1, 8)]
        ids, targets = batch[:2]
        assert not (targets == 2).any() and (ids == 2).any()
        first = (ids == 2)[:, :-1]
        assert ((targets[:, :-1][first] == ids[:, 1:][first]) == (field == "completion")).all()
        if masks:
            assert (batch[2][ids == 2] == 0).all()


def prompt_ids(source: TextSource):
    tokenizer = Tokenizer.from_file(f"{source.tokenizer}/tokenizer.json")
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
