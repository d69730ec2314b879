"""Prompts become ids, and a growing text shows whole letters only. No torch."""

import pytest

from tests.data.kinds_of_tokenizers import KINDS, save_kind
from tests.data.texts import save_tokenizer
from torchdistpackage.data.tokens.prompts import ByteCodec, GrowingText, TokenizerCodec


def shown(codec, prompt: str, text: str) -> list[str]:
    """Return what each token of `text` adds behind the prompt, and the end."""
    before = codec.encode(prompt)
    growing = GrowingText(codec, before)
    return [*map(growing.add, codec.encode(prompt + text)[len(before) :]), growing.end()]


def test_a_letter_of_several_bytes_is_shown_when_it_is_whole():
    assert shown(ByteCodec(), "a", "\u00e9b\u20ac") == ["", "\u00e9", "b", "", "", "\u20ac", ""]
    cut = GrowingText(ByteCodec(), [])
    assert [cut.add(0xE2), cut.add(0x82), cut.end()] == ["", "", "\ufffd"]
    wrong = GrowingText(ByteCodec(), [0x61])
    assert [wrong.add(0xFF), wrong.add(0x62), wrong.add(999)] == ["", "\ufffdb", ""]


def test_what_a_tokenizer_makes_of_a_text_comes_back(tmp_path):
    codec = TokenizerCodec(save_tokenizer(tmp_path))
    assert codec.stop == 1
    parts = shown(codec, "alpha beta", " gamma \u20ac delta")
    assert "".join(parts) == " gamma \u20ac delta" and len(parts) > 4
    assert codec.decode([*codec.encode("alpha"), codec.stop]) == "alpha"


def test_a_prompt_begins_as_a_document_does_and_has_no_end(tmp_path):
    file = save_tokenizer(tmp_path, bos=True) / "tokenizer.json"
    plain, begun = (TokenizerCodec(file, bos=x) for x in ((), (2,)))
    assert begun.encode("alpha") == [2, *plain.encode("alpha")]
    assert begun.encode("<s>alpha") == plain.encode("<s>alpha") == begun.encode("alpha")
    assert begun.encode("") == [], "a prompt without a token is refused"
    assert "".join(shown(begun, "alpha beta", " gamma")) == " gamma"


@pytest.mark.parametrize("name", KINDS)
def test_a_token_is_that_which_stands_amid_a_text(tmp_path, name):
    codec = TokenizerCodec(save_kind(name, tmp_path))
    assert codec.token("</s>") == 2 and codec.token("that is 42. The") is None
    if name in ("T5", "BERT"):  # which know no line ends
        return
    ids = codec.encode("What is 2 + 2?\n 4.")
    for text in ("\n", "."):
        assert codec.token(text) in ids, "and not the one with a space before it"
    assert codec.token("zq") is None
