"""Incremental detokenizing: in any portions the same text as decoding at once, over every kind of tokenizer."""

import re
from itertools import pairwise

import pytest
import toy_tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.frontend.text.detokenizer import IncrementalDetokenizer, OutputText
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.sampling import SamplingParams
from quire.ipc.structured_outputs_params import StructuredOutputsParams

TOKENIZERS = {name: Tokenizer(make()) for name, make in toy_tokenizers.LOCAL.items()}
FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TEXTS = st.text(st.sampled_from("ab .,'!\n\téß漢字мир😀👩🏽‍🚀hello the cat"), max_size=40)


def params(skip: bool = True, spaces: bool = True) -> SamplingParams:
    return SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=spaces)


@st.composite
def token_ids(draw: st.DrawFn, name: str) -> list[int]:
    """Ids at random, ids of a text, and runs of bytes that may or may not be UTF-8."""
    tokenizer = TOKENIZERS[name]
    anything = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12)
    of_text = TEXTS.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    return [i for part in draw(st.lists(anything | of_text, max_size=4)) for i in part]


@st.composite
def portions(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[a:b] for a, b in pairwise([0, *cuts, len(ids)])]


def agrees_with_backend(tokenizer: Tokenizer, ids: list[int], skip: bool) -> bool:
    """With byte fallback, whether every run of byte tokens is UTF-8 as a whole: only then `tokenizers` keeps all of it."""
    if not tokenizer.pieces.byte_fallback:
        return True
    tokens = [tokenizer.backend.id_to_token(i) or "" for i in ids if not (skip and i in tokenizer.special_ids)]
    joined = "".join(t if re.fullmatch("<0x..>", t) else "|" for t in tokens if t)
    for run in joined.split("|"):
        try:
            bytes.fromhex("".join(re.findall("<0x(..)>", run))).decode()
        except UnicodeDecodeError:
            return False
    return True


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
@FEW
@given(data=st.data())
def test_any_portions_give_the_text_of_decoding_at_once(name: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(token_ids(name))
    detokenizer = IncrementalDetokenizer(tokenizer, params(skip))
    text = "".join([detokenizer.push(part) for part in data.draw(portions(ids))]) + detokenizer.push([], finished=True)
    assert text == tokenizer.decode(ids, skip)
    if agrees_with_backend(tokenizer, ids, skip):
        hidden = tokenizer.special_ids if skip else ()
        assert text == tokenizer.backend.decode([i for i in ids if i not in hidden], skip_special_tokens=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@FEW
@given(data=st.data())
def test_output_after_a_prompt_is_the_whole_text_less_the_prompt(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    prompt, output = data.draw(token_ids(name)), data.draw(token_ids(name))
    before = tokenizer.decode(prompt)
    if before.endswith("�") or not agrees_with_backend(tokenizer, prompt, True):
        return  # the prompt ends within a character: see the tests below
    detokenizer = IncrementalDetokenizer(tokenizer, params(), prompt)
    assert before + detokenizer.push(output, finished=True) == tokenizer.decode(prompt + output)


@pytest.mark.parametrize("name", TOKENIZERS)
@FEW
@given(data=st.data())
def test_half_a_character_is_never_shown(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    text = data.draw(TEXTS)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    if "�" in whole:
        return
    detokenizer, shown = IncrementalDetokenizer(tokenizer, params()), ""
    for i in ids:
        shown += detokenizer.push([i])
        assert whole.startswith(shown)
    assert shown == whole


@FEW
@given(text=st.text(max_size=30))
def test_byte_level_text_comes_back_exactly(text: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()
    detokenizer = IncrementalDetokenizer(tokenizer, params())
    assert "".join(detokenizer.push([i]) for i in ids) == text


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    table = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    return [table[bytes([b])] for b in data]


@pytest.mark.parametrize(("name", "expected"), [("byte_level", "x�"), ("llama2_like", "x��")])
def test_a_character_that_never_ends_becomes_the_replacement_character_as_the_decoder_writes_it(
    name: str, expected: str
) -> None:
    tokenizer = TOKENIZERS[name]
    detokenizer = IncrementalDetokenizer(tokenizer, params(), tokenizer.encode("a"))
    ids = byte_ids(tokenizer, b"x" + "😀".encode()[:2])
    assert [detokenizer.push([i]) for i in ids] == ["x", "", ""]
    assert "x" + detokenizer.push([], finished=True) == expected


@pytest.mark.parametrize("make", [toy_tokenizers.byte_level, toy_tokenizers.llama2_like, toy_tokenizers.gemma_like])
def test_structured_output_that_is_cut_within_a_character_is_what_comes_before_it(make) -> None:
    tokenizer = Tokenizer(make())
    wanted = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["x🦙"]))
    ids = tokenizer.encode("x🦙", add_special_tokens=False)
    assert len(ids) > 3
    for n in range(1, len(ids) + 1):
        text = OutputText(tokenizer, wanted).push(ids[:n], finished=True)
        assert "x🦙".startswith(text.strip()) and "�" not in text


def test_byte_fallback_keeps_complete_characters_before_an_incomplete_one() -> None:
    tokenizer = TOKENIZERS["llama2_like"]
    detokenizer = IncrementalDetokenizer(tokenizer, params(), tokenizer.encode("a"))
    ids = byte_ids(tokenizer, b"\n" + "é".encode() + b"\xf0")
    assert [detokenizer.push([i]) for i in ids] == ["\n", "", "é", ""]
    assert detokenizer.push([], finished=True) == "�"


def test_output_that_completes_a_character_of_the_prompt_shows_it() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    head, tail = byte_ids(tokenizer, "😀".encode()[:2]), byte_ids(tokenizer, "😀".encode()[2:])
    detokenizer = IncrementalDetokenizer(tokenizer, params(), head)
    assert [detokenizer.push([i]) for i in tail] == ["", "😀"]


def test_a_prompt_that_ends_within_a_character_adds_nothing_to_other_output() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = IncrementalDetokenizer(tokenizer, params(), byte_ids(tokenizer, b"\xf0\x9f"))
    assert detokenizer.push(tokenizer.encode("hello"), finished=True) == "hello"


@pytest.mark.parametrize(
    ("prompt", "expected"), [("the", " cat"), ("", "cat"), ("<s>", "cat")], ids=["after text", "alone", "after BOS"]
)
def test_the_space_between_prompt_and_output_is_kept(prompt: str, expected: str) -> None:
    tokenizer = TOKENIZERS["llama2_like"]
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    output = [tokenizer.backend.token_to_id("▁cat")]
    assert IncrementalDetokenizer(tokenizer, params(), ids).push(output) == expected


def test_wordpiece_continues_words_and_cleans_up_before_punctuation() -> None:
    tokenizer = TOKENIZERS["wordpiece"]
    ids = [tokenizer.backend.token_to_id(t) for t in ["hello", "##ing", "world", ".", "the", "cat", "'s"]]
    detokenizer = IncrementalDetokenizer(tokenizer, params())
    assert [detokenizer.push([i]) for i in ids] == ["hello", "ing", " world", ".", " the", " cat", "'s"]


def test_special_tokens_may_follow_each_other_without_spaces() -> None:
    tokenizer = TOKENIZERS["wordpiece"]
    ids = tokenizer.encode("hello<s><s>world", add_special_tokens=False)
    assert tokenizer.decode(ids, False, True) == "hello <s> <s> world"
    assert tokenizer.decode(ids, False, False) == "hello <s><s> world"
    assert tokenizer.decode(ids) == "hello world"


def test_special_tokens_are_shown_on_request_and_other_added_tokens_always() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a<tool>b</s>", add_special_tokens=False)
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<tool>b</s>"


@pytest.mark.parametrize("name", [*TOKENIZERS, "window"])
@FEW
@given(data=st.data())
def test_some_special_tokens_can_be_shown_and_no_others(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name] if name in TOKENIZERS else Tokenizer(toy_tokenizers.bpe_suffix())
    ids = data.draw(st.lists(st.integers(1, tokenizer.vocab_size - 1), max_size=12))
    shown = frozenset(data.draw(st.sets(st.sampled_from(sorted(tokenizer.special_ids)))))
    output = OutputText(tokenizer, params())
    output.show(shown)
    text = "".join([output.push(part) for part in data.draw(portions(ids))]) + output.push([], True)
    kept = [i for i in ids if i not in tokenizer.special_ids - shown]
    whole = IncrementalDetokenizer(tokenizer, params(skip=False))
    assert text == whole.push(kept) + whole.push([], True)
    untouched = OutputText(tokenizer, params())
    assert untouched.push(ids, True) == tokenizer.decode(ids)


def test_endless_invalid_bytes_are_shown_as_they_come_and_keep_nothing() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    (bad,) = byte_ids(tokenizer, b"\xff")
    detokenizer = IncrementalDetokenizer(tokenizer, params())
    assert "".join(detokenizer.push([bad]) for _ in range(50)) == "�" * 50


class TestWindow:
    """A decoder that looks at neighbours is decoded over a short window."""

    tokenizer = Tokenizer(toy_tokenizers.bpe_suffix())

    def ids(self, *tokens: str) -> list[int]:
        return [self.tokenizer.backend.token_to_id(t) for t in tokens]

    def test_the_decoder_is_not_taken_for_a_local_one(self) -> None:
        assert not self.tokenizer.pieces.local

    @FEW
    @given(data=st.data())
    def test_any_portions_give_the_text_of_decoding_at_once(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(1, self.tokenizer.vocab_size - 1), max_size=12))
        detokenizer = IncrementalDetokenizer(self.tokenizer, params())
        text = "".join([detokenizer.push(part) for part in data.draw(portions(ids))]) + detokenizer.push([], True)
        assert text == self.tokenizer.backend.decode(ids)

    def test_text_continues_the_prompt(self) -> None:
        detokenizer = IncrementalDetokenizer(self.tokenizer, params(), self.ids("the</w>"))
        assert detokenizer.push(self.ids("cat</w>", "</s>")) == " cat"
